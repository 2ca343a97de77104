"""What a checkpoint holds, in the same words for every format.

    Entry("decoder.layers.0.mlp.linear_fc1.weight")                 # a weight
    Entry("decoder.layers.0.mlp.linear_fc1.weight", "exp_avg")      # an optimizer state of it
    TensorInfo((1024, 256), torch.float32).nbytes

`Common` is everything else: arguments, iteration, scheduler, parameter groups of the optimizer, random number states.
Its optimizer part is in torch_dist's form: without tensors but the step, {0: ..., 1: ...} for a chain of optimizers.

What always holds: names are those of the table (tensor_table); shapes are of whole tensors.
"""

from __future__ import annotations

import copy
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

WEIGHT = ""


class Entry(NamedTuple):
    """A weight, or (slot) an optimizer state of it: exp_avg, exp_avg_sq, fp32_param, ..."""

    name: str
    slot: str = WEIGHT

    def __str__(self) -> str:
        return self.name if self.slot == WEIGHT else f"{self.slot} of {self.name}"


class TensorInfo(NamedTuple):
    """Shape and dtype of a whole tensor."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size in bytes."""
        count = 1
        for length in self.shape:
            count *= length
        return count * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass
class Common:
    """Everything in a checkpoint but its tensors.

    Args:
        state: args, iteration, checkpoint_version, opt_param_scheduler, optimizer (without tensors), ...
        rng: random number states by (pipeline rank, tensor rank); what get_rng_state gathers there.
        combined_names: controllers have their older names.
    """

    state: dict[str, Any]
    rng: dict[tuple[int, int], Any] = field(default_factory=dict)
    combined_names: bool = False

    @property
    def args(self) -> Namespace:
        """The training arguments."""
        return self.state["args"]

    @property
    def iteration(self) -> int:
        """The step that was saved."""
        return int(self.state.get("iteration") or 0)

    def copied(self) -> Common:
        """Return a copy whose arguments and state can be changed."""
        state = {key: copy.copy(value) if key == "args" else copy.deepcopy(value) for key, value in self.state.items()}
        return Common(state, dict(self.rng), self.combined_names)

    def without_optimizer(self) -> Common:
        """Return a copy that a run loads as weights alone: it starts with fresh optimizer states."""
        left = self.copied()
        left.state.pop("optimizer", None)
        left.args.no_save_optim = True
        return left


def layer_bytes(entries: Mapping[Entry, TensorInfo]) -> int:
    """Return the size of the largest layer's weights, a tensor outside the layers counting as a layer."""
    from megatron.training.checkpoints.tensor_table import find_tensor

    sizes: dict[str, int] = {}
    for entry, info in entries.items():
        if entry.slot == WEIGHT:
            place = find_tensor(entry.name)
            owner = place.prefix or entry.name
            sizes[owner] = sizes.get(owner, 0) + info.nbytes
    return max(sizes.values(), default=0)
