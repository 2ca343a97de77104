"""Which layers of a hybrid pattern make the pairs of shortcut MoE.

    shortcut_pairs("M*E-E")      # [(1, 2), (3, 4)]
    shortcut_pairs("ME|E")       # one pipeline segment at a time: UnpairedLayerError

What always holds: every MoE layer is in exactly one pair, as its second layer; the first is no MoE layer.
"""

from __future__ import annotations

from collections.abc import Sequence

MOE_SYMBOL = "E"


class UnpairedLayerError(ValueError):
    """An MoE layer has no layer ahead that it could be paired with.

    Args:
        index: its zero-based index in the segment.
        where: what is ahead of it.
    """

    def __init__(self, index: int, where: str) -> None:
        self.index = index
        super().__init__(
            f"stands {where}; shortcut MoE pairs every E with an attention, Mamba or MLP layer directly before it in "
            "the same pipeline segment"
        )


def shortcut_pairs(symbols: Sequence[str]) -> list[tuple[int, int]]:
    """Return the zero-based indices (predecessor, MoE layer) of the pairs of one pipeline segment.

    Raises:
        UnpairedLayerError: an E that comes first, or after another E.
    """
    pairs = []
    for index, symbol in enumerate(symbols):
        if symbol != MOE_SYMBOL:
            continue
        if index == 0:
            raise UnpairedLayerError(index, "at the start of a pipeline segment")
        if symbols[index - 1] == MOE_SYMBOL:
            raise UnpairedLayerError(index, "after another MoE layer")
        pairs.append((index - 1, index))
    return pairs
