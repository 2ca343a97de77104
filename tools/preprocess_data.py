#!/usr/bin/env python3
"""Tokenizes raw text (JSONL, plain text, Parquet) into the .bin/.idx files that Megatron trains on.

    python tools/preprocess_data.py --input corpus.jsonl --output-prefix data/corpus \\
        --tokenizer-type HuggingFaceTokenizer --tokenizer-model my-tokenizer --append-eod --workers 8
    python pretrain_gpt.py --data-path data/corpus_text_document ...

What always holds: an existing output stays unless --overwrite is given; nothing half-written ever has a final name;
the output is the same for every --workers and --partitions. Exit status: 0 done, 2 bad input or flags (one line on
stderr says what and where), 130 after ^C or SIGTERM. The library is megatron/training/data/.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from closed_pipe import run_tool
from quiet_imports import quiet_imports

TOKENIZER_TYPES = (
    "HuggingFaceTokenizer",
    "SentencePieceTokenizer",
    "GPTSentencePieceTokenizer",
    "Llama2Tokenizer",
    "TikTokenizer",
    "GPT2BPETokenizer",
    "ByteLevelTokenizer",
    "NullTokenizer",
)


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy, so that --help is instant."""
    parser = argparse.ArgumentParser(
        description=(
            "Tokenize raw text into Megatron's .bin/.idx files, written as <prefix>_<key>_document.{bin,idx}. "
            "CRLF line ends and a UTF-8 byte order mark are accepted and dropped. Errors that name path:line (exit 2): "
            "blank line, broken JSON, missing key, null or non-string text, empty document, invalid UTF-8, a text the "
            "tokenizer refuses; --skip-bad-lines counts and reports them instead."
        ),
        allow_abbrev=False,
    )
    _add_input_flags(parser.add_argument_group("input"))
    _add_tokenizer_flags(parser.add_argument_group("tokenizer (the same flags, with the same meaning, as in training)"))
    output = parser.add_argument_group("output")
    output.add_argument("--output-prefix", required=True, metavar="PREFIX", help="path and name without suffix")
    output.add_argument("--append-eod", action="store_true", help="end every document with the tokenizer's EOD token")
    output.add_argument("--overwrite", action="store_true", help="replace an existing output (default: an error)")
    run = parser.add_argument_group("run")
    run.add_argument(
        "--workers",
        type=int,
        default=len(os.sched_getaffinity(0)),
        metavar="N",
        help="tokenizing processes (default: the CPUs this process may use, here %(default)s)",
    )
    run.add_argument(
        "--partitions",
        type=int,
        default=1,
        metavar="N",
        help="places at which the input is read at the same time; worth it for many compressed files "
        "(default: %(default)s)",
    )
    run.add_argument(
        "--log-interval",
        type=int,
        default=10000,
        metavar="N",
        help="documents between two progress lines when stderr is no terminal (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    for name in ("workers", "partitions", "log_interval"):
        if getattr(args, name) < 1:
            parser.error(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    if len(set(args.json_keys)) != len(args.json_keys):
        parser.error("--json-keys names a key twice")
    return args


def _add_input_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="PATH",
        help="files or glob patterns: .jsonl .ndjson .json .txt .text .md, each also .gz .zst .bz2, and .parquet",
    )
    group.add_argument(
        "--json-keys",
        nargs="+",
        default=["text"],
        metavar="KEY",
        help="keys (Parquet: columns) to tokenize, one output each (default: text)",
    )
    group.add_argument(
        "--input-format",
        choices=("auto", "jsonl", "text", "parquet"),
        default="auto",
        help="format of all input files (default: auto, by suffix)",
    )
    group.add_argument(
        "--text-documents",
        choices=("line", "paragraph", "file"),
        default="line",
        help="what one document is in plain text; paragraphs are parted by blank lines (default: %(default)s)",
    )
    group.add_argument(
        "--skip-bad-lines",
        action="store_true",
        help="leave bad documents out, show the first ten and count all (default: stop at the first)",
    )


def _add_tokenizer_flags(group: argparse._ArgumentGroup) -> None:
    group.add_argument("--tokenizer-type", required=True, choices=TOKENIZER_TYPES, help="which tokenizer library")
    group.add_argument(
        "--tokenizer-model",
        metavar="PATH",
        help="HuggingFaceTokenizer: a folder, a tokenizer.json or a hub name; SentencePiece types: the "
        ".model file; TikTokenizer: the vocabulary .json",
    )
    group.add_argument("--vocab-file", metavar="PATH", help="GPT2BPETokenizer: vocab.json")
    group.add_argument("--merge-file", metavar="PATH", help="GPT2BPETokenizer: merges.txt")
    group.add_argument(
        "--vocab-size",
        type=int,
        metavar="N",
        help="NullTokenizer: number of ids; TikTokenizer: ids to use (default: 131072)",
    )
    group.add_argument("--tiktoken-pattern", choices=("v1", "v2"), help="TikTokenizer: split pattern (default: v2)")
    group.add_argument(
        "--tiktoken-num-special-tokens",
        type=int,
        default=1000,
        metavar="N",
        help="TikTokenizer: ids kept for special tokens (default: %(default)s)",
    )
    group.add_argument(
        "--tokenizer-special-tokens",
        dest="special_tokens",
        nargs="+",
        metavar="TOKEN",
        help="additional special tokens (default: none)",
    )
    group.add_argument("--tokenizer-hf-no-use-fast", action="store_true", help="do not use the fast Hugging Face class")
    group.add_argument(
        "--tokenizer-hf-no-include-special-tokens",
        action="store_true",
        help="leave out the special tokens that a Hugging Face tokenizer adds to a text",
    )
    group.add_argument(
        "--tokenizer-sentencepiece-legacy", action="store_true", help="SentencePiece: allow --tokenizer-special-tokens"
    )
    group.add_argument("--trust-remote-code", action="store_true", help="run tokenizer code that comes with a model")
    group.add_argument(
        "--null-tokenizer-eod-id", type=int, metavar="ID", help="NullTokenizer: the EOD id (default: the last)"
    )


class ConsoleProgress:
    """A tqdm bar over the input's bytes on a terminal, plain lines every `log_interval` documents elsewhere."""

    def __init__(self, total_bytes: int, log_interval: int) -> None:
        from tqdm import tqdm

        self._start = time.monotonic()
        self._documents = self._tokens = self._bytes = 0
        self._total = total_bytes
        self._interval = log_interval
        self._tty = sys.stderr.isatty()
        self._bar = tqdm(total=total_bytes, unit="B", unit_scale=True, disable=not self._tty, dynamic_ncols=True)

    def advance(self, documents: int, tokens: int, source_bytes: int) -> None:
        """Count what was done; the rates are averages since the start."""
        line_due = (self._documents + documents) // self._interval > self._documents // self._interval
        self._documents += documents
        self._tokens += tokens
        self._bytes += source_bytes
        if self._tty:
            self._bar.set_postfix_str(self.rates(), refresh=False)
            self._bar.update(source_bytes)
        elif line_due:
            print(f"{self._documents} documents, {self.rates()}, ETA {self._eta():.0f} s", file=sys.stderr, flush=True)

    def skipped(self, location: str, reason: str) -> None:
        """Show one left-out document."""
        self._bar.write(f"skipped {location}: {reason}", file=sys.stderr)

    def rates(self) -> str:
        """Return "<n> documents/s, <n> tokens/s"."""
        seconds = max(time.monotonic() - self._start, 1e-9)
        return f"{self._documents / seconds:.0f} documents/s, {self._tokens / seconds:.0f} tokens/s"

    def _eta(self) -> float:
        elapsed = time.monotonic() - self._start
        return elapsed * (self._total - self._bytes) / max(self._bytes, 1)

    def close(self) -> None:
        """Take the bar off the terminal's live line."""
        self._bar.close()


def _stop_like_interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt  # unwinds like ^C, so that the unfinished folder is removed


def run(args: argparse.Namespace) -> None:
    """Preprocess as the flags say and print the summary; raises DataError."""
    from megatron.training.data.document_reader import InputFormat, find_input_files
    from megatron.training.data.preprocess import Options, preprocess
    from megatron.training.data.shard_writer import check_outputs
    from megatron.training.data.tokenizers import build_tokenizer, with_tokenizer_defaults

    check_outputs(args.output_prefix, args.json_keys, overwrite=args.overwrite)
    input_format = InputFormat(args.input_format, args.text_documents)
    files = find_input_files(args.input, input_format)
    tokenizer = build_tokenizer(with_tokenizer_defaults(args))
    options = Options(
        files=files,
        input_format=input_format,
        json_keys=args.json_keys,
        output_prefix=args.output_prefix,
        append_eod=args.append_eod,
        workers=args.workers,
        partitions=args.partitions,
        skip_bad_records=args.skip_bad_lines,
        overwrite=args.overwrite,
    )
    progress = ConsoleProgress(sum(file.num_bytes for file in files), args.log_interval)
    try:
        summary = preprocess(options, tokenizer, progress)
    finally:
        progress.close()
    print(f"{summary.documents} documents, {summary.tokens} tokens ({summary.dtype}), {progress.rates()}")
    if summary.skipped:
        kinds = ", ".join(f"{count} {kind}" for kind, count in summary.skipped.most_common())
        print(f"skipped {summary.skipped.total()} bad documents: {kinds}")
    for stem in summary.outputs.values():
        print(f"wrote {stem}.bin and .idx (for --data-path {stem})")


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    signal.signal(signal.SIGTERM, _stop_like_interrupt)
    os.environ.setdefault("RANK", "0")  # megatron.core asks for it when it logs, and warns where it is not set
    try:
        with quiet_imports():
            from megatron.training.data.errors import DataError
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        run(args)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted; nothing was written", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    run_tool(main)
