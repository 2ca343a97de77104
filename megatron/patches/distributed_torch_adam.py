"""The distributed optimizer resumes with PyTorch's own Adam.

With the fused optimizers of Transformer Engine and apex the step count belongs to a parameter group. PyTorch's Adam,
used where neither is installed, keeps one with each parameter, and upstream's class goes wrong on that in a resumed
run:

- `state_dict()` fails on an optimizer that has not stepped yet, which is what a checkpoint is loaded into.
- Loading leaves another step count than the one that was saved (one tensor shared by all parameters, then overwritten
  by a parameter's own), or fails because a checkpoint format has none for it; the next update then has another bias
  correction.

The optimizer class is named by the factory that builds it: no seam. Applied to runs with --use-distributed-optimizer,
on any host; nothing changes where a fused optimizer is installed.

One fault is not of PyTorch's Adam: the main copy of a parameter that is fp32 in the model, such as every controller of
wide residual streams, is a view of the parameter itself, and a loaded state is written into it with gradients enabled,
which PyTorch refuses. With this patch the write runs without gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.patches import UpstreamPatch

_MODULE = "megatron.core.optimizer.distrib_optimizer"


def _is_torch_adam(optimizer: Any) -> bool:
    """Whether the step count is kept with each parameter: PyTorch's Adam, used where no fused one is installed."""
    from megatron.core.optimizer.distrib_optimizer import HAVE_APEX_OR_TE

    return not HAVE_APEX_OR_TE and isinstance(optimizer, torch.optim.Adam)  # AdamW is an Adam


def _with_state_before_the_first_step(state_dict: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def state_dict_of_any_age(self: Any) -> Any:
        adam = self.optimizer
        if _is_torch_adam(adam) and not adam.state:
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
        if not _is_torch_adam(self.optimizer):
            return
        for group in self.optimizer.param_groups:
            for parameter in group["params"]:
                self.optimizer.state[parameter]["step"] = torch.tensor(group["step"], dtype=torch.float32)

    return load_state_dict_and_step


def _without_a_step_of_its_own(set_states: Callable[[Any, Any, Any], None]) -> Callable[[Any, Any, Any], None]:
    def set_main_param_and_optimizer_states(self: Any, model_param: Any, tensors: dict[str, Any]) -> None:
        # None is passed over; `load_state_dict` sets the step afterwards, from the parameter's group.
        with torch.no_grad():
            set_states(self, model_param, {**tensors, "step": None} if _is_torch_adam(self.optimizer) else tensors)

    return set_main_param_and_optimizer_states


PATCHES = (
    UpstreamPatch(
        module=_MODULE,
        name="DistributedOptimizer.state_dict",
        reason="fails before the first step of torch's Adam",
        source_sha256="fe621ae6a622b58752df0330a2a30056dda222d73f22dc6bce6a5d1ac2bfa3d8",
        make=_with_state_before_the_first_step,
    ),
    UpstreamPatch(
        module=_MODULE,
        name="DistributedOptimizer.load_state_dict",
        reason="loses the step count of torch's Adam",
        source_sha256="7e5f988b86b485012fe3031b4960e8624d3b6e8db12a49367ffeae5777de029f",
        make=_with_the_saved_step,
    ),
    UpstreamPatch(
        module=_MODULE,
        name="DistributedOptimizer._set_main_param_and_optimizer_states",
        reason="demands a step of every checkpoint format, writes into views of fp32 parameters with gradients on",
        source_sha256="40cab784659711a8e7cdd5a0d84e60de0e1a2fa648316d4d697af83725311b4b",
        make=_without_a_step_of_its_own,
    ),
)
