"""A GPT on wide residual streams computes the ordinary GPT at its start, whatever the architecture around it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness_models import BATCH, SEQUENCE, WIDTH, build_gpt, controllers, run, single_process_megatron, token_batch
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.mlp import MLP

from megatron.core.models.gpt.wide_residual_gpt_model import WideResidualGPTModel

ARCHITECTURES: dict[str, dict[str, Any]] = {
    "learned positions, biases, LayerNorm, untied": {},
    "tied embeddings": {"model_options": {"share_embeddings_and_output_weights": True}},
    "rope, RMSNorm, swiglu, no biases": {
        "model_options": {"position_embedding_type": "rope"},
        "normalization": "RMSNorm",
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "add_bias_linear": False,
    },
    "grouped-query attention": {"num_query_groups": 2},
    "query and key norm": {"qk_layernorm": True},
    "mixture of experts": {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


def relative_difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    return ((found - wanted).abs().max() / wanted.abs().max()).item()


@pytest.mark.parametrize("num_streams", [2, 3, 4, 8])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_wide_model_equals_ordinary_model_at_init(name: str, num_streams: int) -> None:
    ordinary, wide = build_gpt(**ARCHITECTURES[name]), build_gpt(num_streams, **ARCHITECTURES[name])
    difference = relative_difference(run(wide, token_batch()), run(ordinary, token_batch()))
    assert difference <= 1e-6, f"{name}, K={num_streams}: logits differ by {difference:.2e} of the largest"


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_base_weights_are_bit_equal_and_base_names_are_the_ordinary_models(name: str) -> None:
    ordinary = dict(build_gpt(**ARCHITECTURES[name]).named_parameters())
    wide_model = build_gpt(4, **ARCHITECTURES[name])
    wide = dict(wide_model.named_parameters())
    assert set(wide) - set(ordinary) == set(controllers(wide_model)), "only controllers may be new"
    assert set(ordinary) <= set(wide), f"lost: {set(ordinary) - set(wide)}"
    for key, value in ordinary.items():
        assert torch.equal(value, wide[key]), f"{key} was drawn differently"


def test_building_wide_parts_draws_no_random_numbers() -> None:
    build_gpt()
    after_ordinary = torch.get_rng_state()
    build_gpt(4, wide_options={"learned_retention": True})
    assert torch.equal(after_ordinary, torch.get_rng_state()), "the wide model moved the random generator on"


def test_state_keys_are_the_documented_ones() -> None:
    wide = build_gpt(3, num_layers=1, wide_options={"learned_retention": True})
    layer = "decoder.layers.0.residual_"
    assert set(controllers(wide)) == {
        layer + "read_self_attn.read_map.logit",
        layer + "write_self_attn.write_map.logit",
        layer + "write_self_attn.retention.retention_logit",
        layer + "read_mlp.read_map.logit",
        layer + "write_mlp.write_map.logit",
        layer + "write_mlp.retention.retention_logit",
        "decoder.residual_stream_readout.exit_map.logit",
    }


@pytest.mark.parametrize("retention", [False, True])
def test_every_parameter_receives_a_gradient_and_the_padding_none(retention: bool) -> None:
    wide = build_gpt(4, wide_options={"learned_retention": retention})
    run(wide, token_batch(), token_batch(8)).mean().backward()
    for name, param in wide.named_parameters():
        assert param.grad is not None, f"{name} has no gradient"
    for name, param in controllers(wide).items():
        assert param.grad is not None
        assert not param.grad[4:].any(), f"the padding of {name} has a gradient"
    moved = [name for name, param in controllers(wide).items() if param.grad is not None and param.grad[:4].any()]
    assert any("write_map" in name for name in moved), "no write map has a gradient"


def train(model: torch.nn.Module, steps: int) -> list[float]:
    """Losses of AdamW training on fresh random batches."""
    optimizer = torch.optim.AdamW([param for param in model.parameters() if param.requires_grad], lr=1e-3)
    losses = []
    for step in range(steps):
        loss = run(model, token_batch(step), token_batch(1000 + step)).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.filterwarnings("ignore:streamwise_sigmoid_init_scale is 0")
@pytest.mark.parametrize("num_streams", [2, 3, 4, 8])
def test_frozen_maps_at_scale_zero_train_like_the_ordinary_model(num_streams: int) -> None:
    ordinary = build_gpt()
    wide = build_gpt(num_streams, wide_options={"streamwise_sigmoid_init_scale": 0.0})
    for param in controllers(wide).values():
        param.requires_grad_(False)
    for step, (found, wanted) in enumerate(zip(train(wide, 20), train(ordinary, 20), strict=True), 1):
        assert abs(found - wanted) <= 2e-5 * wanted, f"step {step}: loss {found!r}, the ordinary model's {wanted!r}"


def test_untouched_scale_zero_keeps_all_streams_identical_and_the_default_does_not() -> None:
    seen: list[torch.Tensor] = []
    for scale in (0.0, 0.01):
        with pytest.warns(UserWarning, match="identical for ever") if scale == 0 else _nothing():
            wide = build_gpt(4, wide_options={"streamwise_sigmoid_init_scale": scale})
        train(wide, 3)
        handle = wide.decoder.final_layernorm.register_forward_pre_hook(
            lambda module, inputs: seen.append(inputs[0]), prepend=True
        )
        run(wide, token_batch())
        handle.remove()
    same_sbkd, spread_sbkd = (x_sbw.detach().unflatten(-1, (4, WIDTH)) for x_sbw in seen)
    assert torch.equal(same_sbkd[..., :1, :].expand_as(same_sbkd), same_sbkd), "scale 0 did not keep streams identical"
    assert not torch.equal(spread_sbkd[..., 0, :], spread_sbkd[..., 3, :]), "the default scale left streams identical"


class _nothing:  # noqa: N801 - a context manager that expects nothing
    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        return None


def test_dropout_uses_one_mask_for_all_streams_like_the_ordinary_model() -> None:
    options: dict[str, Any] = {"hidden_dropout": 0.3}
    ordinary, wide = build_gpt(**options), build_gpt(4, **options)
    logits = []
    for model in (ordinary, wide):
        model.train()
        torch.manual_seed(5)
        logits.append(run(model, token_batch()))
    difference = relative_difference(logits[1], logits[0])
    assert difference <= 2e-6, f"with dropout the logits differ by {difference:.2e}: another mask was drawn"


@pytest.mark.parametrize("retention", [False, True])
def test_full_recompute_gives_bit_equal_gradients(retention: bool) -> None:
    gradients = []
    recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    for options in ({}, recompute):
        wide = build_gpt(4, hidden_dropout=0.1, wide_options={"learned_retention": retention}, **options)
        wide.train()
        torch.manual_seed(5)
        run(wide, token_batch(), token_batch(8)).mean().backward()
        gradients.append({name: param.grad for name, param in wide.named_parameters()})
    for name, wanted in gradients[0].items():
        assert torch.equal(gradients[1][name], wanted), f"{name}: recomputation changed the gradient"


def test_bf16_model_keeps_fp32_controllers_and_exact_factors() -> None:
    wide = build_gpt(3, params_dtype=torch.bfloat16, bf16=True).bfloat16()
    for name, param in controllers(wide).items():
        assert param.dtype == torch.float32, f"{name} became {param.dtype}"
    read_map = wide.decoder.layers[0].residual_read_mlp.read_map
    assert abs(read_map.factors().sum().item() - 1) < 1e-6, "the K=3 read factors no longer sum to 1"
    assert run(wide, token_batch()).dtype == torch.bfloat16


def test_fp32_residual_stream_is_fp32_between_layers_and_branches_stay_bf16() -> None:
    wide = build_gpt(4, params_dtype=torch.bfloat16, bf16=True, fp32_residual_connection=True).bfloat16()
    dtypes: dict[str, set[torch.dtype]] = {"stream": set(), "branch": set()}
    for layer in wide.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: dtypes["stream"].add(output[0].dtype))
        layer.mlp.register_forward_pre_hook(lambda module, inputs: dtypes["branch"].add(inputs[0].dtype))
    run(wide, token_batch(), token_batch(8)).mean().backward()
    assert dtypes == {"stream": {torch.float32}, "branch": {torch.bfloat16}}


def test_evaluation_keeps_no_graph() -> None:
    wide = build_gpt(4)
    wide.eval()
    outputs: list[torch.Tensor] = []
    for layer in wide.decoder.layers:
        layer.register_forward_hook(lambda module, inputs, output: outputs.append(output[0]))
    with torch.no_grad():
        run(wide, token_batch())
    assert len(outputs) == len(wide.decoder.layers)
    assert not any(output.requires_grad for output in outputs), "a write built a graph in evaluation"


def test_a_layer_keeps_nothing_of_a_forward_that_failed() -> None:
    wide = build_gpt(4)
    layer = wide.decoder.layers[1]

    def fail(*args: object, **kwargs: object) -> None:
        raise RuntimeError("the branch failed")

    handle = layer.mlp.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="the branch failed"):
        run(wide, token_batch())
    handle.remove()
    assert not layer._held.carried, "the stream of the failed forward is still held"
    assert run(wide, token_batch()).shape[:2] == (BATCH, SEQUENCE)


def test_ordinary_layer_class_with_a_wide_config_is_refused() -> None:
    config = build_gpt(4).config
    with pytest.raises(TypeError, match="TransformerLayer knows one residual stream only"):
        WideResidualGPTModel(config, get_gpt_layer_local_spec(), 256, SEQUENCE)


def test_base_modules_are_upstreams_own() -> None:
    assert type(build_gpt(4).decoder.layers[0].mlp) is MLP
