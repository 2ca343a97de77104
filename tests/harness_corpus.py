"""Helpers for the data tests: small inputs, tokenizers without network, tools run in this process, corpora read back.

The tools' `main()` is called in this process because a start of the program costs seconds of imports; what only a
process of its own can show (signals, imports of --help) is tested in one.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parent.parent


@lru_cache
def tool(name: str) -> ModuleType:
    """Import tools/<name>.py."""
    import sys

    sys.path.insert(0, str(ROOT / "tools"))
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.path.remove(str(ROOT / "tools"))
    return module


def tokenizer_for(tokenizer_type: str, **flags: Any) -> Any:
    """Build a tokenizer as preprocessing does."""
    from megatron.training.data.tokenizers import build_tokenizer, with_tokenizer_defaults

    return build_tokenizer(with_tokenizer_defaults(argparse.Namespace(tokenizer_type=tokenizer_type, **flags)))


def write_jsonl(path: Path, documents: Iterable[Any], key: str = "text") -> Path:
    """Write one {"text": document} a line."""
    path.write_text("".join(json.dumps({key: document}) + "\n" for document in documents), encoding="utf-8")
    return path


def ids_as_text(documents: Iterable[Iterable[int]]) -> list[str]:
    """What NullTokenizer reads: the ids as decimal numbers."""
    return [" ".join(map(str, document)) for document in documents]


def read_corpus(stem: Path | str) -> list[list[int]]:
    """Read all documents with upstream's IndexedDataset."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    dataset = IndexedDataset(str(stem))
    assert list(dataset.document_indices) == list(range(len(dataset) + 1)), "every document is one sequence"
    return [np.asarray(dataset[at]).tolist() for at in range(len(dataset))]


def write_corpus(prefix: Path, documents: Iterable[Iterable[int]], vocab_size: int = 1000) -> str:
    """Preprocess documents of ids with NullTokenizer; return the --data-path."""
    from megatron.training.data.document_reader import InputFormat, find_input_files
    from megatron.training.data.preprocess import Options, preprocess

    source = write_jsonl(prefix.with_suffix(".jsonl"), ids_as_text(documents))
    files = find_input_files([str(source)], InputFormat())
    options = Options(files, InputFormat(), ["text"], str(prefix), overwrite=True)
    summary = preprocess(options, tokenizer_for("NullTokenizer", vocab_size=vocab_size), Silent())
    return summary.outputs["text"]


class Silent:
    """A progress that keeps what it is told."""

    def __init__(self) -> None:
        self.documents = self.tokens = self.source_bytes = 0
        self.shown: list[str] = []

    def advance(self, documents: int, tokens: int, source_bytes: int) -> None:
        self.documents += documents
        self.tokens += tokens
        self.source_bytes += source_bytes

    def skipped(self, location: str, reason: str) -> None:
        self.shown.append(f"{location}: {reason}")
