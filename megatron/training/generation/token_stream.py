"""Turns tokens into text piece by piece, for printing them as they are sampled.

    stream = TokenStream(tokenizer.detokenize, prompt_ids)
    for token in tokens:
        print(stream.add(token), end="")
    print(stream.finish())

A token of a byte-level tokenizer may hold part of a character. Such bytes are held back until the character is whole;
they decode to U+FFFD until then.

What always holds: the pieces together are the text of the continuation, and no piece of `add` ends inside a character:
bytes that never become one come out as U+FFFD with the next whole character, or at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

_INCOMPLETE = "\ufffd"


class TokenStream:
    """The text of a growing sequence of tokens that begins with a prompt, whose own text is not repeated."""

    def __init__(self, detokenize: Callable[[list[int]], str], prompt: Sequence[int]) -> None:
        self._detokenize = detokenize
        self._tokens = list(prompt)
        # Tokens [context, printed) are decoded along, so that a tokenizer which treats the start of a text in its own
        # way (a leading space, say) does so there and not at every piece.
        self._context = 0
        self._printed = len(self._tokens)

    def add(self, token: int) -> str:
        """Take a token; return the text that is now whole, often that of this token, possibly none."""
        self._tokens.append(token)
        piece = self._new_text()
        if piece.endswith(_INCOMPLETE):
            return ""
        if piece:
            self._context, self._printed = self._printed, len(self._tokens)
        return piece

    def finish(self) -> str:
        """Return what was held back; an incomplete character is U+FFFD."""
        piece = self._new_text()
        self._context = self._printed = len(self._tokens)
        return piece

    def _new_text(self) -> str:
        before = self._detokenize(self._tokens[self._context : self._printed])
        return self._detokenize(self._tokens[self._context :])[len(before) :]
