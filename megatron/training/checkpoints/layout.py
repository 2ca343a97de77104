"""How a run divides a model over its processes, and in which format its checkpoints are.

    layout = Layout.of(args)                        # what the stored arguments say
    Layout(tensor=2, pipeline=2, expert=1)

What always holds: sizes are 1 or more; a layout that cannot hold the model is a ConversionError before anything is
written.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass

from megatron.training.checkpoints.errors import ConversionError


@dataclass(frozen=True)
class Layout:
    """Numbers of tensor-, pipeline- and expert-parallel ranks, virtual stages a pipeline rank, and tensor-parallel
    ranks of experts."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    virtual: int = 1
    expert_tensor: int = 1

    @classmethod
    def of(cls, args: Namespace) -> Layout:
        """Return the layout of the run that stored these arguments."""
        tensor = getattr(args, "tensor_model_parallel_size", None) or 1
        return cls(
            tensor,
            getattr(args, "pipeline_model_parallel_size", None) or 1,
            getattr(args, "expert_model_parallel_size", None) or 1,
            getattr(args, "virtual_pipeline_model_parallel_size", None) or 1,
            getattr(args, "expert_tensor_parallel_size", None) or tensor,
        )

    def __str__(self) -> str:
        text = f"TP {self.tensor}, PP {self.pipeline}, EP {self.expert}"
        if self.virtual > 1:
            text += f", {self.virtual} virtual stages a rank"
        return text if self.expert_tensor in (1, self.tensor) else f"{text}, expert TP {self.expert_tensor}"

    def check(self, sizes: Mapping[str, int]) -> None:
        """Raise ConversionError when a model of these sizes cannot be divided so."""
        for ranks, divided, what in (
            (self.tensor, sizes.get("groups"), "query groups"),
            (self.tensor, sizes.get("G"), "Mamba groups"),
            (self.tensor, sizes.get("H"), "Mamba heads"),
            (self.expert, sizes.get("E", 1 if self.expert > 1 else None), "experts"),
        ):
            if divided is not None and divided % ranks:
                axis = "expert" if what == "experts" else "tensor"
                raise ConversionError(f"{divided} {what} cannot be divided among {ranks} {axis}-parallel ranks")
