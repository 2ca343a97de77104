"""The unigram entropy that a run prints is that of its training corpora, mixed as the blend mixes them."""

from __future__ import annotations

import argparse
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness_corpus import write_corpus
from hypothesis import given
from hypothesis import strategies as st

from megatron.training.data.unigram import describe_unigram_entropy, entropy, mixed_distribution, token_counts


def arguments(data_path: list[str] | None, **given: Any) -> argparse.Namespace:
    """What data_sources reads of the parsed arguments."""
    paths = ("data_args_path", "train_data_path", "valid_data_path", "test_data_path", "per_split_data_args_path")
    defaults = {**dict.fromkeys(paths), "split": "90,10,0", "mock_data": data_path is None}
    return argparse.Namespace(**{**defaults, "data_path": data_path, **given})


def by_hand(tokens: list[int]) -> float:
    return -sum(n / len(tokens) * math.log(n / len(tokens)) for n in Counter(tokens).values())


@given(st.lists(st.integers(0, 40), min_size=1, max_size=200))
def test_entropy_is_shannons(tokens: list[int]) -> None:
    assert entropy(np.bincount(tokens) / len(tokens)) == pytest.approx(by_hand(tokens), abs=1e-12)


def test_a_run_prints_the_entropy_of_its_corpus(tmp_path: Path) -> None:
    documents = [[1, 2, 3, 3], [3, 5, 7, 2, 2, 2]]
    prefix = write_corpus(tmp_path / "one", documents)
    flat = [token for document in documents for token in document]
    line = describe_unigram_entropy(arguments([prefix]))
    assert line is not None
    assert f"{by_hand(flat):.4f} nats per token (10 tokens)" in line


def test_corpora_are_mixed_by_weight_and_without_weights_by_size(tmp_path: Path) -> None:
    first = write_corpus(tmp_path / "first", [[1] * 30])
    second = write_corpus(tmp_path / "second", [[2] * 10])
    weighted = describe_unigram_entropy(arguments(["1", first, "1", second]))
    plain = describe_unigram_entropy(arguments([first, second]))
    assert weighted is not None
    assert plain is not None
    assert f"{math.log(2):.4f} nats" in weighted
    assert f"{by_hand([1] * 30 + [2] * 10):.4f} nats" in plain
    assert "blend of 2 corpora" in plain


def test_a_large_corpus_is_sampled_and_the_line_says_so(tmp_path: Path) -> None:
    prefix = write_corpus(tmp_path / "large", [[1, 2] * 100_000])
    counts = token_counts(prefix, limit=128 << 10)
    assert 0 < counts.sum() < 200_000
    assert mixed_distribution([counts], [1.0])[1:3] == pytest.approx([0.5, 0.5])


def test_made_up_data_has_no_line() -> None:
    assert describe_unigram_entropy(arguments(None)) is None
