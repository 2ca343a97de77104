"""The configuration of wide streams: ranges, refused options, flags and the pipeline's view of the width."""

from __future__ import annotations

import argparse
from typing import Any

import pytest
import torch
from megatron.core.transformer.heterogeneous.heterogeneous_config import HeterogeneousTransformerConfig
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

from megatron.core.transformer.wide_residual_config import (
    WideResidualConfig,
    WideResidualMLATransformerConfig,
    WideResidualTransformerConfig,
    get_wide_residual_config,
    widen_transformer_config,
)
from megatron.core.transformer.wide_residual_pipeline import pipeline_boundary_config
from megatron.training.wide_residual_arguments import add_wide_residual_args, wide_residual_config_from_args

SIZES: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}


@pytest.mark.parametrize("value", [True, False, 2.0, "4", None])
def test_stream_count_that_is_no_int_is_a_type_error(value: Any) -> None:
    with pytest.raises(TypeError, match=r"num_streams is .*an int"):
        WideResidualConfig(value)


@pytest.mark.parametrize("value", [1, 0, -3])
def test_stream_count_below_two_is_a_value_error(value: int) -> None:
    with pytest.raises(ValueError, match=f"num_streams is {value}"):
        WideResidualConfig(value)


@pytest.mark.parametrize("scale", [-0.01, float("nan"), float("inf")])
def test_bad_write_scale_is_a_value_error(scale: float) -> None:
    with pytest.raises(ValueError, match="streamwise_sigmoid_init_scale"):
        WideResidualConfig(4, streamwise_sigmoid_init_scale=scale)


def test_write_scale_zero_warns_that_streams_stay_identical() -> None:
    with pytest.warns(UserWarning, match="identical for ever"):
        WideResidualConfig(4, streamwise_sigmoid_init_scale=0.0)


@pytest.mark.parametrize(
    ("init", "forget"), [(0.9, 0.1), (1.0, 0.1), (0.5, 0.1), (0.999, 0.0), (0.999, 1.0), (0.999, -0.1)]
)
def test_retention_outside_its_bounds_is_a_value_error_only_with_retention(init: float, forget: float) -> None:
    with pytest.raises(ValueError, match="retention_"):
        WideResidualConfig(4, learned_retention=True, retention_init=init, retention_max_forget=forget)
    WideResidualConfig(4, retention_init=init, retention_max_forget=forget)


@pytest.mark.parametrize(
    "options", [{"learned_retention": 1}, {"learned_retention": True, "retention_init": "0.99"}], ids=str
)
def test_retention_options_of_the_wrong_type_are_type_errors(options: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="retention"):
        WideResidualConfig(4, **options)


REFUSED = [
    ("--inference-fuse-tp-communication", {"inference_fuse_tp_communication": True}),
    ("--fused-residual-rmsnorm", {"fused_residual_rmsnorm": True}),
    ("--init-model-with-meta-device", {"init_model_with_meta_device": True}),
    ("--heterogeneous-layers-config-path", {"heterogeneous_block_specs": True}),
    ("--cuda-graph-impl", {"cuda_graph_impl": "local"}),
    ("--enable-cuda-graph", {"enable_cuda_graph": True}),
    ("--overlap-moe-expert-parallel-comm", {"overlap_moe_expert_parallel_comm": True}),
]


@pytest.mark.parametrize(("flag", "options"), REFUSED, ids=[flag for flag, _ in REFUSED])
def test_refused_option_is_named_with_the_reason(flag: str, options: dict[str, Any]) -> None:
    config = TransformerConfig(**SIZES)
    for name, value in options.items():
        setattr(config, name, value)
    with pytest.raises(ValueError, match=f"{flag} .*cannot be used with wide residual streams: .*Leave {flag} out"):
        widen_transformer_config(config, WideResidualConfig(4))


def test_refused_option_is_refused_when_the_config_is_built_directly() -> None:
    with pytest.raises(ValueError, match="--fused-residual-rmsnorm"):
        WideResidualTransformerConfig(
            **SIZES, normalization="RMSNorm", fused_residual_rmsnorm=True, wide_residual=WideResidualConfig(4)
        )


def test_a_layout_with_a_stage_of_prediction_layers_alone_is_refused() -> None:
    config = TransformerConfig(**SIZES, mtp_num_layers=1)
    config.pipeline_model_parallel_layout = "Et*2|m|L"
    with pytest.raises(ValueError, match=r"--pipeline-model-parallel-layout .*--mtp-num-layers"):
        widen_transformer_config(config, WideResidualConfig(4))


def test_number_in_place_of_the_layout_is_a_type_error() -> None:
    with pytest.raises(TypeError, match=r"wide_residual is 4 .*a WideResidualConfig is wanted"):
        WideResidualTransformerConfig(**SIZES, wide_residual=4)  # type: ignore[arg-type]


def test_heterogeneous_config_cannot_be_widened() -> None:
    config = object.__new__(HeterogeneousTransformerConfig)
    with pytest.raises(TypeError, match="cannot extend a HeterogeneousTransformerConfig"):
        widen_transformer_config(config, WideResidualConfig(4))


def test_widening_keeps_every_attribute_and_leaves_the_original() -> None:
    config = TransformerConfig(**SIZES)
    config.yarn_mscale = 1.5  # set after construction, as Megatron does
    before = dict(config.__dict__)
    wide = widen_transformer_config(config, WideResidualConfig(4))
    assert isinstance(wide, WideResidualTransformerConfig)
    assert config.__dict__ == before
    added = {"wide_residual": WideResidualConfig(4), "residual_stream_recompute_num_layers": None}
    assert wide.__dict__ == {**before, **added}
    assert get_wide_residual_config(config) is None


def test_multi_latent_attention_config_is_widened_to_its_own_class() -> None:
    wide = widen_transformer_config(MLATransformerConfig(**SIZES), WideResidualConfig(2))
    assert isinstance(wide, WideResidualMLATransformerConfig)
    assert isinstance(wide, MLATransformerConfig)


def test_schedules_see_the_carried_width_and_modules_the_branch_width() -> None:
    config = widen_transformer_config(TransformerConfig(**SIZES), WideResidualConfig(3))
    view = pipeline_boundary_config(config)
    assert (config.hidden_size, view.hidden_size) == (64, 192)
    assert isinstance(view, WideResidualTransformerConfig)
    view.timers = "set by the trainer"
    assert config.timers == "set by the trainer", "what the trainer sets on the model's config must reach the modules"
    config.finalize_model_grads_func = torch.sum
    assert view.finalize_model_grads_func is torch.sum
    assert pipeline_boundary_config(view) is view


def test_ordinary_config_has_no_pipeline_view() -> None:
    with pytest.raises(ValueError, match="WideResidualConfig"):
        pipeline_boundary_config(TransformerConfig(**SIZES))


def parse(*flags: str) -> argparse.Namespace:
    return add_wide_residual_args(argparse.ArgumentParser()).parse_args(flags)


def test_flags_become_the_layout() -> None:
    assert wide_residual_config_from_args(parse()) is None
    assert wide_residual_config_from_args(parse("--wide-residual", "4")) == WideResidualConfig(4)
    everything = parse(
        *("--wide-residual", "3", "--wide-residual-streamwise-sigmoid-init-scale", "0.02"),
        *("--wide-residual-learned-retention", "--wide-residual-retention-init", "0.98"),
        *("--wide-residual-retention-max-forget", "0.2"),
    )
    assert wide_residual_config_from_args(everything) == WideResidualConfig(3, 0.02, True, 0.98, 0.2)


@pytest.mark.parametrize(
    "flags",
    [
        ("--wide-residual-learned-retention",),
        ("--wide-residual-streamwise-sigmoid-init-scale", "0.01"),
        ("--wide-residual-retention-init", "0.99"),
        ("--wide-residual-retention-max-forget", "0.1"),
    ],
    ids=lambda flags: flags[0],
)
def test_sub_flag_without_wide_residual_is_an_error(flags: tuple[str, ...]) -> None:
    with pytest.raises(ValueError, match=f"{flags[0]} given without --wide-residual;"):
        wide_residual_config_from_args(parse(*flags))


def test_retention_bound_without_learned_retention_is_an_error() -> None:
    with pytest.raises(ValueError, match="--wide-residual-retention-init given without --wide-residual-learned-retent"):
        wide_residual_config_from_args(parse("--wide-residual", "4", "--wide-residual-retention-init", "0.99"))


@pytest.mark.parametrize("value", ["1", "0", "-2", "four", "2.5"])
def test_bad_stream_count_on_the_command_line_exits_with_2(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as error:
        parse(f"--wide-residual={value}")
    assert error.value.code == 2
    assert "2 or more" in capsys.readouterr().err
