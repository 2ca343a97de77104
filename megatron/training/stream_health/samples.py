"""Sums over the activations of a stream, from which norms, cosines and shares follow.

    sums_m = stream_sums(x_sbw, num_streams=4)       # [2*K*K + 1], fp64; sums of ranks and micro-batches add up
    gram_kj, cosine_kj = mean_of(sums_m, 4)

What always holds: at most MAX_TOKENS tokens are looked at, evenly spread over the stream that this rank has; ranks that
hold copies of the same tokens change nothing, because only means are taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

MAX_TOKENS = 256


def sums_length(num_streams: int) -> int:
    """Return the length of `stream_sums`."""
    return 2 * num_streams * num_streams + 1


@torch.no_grad()
def stream_sums(x_sbw: Tensor, num_streams: int) -> Tensor:
    """Return, over a subsample of the tokens: sums of inner products X_k X_j, of cosines, and the number of tokens.

    Args:
        x_sbw: a stream [..., K*D] of any floating dtype.

    Returns:
        [2*K*K + 1], fp64.
    """
    x_nw = x_sbw.detach().reshape(-1, x_sbw.shape[-1])
    x_nw = x_nw[:: max(1, -(-x_nw.shape[0] // MAX_TOKENS))]
    x_nkd = x_nw.reshape(x_nw.shape[0], num_streams, -1).float()
    gram_nkj = torch.bmm(x_nkd, x_nkd.transpose(1, 2))
    norm_nk = gram_nkj.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    cosine_nkj = gram_nkj / norm_nk.unsqueeze(2) / norm_nk.unsqueeze(1)
    sums = torch.stack((gram_nkj, cosine_nkj)).double().sum(dim=1).flatten()
    return torch.cat((sums, sums.new_full((1,), x_nw.shape[0])))


def mean_of(sums_m: Tensor, num_streams: int) -> tuple[Tensor, Tensor] | None:
    """Return the mean inner products [K, K] and cosines [K, K] per token; None where no token was seen."""
    if sums_m[-1] <= 0:
        return None
    gram_kj, cosine_kj = (sums_m[:-1] / sums_m[-1]).view(2, num_streams, num_streams)
    return gram_kj, cosine_kj
