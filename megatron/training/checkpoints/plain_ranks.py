"""What each rank of a plain checkpoint holds: its folder, its layers, its names, its optimizer's order.

    for rank in ranks_of(layout): rank.folder_name          # "mp_rank_01_000": tensor rank 1, pipeline rank 0
    stages = even_stages(24, 4)                             # [range(0, 6), ...]
    names = optimizer_order(names, groups)                  # which parameter a state with a number belongs to

What always holds: layers are numbered from 0 on every stage; experts from 0 on every expert-parallel rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.optimizer_chain import OptimizerPart
from megatron.training.checkpoints.tensor_table import TensorPlace, find_tensor, grouped_name

FILE = "model_optim_rng.pt"
EMBEDDING, OUTPUT = "embedding.word_embeddings.weight", "output_layer.weight"


class Rank(NamedTuple):
    """A place in the layout."""

    tensor: int
    pipeline: int
    expert: int


def ranks_of(layout: Layout) -> Iterator[Rank]:
    """Yield the ranks that have a file each."""
    for pipeline in range(layout.pipeline):
        for expert in range(layout.expert):
            for tensor in range(layout.tensor):
                yield Rank(tensor, pipeline, expert)


def folder_name(rank: Rank, layout: Layout) -> str:
    """Return the folder of a rank, as upstream names it."""
    name = f"mp_rank_{rank.tensor:02d}"
    if layout.pipeline > 1:
        name += f"_{rank.pipeline:03d}"
    return f"{name}_{rank.expert:03d}" if layout.expert > 1 else name


def check_plain_layout(layout: Layout) -> None:
    """Raise ConversionError for a layout whose plain files are ambiguous."""
    if layout.expert_tensor != layout.tensor and layout.expert > 1:
        raise ConversionError(
            f"{layout}: plain checkpoints do not serve another tensor-parallel size for experts; use torch_dist"
        )


def even_stages(layers: int, stages: int) -> list[range]:
    """Return the layers of every pipeline stage."""
    if layers % stages:
        raise ConversionError(
            f"{layers} layers cannot be divided evenly among {stages} pipeline ranks, as the plain format needs here; "
            "torch_dist has no such limit"
        )
    each = layers // stages
    return [range(stage * each, (stage + 1) * each) for stage in range(stages)]


def stage_of(place: TensorPlace, stages: list[range]) -> int:
    """Return the pipeline rank that holds a tensor."""
    if place.in_decoder:
        return next(stage for stage, layers in enumerate(stages) if (place.layer or 0) in layers)
    return 0 if place.name.startswith("embedding.") else len(stages) - 1


def local_name(place: TensorPlace, first_layer: int, first_expert: int, *, fused: bool, grouped: bool) -> str:
    """Return what a rank calls a tensor: numbers from 0; with Transformer Engine its own spelling."""
    numbers: dict[str, int] = {}
    if place.in_decoder:
        numbers["layer"] = (place.layer or 0) - first_layer
    if place.expert is not None:
        numbers["expert"] = place.expert - first_expert
    local = place.at(**numbers)
    if local.row.expert and grouped:
        return local.prefix + grouped_name(local.row, local.expert or 0)
    if fused and local.row.fused is not None:
        return local.prefix + local.row.fused
    return local.name


def optimizer_order(
    names: Iterable[str], dimensions: Callable[[str], int], parts: list[OptimizerPart]
) -> list[list[list[str]]]:
    """Return which parameters the groups of every optimizer have: [optimizer][group] -> names in their order.

    Args:
        names: of a rank's parameters, in the order in which the model registers them.
        dimensions: of a parameter.
        parts: the chain; with two, the second has the experts.
    """
    order: list[list[list[str]]] = []
    names = [name for name in names if not find_tensor(name).row.buffer]
    for number, part in enumerate(parts):
        if len(parts) > 2:
            raise ConversionError(f"a chain of {len(parts)} optimizers is not served: convert with --weights-only")
        own = [name for name in names if len(parts) == 1 or find_tensor(name).row.expert == bool(number)]
        decaying, plain = part.group_numbers()
        groups: list[list[str]] = [[] for _ in part.groups]
        for name in own:
            decays = find_tensor(name).decays(dimensions(name))
            if not decays and plain is None:
                raise ConversionError(f"{name} has no weight decay, but the optimizer has no such group")
            groups[decaying if decays or plain is None else plain].append(name)
        order.append(groups)
    return order
