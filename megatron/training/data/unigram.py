"""The unigram entropy of the training corpora: the loss of a model that knows how often each token occurs, and no more.

    describe_unigram_entropy(args)
    "unigram entropy of the training corpus: 5.8930 nats per token (1,038,472 tokens); a loss below it uses context"

What always holds: at most SAMPLED_BYTES of a corpus are read, in evenly spaced blocks, and the line says so; several
corpora are mixed by their weights, as the blend is. Only one rank needs to look.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import numpy as np

from megatron.training.data.corpus import read_corpus_index, sampled_blocks
from megatron.training.data.corpus_check import data_sources, is_object_storage

SAMPLED_BYTES = 64 << 20


def token_counts(prefix: str, limit: int = SAMPLED_BYTES) -> np.ndarray:
    """Return how often each token id occurs in (at most limit bytes of) a corpus: (largest id + 1,) int64."""
    index = read_corpus_index(prefix)
    counts = np.zeros(0, np.int64)
    for block in sampled_blocks(prefix + ".bin", limit):
        found = np.bincount(np.frombuffer(block, index.dtype))
        if len(found) > len(counts):
            counts = np.pad(counts, (0, len(found) - len(counts)))
        counts[: len(found)] += found
    return counts


def entropy(probabilities: np.ndarray) -> float:
    """Return the Shannon entropy in nats; zeros count as 0."""
    occurring = probabilities[probabilities > 0]
    return float(-(occurring * np.log(occurring)).sum())


def mixed_distribution(counts: Sequence[np.ndarray], weights: Sequence[float]) -> np.ndarray:
    """Return the token distribution of corpora drawn by weight: (largest id + 1,) float64, of sum 1."""
    mixed = np.zeros(max(map(len, counts)))
    for corpus, weight in zip(counts, weights, strict=True):
        mixed[: len(corpus)] += weight * corpus / corpus.sum()
    distribution: np.ndarray = mixed / mixed.sum()
    return distribution


def describe_unigram_entropy(args: argparse.Namespace) -> str | None:
    """Return the log line on the training corpora that args name; None for made-up data and for object storage."""
    sources = data_sources(args)
    blend = sources.blends[0]
    if sources.mock or blend is None or any(map(is_object_storage, blend[0])):
        return None
    prefixes, weights = blend
    counts = [token_counts(prefix) for prefix in prefixes]
    totals = [read_corpus_index(prefix).num_tokens for prefix in prefixes]
    nats = entropy(mixed_distribution(counts, weights or totals))
    seen, total = sum(int(corpus.sum()) for corpus in counts), sum(totals)
    extent = f"{total:,} tokens" if seen == total else f"from {seen:,} of {total:,} tokens, evenly spaced"
    what = "corpus" if len(prefixes) == 1 else f"blend of {len(prefixes)} corpora"
    return f"unigram entropy of the training {what}: {nats:.4f} nats per token ({extent}); a loss below it uses context"
