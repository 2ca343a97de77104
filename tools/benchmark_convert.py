#!/usr/bin/env python3
"""Measures how fast checkpoints are converted, against `cp` of the same bytes on the same disk.

    python tools/benchmark_convert.py                           # about 1 GB, in a temporary folder here
    python tools/benchmark_convert.py --gigabytes 4 --folder /scratch --json

Makes a GPT checkpoint with optimizer states, then times `cp -r` with `sync`, and every conversion, in turns;
conversions sync what they write by themselves. Prints medians, throughput, the ratio to cp, and each conversion's peak
memory beside twice its largest layer. Exit status: 0, or 2 for a folder that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # a bare checkout works without an install

from benchmarking import Column, Report, argument_parser, positive
from closed_pipe import run_tool
from quiet_imports import quiet_imports

_VOCABULARY, _POSITIONS = 4096, 128


def _size(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no number") from None
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text}: a number above 0 is wanted")
    return number


def parse_arguments(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line; imports nothing heavy."""
    parser = argument_parser(
        "Time checkpoint conversions against cp.", "python tools/benchmark_convert.py --gigabytes 2 --rounds 5"
    )
    add = parser.add_argument
    add("--gigabytes", type=_size, default=1.0, metavar="N", help="size of the checkpoint")
    add("--width", type=positive, default=1024, metavar="D", help="of the model")
    add("--rounds", type=positive, default=3, metavar="N", help="measurements of each; medians are printed")
    add("--folder", type=Path, default=Path("."), metavar="DIR", help="where to work")
    add("--json", action="store_true", help="one JSON object")
    return parser.parse_args(argv)


def model_arguments(layers: int, width: int) -> argparse.Namespace:
    """Return the training arguments of a GPT that nobody trained."""
    return argparse.Namespace(
        num_layers=layers,
        hidden_size=width,
        num_attention_heads=width // 16,
        kv_channels=16,
        ffn_hidden_size=4 * width,
        max_position_embeddings=_POSITIONS,
        padded_vocab_size=_VOCABULARY,
        vocab_size=_VOCABULARY,
        make_vocab_size_divisible_by=128,
        untie_embeddings_and_output_weights=False,
        swiglu=False,
        tensor_model_parallel_size=1,
        pipeline_model_parallel_size=1,
        transformer_impl="local",
        consumed_train_samples=0,
    )


def _layer_shapes(width: int) -> dict[str, tuple[int, ...]]:
    inner = 4 * width
    return {
        "input_layernorm.weight": (width,),
        "self_attention.linear_proj.weight": (width, width),
        "self_attention.linear_qkv.weight": (3 * width, width),
        "pre_mlp_layernorm.weight": (width,),
        "mlp.linear_fc1.weight": (inner, width),
        "mlp.linear_fc2.weight": (width, inner),
    }


def make_checkpoint(target: Path, layers: int, width: int, *, optimizer: bool = True) -> int:
    """Write a torch_dist checkpoint of a GPT with random values; returns the bytes of its tensors."""
    import torch

    from megatron.training.checkpoints.checkpoint_state import WEIGHT, Common, Entry, TensorInfo
    from megatron.training.checkpoints.layout import Layout
    from megatron.training.checkpoints.output_folder import new_checkpoint
    from megatron.training.checkpoints.sharded_writer import ShardedWriter

    shapes: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (_VOCABULARY, width),
        "embedding.position_embeddings.weight": (_POSITIONS, width),
        "decoder.final_layernorm.weight": (width,),
    }
    for layer in range(layers):
        shapes |= {f"decoder.layers.{layer}.{name}": shape for name, shape in _layer_shapes(width).items()}
    slots = [WEIGHT, "exp_avg", "exp_avg_sq"] if optimizer else [WEIGHT]
    entries = {Entry(name, slot): TensorInfo(shape, torch.float32) for slot in slots for name, shape in shapes.items()}
    state: dict[str, Any] = {"args": model_arguments(layers, width), "checkpoint_version": 3.0, "iteration": 10}
    if optimizer:
        groups = [{"wd_mult": 1.0, "is_expert_parallel": False}, {"wd_mult": 0.0, "is_expert_parallel": False}]
        state["optimizer"] = {"state": {"common_step": torch.tensor(10.0)}, "param_groups": groups}
    generator = torch.Generator().manual_seed(1)
    with new_checkpoint(target, 10, overwrite=False) as folder:
        writer = ShardedWriter(folder, entries, Common(state), Layout())
        for entry, info in entries.items():
            writer.write(entry, torch.randn(info.shape, generator=generator))
        writer.finish()
    return sum(info.nbytes for info in entries.values())


def conversions() -> dict[str, Callable[[Any], Any]]:
    """Return what is timed: a name and the plan's maker."""
    from megatron.core.transformer.wide_residual_config import WideResidualConfig
    from megatron.training.checkpoints.layout import Layout
    from megatron.training.checkpoints.reshard import plan_reshard
    from megatron.training.checkpoints.widen import plan_widen

    def reshard(format: str) -> Callable[[Any], Any]:
        return lambda reader: plan_reshard(reader, Layout(tensor=2, pipeline=1, expert_tensor=2), format)

    return {
        "widen to 4 streams": lambda reader: plan_widen(reader, WideResidualConfig(num_streams=4)),
        "reshard to TP 2, torch_dist": reshard("torch_dist"),
        "reshard to TP 2, torch": reshard("torch"),
    }


def _convert(source: Path, target: Path, plan_of: Callable[[Any], Any]) -> Any:
    from megatron.training.checkpoints.conversion import execute
    from megatron.training.checkpoints.open_checkpoint import open_reader

    with open_reader(source) as reader:
        return execute(plan_of(reader), reader, target, progress=False)


def _copy(source: Path, target: Path) -> None:
    subprocess.run(["cp", "-r", str(source), str(target)], check=True)
    subprocess.run(["sync", "-f", str(target)], check=True)


def measure(args: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Return seconds, throughput and memory of everything."""
    width = args.width
    layer_bytes = 3 * 4 * 12 * width * width
    layers = max(2, round((args.gigabytes * 1e9 - 3 * 4 * _VOCABULARY * width) / layer_bytes))
    source = work / "source"
    nbytes = make_checkpoint(source, layers, width)
    seconds: dict[str, list[float]] = {"cp -r": []}
    outcomes: dict[str, Any] = {}
    for _ in range(args.rounds):
        for name, plan_of in [("cp -r", None), *conversions().items()]:
            target = work / "target"
            begin = time.perf_counter()
            if plan_of is None:
                _copy(source, target)
            else:
                outcomes[name] = _convert(source, target, plan_of)
            seconds.setdefault(name, []).append(time.perf_counter() - begin)
            shutil.rmtree(target)
    baseline = statistics.median(seconds["cp -r"])
    rows = []
    for name, times in seconds.items():
        median = statistics.median(times)
        row = {
            "what": name,
            "seconds": median,
            "megabytes_per_second": nbytes / median / 1e6,
            "ratio": baseline / median,
        }
        if name in outcomes:
            row |= {"peak_bytes": outcomes[name].peak_bytes, "largest_layer_bytes": outcomes[name].largest_layer}
        rows.append(row)
    return {"bytes": nbytes, "layers": layers, "width": width, "rounds": args.rounds, "rows": rows}


def make_report(report: dict[str, Any]) -> Report:
    """Return the report for people."""
    rows = []
    for row in report["rows"]:
        cells = [row["what"], f"{row['seconds']:.2f}", f"{row['megabytes_per_second']:.0f}", f"{row['ratio']:.2f}"]
        sizes = [row["peak_bytes"], 2 * row["largest_layer_bytes"]] if "peak_bytes" in row else []
        rows.append([*cells, *(f"{size / 2**20:.1f}" for size in sizes), *([] if sizes else ["", ""])])
    names = ("seconds", "MB/s", "of cp", "peak MiB", "2 layers MiB")
    return Report(
        f"{report['bytes']:,} bytes of tensors, {report['layers']} layers of width {report['width']}, medians of "
        f"{report['rounds']} rounds",
        [Column("what"), *(Column(name, right=True) for name in names)],
        rows,
    )


def main(argv: list[str] | None = None) -> int:
    """Return the exit status."""
    args = parse_arguments(argv)
    with quiet_imports():
        from megatron.training.checkpoints.errors import ConversionError
    try:
        with quiet_imports(), tempfile.TemporaryDirectory(dir=args.folder, prefix="benchmark-convert-") as work:
            report = measure(args, Path(work))
    except (ConversionError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if args.json:
        print(json.dumps(report))
    else:
        make_report(report).print()
    return 0


if __name__ == "__main__":
    run_tool(main)
