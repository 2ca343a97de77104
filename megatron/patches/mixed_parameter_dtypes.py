"""Optimizers save and load models whose parameters are partly fp32 and partly bf16 or fp16.

Controllers of wide residual streams stay fp32 in a bf16 model, so a parameter group holds both kinds. Two places of
upstream expect one kind a group, and there is no seam in either:

- The distributed optimizer notes the position of each parameter in its group in buffer order, then builds the group
  with all fp32 parameters first. Positions are looked up when a checkpoint is written or read, and would name other
  parameters. The patch puts fp32 parameters first where the positions are noted.
- The ordinary float16 optimizer numbers its parameters by walking through the float16 ones alone, while the inner
  optimizer's numbers count all. With the patch it walks through all, in the inner optimizer's order, while it makes or
  takes a state dict; an fp32 parameter is its own main copy.

A model of one dtype is saved and loaded as without the patch. Applied to runs with --wide-residual.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron.patches import UpstreamPatch


def _fp32_first(original: Any) -> Any:
    build = original.__func__

    def build_optimizer_group_ranges(cls: type, param_groups: list[Any], gbuf_ranges: list[Any]) -> Any:
        positions, group_ranges = build(cls, param_groups, gbuf_ranges)
        for group_index, group_range in enumerate(group_ranges):
            group_range["params"].sort(key=lambda param: param.dtype != torch.float32)  # stable
            for order, param in enumerate(group_range["params"]):
                positions[param] = (group_index, order)
        return positions, group_ranges

    return classmethod(build_optimizer_group_ranges)


@contextmanager
def _all_parameters_in_order(optimizer: Any) -> Iterator[None]:
    """Let both lists of a float16 optimizer's groups hold every parameter, in the inner optimizer's order."""
    model_groups, main_groups = optimizer.float16_groups, optimizer.fp32_from_float16_groups
    model_of = {
        main: model
        for model_group, main_group in zip(model_groups, main_groups, strict=True)
        for model, main in zip(model_group, main_group, strict=True)
    }
    ordered = [list(group["params"]) for group in optimizer.optimizer.param_groups]
    optimizer.fp32_from_float16_groups = ordered
    optimizer.float16_groups = [[model_of.get(main, main) for main in group] for group in ordered]
    try:
        yield
    finally:
        optimizer.float16_groups, optimizer.fp32_from_float16_groups = model_groups, main_groups


def _with_all_parameters(original: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if self.is_stub_optimizer:
            return original(self, *args, **kwargs)
        with _all_parameters_in_order(self):
            return original(self, *args, **kwargs)

    return method


_FLOAT16 = "Float16OptimizerWithFloat16Params"
_REASON = "numbers the float16 parameters alone"

PATCHES = (
    UpstreamPatch(
        module="megatron.core.optimizer.distrib_optimizer",
        name="DistributedOptimizer._build_optimizer_group_ranges",
        reason="notes positions in another order than that of the groups built from them",
        source_sha256="c0ccc7598123b0872ed6122810b0c746e4ff8583990c6bc6f77846290c208a43",
        make=_fp32_first,
    ),
    UpstreamPatch(
        module="megatron.core.optimizer.optimizer",
        name=f"{_FLOAT16}.state_dict",
        reason=_REASON,
        source_sha256="a2e5b1e23a1229c0bd2ac81eeb285fc715010ecc38cfef70d201afbcf4f41615",
        make=_with_all_parameters,
    ),
    UpstreamPatch(
        module="megatron.core.optimizer.optimizer",
        name=f"{_FLOAT16}.sharded_state_dict",
        reason=_REASON,
        source_sha256="9c7488e7734f2cae432498fb24f5333451a08aed27888570d80fbe04a6912d04",
        make=_with_all_parameters,
    ),
    UpstreamPatch(
        module="megatron.core.optimizer.optimizer",
        name=f"{_FLOAT16}.load_state_dict",
        reason=_REASON,
        source_sha256="e6e1bd9b96e2009dbf09ab7e4f310132ca20465829a7449b156d864d75c66f06",
        make=_with_all_parameters,
    ),
)
