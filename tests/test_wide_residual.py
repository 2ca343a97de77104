"""Maps, retention, readout and boundary helpers of wide streams: starts, padding, marks, loading."""

from __future__ import annotations

import math
import re
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness_models import build_gpt, controllers, run, single_process_megatron, token_batch, transformer_config
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.optimizer import get_standard_config_overrides
from megatron.core.optimizer.layer_wise_optimizer import is_managed_by_layer_wise_optimizer
from megatron.core.optimizer.optimizer_config import OptimizerConfig

from megatron.core.transformer.wide_residual import (
    _MIN_CONTROLLER_NUMEL,
    LearnedWideResidualRetention,
    StreamwiseSigmoidMap,
    StreamwiseSigmoidResidualReadout,
    StreamwiseSigmoidWideResidualRead,
    _active_vector,
    _make_padded_vector,
    build_wide_residual_readout,
    expand_wide_residual_stream,
)
from megatron.core.transformer.wide_residual_config import WideResidualConfig, widen_transformer_config
from megatron.patches import retention_weight_decay


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


def wide_config(num_streams: int = 4, *, config_options: dict[str, Any] | None = None, **wide_options: Any) -> Any:
    return widen_transformer_config(
        transformer_config(**(config_options or {})), WideResidualConfig(num_streams, **wide_options)
    )


@given(st.integers(2, 64))
@settings(deadline=None)
def test_read_factors_start_at_one_over_k_and_write_factors_with_mean_one(num_streams: int) -> None:
    config = wide_config(num_streams)
    read_k = StreamwiseSigmoidMap(config, map_kind="read").factors().double()
    write_k = StreamwiseSigmoidMap(config, map_kind="write").factors().double()
    assert (read_k - 1 / num_streams).abs().max() < 1e-7
    assert abs(write_k.mean().item() - 1) < 1e-6
    assert ((write_k + write_k.flip(0)) - 2).abs().max() < 1e-6, "mirrored pairs must sum to 2"
    assert (write_k.diff() > 0).all(), "the write factors must differ, or the streams stay identical"


def test_write_logits_spread_over_the_configured_scale() -> None:
    logit_p = StreamwiseSigmoidMap(wide_config(5, streamwise_sigmoid_init_scale=0.2), map_kind="write").logit
    torch.testing.assert_close(logit_p[:5], torch.tensor([-0.2, -0.1, 0.0, 0.1, 0.2]))


@given(st.floats(0.01, 0.9), st.floats(0.01, 0.99))
@settings(deadline=None)
def test_retention_starts_at_its_init_and_stays_within_its_bounds(forget: float, position: float) -> None:
    start = 1 - forget + forget * position
    config = wide_config(3, learned_retention=True, retention_init=start, retention_max_forget=forget)
    retention = LearnedWideResidualRetention(config, 1, "mlp", num_streams=3)
    assert (retention.factors().double() - start).abs().max() < 1e-6
    with torch.no_grad():
        for extreme in (-1e4, 1e4):
            retention.retention_logit[:3] = extreme
            assert (retention.factors() >= 1 - forget - 1e-6).all()
            assert (retention.factors() <= 1).all()


def test_controllers_are_fp32_vectors_padded_with_zeros() -> None:
    for name, param in controllers(build_gpt(3, wide_options={"learned_retention": True})).items():
        assert param.shape == (_MIN_CONTROLLER_NUMEL,) == (128,), name
        assert param.dtype == torch.float32, name
        assert not param[3:].any(), f"the padding of {name} is not zero"


def test_more_streams_than_the_padding_still_fit() -> None:
    assert _make_padded_vector(torch.ones(130)).shape == (130,)
    assert torch.equal(_active_vector(_make_padded_vector(torch.ones(3)), 3), torch.ones(3))
    with pytest.raises(ValueError, match="cannot hold 5 streams"):
        _active_vector(torch.ones(4), 5)
    with pytest.raises(ValueError, match="a vector of one or more"):
        _make_padded_vector(torch.ones(0))


@pytest.mark.parametrize("cast", [torch.nn.Module.bfloat16, torch.nn.Module.half], ids=["bf16", "fp16"])
def test_casting_the_model_leaves_controllers_as_they_are(cast: Any) -> None:
    model = build_gpt(3, wide_options={"learned_retention": True})
    before = {name: param.clone() for name, param in controllers(model).items()}
    cast(model)
    for name, param in controllers(model).items():
        assert param.dtype == torch.float32
        assert torch.equal(param, before[name]), f"{name} was rounded"
        assert hasattr(param, "sequence_parallel"), f"{name} lost its marks"
    assert model.double().decoder.layers[0].residual_read_mlp.read_map.logit.dtype == torch.float64


def test_maps_are_averaged_over_tensor_ranks_and_summed_under_sequence_parallelism() -> None:
    parallel = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    for options, summed in (({}, False), (parallel, True)):
        config = wide_config(4, config_options=options, learned_retention=True)
        retention = LearnedWideResidualRetention(config, 1, "mlp", num_streams=4).retention_logit
        for param in (StreamwiseSigmoidMap(config, map_kind="read").logit, retention):
            marks = vars(param)
            assert marks["sequence_parallel"] is summed
            assert marks["average_gradients_across_tp_domain"] is not summed


def decayed(overrides: dict[Any, Any], name: str, param: torch.nn.Parameter) -> bool:
    matching = [override for key, override in overrides.items() if key.matches(param, name)]
    return not any(override.get("wd_mult") == 0.0 for override in matching)


@pytest.mark.parametrize("qk_layernorm", [False, True])
def test_weight_decay_applies_to_retention_and_not_to_maps(qk_layernorm: bool) -> None:
    model = build_gpt(4, wide_options={"learned_retention": True}, qk_layernorm=qk_layernorm)
    config = OptimizerConfig(optimizer="adam", lr=1e-3, apply_wd_to_qk_layernorm=qk_layernorm)
    plain = get_standard_config_overrides(config)
    patched = retention_weight_decay.PATCH.make(get_standard_config_overrides)(config)
    retention_weight_decay.PATCH.check()
    for name, param in model.named_parameters():
        if getattr(param, "residual_controller", None) == "retention":
            assert decayed(patched, name, param), f"{name} is not decayed"
            assert not decayed(plain, name, param), "upstream decays vectors now: the patch is not needed any more"
        else:
            assert decayed(patched, name, param) == decayed(plain, name, param), f"the patch changed {name}"
        if hasattr(param, "residual_controller"):
            assert not is_managed_by_layer_wise_optimizer(param), f"Muon would take {name}"


def test_expand_repeats_the_activation_stream_major() -> None:
    x_sbd = torch.randn(3, 2, 5, dtype=torch.float64, requires_grad=True)
    y_sbw = expand_wide_residual_stream(x_sbd, 4)
    assert torch.equal(y_sbw.unflatten(-1, (4, 5)), x_sbd.unsqueeze(-2).expand(3, 2, 4, 5))
    assert torch.autograd.gradcheck(lambda x: expand_wide_residual_stream(x, 4), x_sbd)
    for bad, error in ((True, TypeError), (2.0, TypeError), (0, ValueError)):
        with pytest.raises(error):
            expand_wide_residual_stream(x_sbd, bad)  # type: ignore[arg-type]


def test_readout_starts_as_the_mean_and_is_built_only_for_wide_configs() -> None:
    assert build_wide_residual_readout(transformer_config()) is None
    readout = build_wide_residual_readout(wide_config(4))
    assert isinstance(readout, StreamwiseSigmoidResidualReadout)
    x_sbw = torch.randn(3, 2, 4 * 64)
    torch.testing.assert_close(readout(x_sbw), x_sbw.unflatten(-1, (4, 64)).mean(-2), rtol=0, atol=1e-6)


def test_readout_and_independent_read_pass_gradcheck_in_fp64() -> None:
    config = wide_config(3, config_options={"hidden_size": 4, "num_attention_heads": 2})
    for module in (StreamwiseSigmoidResidualReadout(config), StreamwiseSigmoidWideResidualRead(config, 1, "moe")):
        module.double()
        x_sbw = torch.randn(2, 1, 12, dtype=torch.float64, requires_grad=True)
        logit_p = next(module.parameters())
        assert torch.autograd.gradcheck(lambda x, _, module=module: module(x), (x_sbw, logit_p))


@pytest.mark.parametrize(
    "build", [StreamwiseSigmoidMap, StreamwiseSigmoidResidualReadout], ids=lambda cls: cls.__name__
)
def test_ordinary_config_is_refused_by_name(build: Any) -> None:
    options = {"map_kind": "read"} if build is StreamwiseSigmoidMap else {}
    with pytest.raises(ValueError, match=r"needs a config that carries a WideResidualConfig"):
        build(transformer_config(), **options)


def test_unknown_map_kind_and_foreign_stream_count_are_errors() -> None:
    with pytest.raises(ValueError, match="map_kind is 'exit'"):
        StreamwiseSigmoidMap(wide_config(), map_kind="exit")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="asked for 3 streams, the config has 4"):
        LearnedWideResidualRetention(wide_config(4, learned_retention=True), 1, "mlp", num_streams=3)


def combined(state: dict[str, Any]) -> OrderedDict[str, Any]:
    """The same state under the keys of the older combined connection."""
    renamed: OrderedDict[str, Any] = OrderedDict()
    for key, value in state.items():
        renamed[re.sub(r"residual_(read|write)_", "residual_connection_", key)] = value
    return renamed


def trained_state(retention: bool = True) -> dict[str, Any]:
    model = build_gpt(4, wide_options={"learned_retention": retention})
    with torch.no_grad():
        for number, param in enumerate(controllers(model).values(), 1):
            param[:4] += 0.01 * number
    return model.state_dict()


@pytest.mark.parametrize("retention", [False, True])
def test_older_combined_keys_load_strictly_and_leave_the_callers_dict(retention: bool) -> None:
    state = trained_state(retention)
    old = combined(state)
    assert any("residual_connection_self_attn.read_map" in key for key in old)
    keys_before = list(old)
    model = build_gpt(4, seed=99, wide_options={"learned_retention": retention})
    model.load_state_dict(old, strict=True)
    assert list(old) == keys_before, "the caller's dict was changed"
    for key, value in model.state_dict().items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, state[key]), f"{key} was not loaded"
    assert torch.isfinite(run(model, token_batch())).all()


@pytest.mark.parametrize("layout", ["split", "combined"])
def test_missing_unexpected_and_doubled_controllers_fail_strictly(layout: str) -> None:
    state = trained_state()
    if layout == "combined":
        state = combined(state)
    key = next(key for key in state if "write_map" in key)
    faults = {
        "missing": {name: value for name, value in state.items() if name != key},
        "unexpected": {**state, key.replace("write_map", "write_mop"): state[key]},
        "misshaped": {**state, key: state[key][:64]},
    }
    if layout == "split":
        faults["doubled"] = {**state, key.replace("residual_write_", "residual_connection_"): state[key]}
    for fault, broken in faults.items():
        with pytest.raises(RuntimeError, match=r"Error.s. in loading state_dict"):
            build_gpt(4, wide_options={"learned_retention": True}).load_state_dict(broken, strict=True)
        assert fault


@pytest.mark.parametrize("other", [2, 3, 5, 8])
@pytest.mark.parametrize("trained", [False, True])
def test_checkpoint_of_another_stream_count_is_refused_although_its_shapes_fit(other: int, trained: bool) -> None:
    state = trained_state(retention=False) if trained else build_gpt(4).state_dict()
    with pytest.raises(ValueError, match=rf"holds values for 4 streams, this model has {other}"):
        build_gpt(other).load_state_dict(state, strict=True)
    reverse = r"holds values for [0-9] streams, this model has 4"
    with pytest.raises(ValueError, match=reverse):
        build_gpt(4).load_state_dict(build_gpt(other).state_dict(), strict=True)


@pytest.mark.parametrize("num_streams", [2, 3, 4, 5])
def test_checkpoint_of_the_same_stream_count_loads_from_the_first_step_on(num_streams: int) -> None:
    build_gpt(num_streams, seed=5).load_state_dict(build_gpt(num_streams).state_dict(), strict=True)


def test_controllers_that_are_not_finite_are_refused() -> None:
    state = trained_state(retention=False)
    state[next(key for key in state if "write_map" in key)][100] = float("nan")
    with pytest.raises(ValueError, match="not finite"):
        build_gpt(4).load_state_dict(state, strict=True)


def test_reads_of_another_width_are_refused() -> None:
    for module in (
        StreamwiseSigmoidResidualReadout(wide_config(4)),
        StreamwiseSigmoidWideResidualRead(wide_config(4), 1, "moe"),
    ):
        with pytest.raises(ValueError, match="a last dimension of 256 is wanted"):
            module(torch.ones(5, 2, 64))


def test_start_of_the_read_map_is_exact() -> None:
    for num_streams in (2, 3, 4, 8):
        logit = StreamwiseSigmoidMap(wide_config(num_streams), map_kind="read").logit[0].item()
        assert math.isclose(logit, math.log((1 / num_streams) / (1 - 1 / num_streams)), rel_tol=1e-6, abs_tol=1e-9)
