"""A whole wide layer under torch.compile computes what it computes without.

    pytest tests/test_wide_residual_compile.py

Each streamwise operator is one graph break; what lies between them is compiled. With inductor, whose code for a CPU is
built by the C++ compiler.
"""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from harness_models import WIDTH, build_gpt, single_process_megatron
from torch import Tensor


def results(layer: Any, run: Any, device: torch.device) -> list[Tensor]:
    """Output, gradient of the stream and gradients of all parameters of one training pass."""
    mask = torch.ones(1, 1, 8, 8, device=device).triu(1).bool()
    x_sbw = torch.randn(8, 2, 4 * WIDTH, generator=torch.Generator().manual_seed(1)).to(device).requires_grad_()
    y_sbw, _ = run(x_sbw, attention_mask=mask)
    y_sbw.square().sum().backward()
    gradients = [param.grad for param in layer.parameters()]
    layer.zero_grad()
    assert x_sbw.grad is not None
    return [y_sbw.detach(), x_sbw.grad, *(gradient for gradient in gradients if gradient is not None)]


def test_a_compiled_wide_layer_gives_the_results_of_the_layer() -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    with single_process_megatron():
        layer = build_gpt(4, num_layers=1, wide_options={"learned_retention": True}).to(device).decoder.layers[0]
        wanted = results(layer, layer, device)
        torch._dynamo.reset()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            found = results(layer, torch.compile(layer), device)
        torch._dynamo.reset()
    traced = [str(warning.message) for warning in warned if "streamwise_residual" in str(warning.message)]
    assert not traced, f"PyTorch's compiler traces into the operators: {traced[0]}"
    assert len(found) == len(wanted), "a parameter lost its gradient"
    for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5), f"result {index} is off by {(a - b).abs().max()}"


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FP8 needs a GPU")
def test_fp8_through_transformer_engine_composes_with_wide_streams() -> None:
    """The branches' linear layers run in FP8; reads and writes stay in the stream's dtype."""
    engine = pytest.importorskip("transformer_engine.pytorch", reason="FP8 needs transformer-engine")
    from harness_models import SEQUENCE, VOCABULARY, run, token_batch, transformer_config
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec

    from megatron.core.models.gpt.wide_residual_gpt_model import WideResidualGPTModel
    from megatron.core.models.gpt.wide_residual_layer_specs import widen_layer_spec
    from megatron.core.transformer.wide_residual_config import WideResidualConfig, widen_transformer_config

    if not engine.fp8.check_fp8_support()[0]:
        pytest.skip("this GPU has no FP8")
    losses = []
    with single_process_megatron():
        for fp8 in (None, "hybrid"):
            config = transformer_config(bf16=True, params_dtype=torch.bfloat16, fp8=fp8, num_layers=2)
            config = widen_transformer_config(config, WideResidualConfig(4))
            torch.manual_seed(1)
            spec = widen_layer_spec(get_gpt_layer_with_transformer_engine_spec())
            model = WideResidualGPTModel(config, spec, VOCABULARY, SEQUENCE).cuda().bfloat16()
            loss = run(model, token_batch().cuda(), token_batch(8).cuda()).float().mean()
            loss.backward()
            assert all(param.grad is not None for param in model.parameters())
            losses.append(float(loss))
    assert losses[1] == pytest.approx(losses[0], rel=0.05), "FP8 changed the loss by more than its rounding"
