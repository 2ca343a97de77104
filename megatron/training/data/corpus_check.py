"""Says before the model is built whether the corpora of a run can serve it.

    check_corpus(args)     # raises DataError: what was found, what was wanted, what to do

Without this, upstream finds out late or never: a split without documents makes its index builder loop for ever, an
unweighted blend that is too small ends the training in mid-run, no data at all trains on made-up tokens.

What always holds: nothing is built or written and the cost does not grow with the corpus, so every rank checks for
itself and comes to the same result without communication.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from megatron.training.data.corpus import CorpusIndex, largest_sampled_token, read_corpus_index
from megatron.training.data.errors import DataError

SPLIT_NAMES = ("training", "validation", "test")
SPLIT_FLAGS = ("--train-data-path", "--valid-data-path", "--test-data-path")

# Options of upstream's parser that ask for datasets or batches this trainer does not make.
_UNSUPPORTED = {
    "sft": "--sft",
    "fim_data": "--fim-data",
    "dataloader_inter_document_masking": "--dataloader-inter-document-masking",
    "hybrid_context_parallel": "--hybrid-context-parallel",
}

Blend = tuple[list[str], list[float] | None]


@dataclass(frozen=True)
class DataSources:
    """Where the samples come from: mock data, or a blend per split and the share (0 to 1) of its documents to take.

    `blends[i]` and `shares[i]` belong to SPLIT_NAMES[i]; None where the split has no data.
    """

    mock: bool
    blends: tuple[Blend | None, ...] = (None, None, None)
    shares: tuple[tuple[float, float] | None, ...] = (None, None, None)


def data_sources(args: argparse.Namespace) -> DataSources:
    """Read the data flags; raise DataError for none, for malformed ones and for options that are not supported."""
    from megatron.training.utils.common_utils import get_blend_and_blend_per_split

    for name, flag in _UNSUPPORTED.items():
        if getattr(args, name, False):
            raise DataError(f"{flag} is not supported here; leave it out.")
    per_split = (args.train_data_path, args.valid_data_path, args.test_data_path, args.per_split_data_args_path)
    if any(per_split) and (args.data_path or args.data_args_path):
        raise DataError("--data-path and the --train/--valid/--test-data-path options exclude each other; give one.")
    try:
        blend, blend_per_split = get_blend_and_blend_per_split(args)
    except (AssertionError, KeyError, ValueError) as error:
        raise DataError(
            f"the data path options cannot be read ({error or 'a weight is missing'}); give PREFIX, or PREFIX PREFIX "
            "..., or WEIGHT PREFIX WEIGHT PREFIX ..."
        ) from None
    if blend is None and not any(blend_per_split or ()):
        if not args.mock_data:
            raise DataError(
                "no data: give --data-path PREFIX (made by tools/preprocess_data.py), or --mock-data for made-up ones."
            )
        return DataSources(mock=True)
    if blend is not None:
        if args.split is None:
            raise DataError("--split is missing: the shares of training, validation and test, for example 969,30,1.")
        return DataSources(False, (blend,) * 3, tuple(_split_shares(args.split)))
    if args.split is not None:
        raise DataError(
            f"--split {args.split} divides --data-path; with a path of its own for each split leave it out."
        )
    return DataSources(False, tuple(blend_per_split), tuple((0.0, 1.0) if one else None for one in blend_per_split))


def _split_shares(split: str) -> Sequence[tuple[float, float] | None]:
    from megatron.core.datasets.blended_megatron_dataset_config import (
        convert_split_vector_to_split_matrix,
        parse_and_normalize_split,
    )

    problem = DataError(f"--split {split!r}: up to three shares are wanted, not all 0, for example 969,30,1.")
    try:
        parts = [float(part) for part in split.split(",")]
        if not 1 <= len(parts) <= 3 or min(parts) < 0 or sum(parts) <= 0:
            raise problem
        return convert_split_vector_to_split_matrix(parse_and_normalize_split(split))
    except ValueError:
        raise problem from None


def wanted_samples(args: argparse.Namespace) -> tuple[int, int | None, int]:
    """Return the samples that the run will draw for training, validation (None: one whole epoch) and test."""
    train = args.train_samples or (args.train_iters or 0) * args.global_batch_size
    per_evaluation = (args.eval_iters or 0) * (getattr(args, "eval_global_batch_size", None) or args.global_batch_size)
    if args.full_validation:
        return train, None, per_evaluation
    evaluations = 1 if args.skip_train or not args.eval_interval else (args.train_iters or 0) // args.eval_interval + 1
    return train, evaluations * per_evaluation, per_evaluation


def check_corpus(args: argparse.Namespace, tokenizer: Any = None) -> None:
    """Raise DataError unless the corpora that `args` (validated) name exist, are sound and are large enough.

    With `tokenizer`, options that act at the ends of documents are checked against it too.
    """
    sources = data_sources(args)
    _check_end_of_document(args, tokenizer)
    if sources.mock:
        return
    wanted = wanted_samples(args)
    indices: dict[str, CorpusIndex] = {}
    for number, name in enumerate(SPLIT_NAMES):
        blend, share = sources.blends[number], sources.shares[number]
        if blend is None or share is None:
            _check_split_may_lack(number, wanted[number], args)
            continue
        prefixes, weights = blend
        if weights is not None and min(weights) <= 0:
            raise DataError(f"the data weight {min(weights):g} must be greater than 0; leave such a corpus out.")
        if weights is not None and len(prefixes) > 1 and wanted[number] is None:
            raise DataError("--full-validation reads every validation corpus once; give the prefixes without weights.")
        samples = 0
        for prefix in prefixes:
            if is_object_storage(prefix):
                return  # sizes are not known without fetching; upstream checks while building
            if prefix not in indices:
                indices[prefix] = read_corpus_index(prefix)
                _check_tokens(indices[prefix], args)
                _check_assumed_dtype(indices[prefix], args, tokenizer)
            samples += _samples_of(
                indices[prefix], share, name, wanted[number], args, len(prefixes) > 1 and weights is None
            )
        several = len(prefixes) > 1 and weights is None and not (args.multiple_validation_sets and number == 1)
        if several and samples < (wanted[number] or 0):
            raise DataError(
                f"{name} wants {wanted[number]} samples of {args.seq_length} tokens, but the {len(prefixes)} corpora "
                f"hold {samples} and a blend without weights is read only once. Give weights (WEIGHT PREFIX ...), "
                "fewer iterations, or more data."
            )


def _samples_of(
    index: CorpusIndex,
    share: tuple[float, float],
    name: str,
    wanted: int | None,
    args: argparse.Namespace,
    every_one_counts: bool,
) -> int:
    """Return the samples in one epoch of a split; raise DataError when there are none although some are needed."""
    begin, end = (round(edge * index.num_sequences) for edge in share)  # as upstream cuts
    tokens = index.tokens_between(begin, end)
    where = f"{name} gets {end - begin} of the {index.num_sequences} documents of {index.prefix} ({tokens} tokens)"
    remedy = f"Take more documents, or another --split (now {args.split})" if args.split else "Take more documents"
    if tokens == 0:
        raise DataError(f"{where}. {remedy}; a share of 0 leaves {name} out.")
    if tokens < args.seq_length + 1 and (wanted is None or wanted > 0 or every_one_counts):
        raise DataError(
            f"{where}, but one sample needs {args.seq_length + 1} (--seq-length {args.seq_length} and one more). "
            f"{remedy}, or a shorter --seq-length."
        )
    return (tokens - 1) // args.seq_length


def _check_split_may_lack(number: int, wanted: int | None, args: argparse.Namespace) -> None:
    if number == 2 or wanted == 0:  # the trainer leaves the test out when it has no data
        return
    cause = f"--split {args.split}" if args.split else f"no {SPLIT_FLAGS[number]}"
    remedy = "Give it data" if number == 0 else "Give it data, or --eval-iters 0"
    raise DataError(f"{SPLIT_NAMES[number]} has no data ({cause}) but the run asks for it. {remedy}.")


def _check_tokens(index: CorpusIndex, args: argparse.Namespace) -> None:
    vocab_size = getattr(args, "padded_vocab_size", None)
    if vocab_size and (largest := largest_sampled_token(index)) >= vocab_size:
        raise DataError(
            f"{index.prefix} holds token id {largest}, but the model's vocabulary is 0 to {vocab_size - 1}. It was "
            "made with another tokenizer: train with that one, or preprocess again."
        )


def _check_assumed_dtype(index: CorpusIndex, args: argparse.Namespace, tokenizer: Any) -> None:
    if tokenizer is None or not args.per_dataset_sequences_path:
        return
    # Upstream then does not look into the index and takes uint16 up to 65536 ids, where preprocessing stops at 65499.
    assumed = "int32" if tokenizer.vocab_size > 65536 else "uint16"
    if index.dtype.name != assumed:
        raise DataError(
            f"{index.prefix} holds {index.dtype.name} tokens, but with --per-dataset-sequences-path upstream reads "
            f"{assumed} for a vocabulary of {tokenizer.vocab_size}. Leave that option out."
        )


def _check_end_of_document(args: argparse.Namespace, tokenizer: Any) -> None:
    from megatron.training.data.tokenizers import end_of_document

    flags = {
        "reset_position_ids": "--reset-position-ids",
        "reset_attention_mask": "--reset-attention-mask",
        "eod_mask_loss": "--eod-mask-loss",
    }
    given = [flag for name, flag in flags.items() if getattr(args, name)]
    if tokenizer is not None and given and end_of_document(tokenizer) is None:
        raise DataError(f"{given[0]} acts at the end-of-document token, and this tokenizer has none. Leave it out.")


def is_object_storage(prefix: str) -> bool:
    """Whether the prefix names a remote store, whose sizes are not known without fetching."""
    from megatron.core.datasets.object_storage_utils import is_object_storage_path

    return bool(is_object_storage_path(prefix))
