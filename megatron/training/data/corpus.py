"""Looks at a tokenized corpus on disk, without loading it: is the .bin/.idx pair sound, how large, which content.

    index = read_corpus_index("data/corpus_text_document")
    index.num_sequences, index.num_tokens, index.tokens_between(0, 100)
    corpus_fingerprint("data/corpus_text_document")   # changes when the content changes

What always holds: the cost does not grow with the corpus, so that every rank of a job can look for itself; the result
depends on the bytes of the files alone, never on their times or places, so that it is the same on every host.

The .idx layout, which upstream's IndexedDataset documents by its code: 9 bytes magic, u64 version 1, u8 dtype code,
u64 number of sequences n, u64 number of document ends d; then n int32 lengths, n int64 byte offsets into the .bin,
d int64 document ends.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from megatron.training.data.errors import DataError

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_REMAKE = "Make the corpus again with tools/preprocess_data.py"
_IDX_BYTES_HASHED = 64 << 20
_BIN_BYTES_HASHED = 1 << 20
_BLOCK = 64 << 10


@dataclass(frozen=True)
class CorpusIndex:
    """What an .idx says: the token dtype, how many sequences (documents), and the byte offset of each."""

    prefix: str
    dtype: np.dtype
    num_sequences: int
    num_tokens: int
    offsets: np.ndarray  # (num_sequences,) int64, a memory map

    def tokens_between(self, begin: int, end: int) -> int:
        """Return the number of tokens in the sequences [begin, end)."""
        stops = [
            int(self.offsets[at]) // self.dtype.itemsize if at < self.num_sequences else self.num_tokens
            for at in (begin, end)
        ]
        return stops[1] - stops[0]


def read_corpus_index(prefix: str) -> CorpusIndex:
    """Read and check the pair `prefix`.bin/.idx; raise DataError saying what is missing, cut short or does not fit."""
    idx_path, bin_path = prefix + ".idx", prefix + ".bin"
    sizes = {path: _file_size(path, prefix) for path in (idx_path, bin_path)}
    with open(idx_path, "rb") as stream:
        header = stream.read(_HEADER.size)
    if len(header) < _HEADER.size or not header.startswith(_MAGIC):
        raise DataError(f"{idx_path} is no Megatron index ({len(header)} bytes of header read). {_REMAKE}.")
    _, version, code, sequences, document_ends = _HEADER.unpack(header)
    from megatron.core.datasets.indexed_dataset import DType

    if version != 1 or code not in {member.value for member in DType}:
        raise DataError(f"{idx_path} has version {version}, dtype code {code}; version 1 is wanted. {_REMAKE}.")
    wanted = _HEADER.size + 12 * sequences + 8 * document_ends
    if sizes[idx_path] < wanted:
        raise DataError(
            f"{idx_path} is cut short: {sizes[idx_path]} bytes found, {wanted} wanted for {sequences} documents. "
            f"{_REMAKE}."
        )
    if sequences == 0 or sizes[bin_path] == 0:
        raise DataError(f"{prefix}.bin/.idx hold no tokens. {_REMAKE}.")
    dtype = np.dtype(DType.dtype_from_code(code))
    offsets = np.memmap(idx_path, np.int64, "r", offset=_HEADER.size + 4 * sequences, shape=(sequences,))
    last_length = np.memmap(idx_path, np.int32, "r", offset=_HEADER.size + 4 * (sequences - 1), shape=(1,))[0]
    told = int(offsets[-1]) + int(last_length) * dtype.itemsize
    if told != sizes[bin_path]:
        raise DataError(
            f"{bin_path} and {idx_path} do not belong together: the index tells of {told} bytes, the .bin has "
            f"{sizes[bin_path]} (cut short, or one of the two was replaced). {_REMAKE}."
        )
    return CorpusIndex(prefix, dtype, sequences, told // dtype.itemsize, offsets)


def _file_size(path: str, prefix: str) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        advice = "give the path without the suffix" if prefix.endswith((".bin", ".idx")) else "check the path"
        if not os.path.exists(path) and os.path.exists(f"{prefix}_text_document.idx"):
            advice = f"did you mean {prefix}_text_document?"
        elif prefix.replace(".", "", 1).isdigit():
            advice = "if it is a weight, give every corpus one"
        raise DataError(
            f"no corpus at {prefix}: {path} cannot be read ({error.strerror}); {advice}, or make it with "
            "tools/preprocess_data.py."
        ) from None


def largest_sampled_token(index: CorpusIndex) -> int:
    """Return the largest token id found in evenly spaced blocks of the .bin (all of it when it is small)."""
    blocks = sampled_blocks(index.prefix + ".bin", _BIN_BYTES_HASHED)
    return max(int(np.frombuffer(block, index.dtype).max()) for block in blocks)


def corpus_fingerprint(prefix: str) -> str:
    """Return a hash of a corpus' content, 32 hex digits: of its whole index up to 64 MiB, and of samples beyond.

    The cached sample indices depend on the lengths of the documents, which the index lists; samples of the .bin are
    hashed too, so that new tokens of the same lengths make a new cache as well.
    """
    state = tuple(
        (stat.st_ino, stat.st_size, stat.st_mtime_ns) for stat in map(os.stat, (prefix + ".idx", prefix + ".bin"))
    )
    return _fingerprint(prefix, state)


@lru_cache(maxsize=4096)
def _fingerprint(prefix: str, state: tuple) -> str:  # `state` only keys the cache of this process
    digest = hashlib.blake2b(digest_size=16)
    for path, limit in ((prefix + ".idx", _IDX_BYTES_HASHED), (prefix + ".bin", _BIN_BYTES_HASHED)):
        digest.update(struct.pack("<Q", os.path.getsize(path)))
        for block in sampled_blocks(path, limit):
            digest.update(block)
    return digest.hexdigest()


def sampled_blocks(path: str, limit: int) -> Iterator[bytes]:
    """Yield the file in blocks of 64 KiB; beyond `limit` bytes, limit/64 KiB evenly spaced blocks, first and last among
    them. Blocks begin at multiples of 64 KiB, so tokens are never cut."""
    blocks = -(-os.path.getsize(path) // _BLOCK)
    taken = min(blocks, limit // _BLOCK)
    with open(path, "rb") as stream:
        for number in range(taken):
            stream.seek((number * (blocks - 1) // max(taken - 1, 1)) * _BLOCK)
            yield stream.read(_BLOCK)
