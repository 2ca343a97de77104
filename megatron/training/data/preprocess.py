"""Preprocessing end to end: raw documents in, tokenized .bin/.idx pairs out, on many processes.

    summary = preprocess(options, tokenizer, progress)

One thread per partition reads its part of the input and hands chunks of raw records to a shared pool of processes,
which parse and tokenize; the thread takes the results back in the order of the input and writes them to its shard. The
shards are joined in order at the end.

What always holds: the output is the same, byte for byte, for every number of workers and partitions; a bad record
stops the run with its path:line, or with `skip_bad_records` is left out, counted and reported.
"""

from __future__ import annotations

import gc
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from megatron.training.data.document_parser import BadRecord, parse_record
from megatron.training.data.document_reader import InputFile, InputFormat, RecordChunk, Slice, cut_into_parts, read_part
from megatron.training.data.errors import DataError
from megatron.training.data.shard_writer import OutputFolder, Shard
from megatron.training.data.tokenizers import encode_texts, end_of_document

_LOCATIONS_KEPT = 10
_CHUNKS_AHEAD_PER_WORKER = 3


@dataclass(frozen=True)
class Options:
    """What to read and where to write; see tools/preprocess_data.py --help for each."""

    files: Sequence[InputFile]
    input_format: InputFormat
    json_keys: Sequence[str]
    output_prefix: str
    append_eod: bool = False
    workers: int = 1
    partitions: int = 1
    skip_bad_records: bool = False
    overwrite: bool = False


class Progress(Protocol):
    """Told after every chunk; calls come from one thread at a time."""

    def advance(self, documents: int, tokens: int, source_bytes: int) -> None: ...

    def skipped(self, location: str, reason: str) -> None: ...


@dataclass
class Summary:
    """What was written: documents and tokens (tokens summed over keys), skipped records by kind, final paths by key."""

    documents: int = 0
    tokens: int = 0
    skipped: Counter[str] = field(default_factory=Counter)
    outputs: dict[str, str] = field(default_factory=dict)
    dtype: str = ""


@dataclass
class _EncodedChunk:
    """Per key: all ids joined (1-D, the output's dtype) and the length of every document; and what was bad."""

    ids: dict[str, np.ndarray]
    lengths: dict[str, np.ndarray]
    bad: list[tuple[int, str, str]]  # index in the chunk, kind, detail


class _ChunkEncoder:
    """Parses and tokenizes chunks; the pool's processes inherit it by fork, so nothing of it is ever pickled."""

    def __init__(self, tokenizer: Any, options: Options, dtype: type[np.number]) -> None:
        self._tokenizer = tokenizer
        self._keys = options.json_keys
        self._eod = [end_of_document(tokenizer)] if options.append_eod else []
        self._dtype = dtype
        self._vocab_size = tokenizer.vocab_size

    def encode(self, chunk: RecordChunk) -> _EncodedChunk:
        good: list[tuple[int, dict[str, str]]] = []
        bad: list[tuple[int, str, str]] = []
        for index, payload in enumerate(chunk.payloads):
            try:
                good.append((index, parse_record(payload, chunk.slice.file.kind, self._keys)))
            except BadRecord as reason:
                bad.append((index, reason.kind, reason.detail))
        rows = self._encode_records([texts for _, texts in good])
        kept: dict[str, list[np.ndarray]] = {key: [] for key in self._keys}
        for (index, _), row in zip(good, rows, strict=True):
            if isinstance(row, BadRecord):
                bad.append((index, row.kind, row.detail))
            else:
                for key in self._keys:
                    kept[key].append(row[key])
        lengths = {key: np.array([len(ids) for ids in kept[key]], dtype=np.int64) for key in self._keys}
        joined = {key: np.concatenate([np.empty(0, self._dtype), *kept[key]], dtype=self._dtype) for key in self._keys}
        return _EncodedChunk(joined, lengths, sorted(bad))

    def _encode_records(self, records: list[dict[str, str]]) -> list[dict[str, np.ndarray] | BadRecord]:
        try:
            columns = {key: encode_texts(self._tokenizer, [texts[key] for texts in records]) for key in self._keys}
        except Exception as error:  # a tokenizer may refuse one text of many (NullTokenizer: "x" is no number)
            if len(records) == 1:
                return [BadRecord("refused by the tokenizer", f"{type(error).__name__}: {error}")]
            return [row for record in records for row in self._encode_records([record])]
        rows: list[dict[str, np.ndarray] | BadRecord] = []
        for index in range(len(records)):
            try:
                rows.append({key: self._checked_ids(columns[key][index], key) for key in self._keys})
            except BadRecord as reason:
                rows.append(reason)
        return rows

    def _checked_ids(self, ids: list[int], key: str) -> np.ndarray:
        if not ids:
            raise BadRecord("no tokens", f"the tokenizer makes no token of {key!r}")
        array = np.array(ids + self._eod, dtype=np.int64)
        low, high = int(array.min()), int(array.max())
        if low < 0 or high >= self._vocab_size:
            raise BadRecord(
                "token outside the vocabulary",
                f"{key!r} gives token id {low if low < 0 else high}, the vocabulary is 0 to {self._vocab_size - 1}",
            )
        return array.astype(self._dtype)


_encoder: _ChunkEncoder  # set before the pool forks


def _encode_in_worker(chunk: RecordChunk) -> _EncodedChunk:
    return _encoder.encode(chunk)


_STOP_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def _start_worker() -> None:
    """End with the parent: a worker whose parent was killed would wait for work for ever."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
    parent = multiprocessing.parent_process()
    assert parent is not None

    def watch() -> None:
        multiprocessing.connection.wait([parent.sentinel])
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


@contextmanager
def _signals_for_workers() -> Iterator[None]:
    """Fork in this block: the workers leave ^C to the parent and die of SIGTERM from their first moment on.

    Set in the worker it would be too late: a Python handler that it inherits can raise where Python swallows it (in a
    fork callback), and the pool, which terminates its workers when one was killed, would wait for that worker for ever.
    Signals for the parent wait until the block ends.
    """
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers; a library caller with handlers of its own has none of ours
        return
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)
    before = (signal.signal(signal.SIGINT, signal.SIG_IGN), signal.signal(signal.SIGTERM, signal.SIG_DFL))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before[0])
        signal.signal(signal.SIGTERM, before[1])
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


@contextmanager
def _worker_pool(encoder: _ChunkEncoder, workers: int) -> Iterator[ProcessPoolExecutor]:
    global _encoder
    _encoder = encoder
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the processes are the parallelism
    pool = ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork"), initializer=_start_worker)
    try:
        with _signals_for_workers():
            first = pool.submit(os.getpid)  # forks all workers, before this process starts its reader threads
        first.result()
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Run:
    """The state that the reader threads share."""

    def __init__(self, options: Options, pool: ProcessPoolExecutor, progress: Progress) -> None:
        self.options = options
        self.pool = pool
        self.progress = progress
        self.summary = Summary()
        self.lock = threading.Lock()
        self.stop = threading.Event()
        self.error: BaseException | None = None

    def fill(self, part: Sequence[Slice], shard: Shard) -> None:
        """Read, encode and write one part (the body of a reader thread)."""
        try:
            ahead = _CHUNKS_AHEAD_PER_WORKER * self.options.workers + 1
            waiting: deque[tuple[RecordChunk, Future[_EncodedChunk]]] = deque()
            for chunk in read_part(part, self.options.json_keys):
                waiting.append((chunk, self.pool.submit(_encode_in_worker, chunk)))
                if len(waiting) > ahead:
                    self._take(waiting.popleft(), shard)
                if self.stop.is_set():
                    return
            while waiting and not self.stop.is_set():
                self._take(waiting.popleft(), shard)
            shard.close()
        except BrokenProcessPool:
            self._fail(DataError("a worker process was killed, most often for want of memory; give fewer --workers."))
        except BaseException as error:
            self._fail(error)

    def _fail(self, error: BaseException) -> None:
        with self.lock:
            if not self.stop.is_set():
                self.error = error
            self.stop.set()

    def _take(self, pair: tuple[RecordChunk, Future[_EncodedChunk]], shard: Shard) -> None:
        chunk, future = pair
        encoded = future.result()
        if encoded.bad and not self.options.skip_bad_records:
            index, _, detail = encoded.bad[0]
            raise DataError(
                f"{chunk.location(index)}: {detail}. Mend the input, or leave such documents out with --skip-bad-lines."
            )
        for key in self.options.json_keys:
            shard.add(key, encoded.ids[key], encoded.lengths[key])
        documents = len(encoded.lengths[self.options.json_keys[0]])
        tokens = sum(len(ids) for ids in encoded.ids.values())
        with self.lock:
            for index, kind, detail in encoded.bad:
                if self.summary.skipped.total() < _LOCATIONS_KEPT:
                    self.progress.skipped(chunk.location(index), detail)
                self.summary.skipped[kind] += 1
            self.summary.documents += documents
            self.summary.tokens += tokens
            self.progress.advance(documents, tokens, chunk.source_bytes)


def preprocess(options: Options, tokenizer: Any, progress: Progress) -> Summary:
    """Tokenize all documents of `options.files` and write one .bin/.idx pair per key; return what was done.

    Raises DataError for everything the user can mend; then no output exists under a final name.
    """
    from megatron.core.datasets.indexed_dataset import DType

    if options.append_eod and end_of_document(tokenizer) is None:
        raise DataError(
            "--append-eod: this tokenizer has no end-of-document token. Leave the flag out, or name one "
            'in the tokenizer (for Hugging Face "eos_token" in tokenizer_config.json).'
        )
    if len(options.json_keys) > 1 and any(file.kind == "text" for file in options.files):
        raise DataError("plain text holds one document and no keys; give a single --json-keys name for it.")
    dtype = DType.optimal_dtype(tokenizer.vocab_size)
    encoder = _ChunkEncoder(tokenizer, options, dtype)
    parts = cut_into_parts(options.files, options.input_format, options.partitions)
    # Upstream's add_index collects garbage once a shard, which walks all of torch: keep what is there out of it. The
    # workers then share those pages for good, too.
    gc.freeze()
    try:
        summary = _tokenize(options, parts, encoder, dtype, progress)
    except OSError as error:
        raise DataError(f"cannot write to {options.output_prefix}: {error.strerror or error}.") from error
    finally:
        gc.unfreeze()
    summary.dtype = dtype.__name__
    return summary


def _tokenize(
    options: Options,
    parts: Sequence[Sequence[Slice]],
    encoder: _ChunkEncoder,
    dtype: type[np.number],
    progress: Progress,
) -> Summary:
    with (
        OutputFolder(options.output_prefix, options.json_keys, dtype, overwrite=options.overwrite) as output,
        _worker_pool(encoder, options.workers) as pool,
    ):
        run = _Run(options, pool, progress)
        shards = [output.new_shard() for _ in parts]
        threads = [
            threading.Thread(target=run.fill, args=(part, shard)) for part, shard in zip(parts, shards, strict=True)
        ]
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:  # also on ^C: the threads must be out of the folder before it is removed
            run.stop.set()
            for thread in threads:
                thread.join()
        if run.error is not None:
            raise run.error
        if run.summary.documents == 0:
            raise DataError("the input holds no documents" + (" but bad ones" if run.summary.skipped else "") + ".")
        run.summary.outputs = output.commit(shards)
    return run.summary
