"""Reads raw documents from JSONL, plain text and Parquet files, each with the path and line that it came from.

    files = find_input_files(["corpus/*.jsonl.gz", "more.parquet"])
    for part in cut_into_parts(files, InputFormat(), partitions=4):
        for chunk in read_part(part, json_keys=["text"]):
            ...  # chunk.payloads[i] came from chunk.location(i)

Formats by suffix: .jsonl .ndjson .json (one JSON object a line), .txt .text .md (see `InputFormat.text_documents`),
.parquet (one document a row, the JSON keys are its columns). The first two may be compressed: .gz .zst .bz2. `.xz` is
not offered.

What always holds: the documents come in the order of the input, and are the same for every number of parts.

Hugging Face `datasets` reads the Parquet files. It does not read the line formats: its JSON reader hands blocks to
Arrow, which skips blank lines, names at most a row within a block and refuses the whole block for one bad value, and
its text reader raises UnicodeDecodeError without a line; here every error must name path:line. Lines are therefore cut
from the byte stream that pyarrow opens (pyarrow and not fsspec for compressed files: fsspec's .zst files cannot be
iterated, and Python's zstandard stops at the first frame and takes a truncated file for a complete one).
"""

from __future__ import annotations

import bz2
import glob
import io
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

from megatron.training.data.errors import DataError

RecordKind = Literal["jsonl", "text", "parquet"]
TextDocuments = Literal["line", "paragraph", "file"]

SUFFIX_KINDS: dict[str, RecordKind] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
    ".parquet": "parquet",
}
COMPRESSIONS = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2"}

_CHUNK_RECORDS = 1024
_CHUNK_BYTES = 512 * 1024
_UTF8_BOM = b"\xef\xbb\xbf"
_UTF16_BOMS = (b"\xff\xfe", b"\xfe\xff")


@dataclass(frozen=True)
class InputFormat:
    """How to read the input: `kind` "auto" goes by suffix, `text_documents` says what a plain-text document is."""

    kind: Literal["auto"] | RecordKind = "auto"
    text_documents: TextDocuments = "line"


@dataclass(frozen=True)
class InputFile:
    """One input file, its kind and its compression (None when it is not compressed)."""

    path: str
    kind: RecordKind
    compression: str | None
    num_bytes: int


@dataclass(frozen=True)
class Slice:
    """The bytes [start, stop) of a file; only uncompressed line files are ever cut, always behind a newline."""

    file: InputFile
    start: int
    stop: int
    text_documents: TextDocuments


@dataclass(frozen=True)
class RecordChunk:
    """Consecutive raw records of one file.

    `payloads` holds bytes (a line, paragraph or file) or, for Parquet, a dict of the wanted columns. `numbers[i]` is
    the 1-based line (row for Parquet) of record i, counted from the start of the slice. `source_bytes` is how far the
    file was read on for this chunk, for progress only.
    """

    slice: Slice
    numbers: Sequence[int]
    payloads: list[Any]
    source_bytes: int

    def location(self, index: int) -> str:
        """Return "path:line" of a record; counts the lines before the slice only now, as this is rarely asked for."""
        file = self.slice.file
        number = self.numbers[index] + _newlines_before(file.path, self.slice.start)
        return f"{file.path}: row {number}" if file.kind == "parquet" else f"{file.path}:{number}"


def find_input_files(patterns: Sequence[str], input_format: InputFormat) -> list[InputFile]:
    """Resolve paths and glob patterns (`**` too): patterns in the order given, the matches of one sorted by name."""
    files: list[InputFile] = []
    seen: set[str] = set()
    for pattern in patterns:
        matches = [pattern] if os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not matches:
            raise DataError(f"--input {pattern}: no such file, and no file matches it as a pattern.")
        for path in matches:
            if os.path.isdir(path):
                raise DataError(f"--input {path} is a folder; give its files, for example --input '{path}/*.jsonl'.")
            if os.path.realpath(path) in seen:
                raise DataError(f"--input {path} is given twice; every document would be written twice. Name it once.")
            seen.add(os.path.realpath(path))
            files.append(_describe_file(path, input_format))
    return files


def _describe_file(path: str, input_format: InputFormat) -> InputFile:
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    compression = COMPRESSIONS.get(suffixes[-1]) if suffixes else None
    if compression is not None:
        suffixes.pop()
    kind = input_format.kind if input_format.kind != "auto" else SUFFIX_KINDS.get(suffixes[-1] if suffixes else "")
    if kind is None:
        raise DataError(
            f"--input {path}: cannot tell the format from the name; known suffixes are {' '.join(SUFFIX_KINDS)}, "
            f"each also with {' '.join(COMPRESSIONS)} behind it. Say it with --input-format jsonl, text or parquet."
        )
    if kind == "parquet" and compression is not None:
        raise DataError(f"--input {path}: Parquet files compress inside; unpack this one first.")
    try:
        with open(path, "rb") as stream:
            status = os.fstat(stream.fileno())
    except OSError as error:
        raise DataError(f"--input {path} cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"--input {path} is no regular file; write what it gives into one first.")
    return InputFile(path, kind, compression, status.st_size)


def cut_into_parts(files: Sequence[InputFile], input_format: InputFormat, partitions: int) -> list[list[Slice]]:
    """Cut the input into at most `partitions` consecutive parts of about equal size in bytes.

    An uncompressed file of one document per line is cut behind a newline; every other file stays whole.
    """
    total = sum(file.num_bytes for file in files)
    parts: list[list[Slice]] = [[]]
    position = 0  # bytes of all files before the current one
    for file in files:
        whole = (
            file.kind == "parquet" or file.compression or (file.kind, input_format.text_documents) == ("text", "file")
        )
        whole = whole or (file.kind, input_format.text_documents) == ("text", "paragraph")
        start = 0
        while True:
            goal = total * len(parts) // partitions - position  # where, in this file, the current part should end
            if len(parts) < partitions and goal <= start and parts[-1]:
                parts.append([])
                continue
            cut = file.num_bytes if whole or len(parts) == partitions else _behind_newline(file, max(goal, start))
            parts[-1].append(Slice(file, start, cut, input_format.text_documents))
            start = cut
            if start >= file.num_bytes:
                break
        position += file.num_bytes
    return parts


def _behind_newline(file: InputFile, offset: int) -> int:
    if offset >= file.num_bytes:
        return file.num_bytes
    with open(file.path, "rb") as stream:
        stream.seek(offset)
        stream.readline()
        return stream.tell()


def _newlines_before(path: str, offset: int) -> int:
    if offset == 0:
        return 0
    count = 0
    with open(path, "rb") as stream:
        while offset > 0 and (block := stream.read(min(offset, 1 << 24))):
            count += block.count(b"\n")
            offset -= len(block)
    return count


def read_part(part: Sequence[Slice], json_keys: Sequence[str]) -> Iterator[RecordChunk]:
    """Yield the records of one part in order; raise DataError for a file that cannot be read on (with its line)."""
    for piece in part:
        yield from _read_parquet(piece, json_keys) if piece.file.kind == "parquet" else _read_lines(piece)


def _read_parquet(piece: Slice, json_keys: Sequence[str]) -> Iterator[RecordChunk]:
    import datasets  # slow to import, needed for this format only

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs what it raises; once is enough
    path = piece.file.path
    rows_read = 0
    try:
        rows = datasets.load_dataset("parquet", data_files=[path], split="train", streaming=True)
        columns = list(rows.features or {})
        missing = [key for key in json_keys if key not in columns]
        if missing:
            raise DataError(f"{path} has no column {missing[0]!r} (--json-keys); its columns are {', '.join(columns)}.")
        for batch in rows.select_columns(list(json_keys)).iter(batch_size=_CHUNK_RECORDS):
            columns_of_batch = (batch[key] for key in json_keys)
            payloads = [dict(zip(json_keys, row, strict=True)) for row in zip(*columns_of_batch, strict=True)]
            yield RecordChunk(piece, range(rows_read + 1, rows_read + 1 + len(payloads)), payloads, 0)
            rows_read += len(payloads)
    except (OSError, ValueError) as error:  # what Arrow and datasets raise for a file that is not sound Parquet
        raise DataError(f"{path}: row {rows_read + 1}: cannot be read as Parquet: {_first_line(error)}") from error
    yield RecordChunk(piece, [], [], piece.file.num_bytes)


def _read_lines(piece: Slice) -> Iterator[RecordChunk]:
    file = piece.file
    unit = piece.text_documents if file.kind == "text" else "line"
    numbers: list[int] = []
    payloads: list[bytes] = []
    pending: list[bytes] = []  # lines of the paragraph or file under way
    size = position = line_number = pending_number = 0
    try:
        with open(file.path, "rb") as raw:
            for line in _raw_lines(raw, piece):
                line_number += 1
                size += len(line)
                if unit == "line":
                    numbers.append(line_number)
                    payloads.append(line)
                elif unit == "paragraph" and not line.strip():
                    _flush(pending, pending_number, numbers, payloads)
                else:
                    pending_number = pending_number if pending else line_number
                    pending.append(line.removesuffix(b"\r\n") + b"\n" if line.endswith(b"\r\n") else line)
                if size >= _CHUNK_BYTES or len(payloads) >= _CHUNK_RECORDS:
                    yield RecordChunk(piece, numbers, payloads, raw.tell() - piece.start - position)
                    numbers, payloads, size, position = [], [], 0, raw.tell() - piece.start
    except (OSError, EOFError) as error:
        raise DataError(
            f"{file.path}:{line_number + 1}: the {file.compression or 'file'} stream breaks off here: "
            f"{_first_line(error)}. Make or fetch the file again."
        ) from error
    if unit == "file" and not pending:
        pending, pending_number = [b""], 1  # an empty file is an empty document, not none
    _flush(pending, pending_number, numbers, payloads)
    yield RecordChunk(piece, numbers, payloads, piece.stop - piece.start - position)


def _flush(pending: list[bytes], number: int, numbers: list[int], payloads: list[bytes]) -> None:
    if pending:
        numbers.append(number)
        payloads.append(b"".join(pending))
        pending.clear()


def _raw_lines(raw: BinaryIO, piece: Slice) -> Iterator[bytes]:
    """Yield lines with their newlines; a UTF-8 byte order mark at the start of the file is dropped."""
    raw.seek(piece.start)
    stream = _decompressed(raw, piece.file.compression)
    remaining = piece.stop - piece.start if piece.file.compression is None else None
    first = piece.start == 0
    for line in stream:
        if remaining is not None:
            if remaining <= 0:
                return
            remaining -= len(line)
        if first:
            first = False
            if line.startswith(_UTF16_BOMS):
                raise DataError(
                    f"{piece.file.path}:1: starts with a UTF-16 byte order mark; convert it to UTF-8 first."
                )
            line = line.removeprefix(_UTF8_BOM)
        yield line


def _decompressed(raw: BinaryIO, compression: str | None) -> BinaryIO:
    if compression is None:
        return raw
    if compression == "bz2":
        return bz2.open(raw)  # type: ignore[return-value]
    import pyarrow

    return io.BufferedReader(pyarrow.input_stream(pyarrow.PythonFile(raw, "r"), compression=compression), 1 << 20)


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0].rstrip(".")
