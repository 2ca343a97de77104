"""Replay over many training steps holds on to nothing, and what it makes of other recomputation of MoE layers."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from harness_models import build_gpt, run, single_process_megatron, token_batch
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

from megatron.core.transformer.residual_recompute import ResidualStreamRecomputeContext

STEPS, WARM_UP = 50, 10
SAMPLE_EVERY = 10
TOLERANCE_BYTES = 2 * 2**20
MOE: dict[str, Any] = {"num_moe_experts": 4, "moe_router_topk": 2, "add_bias_linear": False, "hidden_dropout": 0.1}


@pytest.fixture(scope="module", autouse=True)
def megatron() -> Iterator[None]:
    with single_process_megatron():
        yield


class Mallinfo2(ctypes.Structure):
    """glibc's account of what malloc has handed out (mallinfo2, malloc.h)."""

    _fields_ = [
        *((name, ctypes.c_size_t) for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd")),
        *((name, ctypes.c_size_t) for name in ("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")),
    ]


def allocated_bytes() -> int:
    """Bytes that this process has allocated and not freed: resident memory would count free and torn pieces too."""
    mallinfo2 = ctypes.CDLL("libc.so.6").mallinfo2
    mallinfo2.restype = Mallinfo2
    now = mallinfo2()
    return now.uordblks + now.hblkhd


def live_tensors() -> int:
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def test_fifty_steps_leave_memory_and_live_tensors_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    """The garbage collector is off, so that a reference cycle counts as a leak as well."""
    model = build_gpt(4, replay=True, block_size=2, hidden_dropout=0.1)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    managed_bytes = 0
    checkpoint = ResidualStreamRecomputeContext.checkpoint

    def counting(self: Any, function: Any, *args: Any, **options: Any) -> Any:
        nonlocal managed_bytes
        output = checkpoint(self, function, *args, **options)
        managed_bytes += sum(tensor.nbytes for tensor in (output if isinstance(output, tuple) else (output,)))
        return output

    monkeypatch.setattr(ResidualStreamRecomputeContext, "checkpoint", counting)
    allocated, tensors = [], []
    gc.collect()
    gc.disable()
    try:
        for step in range(WARM_UP + STEPS):
            run(model, token_batch(step), token_batch(step + 1)).mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            if step % SAMPLE_EVERY == SAMPLE_EVERY - 1:
                allocated.append(allocated_bytes())
                tensors.append(live_tensors())
    finally:
        gc.enable()
    leak = managed_bytes * STEPS // (WARM_UP + STEPS)
    assert leak > 3 * TOLERANCE_BYTES, "the model is too small: a leak of all that is replayed would not be seen"
    assert len(set(tensors)) == 1, f"live tensors every {SAMPLE_EVERY} steps: {tensors}"
    grown = allocated[-1] - allocated[0]
    assert grown < TOLERANCE_BYTES, f"{STEPS} steps made allocated memory grow by {grown / 2**20:.2f} MiB: {allocated}"


def result(model: Any) -> dict[str, torch.Tensor]:
    """Losses and all parameter gradients of one training pass."""
    model.train()
    torch.manual_seed(5)
    model_parallel_cuda_manual_seed(5, force_reset_rng=True)
    loss_bs = run(model, token_batch(), token_batch(8))
    loss_bs.mean().backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    assert all(gradient is not None for gradient in gradients.values())
    return {"losses": loss_bs.detach(), **gradients}


@pytest.mark.parametrize("block_size", [1, 2, None])
@pytest.mark.parametrize(
    ("modules", "options"),
    [
        (["moe"], {}),
        (["moe", "core_attn"], {"moe_shared_expert_intermediate_size": 64}),
        (["shared_experts"], {"moe_shared_expert_intermediate_size": 64}),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else "",
)
def test_recomputed_experts_compose_bit_equally(
    modules: list[str], options: dict[str, Any], block_size: int | None
) -> None:
    wanted = result(build_gpt(4, **MOE, **options))
    replaying = build_gpt(4, replay=True, block_size=block_size, recompute_modules=modules, **MOE, **options)
    found = result(replaying)
    for name, value in wanted.items():
        assert torch.equal(found[name], value), f"with {modules}, N={block_size}: {name} differs"


def test_moe_act_without_grouped_gemm_is_refused() -> None:
    """Local experts have no activation that could be recomputed alone."""
    with pytest.raises(ValueError, match="moe_act in recompute_modules is only supported with moe_grouped_gemm"):
        build_gpt(4, replay=True, recompute_modules=["moe_act"], **MOE)
