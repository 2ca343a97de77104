"""Wide residual streams for models of `transformers`: reads, writes and the readout, in plain PyTorch.

Travels beside config.json of an exported model and is imported by its modelling file; it needs torch and transformers
only. The carried stream has K*D features, stream k being [k*D, (k+1)*D); every branch computes at width D:

    expand   the embedding, repeated K times
    read     z   = sum_k sigmoid(r_k) X_k
    write    Y_k = g_k X_k + 2 sigmoid(s_k) u,  g_k = 1 - F sigmoid(-q_k) with learned retention, else 1
    readout  sum_k sigmoid(e_k) X_k, before the final norm

What always holds: logits (r, s, q, e) are fp32 vectors of K elements in models of any dtype; sums are made in fp32 and
rounded once.

Shape suffixes: b batch, s sequence, k streams, d branch width D, w stream width K*D.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn
from transformers import initialization as init

FP32_MODULES = ["read_map", "write_map", "exit_map", "retention"]
"""Parts of parameter names that stay fp32: `_keep_in_fp32_modules_strict` of the models."""


def expand(embedded_bsd: Tensor, num_streams: int) -> Tensor:
    """Repeat an embedding K times on the last dimension."""
    return embedded_bsd.repeat(*[1] * (embedded_bsd.dim() - 1), num_streams)


class StreamMap(nn.Module):
    """K logits; they start so that a read is the mean, or (with a spread) that writes differ a little."""

    def __init__(self, num_streams: int, spread: float | None = None) -> None:
        super().__init__()
        self.num_streams, self.spread = num_streams, spread
        self.logit = nn.Parameter(torch.empty(num_streams, dtype=torch.float32))

    def start(self) -> None:
        """Set the logits of a new model."""
        if self.spread is None:
            init.constant_(self.logit, -math.log(self.num_streams - 1))
        else:
            init.copy_(self.logit, torch.linspace(-self.spread, self.spread, self.num_streams))


class Retention(nn.Module):
    """K logits of the share of each stream that a write keeps."""

    def __init__(self, num_streams: int, keeps: float, max_forget: float) -> None:
        super().__init__()
        self.keeps, self.max_forget = keeps, max_forget
        self.retention_logit = nn.Parameter(torch.empty(num_streams, dtype=torch.float32))

    def start(self) -> None:
        """Set the logits of a new model: g = keeps."""
        forgotten = (1 - self.keeps) / self.max_forget
        init.constant_(self.retention_logit, math.log((1 - forgotten) / forgotten))

    def forward(self) -> Tensor:
        """Return g [K] in fp32."""
        return 1 - self.max_forget * torch.sigmoid(-self.retention_logit.float())


def _mix(x_bsw: Tensor, logit_k: Tensor, dtype: torch.dtype) -> Tensor:
    x_bskd = x_bsw.unflatten(-1, (logit_k.numel(), -1)).float()
    return (torch.sigmoid(logit_k.float())[:, None] * x_bskd).sum(-2).to(dtype)


class StreamRead(nn.Module):
    """What a branch reads: [..., K*D] -> [..., D]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.read_map = StreamMap(config.num_streams)

    def forward(self, x_bsw: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Read in `dtype` (default: that of the stream)."""
        return _mix(x_bsw, self.read_map.logit, dtype or x_bsw.dtype)


class StreamReadout(nn.Module):
    """What the final norm reads: [..., K*D] -> [..., D]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.exit_map = StreamMap(config.num_streams)

    def forward(self, x_bsw: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """Read in `dtype` (default: that of the stream)."""
        return _mix(x_bsw, self.exit_map.logit, dtype or x_bsw.dtype)


class StreamWrite(nn.Module):
    """Adds a branch's output u [..., D] to the streams [..., K*D]."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.write_map = StreamMap(config.num_streams, spread=config.streamwise_sigmoid_init_scale)
        self.retention = None
        if config.learned_retention:
            self.retention = Retention(config.num_streams, config.retention_init, config.retention_max_forget)

    def forward(self, x_bsw: Tensor, update_bsd: Tensor) -> Tensor:
        """Return the new streams, in their dtype."""
        weight_k = 2 * torch.sigmoid(self.write_map.logit.float())
        x_bskd = x_bsw.unflatten(-1, (weight_k.numel(), -1)).float()
        if self.retention is not None:
            x_bskd = self.retention()[:, None] * x_bskd
        return (x_bskd + weight_k[:, None] * update_bsd.float()[..., None, :]).flatten(-2).to(x_bsw.dtype)


def start_weights(module: nn.Module) -> bool:
    """Set a new model's logits, if `module` has any of its own; returns whether it has."""
    if isinstance(module, StreamMap | Retention):
        module.start()
        return True
    return False
