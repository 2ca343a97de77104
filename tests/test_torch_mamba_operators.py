"""Mamba-2's PyTorch operators compute the recurrence, with gradients, as Hugging Face's slow path does.

    pytest tests/test_torch_mamba_operators.py

The token-by-token recurrence in fp64 is in harness_mamba. Where there is a GPU the same tests run on it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness_mamba import DEVICE, gradients, random, recurrence, relative_error, scan_case, wide
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mamba2.configuration_mamba2 import Mamba2Config
from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

from megatron.core.ssm import torch_chunk_block
from megatron.core.ssm.torch_chunk_scan import chunk_scan
from megatron.core.ssm.torch_mamba_scan import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined, step_size


def scanned(case: dict[str, Any], chunk_size: int) -> tuple[Tensor, Tensor]:
    """The operator on the recurrence's arguments, with the chunk size that is really computed with."""
    step = step_size(case["dt"], case["dt_bias"], True, (0.0, float("inf")))
    return chunk_scan(
        case["x"],
        step,
        case["A"],
        case["B"],
        case["C"],
        chunk_size=chunk_size,
        d=case["D"],
        z_blhp=case["z"],
        initial_states_bhpn=case["initial_states"],
        seq_idx_bl=case["seq_idx"],
    )


def combined(case: dict[str, Any], **options: Any) -> Tensor:
    """mamba_chunk_scan_combined on the recurrence's x, dt, A, B and C."""
    arguments: dict[str, Any] = {name: case[name] for name in ("x", "dt", "A", "B", "C")} | options
    y = mamba_chunk_scan_combined(**arguments)
    assert isinstance(y, Tensor)
    return y


def split_combined(zxbcdt: Tensor, weights: dict[str, Any], **options: Any) -> Tensor:
    """mamba_split_conv1d_scan_combined with the weights of split_weights."""
    y = mamba_split_conv1d_scan_combined(zxbcdt, **(weights | {"chunk_size": 64} | options))
    assert isinstance(y, Tensor)
    return y


def assert_same(case: dict[str, Any], found: tuple[Tensor, Tensor], tolerance: float) -> None:
    """Outputs, final states and every gradient equal those of the recurrence in fp64."""
    exact = wide(case)
    wanted = recurrence(**exact)
    errors = {name: relative_error(f, w) for name, f, w in zip(("y", "final"), found, wanted, strict=True)}
    wanted_gradients = gradients(wanted, exact)
    for name, gradient in gradients(found, case).items():
        assert gradient.dtype == case[name].dtype
        errors[f"gradient of {name}"] = relative_error(gradient, wanted_gradients[name])
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= tolerance}
    assert not wrong, f"differ from the recurrence by more than {tolerance}: {wrong}"


@pytest.mark.parametrize("groups", [1, 2, 4])
@pytest.mark.parametrize(("length", "chunk_size"), [(1, 4), (12, 4), (50, 16), (50, 7), (33, 64), (130, 64)])
def test_scan_equals_the_recurrence_for_every_chunk_size(length: int, chunk_size: int, groups: int) -> None:
    case = scan_case(length=length, groups=groups)
    assert_same(case, scanned(case, chunk_size), 1e-11)


@settings(max_examples=30, deadline=None)
@given(
    batch=st.integers(1, 3),
    length=st.integers(1, 40),
    heads_per_group=st.integers(1, 3),
    groups=st.integers(1, 3),
    head_dim=st.integers(1, 4),
    state=st.integers(1, 4),
    chunk_size=st.integers(1, 16),
    gate=st.booleans(),
    skip=st.sampled_from([None, "h", "hp"]),
    initial=st.booleans(),
    packed=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_scan_equals_the_recurrence_whatever_the_shapes_and_options(
    chunk_size: int, heads_per_group: int, groups: int, **options: Any
) -> None:
    case = scan_case(heads=heads_per_group * groups, groups=groups, **options)
    assert_same(case, scanned(case, chunk_size), 1e-10)


def test_blocks_of_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long sequence is computed block by block; here every block is as short as possible, or all of it at once."""
    case = scan_case(length=70, groups=2, packed=True)
    found = []
    for scores in (1, 1 << 30):
        monkeypatch.setattr(torch_chunk_block, "_SCORES_PER_BLOCK", {DEVICE: scores})
        outputs = scanned(case, 8)
        found.append([*outputs, *gradients(outputs, case).values()])
    for one, other in zip(*found, strict=True):
        assert relative_error(one, other) < 1e-12


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 2e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)], ids=str
)
def test_low_precision_inputs_are_accumulated_in_fp32(dtype: torch.dtype, tolerance: float) -> None:
    """The error is one rounding of the results, not one per token."""
    case = scan_case(length=300, groups=2, head_dim=8, state=16, dtype=dtype)
    found = scanned(case, 64)
    assert found[0].dtype == dtype
    assert found[1].dtype == torch.float32
    assert_same(case, found, tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_strong_decay_gives_no_nan(dtype: torch.dtype) -> None:
    """exp(dt A) far below the smallest number, within a chunk and across one."""
    case = scan_case(length=150, dtype=dtype)
    case["dt_bias"] = (case["dt_bias"].detach() + 40).requires_grad_()
    assert_same(case, scanned(case, 64), 2e-2 if dtype == torch.bfloat16 else 1e-4)


def test_gradients_are_exact() -> None:
    case = scan_case(batch=1, length=5, heads=2, head_dim=2, state=2)
    tensors = [case[name] for name in ("x", "dt", "A", "B", "C", "D", "z", "dt_bias", "initial_states")]

    def run(x: Tensor, dt: Tensor, a: Tensor, b: Tensor, c: Tensor, d: Tensor, z: Tensor, *rest: Tensor) -> Any:
        bias, initial = rest
        return chunk_scan(x, (dt + bias).exp(), a, b, c, chunk_size=3, d=d, z_blhp=z, initial_states_bhpn=initial)

    assert torch.autograd.gradcheck(run, tensors)


def test_caller_may_name_any_chunk_size() -> None:
    case = scan_case(length=20)
    one, other = (combined(case, chunk_size=size, D=case["D"]) for size in (8, 256))
    assert torch.equal(one, other)


@pytest.mark.parametrize("softplus", [True, False])
def test_step_size_is_biased_then_softplus_then_clamped(softplus: bool) -> None:
    case = scan_case(length=20)
    found = combined(case, chunk_size=8, dt_bias=case["dt_bias"], dt_softplus=softplus, dt_limit=(0.2, 0.7))
    step = case["dt"] + case["dt_bias"]
    step = (torch.nn.functional.softplus(step) if softplus else step).clamp(0.2, 0.7)
    inverse = step.expm1().log()  # the recurrence applies softplus itself
    wanted, _ = recurrence(case["x"], inverse, case["A"], case["B"], case["C"])
    assert relative_error(found, wanted) < 1e-10


def test_packed_sequences_are_as_if_alone() -> None:
    """One packed row of three sequences through convolution and scan equals the three run one by one."""
    weights = split_weights(heads=4, groups=2)
    packed = random(1, 70, weights.pop("width"), seed=1)
    lengths = (13, 37, 20)
    seq_idx = torch.repeat_interleave(torch.arange(3), torch.tensor(lengths))[None].to(DEVICE)
    together = split_combined(packed, weights, seq_idx=seq_idx)
    alone = torch.cat([split_combined(part, weights) for part in packed.split(lengths, dim=1)], dim=1)
    assert relative_error(together, alone) < 1e-12
    (found,), (wanted,) = (torch.autograd.grad(y.square().sum(), packed) for y in (together, alone))
    assert relative_error(found, wanted) < 1e-12


def split_weights(heads: int, groups: int, head_dim: int = 3, state: int = 5) -> dict[str, Any]:
    """Weights of mamba_split_conv1d_scan_combined, and under `width` the width of the projection."""
    inner, channels = heads * head_dim, heads * head_dim + 2 * groups * state
    return {
        "width": inner + channels + heads,
        "conv1d_weight": random(channels, 4, seed=21),
        "conv1d_bias": random(channels, seed=22),
        "dt_bias": random(heads, seed=23),
        "A": -random(heads, seed=24).detach().abs(),
        "D": random(heads, seed=25),
        "headdim": head_dim,
        "ngroups": groups,
    }


def test_memory_kept_for_the_backward_grows_linearly_with_the_length() -> None:
    def saved_bytes(length: int) -> int:
        kept: dict[int, int] = {}

        def pack(tensor: Tensor) -> Tensor:
            kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        weights = split_weights(heads=4, groups=1, head_dim=16, state=32)
        zxbcdt = random(1, length, weights.pop("width"), seed=1, dtype=torch.float32)
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            split_combined(zxbcdt, weights)
        return sum(kept.values())

    counted = [saved_bytes(length) for length in (2048, 4096, 8192)]
    first, second = counted[1] - counted[0], counted[2] - counted[1]
    assert second == pytest.approx(2 * first, rel=0.05), f"bytes kept at 2048, 4096, 8192 tokens: {counted}"
    per_token = second / 4096
    inputs = 4 * (2 * 64 + 2 * 32 + 4)
    assert per_token < 4 * inputs, f"{per_token:.0f} bytes kept per token; the projection itself has {inputs}"


# ---- Hugging Face


def hugging_face(groups: int, chunk_size: int, dtype: torch.dtype) -> Any:
    """A Mamba2Mixer with random weights."""
    torch.manual_seed(3)
    config = Mamba2Config(
        hidden_size=32,
        expand=2,
        num_heads=8,
        head_dim=8,
        n_groups=groups,
        state_size=16,
        num_hidden_layers=1,
        chunk_size=chunk_size,
    )
    mixer = Mamba2Mixer(config, layer_idx=0)
    for parameter in mixer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return mixer.to(DEVICE, dtype).eval()


def outputs_and_gradients(mixer: Any, hidden: Tensor, ours: bool) -> dict[str, Tensor]:
    """Output, gradient of the input and of every weight: of Hugging Face's mixer, or of ours with its weights."""
    if ours:
        y = mamba_split_conv1d_scan_combined(
            mixer.in_proj(hidden),
            mixer.conv1d.weight.squeeze(1),
            mixer.conv1d.bias,
            mixer.dt_bias,
            -mixer.A_log.float().exp(),
            mixer.D,
            chunk_size=mixer.chunk_size,
            rmsnorm_weight=mixer.norm.weight,
            rmsnorm_eps=mixer.norm.variance_epsilon,
            outproj_weight=mixer.out_proj.weight,
            outproj_bias=mixer.out_proj.bias,
            headdim=mixer.head_dim,
            ngroups=mixer.n_groups,
            norm_before_gate=False,
        )
    else:
        y = mixer(hidden)
    assert isinstance(y, Tensor)
    assert y.dtype == hidden.dtype
    inputs = {"hidden": hidden, **dict(mixer.named_parameters())}
    total = (y * random(*y.shape, seed=5).detach().to(y.dtype)).sum()
    return {"output": y, **dict(zip(inputs, torch.autograd.grad(total, list(inputs.values())), strict=True))}


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("chunk_size", [8, 32])
def test_mixer_equals_hugging_face(groups: int, chunk_size: int) -> None:
    """The whole mixer with the same weights: outputs, and gradients of the input and of every weight."""
    mixer = hugging_face(groups, chunk_size, torch.float32)
    hidden = random(2, 45, 32, seed=4, dtype=torch.float32)
    wanted = outputs_and_gradients(mixer, hidden, ours=False)
    found = outputs_and_gradients(mixer, hidden, ours=True)
    errors = {name: relative_error(found[name], wanted[name]) for name in wanted}
    wrong = {name: f"{error:.1e}" for name, error in errors.items() if not error <= 2e-5}
    assert not wrong, f"differ from Hugging Face by more than 2e-5: {wrong}"


@pytest.mark.parametrize("groups", [1, 4])
def test_bf16_mixer_is_as_near_to_fp32_as_hugging_face(groups: int) -> None:
    mixer = hugging_face(groups, 32, torch.bfloat16)
    hidden = random(2, 45, 32, seed=4, dtype=torch.bfloat16)
    found, theirs = (outputs_and_gradients(mixer, hidden, ours) for ours in (True, False))
    exact = outputs_and_gradients(mixer.float(), hidden.detach().float().requires_grad_(), ours=False)
    for name, wanted in exact.items():
        our_error, their_error = relative_error(found[name], wanted), relative_error(theirs[name], wanted)
        assert our_error <= max(1.5 * their_error, 1e-2), f"{name}: {our_error:.1e} off, Hugging Face {their_error:.1e}"


# ---- Refusals


@pytest.mark.parametrize("argument", ["cu_seqlens", "return_varlen_states"])
def test_what_is_not_supported_is_refused_by_name(argument: str) -> None:
    with pytest.raises(NotImplementedError, match=argument):
        combined(scan_case(length=4), chunk_size=8, **{argument: True})


def test_shapes_that_do_not_fit_are_refused() -> None:
    case = scan_case(length=4, heads=4)
    with pytest.raises(ValueError, match=r"dt \(2, 3, 4\)"):
        combined(case, chunk_size=8, dt=case["dt"][:, :3])
    with pytest.raises(ValueError, match=r"B \(2, 4, 3, 5\)"):
        combined(case, chunk_size=8, B=case["B"].expand(2, 4, 3, 5), C=case["C"].expand(2, 4, 3, 5))
    with pytest.raises(ValueError, match="chunk_size"):
        combined(case, chunk_size=0)
    weights = split_weights(heads=4, groups=2)
    zxbcdt = random(1, 6, weights.pop("width") + 2, seed=1)
    with pytest.raises(ValueError, match="do not fit 4 heads of 3 in 2 groups"):
        split_combined(zxbcdt, weights)
    with pytest.raises(ValueError, match="headdim"):
        split_combined(zxbcdt, weights, headdim=None)
