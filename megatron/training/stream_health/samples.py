"""Sums over the activations of a stream, from which norms, cosines and shares follow.

    grams = [token_grams(x_sbw, num_streams=4), ...]     # while the forward runs: [n, K, K] of each branch, small
    sums_rm = stream_sums(grams)                         # [r, 2*K*K + 1], fp64; sums of ranks add up
    gram_kj, cosine_kj = mean_of(sums_rm[0].numpy(), 4)

What always holds: at most MAX_TOKENS tokens are looked at, evenly spread over the stream that this rank has; ranks that
hold copies of the same tokens change nothing, because only means are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

MAX_TOKENS = 256


def sums_length(num_streams: int) -> int:
    """Return the length of `stream_sums`."""
    return 2 * num_streams * num_streams + 1


@torch.no_grad()
def token_grams(x_sbw: Tensor, num_streams: int) -> Tensor:
    """Return the inner products X_k X_j of each token of a subsample: [..., K*D] -> [n, K, K], fp32."""
    x_nw = x_sbw.detach().reshape(-1, x_sbw.shape[-1])
    x_nw = x_nw[:: max(1, -(-x_nw.shape[0] // MAX_TOKENS))]
    x_nkd = x_nw.reshape(x_nw.shape[0], num_streams, -1).float()
    return torch.bmm(x_nkd, x_nkd.transpose(1, 2))


@torch.no_grad()
def stream_sums(grams: Sequence[Tensor]) -> Tensor:
    """Return the sums over the tokens of each branch: of inner products, of cosines, and the number of tokens.

    Args:
        grams: [n, K, K] of one or more branches; n may differ.

    Returns:
        [r, 2*K*K + 1], fp64.
    """
    gram_nkj = torch.cat(list(grams)).double()
    norm_nk = gram_nkj.diagonal(dim1=1, dim2=2).clamp_min(torch.finfo(torch.float32).tiny).sqrt()
    cosine_nkj = gram_nkj / norm_nk.unsqueeze(2) / norm_nk.unsqueeze(1)
    per_token_nm = torch.cat((gram_nkj.flatten(1), cosine_nkj.flatten(1), torch.ones_like(norm_nk[:, :1])), dim=1)
    return torch.stack([part_nm.sum(0) for part_nm in per_token_nm.split([len(gram) for gram in grams])])


def mean_of(sums_m: Any, num_streams: int) -> tuple[Any, Any] | None:
    """Return the mean inner products [K, K] and cosines [K, K] per token; None where no token was seen.

    Args:
        sums_m: a row of `stream_sums` as a NumPy array; so are the results.
    """
    if sums_m[-1] <= 0:
        return None
    gram_kj, cosine_kj = (sums_m[:-1] / sums_m[-1]).reshape(2, num_streams, num_streams)
    return gram_kj, cosine_kj
