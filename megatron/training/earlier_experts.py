"""What experts that ran in this process before left in globals of megatron-core, set aside for the next model.

    with Replacements() as replaced:
        set_aside_earlier_experts(replaced)       # before a model is built; put back on exit

Upstream keeps the scale of the auxiliary loss in a class attribute and the metrics of every layer in a global tracker,
sized for the first model with experts that ran. A process that runs one model never notices; a second one of another
shape would meet numbers that do not fit it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megatron.cpu.replacements import Replacements


def set_aside_earlier_experts(replaced: Replacements) -> None:
    """Begin as a new process does."""
    from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

    from megatron.core.transformer.moe import moe_logging

    replaced.set(MoEAuxLossAutoScaler, "main_loss_backward_scale", None)
    replaced.set(moe_logging, "_MOE_METRICS_TRACKER", None)
