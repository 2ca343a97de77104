"""The distributed optimizer resumes with PyTorch's own Adam.

With the fused optimizers of Transformer Engine and apex the step count belongs to a parameter group. PyTorch's Adam
keeps one with each parameter, and two places of upstream's code are wrong for that in a resumed run: `state_dict()`
fails on an optimizer that has not stepped yet, which is what a checkpoint is loaded into; and what `load_state_dict()`
leaves in the parameters' state is not the count that was saved (one tensor shared by all, then overwritten by the
parameter state's), so the next update has another bias correction. The optimizer class is named by the factory that
builds it: no seam. Applied where neither package is installed, on any host.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.patches import UpstreamPatch


def _with_state_of_step_zero(state_dict: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def state_dict_of_any_age(self: Any) -> Any:
        adam = self.optimizer
        if isinstance(adam, torch.optim.Adam) and not adam.state:  # AdamW is an Adam
            for parameter in (parameter for group in adam.param_groups for parameter in group["params"]):
                adam.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32),
                    **{key: torch.zeros_like(parameter) for key in self.optimizer_state_keys},
                }
        return state_dict(self)

    return state_dict_of_any_age


def _with_the_saved_step(load_state_dict: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    def load_state_dict_and_step(self: Any, state_dict: Any) -> None:
        load_state_dict(self, state_dict)
        if not isinstance(self.optimizer, torch.optim.Adam):
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(group["step"], dtype=torch.float32)

    return load_state_dict_and_step


_MODULE = "megatron.core.optimizer.distrib_optimizer"

PATCHES = (
    UpstreamPatch(
        module=_MODULE,
        name="DistributedOptimizer.state_dict",
        reason="fails before the first step with torch's Adam",
        source_sha256="fe621ae6a622b58752df0330a2a30056dda222d73f22dc6bce6a5d1ac2bfa3d8",
        make=_with_state_of_step_zero,
    ),
    UpstreamPatch(
        module=_MODULE,
        name="DistributedOptimizer.load_state_dict",
        reason="loses the step count of torch's Adam",
        source_sha256="7e5f988b86b485012fe3031b4960e8624d3b6e8db12a49367ffeae5777de029f",
        make=_with_the_saved_step,
    ),
)


def is_needed() -> bool:
    """Whether upstream uses PyTorch's Adam here."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return not HAVE_APEX_OR_TE
