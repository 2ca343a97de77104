"""The datasets of a run: never a stale index cache, and a corpus that cannot serve is told before the model is built.

pytest tests/test_text_datasets.py
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import harness_corpus as harness
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset

from megatron.training.data.corpus import corpus_fingerprint, read_corpus_index
from megatron.training.data.errors import DataError
from megatron.training.data.index_cache import BLEND_INDICES, remove_unfinished_indices
from megatron.training.text_datasets import ContentKeyedGPTDataset, check_corpus, gpt_dataset_config

SEQ_LENGTH = 8
ArgsMaker = Callable[..., argparse.Namespace]


@pytest.fixture
def make_args(monkeypatch: pytest.MonkeyPatch) -> ArgsMaker:
    """Arguments from upstream's own parser, as far as the data needs them."""
    from megatron.training.arguments import parse_args

    def make(*words: str, seq_length: int = SEQ_LENGTH) -> argparse.Namespace:
        base = ["--seq-length", str(seq_length), "--global-batch-size", "2", "--train-iters", "4", "--eval-iters", "1"]
        monkeypatch.setattr(sys, "argv", ["train", *base, *words])
        args = parse_args()
        args.rank, args.data_parallel_size = 0, 1
        return args

    return make


def _documents(lengths: Sequence[int], first: int = 0) -> list[list[int]]:
    """Documents of consecutive ids, so that a sample tells where it came from."""
    ids = iter(range(first, 10**6))
    return [[next(ids) % 997 for _ in range(length)] for length in lengths]


def _samples(args: argparse.Namespace, dataset_class: type[GPTDataset], sizes: Sequence[int] = (12, 4, 4)) -> list[Any]:
    """All samples of all splits, through upstream's builder."""
    config = gpt_dataset_config(args, harness.tokenizer_for("NullTokenizer", vocab_size=1000))
    datasets = BlendedMegatronDatasetBuilder(dataset_class, list(sizes), lambda: True, config).build()
    built = [dataset for dataset in datasets if dataset is not None]
    return [[dataset[at]["tokens"].tolist() for at in range(len(dataset))] for dataset in built]


# The index cache


@pytest.mark.parametrize("blend", [False, True])
def test_a_corpus_made_again_never_meets_the_old_index_cache(make_args: ArgsMaker, tmp_path: Path, blend: bool) -> None:
    other = harness.write_corpus(tmp_path / "other", _documents([9] * 60)) if blend else None

    def args_for(prefix: str, cache: str) -> argparse.Namespace:
        path = ["0.6", prefix, "0.4", other] if other else [prefix]
        return make_args("--data-path", *path, "--split", "6,2,2", "--data-cache-path", str(tmp_path / cache))

    old, new = _documents([20] * 30), _documents([3, 50, 7, 11] * 10)
    prefix = harness.write_corpus(tmp_path / "corpus", old)
    _samples(args_for(prefix, "cache"), ContentKeyedGPTDataset)
    _samples(args_for(prefix, "upstream-cache"), GPTDataset)
    harness.write_corpus(tmp_path / "corpus", new)
    fresh = _samples(args_for(prefix, "cache-2"), ContentKeyedGPTDataset)
    assert _samples(args_for(prefix, "cache"), ContentKeyedGPTDataset) == fresh
    try:
        with_upstreams_key = _samples(args_for(prefix, "upstream-cache"), GPTDataset)
    except IndexError:  # a stale index even gives samples of a wrong length
        with_upstreams_key = []
    assert with_upstreams_key != fresh, "the test cannot tell: upstream's own key knows the content by now"


def test_the_samples_are_upstreams(make_args: ArgsMaker, tmp_path: Path) -> None:
    prefix = harness.write_corpus(tmp_path / "corpus", _documents([5, 30, 1, 12] * 20))
    args = make_args("--data-path", prefix, "--split", "6,2,2")
    assert _samples(args, ContentKeyedGPTDataset) == _samples(args, GPTDataset)


def test_the_cache_is_used_again_while_the_content_is_the_same(make_args: ArgsMaker, tmp_path: Path) -> None:
    prefix = harness.write_corpus(tmp_path / "corpus", _documents([20] * 30))
    args = make_args("--data-path", prefix, "--split", "6,2,2", "--data-cache-path", str(tmp_path / "cache"))
    _samples(args, ContentKeyedGPTDataset)
    before = {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()}
    assert before
    for suffix in (".bin", ".idx"):  # another host's copy: same bytes, another time
        shutil.copyfile(prefix + suffix, prefix + ".copy")
        os.replace(prefix + ".copy", prefix + suffix)
        os.utime(prefix + suffix, (1, 1))
    time.sleep(0.01)
    _samples(args, ContentKeyedGPTDataset)
    assert {path.name: path.stat().st_mtime_ns for path in (tmp_path / "cache").iterdir()} == before


def test_an_index_that_a_killed_run_left_unfinished_is_built_again(make_args: ArgsMaker, tmp_path: Path) -> None:
    prefixes = [harness.write_corpus(tmp_path / name, _documents([20] * 30)) for name in ("one", "other")]
    cache = tmp_path / "cache"
    blend = ["0.6", prefixes[0], "0.4", prefixes[1]]
    args = make_args("--data-path", *blend, "--split", "6,2,2", "--data-cache-path", str(cache))
    whole = _samples(args, ContentKeyedGPTDataset)
    files = sorted(cache.glob("*.npy"))
    blended = sorted(cache.glob(BLEND_INDICES))
    assert len(files) > len(blended) > 0
    for cut in (0, 20, -1):
        for file in files:
            file.write_bytes(file.read_bytes()[:cut])
        assert remove_unfinished_indices(cache, BLEND_INDICES) == blended  # as the provider does before it builds
        assert _samples(args, ContentKeyedGPTDataset) == whole
        assert sorted(cache.glob("*.npy")) == files


def test_the_fingerprint_sees_every_kind_of_change(tmp_path: Path) -> None:
    base = _documents([6, 7, 8])
    changed = [
        base,
        _documents([7, 6, 8]),  # other lengths, the same tokens and sizes
        _documents([6, 7, 8], first=1),  # the same lengths, other tokens
        _documents([6, 7, 8, 1]),
    ]
    found = {corpus_fingerprint(harness.write_corpus(tmp_path / str(at), one)) for at, one in enumerate(changed)}
    assert len(found) == len(changed)
    again = harness.write_corpus(tmp_path / "elsewhere", base)
    assert corpus_fingerprint(again) in found, "the same content in another place is the same"


def test_a_large_file_is_sampled_from_its_first_to_its_last_byte(tmp_path: Path) -> None:
    from megatron.training.data.corpus import sampled_blocks

    path = tmp_path / "large"
    content = np.arange(3_000_000, dtype=np.uint32).tobytes()
    path.write_bytes(content)
    blocks = list(sampled_blocks(str(path), 1 << 20))
    assert sum(map(len, blocks)) <= 1 << 20
    assert content.startswith(blocks[0])
    assert content.endswith(blocks[-1])
    assert len(set(blocks)) == len(blocks)
    assert b"".join(sampled_blocks(str(path), 1 << 30)) == content


# Samples


def test_documents_of_one_token_are_trained_on(make_args: ArgsMaker, tmp_path: Path) -> None:
    prefix = harness.write_corpus(tmp_path / "corpus", _documents([1] * 200))
    train, *_ = _samples(make_args("--data-path", prefix, "--split", "8,1,1"), ContentKeyedGPTDataset)
    assert len(train) >= 12
    assert all(len(sample) == SEQ_LENGTH for sample in train)
    assert {token for sample in train for token in sample} <= set(range(160)), "the first 80 % of the documents"


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.integers(1, 30), min_size=1, max_size=40), st.sampled_from(["1,0,0", "6,2,2", "98,1,1", "5,5"]))
def test_the_check_passes_exactly_the_corpora_that_give_samples(
    make_args: ArgsMaker, tmp_path: Path, lengths: list[int], split: str
) -> None:
    prefix = harness.write_corpus(tmp_path / "corpus", _documents(lengths))
    args = make_args("--data-path", prefix, "--split", split, "--eval-iters", "0" if split == "1,0,0" else "1")
    index = read_corpus_index(prefix)
    assert (index.num_sequences, index.num_tokens) == (len(lengths), sum(lengths))
    shares = np.cumsum([0.0, *(float(part) for part in split.split(","))])
    edges = [round(share / shares[-1] * len(lengths)) for share in shares]
    enough = [
        sum(lengths[begin:end]) > SEQ_LENGTH
        for begin, end, part in zip(edges, edges[1:], split.split(","), strict=False)
        if part != "0"
    ]
    if all(enough):
        check_corpus(args)
        assert all(_samples(args, ContentKeyedGPTDataset, (8, 2, 2)))
    else:
        with pytest.raises(DataError, match="gets"):
            check_corpus(args)


def test_an_empty_split_is_an_error_in_the_builder_and_no_endless_loop(make_args: ArgsMaker, tmp_path: Path) -> None:
    prefix = harness.write_corpus(tmp_path / "corpus", _documents([20] * 10))
    with pytest.raises(DataError, match="no tokens in this split"):
        _samples(make_args("--data-path", prefix, "--split", "98,1,1"), ContentKeyedGPTDataset)


# The check


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    """100 documents of 10 tokens."""
    return harness.write_corpus(tmp_path / "corpus", _documents([10] * 100))


def _refused(args: argparse.Namespace, *reasons: str, tokenizer: Any = None) -> None:
    with pytest.raises(DataError) as caught:
        check_corpus(args, tokenizer)
    for reason in reasons:
        assert reason in str(caught.value), str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_corpus_too_small_for_split_or_sequence_is_told(make_args: ArgsMaker, corpus: str) -> None:
    check_corpus(make_args("--data-path", corpus, "--split", "8,1,1"))
    _refused(
        make_args("--data-path", corpus, "--split", "98,1,1", seq_length=16),
        "validation gets 1 of the 100 documents", "(10 tokens)", "one sample needs 17", "--split (now 98,1,1)",
    )  # fmt: skip
    _refused(make_args("--data-path", corpus, "--split", "998,1,1"), "validation gets 0 of the 100 documents")
    _refused(make_args("--data-path", corpus, "--split", "1,0,0"), "validation has no data", "--eval-iters 0")
    check_corpus(make_args("--data-path", corpus, "--split", "1,0,0", "--eval-iters", "0"))
    _refused(make_args("--data-path", corpus, "--split", "0,1,1"), "training has no data")
    _refused(make_args("--train-data-path", corpus), "validation has no data (no --valid-data-path)")
    check_corpus(make_args("--train-data-path", corpus, "--valid-data-path", corpus))


def test_an_unweighted_blend_that_would_run_dry_is_told(make_args: ArgsMaker, corpus: str, tmp_path: Path) -> None:
    other = harness.write_corpus(tmp_path / "other", _documents([10] * 100))
    check_corpus(make_args("--data-path", corpus, other, "--split", "8,1,1"))
    _refused(
        make_args("--data-path", corpus, other, "--split", "8,1,1", "--train-iters", "200"),
        "training wants 400 samples", "hold 198", "Give weights",
    )  # fmt: skip
    check_corpus(make_args("--data-path", "1", corpus, "2", other, "--split", "8,1,1", "--train-iters", "200"))
    _refused(make_args("--data-path", "0", corpus, "2", other, "--split", "8,1,1"), "weight 0 must be greater")
    mixed = make_args("--data-path", "1", corpus, "x", other, "--split", "8,1,1")
    _refused(mixed, "no corpus at 1", "give every corpus one")
    _refused(
        make_args("--data-path", "1", corpus, "2", other, "--split", "8,1,1", "--full-validation"), "--full-validation"
    )


def test_missing_cut_and_mixed_files_are_told(make_args: ArgsMaker, corpus: str, tmp_path: Path) -> None:
    def args() -> argparse.Namespace:
        return make_args("--data-path", corpus, "--split", "8,1,1")

    _refused(make_args("--data-path", corpus + ".bin", "--split", "1"), "no corpus at", "without the suffix")
    _refused(make_args("--data-path", str(tmp_path / "corpus"), "--split", "1"), f"did you mean {corpus}?")
    idx, binary = Path(corpus + ".idx"), Path(corpus + ".bin")
    good_idx, good_bin = idx.read_bytes(), binary.read_bytes()
    binary.write_bytes(good_bin[:-2])
    _refused(args(), "do not belong together", "2000 bytes", "1998", "Make the corpus again")
    binary.write_bytes(good_bin + b"\0\0")
    _refused(args(), "do not belong together")
    binary.unlink()
    _refused(args(), "corpus_text_document.bin cannot be read")
    binary.write_bytes(good_bin)
    for cut in (0, 20, 34, len(good_idx) - 1):
        idx.write_bytes(good_idx[:cut])
        _refused(args(), str(idx))
    idx.write_bytes(b"x" + good_idx[1:])
    _refused(args(), "is no Megatron index")
    idx.write_bytes(good_idx)
    check_corpus(args())


def test_tokens_outside_the_models_vocabulary_are_told(make_args: ArgsMaker, corpus: str) -> None:
    args = make_args("--data-path", corpus, "--split", "8,1,1")
    args.padded_vocab_size = 997
    check_corpus(args)
    args.padded_vocab_size = 996
    _refused(args, "token id 996", "0 to 995", "another tokenizer")


def test_no_data_unsupported_options_and_bad_splits_are_told(make_args: ArgsMaker, corpus: str) -> None:
    _refused(make_args(), "no data", "--mock-data")
    check_corpus(make_args("--mock-data"))
    for flag in ("--sft", "--fim-data", "--dataloader-inter-document-masking"):
        _refused(make_args("--data-path", corpus, "--split", "8,1,1", flag), flag)
    for split in ("0,0,0", "a,b", "1,2,3,4", "-1,2", ""):
        _refused(make_args("--data-path", corpus, f"--split={split}"), "up to three shares")
    _refused(make_args("--data-path", corpus, "--train-data-path", corpus, "--split", "1"), "exclude each other")
    _refused(make_args("--train-data-path", corpus, "--valid-data-path", corpus, "--split", "1"), "leave it out")


def test_options_at_document_ends_need_a_tokenizer_with_an_end(make_args: ArgsMaker, corpus: str) -> None:
    args = make_args("--data-path", corpus, "--split", "8,1,1", "--reset-position-ids")
    check_corpus(args, harness.tokenizer_for("NullTokenizer", vocab_size=1000))
    _refused(args, "--reset-position-ids", tokenizer=argparse.Namespace(eod=None, vocab_size=1000))


def test_upstreams_guess_of_the_token_dtype_is_checked(make_args: ArgsMaker, tmp_path: Path) -> None:
    prefix = harness.write_corpus(tmp_path / "edge", _documents([10] * 100), vocab_size=65500)  # written as int32
    args = make_args("--data-path", prefix, "--split", "8,1,1", "--per-dataset-sequences-path", "x.json")
    _refused(args, "int32", "uint16", tokenizer=harness.tokenizer_for("NullTokenizer", vocab_size=65500))


# The provider


@pytest.fixture
def one_process() -> Iterator[None]:
    """torch.distributed and Megatron's groups with this process alone in them."""
    from megatron.core import parallel_state

    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    yield
    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_the_provider_builds_what_the_flags_say(
    make_args: ArgsMaker, corpus: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.training.global_vars as global_vars

    from megatron.training.text_datasets import train_valid_test_datasets_provider as provider

    assert provider.is_distributed is True  # type: ignore[attr-defined]
    tokenizer = harness.tokenizer_for("NullTokenizer", vocab_size=1000)
    monkeypatch.setattr(global_vars, "_GLOBAL_TOKENIZER", tokenizer)
    for words in (["--data-path", corpus, "--split", "8,1,1"], ["--train-data-path", corpus], ["--mock-data"]):
        args = make_args(*words, "--seed", "77", "--no-create-attention-mask-in-dataloader", "--eod-mask-loss")
        monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
        train, valid, test = provider([8, 2, 2])
        assert len(train) >= 8
        config = train.config
        assert (config.random_seed, config.sequence_length, config.eod_mask_loss) == (77, SEQ_LENGTH, True)
        assert "attention_mask" not in train[0]
        assert (valid is None) == (test is None) == ("--train-data-path" in words)
