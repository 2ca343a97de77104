"""Chooses the next token from logits: the most likely one, or a draw at a temperature from the top k or top p.

    sampler = Sampler(Sampling(temperature=0.8, top_p=0.9), seed=1)
    choice = sampler(logits_v)            # choice.token, choice.logprob

Order, as in most libraries: temperature, then the k most likely, then of these the smallest set whose probability
reaches p (nucleus sampling, Holtzman et al. 2020, arXiv 1904.09751).

What always holds: a token outside of that set is never drawn (it is not among those that the draw sees); equal logits
rank by their id, smaller first; the work is done on the CPU in fp64, so the same logits, options and seed give the same
token on every machine.

Shape suffixes: v vocabulary, c candidates that are left.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron.training.generation.errors import GenerationError


@dataclass(frozen=True)
class Sampling:
    """How to choose. Temperature 0 takes the most likely token; top_k and top_p None keep all tokens.

    Raises:
        GenerationError: a value out of range, or top_k or top_p at temperature 0, where they can change nothing.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if not math.isfinite(self.temperature) or self.temperature < 0:
            raise GenerationError(f"--temperature {self.temperature}: a number from 0 is wanted (0 is greedy).")
        if self.top_k is not None and self.top_k < 1:
            raise GenerationError(f"--top-k {self.top_k}: a whole number from 1 is wanted (leave it out for all).")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise GenerationError(f"--top-p {self.top_p}: a number above 0 and up to 1 is wanted.")
        if self.greedy and (self.top_k is not None or self.top_p is not None):
            raise GenerationError(
                "--top-k and --top-p change nothing where the most likely token is taken (greedy, or temperature 0): "
                "leave them out, or give a --temperature above 0."
            )

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


@dataclass(frozen=True)
class Choice:
    """A chosen token and its natural log-probability under the model itself (temperature 1, whole vocabulary)."""

    token: int
    logprob: float


def candidates(logits_v: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Return the ids [c] that may be drawn, most likely first, and their probabilities [c] (fp64, sum 1).

    Raises:
        GenerationError: a logit is NaN or +inf, so that no probabilities exist.
    """
    logits_v = logits_v.detach().to(device="cpu", dtype=torch.float64)
    if logits_v.isnan().any() or logits_v.max() == math.inf or logits_v.max() == -math.inf:
        raise GenerationError("the model's logits are not finite: the checkpoint is damaged or its training diverged.")
    sorted_v, ids_v = torch.sort(logits_v, descending=True, stable=True)
    if sampling.greedy:
        return ids_v[:1], torch.ones(1, dtype=torch.float64)
    kept = sorted_v.numel() if sampling.top_k is None else min(sampling.top_k, sorted_v.numel())
    # The largest logit first becomes 0: a tiny temperature must not overflow.
    probabilities_c = torch.softmax((sorted_v[:kept] - sorted_v[0]) / sampling.temperature, dim=0)
    if sampling.top_p is not None and sampling.top_p < 1:
        before_c = probabilities_c.cumsum(0) - probabilities_c
        kept = max(int((before_c < sampling.top_p).sum()), 1)
        probabilities_c = probabilities_c[:kept] / probabilities_c[:kept].sum()
    return ids_v[:kept], probabilities_c


def stream_seed(seed: int, *numbers: int) -> int:
    """A seed of its own for each (prompt, sample), so that what one draws does not depend on the others."""
    text = "/".join(map(str, (seed, *numbers)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


class Sampler:
    """Chooses tokens one after another with a random state of its own."""

    def __init__(self, sampling: Sampling, seed: int = 0) -> None:
        self.sampling = sampling
        self._generator = torch.Generator(device="cpu").manual_seed(seed)

    def __call__(self, logits_v: Tensor) -> Choice:
        """Choose a token. logits_v: [v], any floating dtype and device.

        Raises:
            GenerationError: logits that are not finite.
        """
        ids_c, probabilities_c = candidates(logits_v, self.sampling)
        index = 0
        if ids_c.numel() > 1:
            draw = torch.rand((), dtype=torch.float64, generator=self._generator)
            total = probabilities_c.cumsum(0)
            index = int(torch.searchsorted(total, draw * total[-1], right=True).clamp(max=ids_c.numel() - 1))
        token = int(ids_c[index])
        logits_v = logits_v.detach().to(device="cpu", dtype=torch.float64)
        return Choice(token, float(logits_v[token] - torch.logsumexp(logits_v, 0)))
