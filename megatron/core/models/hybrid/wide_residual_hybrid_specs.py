"""Specs of hybrid stacks on wide residual streams: the ordinary specs with the stack exchanged.

    HybridModel(wide_config, wide_residual_hybrid_stack_spec, vocab_size, sequence_length, hybrid_layer_pattern="M*-E")

What always holds: only the stack differs, which widens the layers that it is given; every submodule option of
megatron-core carries over.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.core.models.hybrid.hybrid_block import HybridStack
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec
from megatron.core.transformer.spec_utils import ModuleSpec

from megatron.core.models.hybrid.local_hybrid_specs import local_hybrid_stack_spec
from megatron.core.models.hybrid.local_hybrid_stack import LocalHybridStack
from megatron.core.models.hybrid.shortcut_hybrid_stack import (
    ShortcutHybridStack,
    ShortcutLocalHybridStack,
    ShortcutWideResidualHybridStack,
    ShortcutWideResidualLocalHybridStack,
)
from megatron.core.models.hybrid.wide_residual_hybrid_stack import (
    WideResidualHybridStack,
    WideResidualLocalHybridStack,
)

_WIDE_STACK: dict[type, type] = {
    HybridStack: WideResidualHybridStack,
    LocalHybridStack: WideResidualLocalHybridStack,
    ShortcutHybridStack: ShortcutWideResidualHybridStack,
    ShortcutLocalHybridStack: ShortcutWideResidualLocalHybridStack,
}


def widen_hybrid_stack_spec(spec: ModuleSpec) -> ModuleSpec:
    """Return spec with the wide twin of its stack; spec is left as it was.

    Raises:
        TypeError: no spec of a hybrid stack that has a wide twin; the message names what was found.
    """
    if not isinstance(spec, ModuleSpec):
        raise TypeError(f"a {type(spec).__name__} is no spec of a hybrid stack; a ModuleSpec is wanted")
    if spec.module in _WIDE_STACK.values():
        return spec
    if spec.module not in _WIDE_STACK:
        raise TypeError(
            f"the stack class {getattr(spec.module, '__name__', spec.module)} has no twin on wide residual streams; a "
            f"spec of {' or '.join(stack.__name__ for stack in _WIDE_STACK)} is wanted"
        )
    return replace(spec, module=_WIDE_STACK[spec.module])


wide_residual_hybrid_stack_spec = widen_hybrid_stack_spec(hybrid_stack_spec)
"""Transformer Engine modules, as upstream's hybrid_stack_spec."""

wide_residual_local_hybrid_stack_spec = widen_hybrid_stack_spec(local_hybrid_stack_spec)
"""torch norms and Megatron's own linear layers, for hosts without Transformer Engine."""
