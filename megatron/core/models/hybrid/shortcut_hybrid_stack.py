"""Hybrid stacks in which every MoE layer is paired with the layer ahead of it (shortcut MoE, arXiv 2404.05019).

    HybridModel(config, shortcut_hybrid_stack_spec(hybrid_stack_spec), ..., hybrid_layer_pattern="M*-E")
    WideResidualHybridModel(wide_config, shortcut_hybrid_stack_spec(local_hybrid_stack_spec), ...)

A pair is an E and the layer directly before it in the same pipeline segment: attention, Mamba or MLP. The stack takes
the layer specs of an ordinary stack and exchanges the MoE layer itself, so that the same submodules serve the
multi-token prediction stacks, which stay ordinary.

What always holds: an E that cannot be paired is an error; layers, their numbers and their base parameter names are the
ordinary stack's; after a forward, also one that raised, no layer holds an activation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.core.models.hybrid.local_hybrid_stack import LocalHybridStack
from megatron.core.models.hybrid.shortcut_pairs import UnpairedLayerError, shortcut_pairs
from megatron.core.models.hybrid.wide_residual_hybrid_stack import (
    WideResidualHybridStack,
    WideResidualLocalHybridStack,
)
from megatron.core.transformer.moe.shortcut_moe_layer import ShortcutMoETransformerLayer, shortcut_moe_layer_spec
from megatron.core.transformer.moe.shortcut_moe_options import check_shortcut_options


class _ShortcutMoEStack:
    """Mixin, left of a hybrid stack, ordinary or wide, that pairs each MoE layer with the layer ahead of it."""

    layers: Any
    layer_type_list: Sequence[str]

    def __init__(
        self,
        config: TransformerConfig,
        submodules: HybridStackSubmodules,
        *args: Any,
        shortcut_parallel: bool = False,
        **kwargs: Any,
    ) -> None:
        check_shortcut_options(config, parallel=shortcut_parallel)
        if submodules.moe_layer is not IdentityOp:
            submodules = replace(submodules, moe_layer=shortcut_moe_layer_spec(submodules.moe_layer))
        super().__init__(config, submodules, *args, **kwargs)  # type: ignore[call-arg]
        for predecessor, moe in self.atomic_layer_pairs:
            self.layers[moe].follow(self.layers[predecessor], parallel=shortcut_parallel)

    @property
    def atomic_layer_pairs(self) -> Sequence[tuple[int, int]]:
        """Local indices (predecessor, MoE layer) of the pairs of this stack, which a replay block never splits.

        Raises:
            ValueError: an MoE layer without a predecessor; the message has its position.
        """
        try:
            return shortcut_pairs(self.layer_type_list)
        except UnpairedLayerError as unpaired:
            segment = "".join(self.layer_type_list)
            raise ValueError(f"'E' at position {unpaired.index + 1} of the segment '{segment}' {unpaired}") from None

    def forward(self, *args: Any, padding_mask: Tensor | None = None, **kwargs: Any) -> Tensor:
        """Run the stack. Arguments as HybridStack.forward."""
        paired: list[ShortcutMoETransformerLayer] = [self.layers[moe] for _, moe in self.atomic_layer_pairs]
        try:
            for layer in paired:
                layer.shortcut_padding_mask = padding_mask
            y: Tensor = super().forward(*args, padding_mask=padding_mask, **kwargs)  # type: ignore[misc]
        finally:
            for layer in paired:
                layer.forget_shortcut()
        return y


class ShortcutHybridStack(_ShortcutMoEStack, HybridStack):
    """HybridStack with shortcut MoE. Arguments as HybridStack, submodules those of the ordinary stack.

    Args:
        shortcut_parallel: run the routed experts on a CUDA stream of their own, beside the layer ahead.

    Raises:
        ValueError: an option that shortcut MoE refuses, or an MoE layer without a layer ahead to pair with.
        TypeError: an MoE layer class without a shortcut twin.
    """


class ShortcutLocalHybridStack(_ShortcutMoEStack, LocalHybridStack):
    """The same for hosts without Transformer Engine."""


class ShortcutWideResidualHybridStack(_ShortcutMoEStack, WideResidualHybridStack):
    """The same on wide residual streams."""


class ShortcutWideResidualLocalHybridStack(_ShortcutMoEStack, WideResidualLocalHybridStack):
    """The same on wide residual streams, for hosts without Transformer Engine."""


_SHORTCUT_STACK: dict[type, type] = {
    HybridStack: ShortcutHybridStack,
    LocalHybridStack: ShortcutLocalHybridStack,
    WideResidualHybridStack: ShortcutWideResidualHybridStack,
    WideResidualLocalHybridStack: ShortcutWideResidualLocalHybridStack,
}


def shortcut_hybrid_stack_spec(spec: ModuleSpec, *, parallel: bool = False) -> ModuleSpec:
    """Return spec, ordinary or wide, with the shortcut twin of its stack; spec is left as it was.

    Args:
        parallel: run the routed experts on a CUDA stream of their own, beside the layer ahead.

    Raises:
        TypeError: no spec of a hybrid stack that has a shortcut twin; the message names what was found.
    """
    found = spec.module if isinstance(spec, ModuleSpec) else type(spec)
    if found not in _SHORTCUT_STACK:
        raise TypeError(
            f"{getattr(found, '__name__', found)} has no twin with shortcut MoE; a spec of "
            f"{' or '.join(stack.__name__ for stack in _SHORTCUT_STACK)} is wanted"
        )
    return replace(spec, module=_SHORTCUT_STACK[found], params={**spec.params, "shortcut_parallel": parallel})
