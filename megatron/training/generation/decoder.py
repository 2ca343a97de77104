"""Gives the logits of the next token while a sequence grows: with upstream's static cache, or by computing it anew.

    decoder = make_decoder(model, context_length, cached=True)
    logits_v = decoder.advance(prompt_tokens)      # the logits after the last of them
    logits_v = decoder.advance([token])

Cached: megatron-core's StaticInferenceContext keeps the keys and values of every attention layer and the states of
every Mamba layer; a step computes the new token alone. Anew: every step runs the whole prefix as training does.

What always holds: both give the same logits up to rounding, and no gradients are recorded.

Shape suffixes: b batch (1 here), s new tokens, v vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from megatron.core.inference.contexts import StaticInferenceContext
from megatron.core.inference.utils import InferenceMode
from megatron.core.ssm.gated_delta_net.gdn import GatedDeltaNet
from megatron.core.utils import get_model_config
from torch import Tensor


class Decoder(Protocol):
    """A sequence under construction; starts empty."""

    def advance(self, tokens: Sequence[int]) -> Tensor:
        """Append tokens (1 or more) and return the logits [v] (fp32) of the token after the last one."""


def _inputs(tokens: Sequence[int], first: int) -> tuple[Tensor, Tensor]:
    """Return tokens and their positions, both [b, s]."""
    device = torch.cuda.current_device()
    tokens_bs = torch.tensor([list(tokens)], dtype=torch.long, device=device)
    positions_bs = torch.arange(first, first + len(tokens), dtype=torch.long, device=device)[None]
    return tokens_bs, positions_bs


class CachedDecoder:
    """Runs new tokens only. At most `context_length` tokens in all."""

    def __init__(self, model: Any, context_length: int) -> None:
        self._model = model
        self._cache = StaticInferenceContext(max_batch_size=1, max_sequence_length=context_length)

    @torch.no_grad()
    def advance(self, tokens: Sequence[int]) -> Tensor:
        """As Decoder.advance. Several tokens are taken in the first call only: later ones are causal one by one."""
        pieces = [tokens] if self._cache.sequence_len_offset == 0 else [[token] for token in tokens]
        for piece in pieces:
            tokens_bs, positions_bs = _inputs(piece, self._cache.sequence_len_offset)
            with InferenceMode.active():
                logits_bsv = self._model(
                    tokens_bs, positions_bs, None, inference_context=self._cache, runtime_gather_output=True
                )
            self._cache.increment_sequence_len_offset(len(piece))
            self._cache.enable_decode_mode()
        return logits_bsv[0, -1].float()


class RecomputingDecoder:
    """Runs the whole sequence at every step."""

    def __init__(self, model: Any) -> None:
        self._model = model
        self._tokens: list[int] = []

    @torch.no_grad()
    def advance(self, tokens: Sequence[int]) -> Tensor:
        """As Decoder.advance."""
        self._tokens.extend(tokens)
        tokens_bs, positions_bs = _inputs(self._tokens, 0)
        return self._model(tokens_bs, positions_bs, None, runtime_gather_output=True)[0, -1].float()


def cache_obstacle(model: Any) -> str | None:
    """Say why the cache cannot serve this model, or None when it can."""
    config = get_model_config(model)
    if config.multi_latent_attention:
        return "the cache of multi-latent attention is not tested here"
    if config.experimental_attention_variant is not None:
        return f"the cache of {config.experimental_attention_variant} is not tested here"
    if any(isinstance(module, GatedDeltaNet) for module in model.modules()):
        return "gated delta nets have none"
    if config.moe_expert_capacity_factor is not None:
        return "experts of limited capacity (--moe-expert-capacity-factor) drop tokens by their company"
    return None


def make_decoder(model: Any, context_length: int, *, cached: bool) -> Decoder:
    """Return a decoder for one sequence. The model is in evaluation mode and takes [b, s] tokens and positions."""
    return CachedDecoder(model, context_length) if cached else RecomputingDecoder(model)
