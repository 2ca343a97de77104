"""Continues a prompt token by token until an end of text, a number of tokens or the end of the context.

    run = Continuation(decoder, sampler, Limits(max_new_tokens=64, context_length=256, vocabulary=4096, end=0))
    for choice in run.tokens(prompt_ids): ...
    run.stopped                           # "end of text", "max-new-tokens" or "context"

What always holds: an id that the tokenizer does not have (padding of the vocabulary) is never chosen; the token that
ends a text is not among those yielded; no token is computed that cannot be used.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron.training.generation.decoder import Decoder
from megatron.training.generation.errors import GenerationError
from megatron.training.generation.sampler import Choice

Stop = Literal["end of text", "max-new-tokens", "context"]


@dataclass(frozen=True)
class Limits:
    """Where a continuation ends. `vocabulary` is the tokenizer's size, `end` its end-of-text id (None for none)."""

    max_new_tokens: int
    context_length: int
    vocabulary: int
    end: int | None


def check_prompt(tokens: Sequence[int], limits: Limits, name: str) -> None:
    """Raise GenerationError for a prompt that cannot be continued; `name` says which one it is."""
    if not tokens:
        raise GenerationError(f"{name} is empty: give at least one token of text to continue.")
    bad = next((token for token in tokens if not 0 <= token < limits.vocabulary), None)
    if bad is not None:
        raise GenerationError(f"{name} has the token {bad}; the tokenizer's ids are 0 to {limits.vocabulary - 1}.")
    if len(tokens) >= limits.context_length:
        raise GenerationError(
            f"{name} has {len(tokens)} tokens, and the context of the checkpoint (--max-position-embeddings) has "
            f"{limits.context_length}: at most {limits.context_length - 1} leave room for a new one. Shorten it."
        )


class Continuation:
    """One continuation of one prompt."""

    def __init__(self, decoder: Decoder, sampler: Callable[[Tensor], Choice], limits: Limits) -> None:
        self._decoder = decoder
        self._sampler = sampler
        self._limits = limits
        self.stopped: Stop | None = None

    def tokens(self, prompt: Sequence[int]) -> Iterator[Choice]:
        """Yield the chosen tokens; `stopped` says afterwards why there are no more."""
        limits = self._limits
        room = limits.context_length - len(prompt)
        pending: Sequence[int] = prompt
        for _ in range(min(limits.max_new_tokens, room)):
            choice = self._sampler(self._decoder.advance(pending)[: limits.vocabulary])
            if choice.token == limits.end:
                self.stopped = "end of text"
                return
            yield choice
            pending = [choice.token]
        self.stopped = "max-new-tokens" if limits.max_new_tokens <= room else "context"
