#!/usr/bin/env python3
"""Continues a prompt with a checkpoint that pretrain_gpt.py saved, printing text as it is sampled.

    python tools/generate.py --load runs/mine/checkpoints --prompt "In the beginning"
    python tools/generate.py --load runs/mine/checkpoints --prompt "And" --temperature 0.8 --top-p 0.9 --num-samples 3
    echo "And God said" | python tools/generate.py --load runs/mine/checkpoints --prompt - --json

Model and tokenizer come from the arguments that the checkpoint stores. Without a sampling option the most likely token
is taken at each step. Standard output has the prompts with their continuations (with --json one object a line) and
nothing else; what is said about the run goes to standard error. Exit status: 0 done, 2 bad input, 130 after ^C.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext, redirect_stdout
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # a bare checkout works without an install

from closed_pipe import run_tool
from quiet_imports import quiet_imports

if TYPE_CHECKING:
    from megatron.training.generation.checkpoint_model import LoadedModel
    from megatron.training.generation.continuation import Continuation, Limits
    from megatron.training.generation.sampler import Choice, Sampling


def _positive(text: str) -> int:
    try:
        number = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number}: a whole number from 1 is wanted")
    return number


def _add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--load", required=True, metavar="DIR", help="folder of checkpoints: what training had as --save")
    add("--ckpt-step", type=_positive, metavar="N", help="the step to load (default: the latest)")
    add(
        *("--prompt", "-p"),
        action="append",
        default=[],
        metavar="TEXT",
        help="text to continue; may be given several times; - reads standard input",
    )
    add("--prompt-file", action="append", default=[], metavar="FILE", help="a file whose whole text is a prompt")
    add("--max-new-tokens", type=_positive, default=128, metavar="N", help="at most so many (default: %(default)s)")
    add("--num-samples", type=_positive, default=1, metavar="N", help="continuations of each prompt (default: 1)")
    choice = parser.add_argument_group("choice of tokens (default: the most likely one)")
    add = choice.add_argument
    add("--greedy", action="store_true", help="the most likely token, said explicitly")
    add(
        "--temperature", type=float, metavar="T", help="divide the logits by T; 0 is greedy (1 with --top-k or --top-p)"
    )
    add("--top-k", type=int, metavar="K", help="draw from the K most likely tokens")
    add("--top-p", type=float, metavar="P", help="draw from the most likely tokens that together reach probability P")
    add("--seed", type=int, default=0, metavar="N", help="of the draws; the same seed gives the same text (default: 0)")
    output = parser.add_argument_group("output and speed")
    output.add_argument("--json", action="store_true", help="one JSON object a continuation, with tokens and logprobs")
    output.add_argument("--no-cache", action="store_true", help="compute the whole prefix for every token")
    output.add_argument("--verbose", action="store_true", help="show on standard error what megatron says on loading")


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy."""
    parser = argparse.ArgumentParser(
        description="Continue prompts with a trained checkpoint.",
        epilog="example: generate.py --load runs/mine/checkpoints --prompt 'In the beginning' --temperature 0.8",
        allow_abbrev=False,
    )
    _add_options(parser)
    args = parser.parse_args(argv)
    if not args.prompt and not args.prompt_file:
        parser.error("--prompt or --prompt-file is wanted")
    if args.prompt.count("-") > 1:
        parser.error("--prompt -: standard input can be read once")
    return args


def sampling_of(args: argparse.Namespace) -> Sampling:
    """Return how to choose tokens; raises GenerationError for options that contradict each other."""
    from megatron.training.generation.errors import GenerationError
    from megatron.training.generation.sampler import Sampling

    drawing = [
        f"--{name.replace('_', '-')}" for name in ("temperature", "top_k", "top_p") if getattr(args, name) is not None
    ]
    if args.greedy and drawing:
        raise GenerationError(f"--greedy and {', '.join(drawing)} contradict each other: give one of them.")
    temperature = args.temperature
    if temperature is None:
        temperature = 1.0 if drawing else 0.0
    sampling = Sampling(temperature, args.top_k, args.top_p)
    if sampling.greedy and args.num_samples > 1:
        raise GenerationError(
            f"--num-samples {args.num_samples} would print the same text again and again, for the most likely token is "
            "taken: give a --temperature above 0, or --num-samples 1."
        )
    return sampling


def read_prompts(args: argparse.Namespace) -> list[tuple[str, str]]:
    """Return (what to call it, text) for each prompt; a file's last line end is not part of it."""
    from megatron.training.generation.errors import GenerationError

    def without_line_end(data: bytes, name: str) -> str:
        try:
            return data.decode("utf-8").removesuffix("\n").removesuffix("\r")
        except UnicodeDecodeError as error:
            raise GenerationError(f"{name} is not UTF-8 (byte {error.start}).") from None

    prompts = []
    for number, text in enumerate(args.prompt, start=1):
        name = f"prompt {number}" if len(args.prompt) > 1 else "the prompt"
        if text == "-":
            name = "standard input"
            text = without_line_end(sys.stdin.buffer.read(), name)
        prompts.append((name, text))
    for path in args.prompt_file:
        try:
            prompts.append((f"--prompt-file {path}", without_line_end(Path(path).read_bytes(), path)))
        except OSError as error:
            raise GenerationError(f"--prompt-file {path} cannot be read: {error.strerror}.") from None
    for name, text in prompts:
        if not text:
            raise GenerationError(f"{name} is empty: give some text to continue.")
    return prompts


@contextmanager
def _megatron_kept_quiet(verbose: bool) -> Iterator[None]:
    """Send what megatron prints to standard error, or nowhere, where its log then has warnings only."""
    logger = logging.getLogger("megatron")
    level = logger.level
    try:
        with open(os.devnull, "w") as nowhere, redirect_stdout(sys.stderr if verbose else nowhere):
            if not verbose:
                logger.setLevel(logging.WARNING)
            yield
    finally:
        logger.setLevel(level)


def _note(text: str) -> None:
    print(f"> {text}", file=sys.stderr, flush=True)


def _generate_one(
    loaded: LoadedModel, run: Continuation, ids: list[int], out: TextIO | None
) -> tuple[str, list[Choice], float]:
    """Return the text, its tokens and the seconds taken; writes the text to `out` as it comes."""
    from megatron.training.generation.token_stream import TokenStream

    stream = TokenStream(loaded.tokenizer.detokenize, ids)
    pieces, choices = [], []
    begin = time.perf_counter()
    for choice in run.tokens(ids):
        choices.append(choice)
        pieces.append(stream.add(choice.token))
        if out is not None:
            out.write(pieces[-1])
            out.flush()
    seconds = time.perf_counter() - begin
    pieces.append(stream.finish())
    if out is not None:
        out.write(pieces[-1] + "\n")
        out.flush()
    return "".join(pieces), choices, seconds


def generate(args: argparse.Namespace, loaded: LoadedModel, prompts: list[tuple[str, str]], sampling: Sampling) -> None:
    """Print every continuation of every prompt."""
    from megatron.training.data.tokenizers import encode_texts
    from megatron.training.generation.continuation import Continuation, check_prompt
    from megatron.training.generation.decoder import cache_obstacle, make_decoder
    from megatron.training.generation.sampler import Sampler, stream_seed

    limits = limits_of(args, loaded)
    all_ids = encode_texts(loaded.tokenizer, [text for _, text in prompts])
    for (name, _), ids in zip(prompts, all_ids, strict=True):
        check_prompt(ids, limits, name)
    obstacle = None if args.no_cache else cache_obstacle(loaded.model)
    if obstacle:
        _note(f"no cache: {obstacle}; the whole prefix is computed for every token")
    cached = not args.no_cache and obstacle is None
    for number, ((_, prompt), ids) in enumerate(zip(prompts, all_ids, strict=True)):
        for sample in range(args.num_samples):
            if not args.json:
                sys.stdout.write(("\n" if number or sample else "") + prompt)
                sys.stdout.flush()
            decoder = make_decoder(
                loaded.model, min(limits.context_length, len(ids) + limits.max_new_tokens), cached=cached
            )
            run = Continuation(decoder, Sampler(sampling, stream_seed(args.seed, number, sample)), limits)
            text, choices, seconds = _generate_one(loaded, run, ids, None if args.json else sys.stdout)
            if args.json:
                print(json.dumps(_record(prompt, ids, sample, text, choices, run)), flush=True)
            _note(f"{len(choices)} tokens in {seconds:.1f} s, stopped by {run.stopped}")


def _record(
    prompt: str, ids: list[int], sample: int, text: str, choices: list[Choice], run: Continuation
) -> dict[str, Any]:
    """What --json writes of a continuation."""
    return {
        "prompt": prompt,
        "sample": sample,
        "text": text,
        "stopped": run.stopped,
        "prompt_tokens": ids,
        "tokens": [choice.token for choice in choices],
        "logprobs": [choice.logprob for choice in choices],
    }


def limits_of(args: argparse.Namespace, loaded: LoadedModel) -> Limits:
    """Return where continuations by this checkpoint end."""
    from megatron.training.data.tokenizers import end_of_document
    from megatron.training.generation.continuation import Limits

    tokenizer = loaded.tokenizer
    return Limits(args.max_new_tokens, loaded.context_length, tokenizer.vocab_size, end_of_document(tokenizer))


def run(args: argparse.Namespace) -> None:
    """Check what can be checked without the model, load it, generate; raises GenerationError."""
    from megatron.training.generation.checkpoint_location import find_checkpoint

    sampling = sampling_of(args)
    prompts = read_prompts(args)
    location = find_checkpoint(args.load, args.ckpt_step)
    with quiet_imports():
        from megatron.cpu.host import training_host
        from megatron.training.generation.checkpoint_model import describe, open_checkpoint
    stdout = sys.stdout
    with _megatron_kept_quiet(args.verbose), training_host() as host, ExitStack() as opened:
        with nullcontext() if args.verbose else quiet_imports():
            loaded = opened.enter_context(open_checkpoint(location, host))
        _note(f"{describe(loaded)}, {'GPU' if host == 'cuda' else 'CPU'}")
        with redirect_stdout(stdout):
            generate(args, loaded, prompts, sampling)


def _status(args: argparse.Namespace) -> int:
    """Run; print what the user can put right as one line."""
    try:
        with quiet_imports():
            from megatron.cpu.host import HostChoiceError
            from megatron.training.generation.errors import GenerationError
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    try:
        run(args)
    except (GenerationError, HostChoiceError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    try:
        return _status(args)
    except KeyboardInterrupt:
        print("\ninterrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    run_tool(main)
