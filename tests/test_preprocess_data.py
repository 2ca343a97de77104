"""tools/preprocess_data.py: formats, bad input, whole outputs, the same output for any number of workers.

pytest tests/test_preprocess_data.py
"""

from __future__ import annotations

import bz2
import gzip
import json
import os
from pathlib import Path
from typing import Any

import harness_corpus as harness
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "1000"]
BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]
GOOD = b'{"text": "7 8 9"}'


class Tool:
    """Runs tools/preprocess_data.py in this process in a folder of its own."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self._capsys = capsys

    def __call__(self, *inputs: Path | str, prefix: str = "out", flags: list[str] = NULL) -> tuple[int, str, str]:
        argv = ["--input", *map(str, inputs), "--output-prefix", str(self.folder / prefix), "--workers", "2", *flags]
        self._capsys.readouterr()
        status = harness.tool("preprocess_data").main(argv)
        captured = self._capsys.readouterr()
        return status, captured.out, captured.err

    def documents(self, prefix: str = "out", key: str = "text") -> list[list[int]]:
        return harness.read_corpus(self.folder / f"{prefix}_{key}_document")

    def outputs(self) -> list[str]:
        return sorted(path.name for path in self.folder.iterdir() if path.name.startswith((".", "out")))


@pytest.fixture
def run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Tool:
    (tmp_path / "run").mkdir()
    return Tool(tmp_path / "run", capsys)


def _write(folder: Path, name: str, content: bytes) -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# Formats


@pytest.mark.parametrize("suffix", ["jsonl", "json", "jsonl.gz", "jsonl.zst", "jsonl.bz2", "txt", "txt.gz", "parquet"])
def test_every_format_gives_the_same_documents(run: Tool, tmp_path: Path, suffix: str) -> None:
    texts = harness.ids_as_text([[1, 2, 3], [4], [5, 6]])
    if suffix == "parquet":
        pa = pytest.importorskip("pyarrow")
        import pyarrow.parquet

        pyarrow.parquet.write_table(pa.table({"other": [1, 2, 3], "text": texts}), tmp_path / "in.parquet")
    else:
        lines = texts if suffix.startswith("txt") else [json.dumps({"text": text}) for text in texts]
        content = "".join(line + "\n" for line in lines).encode()
        pack = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "bz2": bz2.compress}
        _write(tmp_path, f"in.{suffix}", pack.get(suffix.rsplit(".")[-1], bytes)(content))
    status, out, err = run(tmp_path / f"in.{suffix}")
    assert status == 0, err
    assert run.documents() == [[1, 2, 3], [4], [5, 6]]
    assert "3 documents, 6 tokens" in out


@pytest.mark.parametrize("pack", [gzip.compress, zstandard.ZstdCompressor().compress, bz2.compress])
def test_compressed_files_joined_end_to_end_are_read_to_the_end(run: Tool, tmp_path: Path, pack: Any) -> None:
    suffix = {gzip.compress: "gz", bz2.compress: "bz2"}.get(pack, "zst")
    path = _write(tmp_path, f"in.jsonl.{suffix}", pack(GOOD + b"\n") + pack(GOOD + b"\n"))
    assert run(path)[0] == 0
    assert run.documents() == [[7, 8, 9]] * 2, "a reader that stops at the first frame loses documents"


def test_paragraphs_and_whole_files_are_documents_when_asked(run: Tool, tmp_path: Path) -> None:
    path = _write(tmp_path, "in.txt", b"\xef\xbb\xbfone\r\ntwo\r\n\r\n  \r\nthree\r\n")
    assert run(path, prefix="out-p", flags=[*BYTES, "--text-documents", "paragraph"])[0] == 0
    assert [bytes(ids).decode() for ids in run.documents("out-p")] == ["one\ntwo", "three"]
    assert run(path, prefix="out-f", flags=[*BYTES, "--text-documents", "file"])[0] == 0
    assert [bytes(ids).decode() for ids in run.documents("out-f")] == ["one\ntwo\n\n  \nthree"]


def test_several_keys_make_aligned_outputs_and_globs_come_in_order(run: Tool, tmp_path: Path) -> None:
    for name, shift in (("b", 100), ("a", 0)):
        lines = [json.dumps({"x": str(shift + at), "y": f"{shift + at} {shift + at}"}) for at in range(3)]
        _write(tmp_path, f"{name}.jsonl", "\n".join(lines).encode())  # no newline at the end
    status, _, err = run(tmp_path / "*.jsonl", flags=[*NULL, "--json-keys", "x", "y"])
    assert status == 0, err
    assert run.documents(key="x") == [[0], [1], [2], [100], [101], [102]]
    assert run.documents(key="y") == [[0] * 2, [1] * 2, [2] * 2, [100] * 2, [101] * 2, [102] * 2]


def test_byte_order_mark_and_crlf_are_dropped(run: Tool, tmp_path: Path) -> None:
    path = _write(tmp_path, "in.jsonl", b"\xef\xbb\xbf" + GOOD + b"\r\n" + GOOD + b"\r\n")
    assert run(path)[0] == 0
    assert run.documents() == [[7, 8, 9]] * 2


# Bad input

BAD_LINES = {
    "blank line": (b"", "blank"),
    "blank line of spaces": (b"  \t", "blank"),
    "truncated JSON": (b'{"text": "7 8', "not a complete JSON object"),
    "two objects": (GOOD + GOOD, "not a complete JSON object"),
    "byte order mark inside": (b"\xef\xbb\xbf" + GOOD, "not a complete JSON object"),
    "number too long": (b'{"n": ' + b"9" * 5000 + b', "text": "7"}', "cannot be read"),
    "nested too deeply": (b"[" * 100000, "cannot be read"),
    "not an object": (b'["7"]', "holds a JSON list"),
    "missing key": (b'{"body": "7"}', "has no key 'text' (keys found: 'body')"),
    "null": (b'{"text": null}', "is null"),
    "number": (b'{"text": 7}', "is a number"),
    "boolean": (b'{"text": true}', "is a boolean"),
    "list": (b'{"text": ["7"]}', "is a list"),
    "empty document": (b'{"text": ""}', "is empty"),
    "invalid UTF-8": (b'{"text": "\xff"}', "byte 11 of the line (0xff) is not valid UTF-8"),
    "lone surrogate": (b'{"text": "\\ud800"}', "lone surrogate"),
    "no number for NullTokenizer": (b'{"text": "seven"}', "ValueError"),
    "outside the vocabulary": (b'{"text": "7 1000"}', "token id 1000, the vocabulary is 0 to 999"),
    "negative": (b'{"text": "7 -1"}', "token id -1"),
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_an_error_with_path_and_line_or_skipped_and_counted(run: Tool, tmp_path: Path, name: str) -> None:
    line, reason = BAD_LINES[name]
    path = _write(tmp_path, "in.jsonl", b"\n".join([GOOD, GOOD, line, GOOD]))
    status, _, err = run(path)
    assert status == 2
    assert err.startswith(f"error: {path}:3: "), err
    assert reason in err
    assert err.count("\n") == 1, "one line, no traceback"
    assert run.outputs() == [], "nothing may be left of a failed run"

    status, out, err = run(path, flags=[*NULL, "--skip-bad-lines"])
    assert status == 0, err
    assert f"skipped {path}:3: " in err
    assert "skipped 1 bad documents: 1 " in out
    assert run.documents() == [[7, 8, 9]] * 3


def test_bad_rows_of_parquet_are_named(run: Tool, tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"text": ["7"] * 1500 + [None]}), tmp_path / "in.parquet")
    status, _, err = run(tmp_path / "in.parquet")
    assert (status, err.startswith(f"error: {tmp_path}/in.parquet: row 1501: 'text' is null")) == (2, True), err
    status, _, err = run(tmp_path / "in.parquet", flags=[*NULL, "--json-keys", "body"])
    assert status == 2
    assert "has no column 'body' (--json-keys); its columns are text" in err
    whole = (tmp_path / "in.parquet").read_bytes()
    status, _, err = run(_write(tmp_path, "cut.parquet", whole[:-100]))
    assert status == 2
    assert "cut.parquet" in err
    assert err.count("\n") == 1
    assert run.outputs() == []


@pytest.mark.parametrize("suffix", ["gz", "zst", "bz2"])
def test_a_compressed_file_that_is_cut_short_is_an_error_also_when_bad_lines_are_skipped(
    run: Tool, tmp_path: Path, suffix: str
) -> None:
    content = b"".join(b'{"text": "%d %d"}\n' % (at % 997, at * at % 991) for at in range(20000))
    pack = {"gz": gzip.compress, "zst": zstandard.ZstdCompressor().compress, "bz2": bz2.compress}[suffix]
    path = _write(tmp_path, f"in.jsonl.{suffix}", pack(content)[:-50])
    status, _, err = run(path, flags=[*NULL, "--skip-bad-lines"])
    assert status == 2, "documents would be lost without a word"
    assert err.splitlines()[-1].startswith(f"error: {path}:")
    assert "breaks off" in err
    assert run.outputs() == []


def test_whole_run_errors_say_what_was_found_and_what_to_do(run: Tool, tmp_path: Path) -> None:
    good = _write(tmp_path, "in.jsonl", GOOD)
    _write(tmp_path, "in.data", GOOD)
    _write(tmp_path, "empty.jsonl", b"")
    utf16 = _write(tmp_path, "utf16.jsonl", '{"text": "7"}'.encode("utf-16"))
    os.mkfifo(tmp_path / "pipe.jsonl")
    cases: list[tuple[list[Any], list[str], str]] = [
        ([tmp_path / "no*.jsonl"], NULL, "no file matches"),
        ([tmp_path], NULL, "is a folder"),
        ([good, good], NULL, "given twice"),
        ([tmp_path / "in.data"], NULL, "--input-format"),
        ([tmp_path / "empty.jsonl"], NULL, "holds no documents"),
        ([utf16], NULL, "UTF-16"),
        ([good], [*NULL, "--json-keys", "a/b"], "file name"),
        ([good], ["--tokenizer-type", "NullTokenizer"], "--vocab-size"),
        ([good], ["--tokenizer-type", "HuggingFaceTokenizer"], "needs --tokenizer-model"),
        ([good], ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", "/no/where"], "no such file"),
        ([good], ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(good)], "cannot be loaded"),
        ([good], ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)], "cannot be loaded"),
        ([good], ["--tokenizer-type", "SentencePieceTokenizer", "--tokenizer-model", str(good)], "cannot be loaded"),
        ([good], ["--tokenizer-type", "TikTokenizer", "--tokenizer-model", str(good)], "cannot be loaded"),
        ([good], ["--tokenizer-type", "GPT2BPETokenizer", "--vocab-file", str(good)], "--merge-file"),
    ]
    for inputs, flags, reason in cases:
        status, _, err = run(*inputs, flags=flags)
        assert (status, reason in err, err.count("\n")) == (2, True, 1), (inputs, flags, err)
        assert run.outputs() == []
    argv = ["--input", str(good), "--output-prefix", f"{run.folder}/out/", *NULL]
    assert harness.tool("preprocess_data").main(argv) == 2, "a prefix without a name"
    assert run(_write(tmp_path, "bad.jsonl", b"{"), flags=[*NULL, "--skip-bad-lines"])[0] == 2, "nothing but bad lines"
    with pytest.raises(SystemExit) as caught:
        run(good, flags=[*NULL, "--partitions", "0"])
    assert caught.value.code == 2


def test_an_unwritable_place_is_an_error_without_traceback(run: Tool, tmp_path: Path) -> None:
    (run.folder / "file").write_text("in the way")
    status, _, err = run(_write(tmp_path, "in.jsonl", GOOD), prefix="file/out")
    assert (status, err.count("\n")) == (2, 1)
    assert "cannot write to" in err


def test_an_existing_output_stays_unless_overwrite_is_given(run: Tool, tmp_path: Path) -> None:
    first, second = _write(tmp_path, "1.jsonl", GOOD), _write(tmp_path, "2.jsonl", b'{"text": "1"}')
    assert run(first)[0] == 0
    status, _, err = run(second)
    assert (status, "exists and stays" in err) == (2, True)
    assert run.documents() == [[7, 8, 9]]
    assert run(second, flags=[*NULL, "--overwrite"])[0] == 0
    assert run.documents() == [[1]]
    assert run(_write(tmp_path, "bad.jsonl", b"{"), flags=[*NULL, "--overwrite"])[0] == 2
    assert run.documents() == [[1]], "a failed run leaves the old output as it was"


# Sameness and bytes


@pytest.mark.parametrize("unit", ["line", "paragraph"])
def test_output_is_the_same_for_any_number_of_workers_and_partitions(run: Tool, tmp_path: Path, unit: str) -> None:
    texts = [f"document {at}: " + "word " * (at * 7 % 50) for at in range(3000)]
    harness.write_jsonl(tmp_path / "a.jsonl", texts)
    _write(tmp_path, "b.txt", ("\n\n" if unit == "paragraph" else "\n").join(texts[:700]).encode())
    _write(tmp_path, "c.jsonl.gz", gzip.compress((tmp_path / "a.jsonl").read_bytes()))
    _write(tmp_path, "d.jsonl", b"")
    written = set()
    for workers, partitions in ((1, 1), (2, 1), (3, 4), (1, 17)):
        argv = ["--workers", str(workers), "--partitions", str(partitions), "--text-documents", unit, "--append-eod"]
        status, _, err = run(tmp_path / "[a-d].*", flags=[*BYTES, *argv, "--overwrite"])
        assert status == 0, err
        written.add(tuple((run.folder / f"out_text_document.{kind}").read_bytes() for kind in ("bin", "idx")))
    assert len(written) == 1, "workers or partitions changed the output"
    expected = [*texts, *(text.rstrip("\n") for text in texts[:700]), *texts]
    assert [bytes(ids[:-1]).decode() for ids in run.documents()] == expected


@pytest.mark.parametrize("partitions", [1, 3, 8])
def test_the_line_of_an_error_is_right_in_every_partition(run: Tool, tmp_path: Path, partitions: int) -> None:
    for bad in (1, 2, 1499, 2999, 3000):
        lines = [GOOD] * 3000
        lines[bad - 1] = b"{"
        path = _write(tmp_path, "in.jsonl", b"\n".join(lines))
        status, _, err = run(path, flags=[*NULL, "--partitions", str(partitions)])
        assert (status, err.startswith(f"error: {path}:{bad}: ")) == (2, True), (bad, err)


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(st.lists(st.integers(0, 299), min_size=1, max_size=6), min_size=1, max_size=30),
    st.integers(1, 6),
    st.sampled_from(["\n", "\r\n"]),
)
def test_any_documents_cut_anywhere_come_back(
    run: Tool, tmp_path: Path, documents: list[list[int]], partitions: int, newline: str
) -> None:
    from megatron.training.data.document_reader import InputFormat, cut_into_parts, find_input_files, read_part

    lines = [json.dumps({"text": text}) for text in harness.ids_as_text(documents)]
    path = _write(tmp_path, "in.jsonl", newline.join(lines).encode())
    files = find_input_files([str(path)], InputFormat())
    parts = cut_into_parts(files, InputFormat(), partitions)
    assert len(parts) <= partitions
    chunks = [chunk for part in parts for chunk in read_part(part, ["text"])]
    read = [(chunk.location(at), payload) for chunk in chunks for at, payload in enumerate(chunk.payloads)]
    assert [json.loads(payload) for _, payload in read] == [json.loads(line) for line in lines]
    assert [location for location, _ in read] == [f"{path}:{at + 1}" for at in range(len(lines))]
    assert sum(chunk.source_bytes for chunk in chunks) == path.stat().st_size


@pytest.mark.parametrize("largest", [65498, 65499, 65500, 65535, 65536])
def test_token_ids_at_the_dtype_edge_round_trip(run: Tool, tmp_path: Path, largest: int) -> None:
    path = harness.write_jsonl(tmp_path / "in.jsonl", [f"0 {largest} {largest - 1}"])
    flags = ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(largest + 1), "--append-eod"]
    status, out, err = run(path, flags=flags)
    assert status == 0, err
    assert run.documents() == [[0, largest, largest - 1, largest]]
    dtype = "uint16" if largest + 1 < 65500 else "int32"
    assert f"({dtype})" in out


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.sampled_from([300, 65499, 65500, 70000]), st.lists(st.integers(1, 40), min_size=1, max_size=20))
def test_lengths_times_itemsize_is_the_size_of_bin(tmp_path: Path, vocab_size: int, lengths: list[int]) -> None:
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    documents = [[vocab_size - 1] * length for length in lengths]
    stem = harness.write_corpus(tmp_path / "corpus", documents, vocab_size)
    dataset = IndexedDataset(stem)
    assert dataset.sequence_lengths.tolist() == lengths
    assert int(dataset.sequence_lengths.sum()) * np.dtype(dataset.index.dtype).itemsize == os.path.getsize(
        stem + ".bin"
    )
    assert harness.read_corpus(stem) == documents


def test_a_document_of_one_token_is_kept(run: Tool, tmp_path: Path) -> None:
    assert run(harness.write_jsonl(tmp_path / "in.jsonl", ["5", "6 7", "8"]))[0] == 0
    assert run.documents() == [[5], [6, 7], [8]]
