"""The parts around Mamba-2's scan: causal convolution, gated norm, and the steps of decoding.

pytest tests/test_torch_mamba_parts.py
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness_mamba import DEVICE, random, recurrence, relative_error, scan_case
from torch import Tensor
from torch.nn import functional
from transformers.models.mamba2.modeling_mamba2 import MambaRMSNormGated

from megatron.core.ssm import torch_causal_conv1d
from megatron.core.ssm.torch_causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from megatron.core.ssm.torch_gated_norm import RMSNorm
from megatron.core.ssm.torch_mamba_scan import mamba_chunk_scan_combined
from megatron.core.ssm.torch_selective_state_update import selective_state_update


def convolved(*arguments: Any, **options: Any) -> Tensor:
    """causal_conv1d_fn where it returns one tensor."""
    y = causal_conv1d_fn(*arguments, **options)
    assert isinstance(y, Tensor)
    return y


@pytest.mark.parametrize("length", [1, 2, 3, 4, 29])
@pytest.mark.parametrize("activation", [None, "silu"])
@pytest.mark.parametrize("tokens_per_block", [4, 1000])
def test_convolution_equals_pytorchs(
    length: int, activation: str | None, tokens_per_block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the sequence is shorter than the kernel, and where blocks meet."""
    monkeypatch.setattr(torch_causal_conv1d, "_ELEMENTS_PER_BLOCK", {DEVICE: tokens_per_block})
    x, weight, bias = random(2, 6, length, seed=1), random(6, 4, seed=2), random(6, seed=3)
    wanted = functional.conv1d(x, weight[:, None], bias, padding=3, groups=6)[:, :, :length]
    wanted = wanted if activation is None else functional.silu(wanted)
    found = convolved(x, weight, bias, activation=activation)
    assert relative_error(found, wanted) < 1e-13
    pairs = (torch.autograd.grad(y.square().sum(), [x, weight, bias]) for y in (found, wanted))
    for one, other in zip(*pairs, strict=True):
        assert relative_error(one, other) < 1e-12


def test_convolution_continues_from_the_states_it_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_causal_conv1d, "_ELEMENTS_PER_BLOCK", {DEVICE: 1})
    x, weight, bias = random(2, 6, 40, seed=1), random(6, 4, seed=2), random(6, seed=3)
    wanted = convolved(x, weight, bias, activation="silu")
    for cut in (1, 2, 5, 39):
        first, states = causal_conv1d_fn(x[:, :, :cut], weight, bias, return_final_states=True, activation="silu")
        assert states.shape == (2, 6, 3)
        second = convolved(x[:, :, cut:], weight, bias, initial_states=states, activation="silu")
        found = torch.cat([first, second], dim=2)
        assert relative_error(found, wanted) < 1e-13
        (one,), (other,) = (torch.autograd.grad(y.square().sum(), x, retain_graph=True) for y in (found, wanted))
        assert relative_error(one, other) < 1e-12, f"cut at {cut}"


def test_convolution_gradients_are_exact() -> None:
    seq_idx = torch.tensor([[0, 0, 1, 1, 1, 1, 2]], device=DEVICE)
    inputs = [random(1, 3, 7, seed=1), random(3, 4, seed=2), random(3, seed=3)]
    assert torch.autograd.gradcheck(lambda *t: convolved(*t, seq_idx=seq_idx, activation="silu"), inputs)
    inputs.append(random(1, 3, 3, seed=4))
    assert torch.autograd.gradcheck(lambda *t: convolved(*t[:3], initial_states=t[3], activation="silu"), inputs)


def test_bf16_convolution_rounds_once() -> None:
    x, weight, bias = (random(*s, seed=i, dtype=torch.bfloat16) for i, s in enumerate([(2, 6, 50), (6, 4), (6,)]))
    found = convolved(x, weight, bias, activation="silu")
    wanted = convolved(x.double(), weight.double(), bias.double(), activation="silu")
    assert found.dtype == torch.bfloat16
    assert ((found.double() - wanted).abs() <= wanted.abs() * 2**-8 + 1e-6).all()


def test_convolution_refuses_what_it_does_not_know() -> None:
    x, weight = random(1, 3, 7, seed=1), random(3, 4, seed=2)
    with pytest.raises(ValueError, match="got 'relu'"):
        causal_conv1d_fn(x, weight, activation="relu")
    with pytest.raises(NotImplementedError, match="seq_idx together with initial_states"):
        causal_conv1d_fn(x, weight, seq_idx=torch.zeros(1, 7), return_final_states=True)


# ---- Gated norm


def normalised(x: Tensor, z: Tensor | None, weight: Tensor, group_size: int, norm_before_gate: bool) -> Tensor:
    """The gated norm as one writes it down."""
    gate = 1 if z is None else functional.silu(z)
    u = x if norm_before_gate else x * gate
    groups = u.unflatten(-1, (-1, group_size))
    y = (groups / (groups.square().mean(-1, keepdim=True) + 1e-5).sqrt()).flatten(-2) * weight
    return y * gate if norm_before_gate else y


@pytest.mark.parametrize("norm_before_gate", [True, False])
@pytest.mark.parametrize("group_size", [None, 4])
@pytest.mark.parametrize("gated", [True, False])
def test_norm_equals_its_formula(norm_before_gate: bool, group_size: int | None, gated: bool) -> None:
    norm = RMSNorm(12, group_size=group_size, norm_before_gate=norm_before_gate, device=DEVICE, dtype=torch.float64)
    torch.nn.init.normal_(norm.weight)
    x, z = random(2, 5, 12, seed=1), random(2, 5, 12, seed=2) if gated else None
    found = norm(x, z)
    wanted = normalised(x, z, norm.weight, group_size or 12, norm_before_gate)
    assert relative_error(found, wanted) < 1e-13
    inputs = [tensor for tensor in (x, z, norm.weight) if tensor is not None]
    pairs = (torch.autograd.grad(y.square().sum(), inputs) for y in (found, wanted))
    for one, other in zip(*pairs, strict=True):
        assert relative_error(one, other) < 1e-12


def test_norm_equals_hugging_face() -> None:
    ours, theirs = RMSNorm(24, eps=1e-6, group_size=8, norm_before_gate=False), MambaRMSNormGated(24, 8, 1e-6)
    x, z = (torch.randn(3, 7, 24, generator=torch.Generator().manual_seed(i)) for i in (1, 2))
    assert relative_error(ours(x, z), theirs(x, z)) < 1e-6
    assert ours.state_dict().keys() == {"weight"}


def test_norm_refuses_groups_that_do_not_fit() -> None:
    with pytest.raises(ValueError, match="12 is no multiple of group_size 5"):
        RMSNorm(12, group_size=5)


# ---- Decoding


def decode_inputs(case: dict[str, Any], tokens: slice) -> list[Tensor]:
    """x, dt, A, B, C as MambaMixer hands them to selective_state_update."""
    head_dim, state = case["x"].shape[3], case["B"].shape[3]
    dt = case["dt"][:, tokens, :, None].expand(-1, -1, -1, head_dim)
    rate = case["A"][:, None, None].expand(-1, head_dim, state)
    return [case["x"][:, tokens], dt, rate, case["B"][:, tokens], case["C"][:, tokens]]


def updated(state: Tensor, inputs: list[Tensor], **options: Any) -> Tensor:
    """selective_state_update on x, dt, A, B, C."""
    return selective_state_update(state, **(dict(zip(("x", "dt", "A", "B", "C"), inputs, strict=True)) | options))


@pytest.mark.parametrize("groups", [1, 2])
@pytest.mark.parametrize("step", [1, 3], ids=["one token", "three tokens a call"])
@torch.no_grad()
def test_decoding_after_a_prefill_equals_the_whole_sequence(groups: int, step: int) -> None:
    case = scan_case(length=20, groups=groups, initial=False)
    wanted, wanted_state = recurrence(**case)
    prefill: dict[str, Any] = {n: case[n][:, :8] for n in ("x", "dt", "B", "C", "z")}
    prefill |= {"A": case["A"], "D": case["D"], "dt_bias": case["dt_bias"], "dt_softplus": True}
    y, state = mamba_chunk_scan_combined(**prefill, chunk_size=4, return_final_states=True)
    decoded = [y]
    for start in range(8, 20, step):
        tokens = slice(start, start + step)
        y = updated(
            state,
            decode_inputs(case, tokens),
            D=case["D"][:, None].expand(-1, 3),
            z=case["z"][:, tokens],
            dt_bias=case["dt_bias"][:, None].expand(-1, 3),
            dt_softplus=True,
        )
        decoded.append(y)
    assert relative_error(torch.cat(decoded, dim=1), wanted) < 1e-12
    assert relative_error(state, wanted_state) < 1e-12


@torch.no_grad()
def test_convolution_step_by_step_equals_the_whole_sequence() -> None:
    x, weight, bias = random(2, 6, 20, seed=1), random(6, 4, seed=2), random(6, seed=3)
    wanted = convolved(x, weight, bias, activation="silu")
    for width in (3, 4, 6):  # of the cached states; causal_conv1d needs three, MambaMixer keeps four
        state = functional.pad(x[:, :, :2], (width - 2, 0)).clone()
        steps = [causal_conv1d_update(x[:, :, t], state, weight, bias, "silu", None) for t in range(2, 5)]
        rest = causal_conv1d_update(x[:, :, 5:].transpose(1, 2), state, weight, bias, "silu", None)
        found = torch.cat([torch.stack(steps, dim=2), rest.transpose(1, 2)], dim=2)
        assert relative_error(found, wanted[:, :, 2:]) < 1e-13, f"{width} cached inputs"
        assert torch.equal(state, x[:, :, -width:])


@torch.no_grad()
def test_slots_of_the_state_cache_are_found_by_index_and_padding_touches_none() -> None:
    case = scan_case(batch=3, length=2, initial=False)
    inputs = decode_inputs(case, slice(0, 2))
    cache = random(5, 4, 3, 5, seed=9).detach()
    alone, by_index = cache[[4, 0]].clone(), cache.clone()
    kept = torch.zeros(5, 2, 4, 3, 5, dtype=torch.float64, device=DEVICE)
    active = [0, 2]
    indices = torch.tensor([4, -1, 0], device=DEVICE)
    found = updated(by_index, inputs, state_batch_indices=indices, intermediate_ssm_states=kept)
    x, dt, rate, b, c = inputs
    wanted = selective_state_update(alone, x[active], dt[active], rate, b[active], c[active])
    assert torch.equal(found[active], wanted)
    assert torch.equal(found[1], torch.zeros_like(found[1])), "padding must yield zeros"
    assert torch.equal(by_index[[4, 0]], alone)
    assert torch.equal(by_index[1:4], cache[1:4]), "a slot that no sequence has was touched"
    assert torch.equal(kept[[4, 0], 1], alone), "the state after the last token is the one that is kept"

    conv, weight = random(5, 6, 4, seed=3).detach(), random(6, 4, seed=4)
    before, inputs_bsd = conv.clone(), random(3, 2, 6, seed=5)
    found = causal_conv1d_update(inputs_bsd, conv, weight, None, None, indices)
    alone = before[[4, 0]].clone()
    wanted = causal_conv1d_update(inputs_bsd[active], alone, weight, None, None, None)
    assert torch.equal(found[active], wanted)
    assert torch.equal(conv[[4, 0]], alone)
    assert torch.equal(conv[1:4], before[1:4])
    assert not found[1].any()


@torch.no_grad()
def test_state_without_heads_is_one_head() -> None:
    case = scan_case(heads=1, length=3, initial=False)
    x, dt, rate, b, c = decode_inputs(case, slice(0, 3))
    state = random(2, 1, 3, 5, seed=9).detach()
    flat = state.squeeze(1).clone()
    found = selective_state_update(flat, x.squeeze(2), dt.squeeze(2), rate.squeeze(0), b.squeeze(2), c.squeeze(2))
    assert torch.equal(found, selective_state_update(state, x, dt, rate, b, c).squeeze(2))
    assert torch.equal(flat, state.squeeze(1))


def test_a_batch_that_the_cache_has_no_slots_for_is_refused() -> None:
    """MambaMixer's static decoding turns two sequences into two tokens of one: that must not pass unseen."""
    with pytest.raises(ValueError, match="1 sequences, the state cache 2"):
        causal_conv1d_update(random(1, 2, 6, seed=1), random(2, 6, 4, seed=2), random(6, 4, seed=3), None, "silu", None)
