#!/usr/bin/env python3
"""Trains a small byte-level BPE tokenizer on a corpus, for models too small for a 50k vocabulary.

    python tools/train_tokenizer.py --input corpus.jsonl --vocab-size 4096 --output my-tokenizer
    python tools/preprocess_data.py --tokenizer-type HuggingFaceTokenizer --tokenizer-model my-tokenizer ...

The folder is a plain Hugging Face tokenizer: id 0 is <|endoftext|> (ends a document), id 1 is <|padding|>, the 256
bytes follow, so every text can be encoded. What always holds: the same input gives the same files, byte for byte; no
network is used; the folder appears whole or not at all. Exit status: 0 done, 2 bad input or flags, 130 after ^C.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from closed_pipe import run_tool
from quiet_imports import quiet_imports

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|padding|>"
SMALLEST_VOCABULARY = 256 + 2


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy."""
    parser = argparse.ArgumentParser(
        description="Train a byte-level BPE tokenizer and save it as a Hugging Face tokenizer folder.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files or glob patterns, in the formats of tools/preprocess_data.py",
    )
    parser.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys (Parquet: columns) to train on (default: text)",
    )
    parser.add_argument(
        "--vocab-size",
        type=int,
        default=4096,
        metavar="N",
        help=f"ids in all, at least {SMALLEST_VOCABULARY} (default: %(default)s)",
    )
    parser.add_argument("--output", required=True, metavar="DIR", help="folder to make; it must not exist yet")
    args = parser.parse_args(argv)
    if args.vocab_size < SMALLEST_VOCABULARY:
        parser.error(f"--vocab-size {args.vocab_size}: at least {SMALLEST_VOCABULARY} (256 bytes and 2 special tokens)")
    return args


def read_texts(args: argparse.Namespace) -> Iterator[str]:
    """Yield every text of the input in order; raises DataError with path:line at the first bad one."""
    from megatron.training.data.document_parser import BadRecord, parse_record
    from megatron.training.data.document_reader import InputFormat, cut_into_parts, find_input_files, read_part
    from megatron.training.data.errors import DataError

    files = find_input_files(args.input, InputFormat())
    for part in cut_into_parts(files, InputFormat(), partitions=1):
        for chunk in read_part(part, args.json_keys):
            for index, payload in enumerate(chunk.payloads):
                try:
                    yield from parse_record(payload, chunk.slice.file.kind, args.json_keys).values()
                except BadRecord as reason:
                    raise DataError(f"{chunk.location(index)}: {reason}.") from None


def train(args: argparse.Namespace) -> int:
    """Train and save; return the size of the vocabulary that the corpus gave."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    from megatron.training.data.errors import DataError

    output = Path(args.output)
    if output.exists():
        raise DataError(f"--output {output} exists and stays as it is; name a folder that does not exist yet.")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=args.vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=sys.stderr.isatty(),
    )
    texts = read_texts(args)
    first = next(texts, None)
    if first is None:
        raise DataError(f"--input {' '.join(args.input)} has no document to learn from.")
    tokenizer.train_from_iterator(itertools.chain([first], texts), trainer)
    try:
        _save_folder(tokenizer, output)
    except OSError as error:
        raise DataError(f"--output {output} cannot be written: {error.strerror}.") from error
    return tokenizer.get_vocab_size()


def _save_folder(tokenizer: Tokenizer, output: Path) -> None:
    output.absolute().parent.mkdir(parents=True, exist_ok=True)
    folder = tempfile.mkdtemp(prefix=f".{output.name}.unfinished-", dir=output.absolute().parent)
    try:
        tokenizer.save(os.path.join(folder, "tokenizer.json"))
        config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TEXT, "pad_token": PADDING}
        Path(folder, "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        os.chmod(folder, 0o755)  # mkdtemp makes it private, a tokenizer is not
        os.rename(folder, output)
    finally:
        shutil.rmtree(folder, ignore_errors=True)  # gone already when it was renamed


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    try:
        with quiet_imports():
            from megatron.training.data.errors import DataError
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        size = train(args)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    print(f"wrote {args.output}: {size} ids, documents end with {END_OF_TEXT} (id 0)")
    if size < args.vocab_size:
        print(f"note: the corpus gave no more than {size} of the {args.vocab_size} ids asked for")
    return 0


if __name__ == "__main__":
    run_tool(main)
