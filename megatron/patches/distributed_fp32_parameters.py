"""The distributed optimizer loads the state of parameters that are fp32 in the model.

For a bf16 parameter the optimizer's main copy is a tensor of its own. For an fp32 one, such as every controller of wide
residual streams, it is a view of the parameter itself, and upstream's loader of its default checkpoint layout writes
into that view with gradients enabled, which PyTorch refuses ("a view of a leaf Variable that requires grad"). Its two
other loaders run without gradients; with this patch this one does too. Applied on any host with
--use-distributed-optimizer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.patches import UpstreamPatch


def _without_gradients(load: Callable[..., None]) -> Callable[..., None]:
    def load_without_gradients(self: Any, *args: Any, **kwargs: Any) -> None:
        with torch.no_grad():
            load(self, *args, **kwargs)

    return load_without_gradients


PATCH = UpstreamPatch(
    module="megatron.core.optimizer.distrib_optimizer",
    name="DistributedOptimizer.load_parameter_state_from_dp_reshardable",
    reason="copies into views of fp32 parameters with gradients enabled",
    source_sha256="79cddb4c716f13c2706a4b1324e5c63071ca0e716ee940949d705f775526a221",
    make=_without_gradients,
)
