"""Shortcut MoE: what cannot be served is refused where arguments are parsed, where it stands, with the reason; resume.

Checks that upstream's options still exist guard the tables of refused options.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness_models import build_hybrid, single_process_megatron
from harness_pretrain import TINY_GPT, pretrain
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core.models.hybrid.local_hybrid_specs import local_hybrid_stack_spec
from megatron.core.models.hybrid.shortcut_hybrid_stack import shortcut_hybrid_stack_spec
from megatron.core.transformer.moe.shortcut_moe_options import check_shortcut_options
from megatron.training.local_defaults import LocalChoiceError
from megatron.training.model_kinds import MODEL_KINDS
from megatron.training.pretrain_entry import ARGUMENT_EXTENSIONS, ArgumentExtension, validated_arguments
from megatron.training.shortcut_moe_arguments import check_shortcut_pattern

SCRIPT = "pretrain_mamba.py"
HYBRID = [
    *("--num-experts", "4", "--moe-router-topk", "2", "--disable-bias-linear", "--hybrid-layer-pattern", "M*E"),
    *("--mamba-head-dim", "16", "--mamba-state-dim", "16", "--mamba-num-groups", "2"),
]
SHARED = ["--moe-shared-expert-intermediate-size", "32"]
SHORTCUT = [*HYBRID, *SHARED, "--moe-shortcut-connection"]
TWO_STAGES = ["--pipeline-model-parallel-size", "2"]


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


def refused(kind: str, options: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Parse the options as a pretraining script does on a CPU host, and return why they are refused."""
    tiny = TINY_GPT[2:] if kind == "hybrid" else TINY_GPT  # the pattern says the number of layers
    monkeypatch.setattr(sys, "argv", ["pretrain", *tiny, *options])
    check = ArgumentExtension(lambda parser: parser, before_validation=MODEL_KINDS[kind].check)
    with pytest.raises(LocalChoiceError) as refusal:
        validated_arguments("cpu", (check, *ARGUMENT_EXTENSIONS))
    return str(refusal.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ([*HYBRID, "--moe-shortcut-parallel"], "--moe-shortcut-parallel given without --moe-shortcut-connection"),
        ([*HYBRID, "--moe-shortcut-connection"], "give --moe-shared-expert-intermediate-size"),
        ([*SHORTCUT, "--moe-shared-expert-overlap"], "--moe-shared-expert-overlap cannot be used"),
        ([*SHORTCUT, "--recompute-granularity", "full"], "--recompute-granularity full cannot be used"),
        ([*SHORTCUT, "--cuda-graph-impl", "local"], "--cuda-graph-impl cannot be used"),
        ([*SHORTCUT, "--hybrid-layer-pattern", "EM*E"], "'E' at position 1 of the pattern stands at the start"),
        ([*SHORTCUT, "--hybrid-layer-pattern", "M*EE"], "'E' at position 4 of the pattern stands after another MoE"),
        (
            [*SHORTCUT, *TWO_STAGES, "--hybrid-layer-pattern", "ME|E*"],
            "'E' at position 4 of the pattern stands at the start",
        ),
        ([*SHORTCUT, "--hybrid-layer-pattern", "M*-"], "'M*-' has no E"),
    ],
)
def test_what_a_hybrid_cannot_serve_is_refused(
    options: list[str], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert reason in refused("hybrid", options, monkeypatch)


@pytest.mark.parametrize(
    ("pattern", "layout", "position"),
    [
        ("M*-E", ["--pipeline-model-parallel-size", "2"], None),
        ("M*E-E*", ["--pipeline-model-parallel-size", "2"], None),
        ("M-*E-E", ["--pipeline-model-parallel-size", "3"], None),
        ("ME*EME", ["--pipeline-model-parallel-size", "2"], 3),
        ("M*E-*E", ["--pipeline-model-parallel-size", "2", "--decoder-first-pipeline-num-layers", "2"], 2),
        ("M*E-*E", ["--pipeline-model-parallel-size", "2", "--decoder-last-pipeline-num-layers", "1"], 5),
        ("M*E|-E", ["--pipeline-model-parallel-size", "2"], None),
    ],
)
def test_a_pipeline_cut_between_a_pair_is_shown_where_it_is(
    pattern: str, layout: list[str], position: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = dict(zip(layout[::2], map(int, layout[1::2]), strict=True))
    args = Namespace(
        pipeline_model_parallel_size=sizes["--pipeline-model-parallel-size"],
        decoder_first_pipeline_num_layers=sizes.get("--decoder-first-pipeline-num-layers"),
        decoder_last_pipeline_num_layers=sizes.get("--decoder-last-pipeline-num-layers"),
    )
    if position is None:
        check_shortcut_pattern(pattern, args)
        return
    with pytest.raises(ValueError, match="stands at the start of a pipeline segment") as error:
        check_shortcut_pattern(pattern, args)
    assert str(error.value).endswith(f"\n    {pattern}\n    {' ' * position}^")


def test_a_gpt_is_refused_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["--num-experts", "4", "--disable-bias-linear", *SHARED, "--moe-shortcut-connection"]
    assert "a GPT has none" in refused("gpt", options, monkeypatch)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("overlap_moe_expert_parallel_comm", True),
        ("fused_residual_rmsnorm", True),
        ("transformer_impl", "inference_optimized"),
        ("fine_grained_activation_offloading", True),
        ("moe_paged_stash", True),
    ],
)
def test_a_config_with_an_option_that_cannot_run_is_refused(option: str, value: Any) -> None:
    config = TransformerConfig(
        num_layers=2, hidden_size=64, num_attention_heads=4, moe_shared_expert_intermediate_size=32
    )
    check_shortcut_options(config)
    assert hasattr(config, option), f"megatron-core knows no {option} any more"
    setattr(config, option, value)
    with pytest.raises(ValueError, match="cannot be used with --moe-shortcut-connection"):
        check_shortcut_options(config)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"overlap_param_gather": True}, "--overlap-param-gather cannot be used with --moe-shortcut-parallel"),
        ({"moe_latent_size": 16}, "--moe-latent-size cannot be used with --moe-shortcut-parallel"),
        ({"transformer_impl": "transformer_engine"}, "needs --moe-router-dtype fp64"),
        ({"transformer_impl": "transformer_engine", "moe_router_dtype": "fp32"}, "needs --moe-router-dtype fp64"),
        ({"transformer_impl": "transformer_engine", "moe_router_dtype": "fp64"}, None),
    ],
)
def test_what_cannot_run_on_two_streams_is_refused_in_parallel_alone(
    changes: dict[str, Any], reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["pretrain", *TINY_GPT[2:], *SHORTCUT])
    args = validated_arguments("cpu")
    for name, value in changes.items():
        assert hasattr(args, name), f"megatron-core knows no {name} any more"
        setattr(args, name, value)
    check_shortcut_options(args)
    if reason is None:
        check_shortcut_options(args, parallel=True)
        return
    with pytest.raises(ValueError, match=reason):
        check_shortcut_options(args, parallel=True)


def test_a_stack_refuses_an_unpaired_moe_layer_itself() -> None:
    with pytest.raises(ValueError, match="'E' at position 3 of the segment '\\*EE' stands after another MoE layer"):
        build_hybrid(
            "*EE",
            stack_spec=shortcut_hybrid_stack_spec(local_hybrid_stack_spec),
            moe_shared_expert_intermediate_size=48,
        )


def test_a_resumed_run_is_bit_equal_and_another_setting_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = [*TINY_GPT[2:], *SHORTCUT, "--wide-residual", "2", "--train-iters", "6", "--moe-shortcut-parallel"]
    options += ["--recompute-granularity", "selective", "--recompute-modules", "residual_stream"]
    folder = str(tmp_path / "checkpoints")
    whole = pretrain([*options, "--save", folder, "--save-interval", "3"], tmp_path, script=SCRIPT)
    assert whole.log.count("> --moe-shortcut-parallel: a CPU has no CUDA streams") == 1
    # The flags come from the checkpoint.
    ours = ("--moe-shortcut-connection", "--moe-shortcut-parallel")
    bare = [option for option in options if option not in ours]
    resume = ["--load", folder, "--ckpt-step", "3"]
    resumed = pretrain([*bare, *resume, "--use-checkpoint-args"], tmp_path, script=SCRIPT)
    assert resumed.losses == {step: loss for step, loss in whole.losses.items() if step > 3}
    assert "> --moe-shortcut-parallel: a CPU has no CUDA streams" in resumed.log
    refusal = refused("hybrid", [*bare[len(TINY_GPT[2:]) :], *resume], monkeypatch)
    assert "was written with --moe-shortcut-connection; add it" in refusal
