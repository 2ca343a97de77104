"""Saved activation bytes: the report's prediction beside what autograd holds, configuration by configuration."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness_models import transformer_config

from megatron.cpu.host import cpu_host
from megatron.training.layer_activations import lone_rank
from megatron.training.pretrain_entry import validated_arguments
from megatron.training.stream_layout import choose_block_size
from megatron.training.stream_memory_report import StreamMemoryReport, build_report
from megatron.training.wide_residual_builders import gpt_model_config_from_args

LAYERS = 4
FLAGS = [
    *("--num-layers", str(LAYERS), "--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "128"),
    *("--max-position-embeddings", "128", "--micro-batch-size", "2", "--global-batch-size", "16"),
    *("--vocab-size", "128", "--padded-vocab-size", "128"),
]
NO_DROPOUT = ["--hidden-dropout=0", "--attention-dropout=0"]
MOE = [
    *("--num-experts=4", "--moe-router-topk=2", "--disable-bias-linear", "--moe-token-dispatcher-type=alltoall"),
    *("--moe-router-load-balancing-type=aux_loss", "--moe-aux-loss-coeff=0.01"),
]


@pytest.fixture(scope="module", autouse=True)
def host() -> Iterator[None]:
    with cpu_host():
        yield


def report(
    monkeypatch: pytest.MonkeyPatch, *flags: str, sizes: tuple[int, ...] = (1, 2, 3, LAYERS)
) -> StreamMemoryReport:
    """The report for FLAGS and more flags, measured for the given block sizes."""
    monkeypatch.setattr(sys, "argv", ["report", *FLAGS, *flags])
    args = validated_arguments("cpu")
    with lone_rank(args):
        return build_report(args, measure=bool(sizes), also_measure=sizes)


CONFIGURATIONS: dict[str, list[str]] = {
    "fp32, LayerNorm, GELU, biases": ["--wide-residual=4", *NO_DROPOUT],
    "dropout": ["--wide-residual=3"],
    "dropout without biases": ["--wide-residual=3", "--disable-bias-linear"],
    "bf16, RMSNorm, SwiGLU, no biases": [
        *("--wide-residual=4", *NO_DROPOUT),
        *("--bf16", "--normalization=RMSNorm", "--swiglu", "--disable-bias-linear"),
    ],
    "bf16, fp32 stream": ["--wide-residual=2", "--bf16", "--fp32-residual-connection", *NO_DROPOUT],
    "bf16, fp32 stream, RMSNorm, dropout, retention": [
        *("--wide-residual=4", "--bf16", "--fp32-residual-connection", "--normalization=RMSNorm"),
        "--wide-residual-learned-retention",
    ],
    "grouped queries, rotary": [
        *("--wide-residual=4", "--group-query-attention", "--num-query-groups=2", "--position-embedding-type=rope"),
    ],
    "8 streams, retention": ["--wide-residual=8", "--wide-residual-learned-retention", *NO_DROPOUT],
    "core attention recomputed": [
        *("--wide-residual=4", "--bf16", "--recompute-granularity=selective", "--recompute-modules=core_attn"),
    ],
    "experts": ["--wide-residual=4", *MOE, *NO_DROPOUT],
    "experts in every second layer, bf16": ["--wide-residual=4", *MOE, "--moe-layer-freq=2", "--bf16"],
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_measured_bytes_are_those_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    found = report(monkeypatch, *CONFIGURATIONS[name])
    (stage,) = found.stages
    measured = [row for row in stage.rows if row.measured_kept is not None]
    expected = 2 + LAYERS
    if "--fp32-residual-connection" in CONFIGURATIONS[name]:
        expected -= 1  # PyTorch's norms cannot run the ordinary model
    assert len(measured) == expected, "a row was not measured"
    for row in measured:
        assert row.measured_kept is not None
        assert row.measured_held is not None
        what = f"{name}, {row.model}, N={row.block_size}"
        assert row.kept == pytest.approx(row.measured_kept, rel=0.02), f"{what}: kept after the forward"
        if "core_attn" in " ".join(CONFIGURATIONS[name]) or row.block_size == 3:
            continue  # attention is rebuilt besides; the last block is shorter than the bound takes it for
        assert row.held == pytest.approx(row.measured_held, rel=0.05), f"{what}: held at most"
    three = stage.row("replay", 3)
    assert three.measured_held is not None
    assert three.measured_held <= 1.02 * three.held, f"{name}: a short last block exceeds the bound"


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_and_pipeline_ranks_are_predicted(sequence_parallel: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    flags = ["--wide-residual=4", "--tensor-model-parallel-size=2", "--pipeline-model-parallel-size=2", *NO_DROPOUT]
    found = report(monkeypatch, *flags, *(["--sequence-parallel"] if sequence_parallel else []), sizes=(1, 2))
    assert [stage.in_flight for stage in found.stages] == [2, 1], "1F1B keeps one more micro-batch on the first stage"
    for stage in found.stages:
        assert stage.chunk_layers == [2]
        for row in stage.rows:
            assert row.measured_kept is not None
            assert row.measured_held is not None
            what = f"stage {stage.stage}, {row.model}, N={row.block_size}"
            assert row.kept == pytest.approx(row.measured_kept, rel=0.02), what
            assert row.held == pytest.approx(row.measured_held, rel=0.05), what


def test_sequence_parallelism_divides_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--wide-residual=4", "--tensor-model-parallel-size=2", *NO_DROPOUT]
    extra = {}
    for split in ([], ["--sequence-parallel"]):
        (stage,) = report(monkeypatch, *flags, *split, sizes=()).stages
        extra[bool(split)] = stage.row("wide").kept - stage.row("ordinary").kept
    assert extra[True] * 2 == extra[False]


def test_interleaved_stages_count_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--wide-residual=4", "--pipeline-model-parallel-size=2", "--num-virtual-stages-per-pipeline-rank=2"]
    found = report(monkeypatch, *flags, sizes=())
    # Warm-up forwards are 2 for each later stage and one group of 2 micro-batches for each later chunk; one more runs.
    assert [(stage.chunk_layers, stage.in_flight) for stage in found.stages] == [([1, 1], 5), ([1, 1], 3)]
    first = found.stages[0].row("wide")
    assert first.held == pytest.approx(5 * first.kept / 2)


@pytest.mark.parametrize("pipeline", [1, 2])
def test_auto_takes_the_block_that_the_report_marks(pipeline: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", str(pipeline))
    flags = ["--wide-residual=4", f"--pipeline-model-parallel-size={pipeline}", "--num-layers=16", *NO_DROPOUT]
    replay = ["--recompute-granularity=selective", "--recompute-modules=residual_stream"]
    auto = [*flags, *replay, "--residual-stream-recompute-num-layers=auto"]
    found = report(monkeypatch, *auto, sizes=())
    held = {
        size: max(stage.row("replay", size).held for stage in found.stages) for size in range(1, 16 // pipeline + 1)
    }
    assert found.best_block_size == min(held, key=lambda size: (held[size], size)), "another block holds less"
    assert found.best_block_size not in (1, 16 // pipeline), "the case is too easy to tell anything"
    monkeypatch.setattr(sys, "argv", ["pretrain_gpt.py", *FLAGS, *auto])
    chosen = gpt_model_config_from_args(validated_arguments("cpu")).transformer.residual_stream_recompute_num_layers
    assert chosen == found.best_block_size


def auto_of(pattern: str, *, micro_batches: int = 1, **config_options: Any) -> int:
    """The block that `auto` takes for a hybrid of 4 streams without biases and dropout."""
    args = Namespace(
        hybrid_layer_pattern=pattern,
        moe_shortcut_connection=False,
        global_batch_size=micro_batches,
        micro_batch_size=1,
        data_parallel_size=1,
    )
    layers = len(pattern.split("/")[0].replace("|", ""))
    config = transformer_config(num_layers=layers, add_bias_linear=False, **config_options)
    return choose_block_size(args, config, 4)


def test_auto_counts_one_branch_a_layer_in_a_hybrid_stack() -> None:
    # Units of D: 8/N blocks of 4, 1 for each read and norm of a block, 4 for each write but the last: 33, 22, 24, ...
    assert auto_of("M*-EM*-E") == 2
    assert auto_of("M*-EM*-E/M*-EM*-EM*-EM*-EM*-E") == 2, "prediction depths have no streams"


def test_auto_looks_at_the_stage_of_a_hybrid_that_holds_the_most() -> None:
    stages: dict[str, Any] = {"pipeline_model_parallel_size": 2, "pipeline_dtype": torch.float32}
    # One micro-batch: 24 layers in blocks of N hold 4 * ceil(24 / N) + 5 * N - 4: 97, 54, 43, 40 (N = 4), 41, ...
    assert auto_of("M" * 24) == 4
    for cut in ("M" * 24 + "|M", "M|" + "M" * 24):
        assert auto_of(cut, **stages) == 4, "the long segment is the whole model of before"
    # First stage of 12 layers, so many in flight: 4 * m * ceil(12 / N) + 5 * N - 4.
    assert auto_of("M" * 24, **stages) == 3
    assert auto_of("M" * 24, micro_batches=8, **stages) == 4


def test_a_wide_model_with_the_best_block_holds_little_more_than_the_ordinary_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """12 layers, D=512, 1024 tokens, K=4, predicted and measured; docs/wide.md has the same numbers at full size."""
    size = ["--num-layers=12", "--hidden-size=512", "--num-attention-heads=8", "--seq-length=1024", "--bf16"]
    flags = [*size, "--max-position-embeddings=1024", "--micro-batch-size=1", "--wide-residual=4", *NO_DROPOUT]
    recompute = ["--recompute-granularity=selective", "--recompute-modules=core_attn"]
    # Without attention scores, as a fused attention keeps them, the streams weigh most.
    found = report(monkeypatch, *flags, *recompute, sizes=(2,))
    (stage,) = found.stages
    best = stage.row("replay", found.best_block_size)
    ordinary, wide = stage.row("ordinary"), stage.row("wide")
    for row in (ordinary, wide, best):
        assert row.measured_held is not None
        assert row.measured_kept == pytest.approx(row.kept, rel=0.02)
    assert ordinary.measured_held is not None
    assert best.measured_held is not None
    assert wide.measured_held is not None
    print({row.model: row.measured_held for row in (ordinary, wide, best)})
    assert best.measured_held <= 1.25 * ordinary.measured_held
    assert wide.measured_held > 1.2 * ordinary.measured_held, "the comparison is void: streams weigh nothing here"
