"""Saved activation bytes of hybrids: the prediction beside what autograd holds, and the block that auto takes."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
from megatron.core.ssm.mamba_mixer import MambaMixer

from megatron.core.ssm.torch_mamba_scan import tokens_per_kept_state
from megatron.cpu.host import cpu_host
from megatron.training.hybrid_builders import hybrid_model_config_from_args
from megatron.training.layer_activations import build_stack, fit_layers, lone_rank, measure_stack
from megatron.training.pretrain_entry import validated_arguments
from megatron.training.stream_memory_report import StageReport, StreamMemoryReport, build_report

FLAGS = [
    *("--hidden-size", "64", "--num-attention-heads", "4", "--seq-length", "96", "--max-position-embeddings", "96"),
    *("--mamba-head-dim", "32", "--mamba-num-groups", "2", "--mamba-state-dim", "16"),
    *("--micro-batch-size", "2", "--global-batch-size", "16", "--vocab-size", "128", "--padded-vocab-size", "128"),
]
NO_DROPOUT = ["--hidden-dropout=0", "--attention-dropout=0"]
MOE = [
    *("--num-experts=4", "--moe-router-topk=2", "--disable-bias-linear", "--moe-token-dispatcher-type=alltoall"),
    *("--moe-router-load-balancing-type=aux_loss", "--moe-aux-loss-coeff=0.01"),
]
SHORTCUT = ["--moe-shared-expert-intermediate-size=64", "--moe-shortcut-connection"]


@pytest.fixture(scope="module", autouse=True)
def host() -> Iterator[None]:
    with cpu_host():
        yield


def report(
    monkeypatch: pytest.MonkeyPatch, pattern: str, *flags: str, sizes: tuple[int, ...] = ()
) -> StreamMemoryReport:
    """The report for a pattern, FLAGS and more flags, measured for the given block sizes."""
    monkeypatch.setattr(sys, "argv", ["report", "--hybrid-layer-pattern", pattern, *FLAGS, *flags])
    args = validated_arguments("cpu")
    with lone_rank(args):
        return build_report(args, measure=bool(sizes), also_measure=sizes)


def check_measured(stage: StageReport, even: tuple[int, ...]) -> int:
    """Compare the measured rows; `held` where one chunk has blocks of the sizes `even`, which are all equally full, and
    elsewhere as a bound. Returns the number of rows."""
    measured = [row for row in stage.rows if row.measured_kept is not None]
    for row in measured:
        assert row.measured_kept is not None
        assert row.measured_held is not None
        what = f"stage {stage.stage}, {row.model}, N={row.block_size}"
        assert row.kept == pytest.approx(row.measured_kept, rel=0.005), f"{what}: kept after the forward"
        assert row.measured_held <= 1.005 * row.held, f"{what}: held is no bound"
        if row.block_size in even or (row.block_size is None and len(stage.chunk_layers) == 1):
            assert row.held == pytest.approx(row.measured_held, rel=0.005), f"{what}: held at most"
    return len(measured)


# Name: pattern, flags, block sizes of equal blocks, block sizes besides.
CONFIGURATIONS: dict[str, tuple[str, list[str], tuple[int, ...], tuple[int, ...]]] = {
    "Mamba alone, fp32": ("MMMM", ["--wide-residual=4", *NO_DROPOUT], (2, 4), (3,)),
    "Mamba, attention, MLP, fp32, dropout": ("M*-M", ["--wide-residual=4"], (1, 2, 4), ()),
    "bf16, two streams, RMSNorm, SwiGLU, rotary": (
        "M*-*",
        [
            *("--wide-residual=2", "--bf16", "--normalization=RMSNorm", "--swiglu", "--disable-bias-linear"),
            *("--position-embedding-type=rope", *NO_DROPOUT),
        ],
        (2, 4),
        (),
    ),
    "experts, bf16": ("M*ME-E", ["--wide-residual=4", "--bf16", *MOE, *NO_DROPOUT], (2, 3, 6), (4,)),
    "bf16, fp32 stream, retention, dropout": (
        "M*-M",
        ["--wide-residual=4", "--bf16", "--fp32-residual-connection", "--wide-residual-learned-retention"],
        (2,),
        (),
    ),
    "shortcut experts": ("M*E-ME", ["--wide-residual=4", *MOE, *SHORTCUT, *NO_DROPOUT], (3, 6), (1, 4)),
    "shortcut experts, bf16, RMSNorm, two streams": (
        "ME*E",
        ["--wide-residual=2", "--bf16", "--normalization=RMSNorm", *MOE, *SHORTCUT],
        (1, 2, 4),
        (),
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_measured_bytes_of_a_hybrid_are_those_predicted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    pattern, flags, even, besides = CONFIGURATIONS[name]
    found = report(monkeypatch, pattern, *flags, sizes=(*even, *besides))
    (stage,) = found.stages
    assert stage.chunk_patterns == [pattern]
    ordinary = 0 if "--fp32-residual-connection" in flags else 1  # PyTorch's norms cannot run that one
    assert check_measured(stage, even) == ordinary + 1 + len({*even, *besides, found.best_block_size})
    assert stage.row("replay", found.best_block_size).kept < stage.row("wide").kept


def test_unfused_operators_are_predicted_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGATRON_STREAMWISE_BACKEND", "eager")
    found = report(monkeypatch, "M*ME", "--wide-residual=4", *MOE, *SHORTCUT, *NO_DROPOUT, sizes=(2, 4))
    check_measured(found.stages[0], (2, 4))


def test_a_length_of_several_mamba_states_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 heads keep a state every 64 tokens: 300 tokens keep four, and that of the rest."""
    heads = ["--mamba-head-dim=2", "--mamba-num-groups=1", "--mamba-state-dim=64"]
    length = ["--seq-length=300", "--max-position-embeddings=300"]
    monkeypatch.setattr(sys, "argv", ["report", "--hybrid-layer-pattern=M", *FLAGS, *heads, *length])
    args = validated_arguments("cpu")
    with lone_rank(args):
        fit = fit_layers(args, "M")
        counted = measure_stack(args, ["M"] * 2).kept - measure_stack(args, ["M"]).kept
        model = build_stack(args, ["M"], num_streams=None, block_size=None, head=False)
    (mixer,) = (module for module in model.modules() if isinstance(module, MambaMixer))
    assert tokens_per_kept_state(args.micro_batch_size, mixer.nheads_local_tp, "cpu") == 64
    assert args.seq_length not in fit.lengths, "the case measures what it predicts"
    assert fit.layer(args.seq_length) == counted


def test_stages_of_a_cut_pattern_are_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    flags = ["--wide-residual=4", "--pipeline-model-parallel-size=2", *NO_DROPOUT]
    found = report(monkeypatch, "M*|M-M-", *flags, sizes=(1, 2))
    assert [stage.chunk_patterns for stage in found.stages] == [["M*"], ["M-M-"]]
    assert [stage.in_flight for stage in found.stages] == [2, 1], "1F1B keeps one more micro-batch on the first stage"
    for stage in found.stages:
        check_measured(stage, (1, 2))


def test_interleaved_segments_are_dealt_to_the_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    found = report(monkeypatch, "M|*-|M-|*", "--wide-residual=4", "--pipeline-model-parallel-size=2", sizes=(2,))
    assert [(stage.chunk_patterns, stage.in_flight) for stage in found.stages] == [(["M", "M-"], 5), (["*-", "*"], 3)]
    first, last = found.stages
    check_measured(first, ())
    check_measured(last, ())
    wide = first.row("wide")
    assert 5 * wide.kept / 2 < wide.held < 5 * wide.kept, "all in flight are taken for the larger chunk"


@pytest.mark.parametrize(
    ("pattern", "flags"),
    [
        ("M*-M" * 4, []),
        ("M*-M" * 2 + "|" + "M-" * 4, ["--pipeline-model-parallel-size=2"]),
        ("*EMEM-ME" * 2, [*MOE, *SHORTCUT]),
    ],
    ids=["one stage", "two stages", "shortcut pairs"],
)
def test_auto_takes_the_block_that_the_report_of_a_hybrid_marks(
    pattern: str, flags: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2" if "|" in pattern else "1")
    replay = ["--recompute-granularity=selective", "--recompute-modules=residual_stream"]
    auto = ["--wide-residual=4", *flags, *NO_DROPOUT, *replay, "--residual-stream-recompute-num-layers=auto"]
    found = report(monkeypatch, pattern, *auto)
    held = {row.block_size: row.held for row in found.stages[0].rows if row.block_size}
    best = found.best_block_size
    assert best == min(held, key=lambda size: (held[size], size)), "another block holds less"
    assert best not in (1, max(held)), "the case is too easy to tell anything"
    monkeypatch.setattr(sys, "argv", ["pretrain_mamba.py", "--hybrid-layer-pattern", pattern, *FLAGS, *auto])
    chosen = hybrid_model_config_from_args(validated_arguments("cpu")).transformer.residual_stream_recompute_num_layers
    assert chosen == best
