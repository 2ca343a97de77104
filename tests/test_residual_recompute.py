"""Replay of the residual stream: plans, bit-equal results, operations counted, storages freed, nothing left alive."""

from __future__ import annotations

import gc
import weakref
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness_models import (
    build_gpt,
    run,
    single_process_megatron,
    token_batch,
    transformer_config,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.core.tensor_parallel.checkpoint_manager import CheckpointWithoutOutputManager
from megatron.core.transformer.residual_recompute import (
    ResidualStreamRecomputeContext,
    build_residual_stream_recompute_plan,
    residual_stream_recompute_enabled,
)
from megatron.core.transformer.wide_residual import wide_residual_recompute_enabled
from megatron.core.transformer.wide_residual_config import (
    WideResidualConfig,
    WideResidualTransformerConfig,
    widen_transformer_config,
)


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


def replaying_gpt(num_streams: int = 4, block_size: int | None = 2, **options: Any) -> Any:
    """The model of build_gpt with replay on."""
    return build_gpt(num_streams, replay=True, block_size=block_size, **options)


def ends(*arguments: Any, **options: Any) -> str:
    plan = build_residual_stream_recompute_plan(*arguments, **options)
    return " ".join("T" if context.is_block_end else "F" for context in plan)


@pytest.mark.parametrize(
    ("arguments", "pairs", "wanted"),
    [
        ((5, 2), (), "F T F T T"),
        ((4, 3), ((0, 1), (2, 3)), "F T F T"),
        ((8, 4), ((3, 4), (5, 6)), "F F T F F F T T"),
        ((5, 1), ((1, 2), (3, 4)), "T F T F T"),
        ((3, None), (), "F F T"),
        ((2, 9), (), "F T"),
        ((0, 2), (), ""),
    ],
)
def test_plan_ends_blocks_as_documented(arguments: Any, pairs: Any, wanted: str) -> None:
    assert ends(*arguments, atomic_layer_pairs=pairs) == wanted


@given(st.data())
@settings(deadline=None)
def test_plan_never_splits_a_pair_and_blocks_stay_within_their_size(data: st.DataObject) -> None:
    num_layers, size = data.draw(st.integers(1, 20)), data.draw(st.integers(1, 8))
    pairs, index = [], 0
    while index < num_layers - 1:
        if data.draw(st.booleans()):
            pairs.append((index, index + 1))
            index += 1
        index += 1
    plan = build_residual_stream_recompute_plan(num_layers, size, atomic_layer_pairs=pairs)
    assert len(plan) == num_layers
    assert plan[-1].is_block_end
    for first, second in pairs:
        assert plan[first].manager is plan[second].manager
        assert not plan[first].is_block_end
    for number, context in enumerate(plan[:-1]):
        assert (plan[number + 1].manager is context.manager) is not context.is_block_end
    for count in Counter(id(context.manager) for context in plan).values():
        assert count <= max(size, 2 if pairs else 1)


@pytest.mark.parametrize(
    ("arguments", "pairs", "reason"),
    [
        ((True, 2), (), "num_layers is True"),
        ((4.0, 2), (), "num_layers is 4.0"),
        ((-1, 2), (), "num_layers is -1"),
        ((4, True), (), "block_size is True"),
        ((4, 2.0), (), "block_size is 2.0"),
        ((4, 0), (), "block_size is 0"),
        ((4, 2), ((0,),), "malformed"),
        ((4, 2), (0,), "malformed"),
        ((4, 2), ((0, 1, 2),), "malformed"),
        ((4, 2), ((0, True),), "int layer indices"),
        ((4, 2), ((0, 1), (1, 2)), "disjoint"),
        ((4, 2), ((0, 2),), "not adjacent"),
        ((4, 2), ((2, 1),), "not adjacent"),
        ((4, 2), ((3, 4),), "outside the 4 local layers"),
        ((4, 2), ((-1, 0),), "outside the 4 local layers"),
    ],
)
def test_bad_plan_is_a_value_error_with_the_reason(arguments: Any, pairs: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        build_residual_stream_recompute_plan(*arguments, atomic_layer_pairs=pairs)


def test_context_is_frozen_and_only_a_block_end_finalizes() -> None:
    context = ResidualStreamRecomputeContext(CheckpointWithoutOutputManager(), is_block_end=False)
    with pytest.raises(AttributeError):
        context.is_block_end = True  # type: ignore[misc]
    with pytest.raises(RuntimeError, match="only the last layer"):
        context.finalize(torch.ones(1))


def result(model: Any, seed: int = 5) -> dict[str, torch.Tensor]:
    """Losses, gradient of the embedding output and all parameter gradients of one training pass."""
    model.train()
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)
    kept: dict[str, torch.Tensor] = {}

    def keep(module: torch.nn.Module, inputs: Any, output: torch.Tensor) -> None:
        output.retain_grad()
        kept["embedded"] = output

    handle = model.embedding.register_forward_hook(keep)
    loss_bs = run(model, token_batch(), token_batch(8))
    handle.remove()
    loss_bs.float().mean().backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"losses": loss_bs.detach(), "input gradient": kept["embedded"].grad, **gradients}


VARIANTS: dict[str, dict[str, Any]] = {
    "fp32": {},
    "fp32, K=3": {"num_streams": 3},
    "bf16": {"params_dtype": torch.bfloat16, "bf16": True},
    "dropout": {"hidden_dropout": 0.1, "attention_dropout": 0.1},
    "retention": {"wide_options": {"learned_retention": True}},
    "fp32 residual stream": {"params_dtype": torch.bfloat16, "bf16": True, "fp32_residual_connection": True},
    "mixture of experts": {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False},
    "no biases, RMSNorm": {"add_bias_linear": False, "normalization": "RMSNorm"},
    "everything": {
        "wide_options": {"learned_retention": True},
        "hidden_dropout": 0.1,
        "params_dtype": torch.bfloat16,
        "bf16": True,
        "fp32_residual_connection": True,
    },
}


@pytest.mark.parametrize("block_size", [1, 2, None])
@pytest.mark.parametrize("variant", VARIANTS)
def test_replay_is_bit_equal_to_the_eager_model(variant: str, block_size: int | None) -> None:
    options = {"num_streams": 4, **VARIANTS[variant]}
    eager, replaying = build_gpt(**options), replaying_gpt(block_size=block_size, **options)
    if options.get("bf16"):
        eager, replaying = eager.bfloat16(), replaying.bfloat16()
    wanted, found = result(eager), result(replaying)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"{variant}, N={block_size}: {name} differs"


@pytest.mark.parametrize("module", ["core_attn", "mlp"])
def test_other_selective_modules_compose_bit_equally(module: str) -> None:
    wanted = result(build_gpt(4, hidden_dropout=0.1, add_bias_linear=False))
    found = result(replaying_gpt(hidden_dropout=0.1, add_bias_linear=False, recompute_modules=[module]))
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"with {module}: {name} differs"


@pytest.mark.parametrize(
    ("module", "reason"),
    [("layernorm", "replays the norms .* already"), ("mlp", "--disable-bias-linear")],
)
def test_selective_modules_that_cannot_compose_are_refused(module: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        replaying_gpt(recompute_modules=[module])


def test_two_chained_branches_make_the_documented_number_of_calls() -> None:
    model = replaying_gpt(block_size=None, num_layers=1)
    layer = model.decoder.layers[0]
    calls: Counter[str] = Counter()

    def count(kind: str, module: torch.nn.Module) -> None:
        forward = module.forward

        def counting(*args: Any, **kwargs: Any) -> Any:
            calls[kind] += 1
            return forward(*args, **kwargs)

        module.forward = counting

    for name, module in layer.named_children():
        if name.startswith("residual_"):
            count("connection", module)
    count("branch", layer.self_attention)
    count("branch", layer.mlp)
    norm_forward = torch.nn.LayerNorm.forward

    def counting_norm(self: torch.nn.LayerNorm, *args: Any) -> torch.Tensor:
        if self in (layer.input_layernorm, layer.pre_mlp_layernorm):
            calls["norm"] += 1
        return norm_forward(self, *args)

    for norm in (layer.input_layernorm, layer.pre_mlp_layernorm):
        norm.forward = lambda z, norm=norm: layer._normalize(lambda value: counting_norm(norm, value), z)
    model.train()
    loss = run(model, token_batch(), token_batch(8)).mean()
    # The attention's read, its write with the read of the MLP, the MLP's write, which is live.
    assert calls == {"connection": 3, "norm": 2, "branch": 2}, "forward"
    loss.backward()
    assert calls == {"connection": 3 + 2, "norm": 4, "branch": 2}, "forward and replay"


def test_managed_storages_are_empty_after_the_forward_and_gone_after_the_backward() -> None:
    model = replaying_gpt(block_size=2)
    model.train()
    outputs: list[torch.Tensor] = []
    forward = ResidualStreamRecomputeContext.checkpoint

    def remember(self: Any, function: Any, *args: Any, **options: Any) -> Any:
        output = forward(self, function, *args, **options)
        outputs.extend([output] if isinstance(output, torch.Tensor) else output)
        return output

    ResidualStreamRecomputeContext.checkpoint = remember  # type: ignore[method-assign]
    try:
        loss = run(model, token_batch(), token_batch(8)).mean()
    finally:
        ResidualStreamRecomputeContext.checkpoint = forward  # type: ignore[method-assign]
    # Three layers in blocks of 2 and 1: what all six branches read and normed, and all writes but two.
    assert len(outputs) == 6 + 4
    assert [output.untyped_storage().size() for output in outputs] == [0] * len(outputs)
    alive = [weakref.ref(output) for output in outputs]
    outputs.clear()
    loss.backward()
    del loss
    gc.collect()
    assert not [reference for reference in alive if reference() is not None], "outputs outlive the backward"
    assert all(layer.residual_stream_recompute_context is None for layer in model.decoder.layers)
    held = [layer._held for layer in model.decoder.layers]
    assert not any(layer.carried or layer.read_ahead or layer.normed for layer in held)


def test_two_micro_batches_in_flight_share_nothing() -> None:
    eager, replaying = build_gpt(4, hidden_dropout=0.1), replaying_gpt(hidden_dropout=0.1)
    gradients = []
    for model in (eager, replaying):
        model.train()
        torch.manual_seed(5)
        losses = [run(model, token_batch(seed), token_batch(seed + 50)).mean() for seed in (1, 2, 3)]
        losses[0].backward()
        losses.append(run(model, token_batch(4), token_batch(54)).mean())
        for loss in losses[1:]:
            loss.backward()
        gradients.append({name: param.grad for name, param in model.named_parameters()})
    for name, value in gradients[0].items():
        assert torch.equal(gradients[1][name], value), f"{name} differs with micro-batches in flight"


def test_boundary_without_gradient_leaves_no_freed_storage() -> None:
    manager = CheckpointWithoutOutputManager()
    output = manager.checkpoint(torch.sin, torch.ones(3))
    manager.discard_all_outputs_and_register_recompute(output + 1)
    assert torch.equal(output, torch.ones(3).sin())
    assert len(manager) == 0


def test_manager_serves_one_forward() -> None:
    manager = CheckpointWithoutOutputManager()
    x = torch.ones(3, requires_grad=True)
    boundary = manager.checkpoint(torch.sin, x).cos()
    manager.discard_all_outputs_and_register_recompute(boundary)
    with pytest.raises(RuntimeError, match="fresh CheckpointWithoutOutputManager"):
        manager.checkpoint(torch.sin, x)
    with pytest.raises(RuntimeError, match="discarded already"):
        manager.discard_all_outputs_and_register_recompute(boundary)
    boundary.sum().backward()
    torch.testing.assert_close(x.grad, -torch.ones(3).sin().sin() * torch.ones(3).cos())


def test_grad_instead_of_backward_is_a_clear_error() -> None:
    model = replaying_gpt()
    model.train()
    loss = run(model, token_batch(), token_batch(8)).mean()
    with pytest.raises(RuntimeError, match=r"residual-stream replay works with \.backward\(\) only"):
        torch.autograd.grad(loss, [model.embedding.word_embeddings.weight])


def test_frozen_embedding_still_trains_the_first_maps() -> None:
    gradients = []
    for model in (build_gpt(4), replaying_gpt(4)):
        model.train()
        for param in model.embedding.parameters():
            param.requires_grad_(False)
        run(model, token_batch(), token_batch(8)).mean().backward()
        gradients.append({name: param.grad for name, param in model.named_parameters() if param.requires_grad})
    for name, value in gradients[0].items():
        assert value is not None
        assert torch.equal(gradients[1][name], value), f"{name} differs with a frozen embedding"


def test_replay_is_active_only_in_training_with_gradients() -> None:
    config = replaying_gpt().config
    for enabled in (residual_stream_recompute_enabled, wide_residual_recompute_enabled):
        assert enabled(config, True)
        assert not enabled(config, False)
        with torch.no_grad():
            assert not enabled(config, True)
        assert not enabled(build_gpt(4).config, True)
        assert not enabled(transformer_config(), True)


def test_evaluation_of_a_replaying_model_equals_the_eager_one() -> None:
    eager, replaying = build_gpt(4), replaying_gpt()
    for model in (eager, replaying):
        model.eval()
    with torch.no_grad():
        assert torch.equal(run(replaying, token_batch()), run(eager, token_batch()))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"recompute_modules": ["residual_stream"]}, "needs --recompute-granularity selective; it is None"),
        (
            {
                "recompute_modules": ["residual_stream"],
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
            "needs --recompute-granularity selective; it is 'full'",
        ),
        ({"residual_stream_recompute_num_layers": 2}, "without residual_stream among --recompute-modules"),
        *[
            (
                {
                    "recompute_granularity": "selective",
                    "recompute_modules": ["residual_stream"],
                    "residual_stream_recompute_num_layers": size,
                },
                "an int of 1 or more is wanted",
            )
            for size in (0, -1, True, 1.5, "2")
        ],
    ],
)
def test_bad_replay_options_are_named(options: dict[str, Any], reason: str) -> None:
    sizes: dict[str, Any] = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4}
    with pytest.raises(ValueError, match=reason):
        WideResidualTransformerConfig(**sizes, **options, wide_residual=WideResidualConfig(4))


def test_replay_without_wide_streams_is_refused() -> None:
    with pytest.raises(ValueError, match="needs wide residual streams"):
        WideResidualTransformerConfig(
            num_layers=2,
            hidden_size=64,
            num_attention_heads=4,
            recompute_granularity="selective",
            recompute_modules=["residual_stream"],
        )


def test_widening_adds_replay_to_the_other_modules() -> None:
    ordinary = transformer_config(recompute_granularity="selective", recompute_modules=["core_attn"])
    wide = widen_transformer_config(
        ordinary, WideResidualConfig(4), recompute_residual_stream=True, residual_stream_recompute_num_layers=3
    )
    assert wide.recompute_modules == ["core_attn", "residual_stream"]
    assert ordinary.recompute_modules == ["core_attn"]
