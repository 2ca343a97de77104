"""Generation with the static cache and by recomputing the prefix: one output, on models that were not trained."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness_models import SEQUENCE, build_gpt, single_process_megatron

from megatron.training.generation.decoder import CachedDecoder, Decoder, RecomputingDecoder, cache_obstacle
from megatron.training.wide_residual_builders import float16_module


@pytest.fixture(scope="module")
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


MODELS: dict[str, dict[str, Any]] = {
    "learned-positions": {},
    "rope": {"model_options": {"position_embedding_type": "rope"}, "normalization": "RMSNorm"},
    "grouped-queries": {"num_query_groups": 2, "model_options": {"position_embedding_type": "rope"}},
    "sliding-window": {"window_size": (5, 0), "model_options": {"position_embedding_type": "rope"}},
    "experts": {"num_moe_experts": 4, "moe_router_load_balancing_type": "none", "add_bias_linear": False},
}


def greedy(decoder: Decoder, prompt: list[int]) -> tuple[list[int], torch.Tensor]:
    """Return the most likely tokens up to the end of the context, and the logits of each step."""
    rows, pending = [], prompt
    for _ in range(SEQUENCE - len(prompt)):
        rows.append(decoder.advance(pending))
        pending = [int(rows[-1].argmax())]
    logits = torch.stack(rows)
    return logits.argmax(-1).tolist(), logits


@pytest.mark.parametrize("num_streams", [None, 4])
@pytest.mark.parametrize("name", MODELS)
def test_cached_greedy_output_is_the_recomputed_one(megatron: None, name: str, num_streams: int | None) -> None:
    wide_options = {"streamwise_sigmoid_init_scale": 0.5} if num_streams else None
    model = build_gpt(num_streams, wide_options=wide_options, init_method_std=0.3, **MODELS[name]).eval()
    prompt = [3, 1, 4, 1, 5]
    expected_tokens, expected = greedy(RecomputingDecoder(model), prompt)
    assert len(set(expected_tokens)) > 3, "the model says the same all the time: nothing is compared"
    tokens, logits = greedy(CachedDecoder(model, SEQUENCE), prompt)
    assert tokens == expected_tokens
    assert (logits - expected).abs().max().item() < 1e-5 * expected.abs().max().item()


@pytest.mark.parametrize("num_streams", [None, 4])
def test_cached_logits_are_the_recomputed_ones_within_bf16_rounding(megatron: None, num_streams: int | None) -> None:
    """After the same tokens: a free run could take another way where two logits are closer than bf16 resolves."""
    bf16 = {"bf16": True, "params_dtype": torch.bfloat16, "fp32_residual_connection": num_streams is not None}
    model = float16_module(None, build_gpt(num_streams, init_method_std=0.3, **bf16).eval())
    tokens, expected = greedy(RecomputingDecoder(model), [3, 1, 4, 1, 5])
    decoder = CachedDecoder(model, SEQUENCE)
    logits = torch.stack([decoder.advance(piece) for piece in ([3, 1, 4, 1, 5], *([token] for token in tokens[:-1]))])
    assert logits.dtype == torch.float32
    assert (logits - expected).abs().max().item() < 0.05 * expected.abs().max().item()


def test_experts_of_limited_capacity_are_not_cached(megatron: None) -> None:
    experts = {**MODELS["experts"], "moe_pad_expert_input_to_capacity": False}
    assert cache_obstacle(build_gpt(**experts)) is None
    obstacle = cache_obstacle(build_gpt(4, **experts, moe_expert_capacity_factor=1.0))
    assert obstacle is not None
    assert "--moe-expert-capacity-factor" in obstacle


def test_a_cached_step_computes_one_token(megatron: None) -> None:
    model = build_gpt(4).eval()
    widths: list[int] = []
    model.decoder.layers[0].register_forward_pre_hook(
        lambda layer, args, kwargs: widths.append(kwargs["hidden_states"].shape[0]), with_kwargs=True
    )
    greedy(CachedDecoder(model, SEQUENCE), [3, 1, 4])
    assert widths == [3, *[1] * (SEQUENCE - 4)]
