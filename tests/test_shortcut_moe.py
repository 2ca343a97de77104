"""Shortcut MoE: the formula, wide equal to ordinary, replay of whole pairs, nothing left alive.

The formula is written here once more, with plain tensors, for an MLP predecessor: h = x + P(norm(x)),
x' = h + norm_o(Experts(norm_r(x)) + SharedExpert(norm_s(h))), on one stream and, with every map changed, on K streams.

Shape suffixes: s sequence, b batch, d width D, w stream width K*D, e experts, n tokens.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness_models import BATCH, SEQUENCE, WIDTH, build_hybrid, controllers, run, single_process_megatron, token_batch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.core.models.hybrid.local_hybrid_specs import local_hybrid_stack_spec
from megatron.core.models.hybrid.shortcut_hybrid_stack import shortcut_hybrid_stack_spec
from megatron.core.models.hybrid.shortcut_pairs import shortcut_pairs
from megatron.core.transformer.residual_recompute import ResidualStreamRecomputeContext

PATTERN = "M*E-E"
AUX: dict[str, Any] = {"moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.01}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


def build(pattern: str = PATTERN, num_streams: int | None = None, *, parallel: bool = False, **options: Any) -> Any:
    """A hybrid with shortcut MoE, ordinary or wide."""
    spec = shortcut_hybrid_stack_spec(local_hybrid_stack_spec, parallel=parallel)
    return build_hybrid(pattern, num_streams, stack_spec=spec, moe_shared_expert_intermediate_size=48, **options)


def result(model: Any, seed: int = 5) -> dict[str, torch.Tensor]:
    """Losses and all gradients of one training pass."""
    model.train()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    loss_bs = run(model, token_batch(), token_batch(8))
    loss_bs.float().mean().backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    missing = [name for name, gradient in gradients.items() if gradient is None]
    assert not missing, f"no gradient: {missing}"
    return {"losses": loss_bs.detach(), **gradients}


def assert_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    differing = [name for name, value in wanted.items() if not torch.equal(found[name], value)]
    assert not differing, f"not bit-equal: {differing}"


# ---- the formula ----


def norm(module: Any, z_sbd: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.layer_norm(z_sbd, (WIDTH,), module.weight, module.bias, 1e-5)


def mlp(module: Any, z: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.gelu(z @ module.linear_fc1.weight.T) @ module.linear_fc2.weight.T


def routed_experts(moe: Any, z_sbd: torch.Tensor, top: int = 2) -> torch.Tensor:
    """Every expert on every token, weighted with the softmax over the top logits, without any dispatch."""
    logits_sbe = z_sbd @ moe.router.weight.T
    best_sbt, chosen_sbt = logits_sbe.topk(top, dim=-1)
    weights_sbe = torch.zeros_like(logits_sbe).scatter(-1, chosen_sbt, best_sbt.softmax(-1))
    every_sbde = torch.stack([mlp(expert, z_sbd) for expert in moe.experts.local_experts], -1)
    return (every_sbde * weights_sbe.unsqueeze(-2)).sum(-1)


def read(connection: Any, x_sbw: torch.Tensor, streams: int) -> torch.Tensor:
    factors_k = connection.read_map.logit[:streams].sigmoid()
    return (x_sbw.unflatten(-1, (streams, WIDTH)) * factors_k[:, None]).sum(-2)


def write(connection: Any, x_sbw: torch.Tensor, u_sbd: torch.Tensor, streams: int) -> torch.Tensor:
    factors_k = 2 * connection.write_map.logit[:streams].sigmoid()
    return x_sbw + (u_sbd.unsqueeze(-2) * factors_k[:, None]).flatten(-2)


def run_pair(model: Any, x: torch.Tensor) -> torch.Tensor:
    """The two layers of the model as its stack calls them."""
    for layer in model.decoder.layers:
        x, _ = layer(hidden_states=x, attention_mask=None)
    return x


def test_an_ordinary_pair_computes_the_formula() -> None:
    model = build("-E")
    ahead, moe = model.decoder.layers
    x_sbd = torch.randn(SEQUENCE, BATCH, WIDTH)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.1 * torch.randn_like(param))  # norms and biases that are not 1 and 0
        h_sbd = x_sbd + mlp(ahead.mlp, norm(ahead.pre_mlp_layernorm, x_sbd))
        routed_sbd = routed_experts(moe.mlp, norm(moe.shortcut_layernorm, x_sbd))
        shared_sbd = mlp(moe.mlp.shared_experts, norm(moe.pre_mlp_layernorm, h_sbd))
        wanted = h_sbd + norm(moe.shortcut_output_layernorm, routed_sbd + shared_sbd)
        found = run_pair(model, x_sbd)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


def test_a_wide_pair_has_three_reads_and_computes_the_formula() -> None:
    streams = 3
    model = build("-E", streams, wide_options={"streamwise_sigmoid_init_scale": 1.0})
    ahead, moe = model.decoder.layers
    x_sbw = torch.randn(SEQUENCE, BATCH, streams * WIDTH)
    with torch.no_grad():
        for logit in controllers(model).values():
            logit[:streams] += torch.randn(streams)
        z_sbd = read(ahead.residual_read_mlp, x_sbw, streams)
        h_sbw = write(ahead.residual_write_mlp, x_sbw, mlp(ahead.mlp, norm(ahead.pre_mlp_layernorm, z_sbd)), streams)
        shared_input_sbd = norm(moe.pre_mlp_layernorm, read(moe.residual_read_mlp, h_sbw, streams))
        routed_input_sbd = norm(moe.shortcut_layernorm, read(moe.residual_read_shortcut, x_sbw, streams))
        sum_sbd = routed_experts(moe.mlp, routed_input_sbd) + mlp(moe.mlp.shared_experts, shared_input_sbd)
        wanted = write(moe.residual_write_mlp, h_sbw, norm(moe.shortcut_output_layernorm, sum_sbd), streams)
        found = run_pair(model, x_sbw)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()


# ---- wide and ordinary ----


@pytest.mark.parametrize("pattern", ["M*E-E", "ME*E"])
@pytest.mark.parametrize("num_streams", [2, 4])
def test_wide_equals_ordinary_at_the_start(pattern: str, num_streams: int) -> None:
    ordinary, wide = build(pattern), build(pattern, num_streams)
    wanted, found = run(ordinary, token_batch()), run(wide, token_batch())
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()
    base = dict(ordinary.named_parameters())
    extra = {name for name, _ in wide.named_parameters()} - base.keys()
    assert extra == controllers(wide).keys()
    pairs = [f"decoder.layers.{moe}.residual_read_shortcut.read_map.logit" for _, moe in shortcut_pairs(pattern)]
    assert set(pairs) <= extra
    for name, param in wide.named_parameters():
        assert name in extra or torch.equal(param, base[name]), f"{name} was drawn differently"


def test_base_parameters_are_those_of_the_model_without_shortcut() -> None:
    plain = dict(build_hybrid(PATTERN, moe_shared_expert_intermediate_size=48).named_parameters())
    for name, param in build().named_parameters():
        if ".shortcut_" in name:
            assert name not in plain
        else:
            assert torch.equal(param, plain.pop(name)), f"{name} was drawn differently"
    assert not plain, f"missing: {sorted(plain)}"


@pytest.mark.parametrize("num_streams", [None, 4])
def test_every_parameter_has_a_gradient(num_streams: int | None) -> None:
    wide_options = {"streamwise_sigmoid_init_scale": 1.0}
    gradients = result(build(PATTERN, num_streams, wide_options=wide_options, **AUX))
    # The first read sees equal streams: what it has is rounding.
    zero = [
        name for name, gradient in gradients.items() if not gradient.any() and ".layers.0.residual_read" not in name
    ]
    assert not zero, f"all-zero gradients: {zero}"


def test_parallel_computes_the_same_bits() -> None:
    found = result(build(num_streams=4, parallel=True, transformer_impl="local"))
    assert_same_bits(found, result(build(num_streams=4)))


def test_prediction_depths_stay_ordinary() -> None:
    for num_streams in (None, 2):
        names = [name for name, _ in build("*E/*E", num_streams).named_parameters() if ".shortcut_" in name]
        assert names
        assert not [name for name in names if not name.startswith("decoder.layers.1.")]


# ---- recomputation ----


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": AUX,
    "bf16, fp32 residual stream, dropout": {
        **{"params_dtype": torch.bfloat16, "bf16": True, "fp32_residual_connection": True, "hidden_dropout": 0.1},
    },
    "retention, dropout": {"wide_options": {"learned_retention": True}, "hidden_dropout": 0.1},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_replay_is_bit_equal(variant: str) -> None:
    options = VARIANTS[variant]
    in_bf16 = options.get("bf16")

    def built(**replay: Any) -> Any:
        model = build(PATTERN, 4, **replay, **options)
        return model.bfloat16() if in_bf16 else model

    wanted = result(built())
    for block_size in (1, 2, None):
        assert_same_bits(result(built(replay=True, block_size=block_size)), wanted)


@pytest.mark.parametrize("module", ["moe", "shared_experts"])
@pytest.mark.parametrize("num_streams", [None, 4])
def test_selective_recomputation_of_experts_is_bit_equal(module: str, num_streams: int | None) -> None:
    wanted = result(build(PATTERN, num_streams))
    options: dict[str, Any] = {"recompute_granularity": "selective", "recompute_modules": [module]}
    assert_same_bits(result(build(PATTERN, num_streams, replay=num_streams is not None, **options)), wanted)


@pytest.mark.parametrize(("block_size", "ends"), [(1, "TFTFT"), (2, "TFTFT"), (3, "FFTFT"), (4, "FFTFT"), (5, "FFFFT")])
def test_a_replay_block_never_splits_a_pair(block_size: int, ends: str) -> None:
    model = build(PATTERN, 2, replay=True, block_size=block_size)
    model.train()
    seen = []
    for layer in model.decoder.layers:
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.residual_stream_recompute_context))
    run(model, token_batch())
    assert "".join("FT"[context.is_block_end] for context in seen) == ends


def test_the_routed_read_and_its_norm_are_replayed_and_nothing_outlives_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build(PATTERN, 4, replay=True)
    model.train()
    outputs: list[torch.Tensor] = []
    forward = ResidualStreamRecomputeContext.checkpoint

    def remember(self: Any, function: Any, *args: Any, **options: Any) -> Any:
        outputs.append(forward(self, function, *args, **options))
        return outputs[-1]

    monkeypatch.setattr(ResidualStreamRecomputeContext, "checkpoint", remember)
    loss = run(model, token_batch(), token_batch(8)).mean()
    monkeypatch.undo()
    # Five branches: reads with their norms, and all writes but the last; two pairs: the routed read with its norm.
    assert len(outputs) == 5 + 4 + 2
    assert [output.untyped_storage().size() for output in outputs] == [0] * len(outputs)
    alive = [weakref.ref(output) for output in outputs]
    outputs.clear()
    loss.backward()
    del loss
    gc.collect()
    assert not [reference for reference in alive if reference() is not None], "outputs outlive the backward"


@pytest.mark.parametrize("num_streams", [None, 2])
def test_a_forward_that_raised_leaves_nothing_behind(num_streams: int | None) -> None:
    model = build("*E", num_streams)
    ahead, moe = model.decoder.layers
    wanted = run(model, token_batch())

    def fail(*_: Any) -> None:
        assert moe._routed_sbd is not None, "the routed experts had not run before the layer ahead"
        raise KeyError("ahead")

    handle = ahead.self_attention.register_forward_pre_hook(fail)
    with pytest.raises(KeyError, match="ahead"):
        run(model, token_batch())
    handle.remove()
    assert moe._routed_sbd is None
    assert moe.shortcut_padding_mask is None
    assert torch.equal(run(model, token_batch()), wanted)


def test_the_moe_layer_without_the_layer_ahead_is_an_error() -> None:
    with pytest.raises(RuntimeError, match="layer 2 is the MoE half of a shortcut pair, and the layer that it follows"):
        build("*E").decoder.layers[1](hidden_states=torch.randn(4, 1, WIDTH), attention_mask=None)
