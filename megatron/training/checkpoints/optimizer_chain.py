"""The optimizer's part of a checkpoint that is no tensor: parameter groups, step, a chain of one or two optimizers.

    parts = parts_of(common.state["optimizer"])
    parts[0].groups, parts[0].step
    rechained(common.state["optimizer"], experts_apart=True, bare_experts=False)

With expert-parallel ranks the experts have an optimizer of their own (the second); without, there is one for all.

What always holds: hyperparameters and step are those that were stored.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from megatron.training.checkpoints.errors import ConversionError


@dataclass
class OptimizerPart:
    """One optimizer: `state` as stored, whose inner part has the groups."""

    state: dict[str, Any]

    @property
    def inner(self) -> dict[str, Any]:
        """The torch optimizer's own state dict."""
        return self.state.get("optimizer", self.state)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Its parameter groups."""
        return self.inner["param_groups"]

    @property
    def distributed(self) -> bool:
        """Whether it is a distributed optimizer's."""
        return "param_state_sharding_type" in self.state or "param_state" in self.state

    @property
    def has_master_weights(self) -> bool:
        """Whether weights in half precision have fp32 copies in it."""
        return "optimizer" in self.state and not self.distributed

    @property
    def step(self) -> Any:
        """The number of steps taken (a tensor), or None."""
        return self.inner.get("state", {}).get("common_step")

    def group_numbers(self) -> tuple[int, int | None]:
        """Return the numbers of the groups with and without weight decay.

        Raises:
            ConversionError: there are others, whose parameters cannot be told.
        """
        decaying = [number for number, group in enumerate(self.groups) if group.get("wd_mult", 1.0) != 0]
        plain = [number for number, group in enumerate(self.groups) if group.get("wd_mult", 1.0) == 0]
        if len(decaying) != 1 or len(plain) > 1:
            raise ConversionError(
                f"the optimizer has {len(self.groups)} parameter groups; one with weight decay and one without are "
                "served: convert with --weights-only"
            )
        return decaying[0], plain[0] if plain else None


def parts_of(optimizer: Any) -> list[OptimizerPart]:
    """Return the optimizers of a chain (a list, or a dict by number), or the only one."""
    if isinstance(optimizer, (list, tuple)):
        return [OptimizerPart(part) for part in optimizer]
    if optimizer and all(isinstance(key, int) for key in optimizer):
        return [OptimizerPart(optimizer[key]) for key in sorted(optimizer)]
    return [OptimizerPart(optimizer)]


def joined(parts: list[OptimizerPart]) -> dict[Any, Any]:
    """Return the parts as torch_dist stores them."""
    if len(parts) == 1:
        return parts[0].state
    return {number: part.state for number, part in enumerate(parts)}


def rechained(optimizer: Any, *, experts_apart: bool, bare_experts: bool) -> dict[Any, Any]:
    """Return the optimizer's part with the experts in an optimizer of their own, or all in one.

    Args:
        experts_apart: there are expert-parallel ranks and experts.
        bare_experts: some expert tensors (biases) have no weight decay.
    """
    parts = parts_of(optimizer)
    if (len(parts) > 1) == experts_apart:
        return joined(parts)
    if not experts_apart:
        return parts[0].state
    own = OptimizerPart(copy.deepcopy(parts[0].state))
    decaying, plain = own.group_numbers()
    kept = [own.groups[decaying]] + ([own.groups[plain]] if bare_experts and plain is not None else [])
    for group in kept:
        group["is_expert_parallel"] = True
    own.inner["param_groups"] = kept
    return joined([parts[0], own])
