"""The all-to-all token dispatcher hands host integers to the collective on the CPU host.

Upstream turns the split sizes into NumPy arrays only when they lie on a GPU; on the CPU they stay tensors, which
`all_to_all_single` refuses. MoELayer names its dispatcher classes itself and the conversion is a module function called
by name: no seam. Installed by the CPU host alone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from megatron.patches import UpstreamPatch


def _convert_on_cpu(maybe_move_tensor_to_cpu: Callable[..., Any]) -> Callable[..., Any]:
    def move_to_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        if as_numpy and torch.is_tensor(tensor) and tensor.device.type == "cpu":
            return tensor.detach().numpy()
        return maybe_move_tensor_to_cpu(tensor, as_numpy=as_numpy, record_stream=record_stream)

    return move_to_host


PATCH = UpstreamPatch(
    module="megatron.core.transformer.moe.token_dispatcher",
    name="maybe_move_tensor_to_cpu",
    reason="split sizes on the CPU stay tensors",
    source_sha256="8fc5847a887d73195b064efc01599f8768a48bbe3327b8fa50f34112cbbf1153",
    make=_convert_on_cpu,
)
