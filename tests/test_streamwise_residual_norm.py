"""A read, alone or behind a write, with the RMSNorm or LayerNorm behind it: the equations, the bits, the misuses.

    pytest tests/test_streamwise_residual_norm.py

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from harness_triton import EPSILON, MAX_FORGET, normal, reference_read, reference_write, triton_device
from torch import Tensor

from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE
from megatron.core.transformer.streamwise_residual_norm import StreamNorm, stream_norm_of
from megatron.core.transformer.streamwise_residual_ops import (
    streamwise_sigmoid_read,
    streamwise_sigmoid_write_read,
    streamwise_sigmoid_writeback,
)

EPS = 1e-3  # large enough to be seen
KINDS = ("RMSNorm", "LayerNorm")
K = 3


@pytest.fixture(params=["compiled", "eager", "triton"])
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> torch.device:
    """Where tensors are made; the test runs on every backend."""
    if request.param == "triton":
        return triton_device(monkeypatch)
    monkeypatch.setenv(BACKEND_VARIABLE, request.param)
    return torch.device("cpu")


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    monkeypatch.setenv(BACKEND_VARIABLE, "compiled")
    return torch.device("cpu")


def norm_of(kind: str, d: int, dtype: torch.dtype, device: torch.device) -> StreamNorm:
    """A norm with weights, and biases in a LayerNorm, that are not 1 and 0."""
    module = getattr(torch.nn, kind)(d, eps=EPS).to(device, dtype)
    for seed, parameter in enumerate(module.parameters()):
        parameter.data.copy_(normal(d, dtype=dtype, seed=20 + seed, device=device))
    found = stream_norm_of(module)
    assert found is not None
    return found


class Case:
    """Inputs of a read and norm, and of a write, read and norm, in one dtype for streams and branches."""

    def __init__(
        self,
        device: torch.device,
        kind: str,
        leading: tuple[int, ...],
        d: int,
        dtype: torch.dtype,
        retained: bool = True,
    ) -> None:
        held = torch.float64 if dtype is torch.float64 else torch.float32
        self.norm = norm_of(kind, d, dtype, device)
        self.inputs = {
            "x": normal(*leading, K * d, dtype=dtype, seed=1, device=device),
            "u": normal(*leading, d, dtype=dtype, seed=2, device=device),
            "s": normal(128, dtype=held, seed=3, device=device),
            "r": normal(128, dtype=held, seed=4, device=device),
        }
        if retained:
            self.inputs["q"] = normal(128, dtype=held, seed=5, device=device)
        self.parameters = [p for p in (self.norm.weight_d, self.norm.bias_d) if p is not None]
        self.grad_y = normal(*leading, K * d, dtype=dtype, seed=6, device=device).detach()
        self.grad_n = normal(*leading, d, dtype=dtype, seed=7, device=device).detach()

    def options(self) -> dict[str, Any]:
        q = self.inputs.get("q")
        return {} if q is None else {"retention_logits": q, "retention_max_forget": MAX_FORGET}

    def write_read(self) -> tuple[list[Tensor], list[Tensor]]:
        """(Y and norm(z), all gradients) of the one operator."""
        x, u, s, r = (self.inputs[name] for name in "xusr")
        outputs = list(streamwise_sigmoid_write_read(x, u, s, r, K, norm=self.norm, **self.options()))
        return outputs, self._gradients(outputs, [self.grad_y, self.grad_n], list(self.inputs.values()))

    def write_then_read(self) -> tuple[list[Tensor], list[Tensor]]:
        """The same of a write, and a read with its norm."""
        x, u, s, r = (self.inputs[name] for name in "xusr")
        y = streamwise_sigmoid_writeback(x, u, s, K, **self.options())
        outputs = [y, streamwise_sigmoid_read(y, r, K, norm=self.norm)]
        return outputs, self._gradients(outputs, [self.grad_y, self.grad_n], list(self.inputs.values()))

    def read(self) -> tuple[list[Tensor], list[Tensor]]:
        """The same of a read with its norm."""
        outputs = [streamwise_sigmoid_read(self.inputs["x"], self.inputs["r"], K, norm=self.norm)]
        return outputs, self._gradients(outputs, [self.grad_n], [self.inputs["x"], self.inputs["r"]])

    def read_then_norm(self) -> tuple[list[Tensor], list[Tensor]]:
        """The same of a read, and PyTorch's norm of what it stored."""
        outputs = [self.norm(streamwise_sigmoid_read(self.inputs["x"], self.inputs["r"], K))]
        return outputs, self._gradients(outputs, [self.grad_n], [self.inputs["x"], self.inputs["r"]])

    def equations(self, with_write: bool) -> tuple[list[Tensor], list[Tensor]]:
        """The same in fp64 by formulas; gradients of inputs without influence are left out."""
        exact = {name: t.detach().double().requires_grad_() for name, t in self.inputs.items()}
        parameters = [p.detach().double().requires_grad_() for p in self.parameters]
        y = reference_write(exact["x"], exact["u"], exact["s"], K, exact.get("q")) if with_write else exact["x"]
        z = reference_read(y, exact["r"], K)
        if self.norm.kind == "LayerNorm":
            z = z - z.mean(-1, keepdim=True)
        out = z * (z.square().mean(-1, keepdim=True) + EPS).rsqrt() * parameters[0]
        if self.norm.kind == "LayerNorm":
            out = out + parameters[1]
        outputs = [y, out] if with_write else [out]
        grads = [self.grad_y, self.grad_n] if with_write else [self.grad_n]
        inputs = list(exact.values()) if with_write else [exact["x"], exact["r"]]
        return outputs, list(torch.autograd.grad(outputs, inputs + parameters, [g.double() for g in grads]))

    def _gradients(self, outputs: list[Tensor], grads: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
        return list(torch.autograd.grad(outputs, inputs + self.parameters, grads, retain_graph=True))


def error(found: Tensor, wanted: Tensor) -> float:
    """Largest difference in units of the largest wanted value."""
    if not wanted.numel():
        return 0.0
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30)).item()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["fp32", "fp64"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_norm_gives_the_fp64_equations(device: torch.device, kind: str, dtype: torch.dtype) -> None:
    """Within 64 units in the last place of the largest value, forward and backward."""
    case = Case(device, kind, (5, 3), 23, dtype)
    for (outputs, gradients), wanted in (
        (case.read(), case.equations(with_write=False)),
        (case.write_read(), case.equations(with_write=True)),
    ):
        for index, (got, want) in enumerate(zip(outputs + gradients, wanted[0] + wanted[1], strict=True)):
            assert got.dtype in (dtype, torch.float32)
            assert error(got, want) < 64 * EPSILON[dtype], f"result {index} is off by {error(got, want)}"


@pytest.mark.parametrize("kind", KINDS)
def test_bf16_is_rounded_before_the_norm_and_once_after_it(compiled: torch.device, kind: str) -> None:
    """As the read and the module round: all but a few elements have the same bits, those are neighbours."""
    case = Case(compiled, kind, (40,), 200, torch.bfloat16)
    (found,), gradients = case.read()
    (wanted,), wanted_gradients = case.read_then_norm()
    assert (found != wanted).float().mean() < 1e-3
    torch.testing.assert_close(found, wanted, rtol=2**-7, atol=0)
    for name, got, want in zip("xrwb", gradients, wanted_gradients, strict=False):
        assert error(got, want) < 2e-2, f"gradient of {name}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("retained", [False, True], ids=["kept whole", "retention"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_write_read_and_norm_in_one_pass_give_the_bits_of_the_two(
    device: torch.device, kind: str, retained: bool, dtype: torch.dtype
) -> None:
    """The outputs bit for bit; gradients within the roundings that one pass saves."""
    case = Case(device, kind, (3, 4), 35, dtype, retained)
    (outputs, gradients), (wanted, wanted_gradients) = case.write_read(), case.write_then_read()
    assert all(map(torch.equal, outputs, wanted))
    for index, (got, want) in enumerate(zip(gradients, wanted_gradients, strict=True)):
        assert error(got, want) < 4 * EPSILON[dtype] + 1e-6, f"gradient {index}"


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("weights", [torch.float32, torch.bfloat16], ids=["fp32 weights", "bf16 weights"])
def test_every_mixture_of_dtypes_gives_what_read_and_module_give(
    compiled: torch.device, stream: torch.dtype, branch: torch.dtype, weights: torch.dtype
) -> None:
    """Those without a kernel run one after the other, with PyTorch's own result or refusal."""
    x, r = (
        normal(9, K * 17, dtype=stream, seed=1, device=compiled),
        normal(K, dtype=torch.float32, seed=2, device=compiled),
    )
    for kind in KINDS:
        norm = norm_of(kind, 17, weights, compiled)
        try:
            wanted = norm(streamwise_sigmoid_read(x, r, K, output_dtype=branch))
        except RuntimeError as refusal:
            with pytest.raises(RuntimeError, match=re.escape(str(refusal))):
                streamwise_sigmoid_read(x, r, K, output_dtype=branch, norm=norm)
            continue
        found = streamwise_sigmoid_read(x, r, K, output_dtype=branch, norm=norm)
        assert found.dtype is wanted.dtype
        assert error(found, wanted) <= 2 * EPSILON[branch]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_of_another_dtype_than_the_branch_input_gives_the_same(compiled: torch.device, kind: str) -> None:
    """There is no kernel for it: the write runs by itself, then the read with its norm."""
    case = Case(compiled, kind, (9,), 40, torch.float32)
    x, u, s, r = (case.inputs[name] for name in "xusr")
    y, out = streamwise_sigmoid_write_read(x, u, s, r, K, output_dtype=torch.bfloat16, norm=case.norm)
    y_alone = streamwise_sigmoid_writeback(x, u, s, K)
    alone = streamwise_sigmoid_read(y_alone, r, K, output_dtype=torch.bfloat16, norm=case.norm)
    assert torch.equal(y, y_alone)
    assert torch.equal(out, alone)
    used, grads = [x, u, s, r, *case.parameters], [case.grad_y, case.grad_n.bfloat16()]
    found, wanted = (torch.autograd.grad(outputs, used, grads) for outputs in ((y, out), (y_alone, alone)))
    for index, (got, want) in enumerate(zip(found, wanted, strict=True)):
        assert error(got, want) < 1e-5, f"gradient {index}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("d", [1, 15, 16, 17, 1023, 1025, 2100])
def test_rows_of_any_length_give_what_read_and_module_give(compiled: torch.device, kind: str, d: int) -> None:
    case = Case(compiled, kind, (19,), d, torch.float32)
    (outputs, gradients), (wanted, wanted_gradients) = case.read(), case.read_then_norm()
    for index, (got, want) in enumerate(zip(outputs + gradients, wanted + wanted_gradients, strict=True)):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=2e-5, msg=f"result {index}")


@pytest.mark.parametrize("kind", KINDS)
def test_no_token_and_scattered_rows_give_what_contiguous_ones_give(device: torch.device, kind: str) -> None:
    empty = Case(device, kind, (0, 2), 8, torch.float32)
    for outputs, gradients in (empty.read(), empty.write_read()):
        assert outputs[-1].shape == (0, 2, 8)
        assert all(not gradient.any() for gradient in gradients)
    case = Case(device, kind, (4, 3), 10, torch.float32)
    wanted = case.write_read()
    for name in "xu":
        scattered = case.inputs[name].detach().transpose(0, 1).contiguous().transpose(0, 1)
        case.inputs[name] = scattered.requires_grad_()
        assert not scattered.is_contiguous()
    case.grad_n = torch.nn.functional.pad(case.grad_n, (0, 3))[..., :10]
    found = case.write_read()
    assert all(map(torch.equal, found[0] + found[1], wanted[0] + wanted[1]))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_twenty_repetitions_on_any_number_of_threads_give_the_same_bits(
    compiled: torch.device, kind: str, dtype: torch.dtype
) -> None:
    case = Case(compiled, kind, (131,), 96, dtype)
    threads, results = torch.get_num_threads(), []
    try:
        for repetition in range(20):
            torch.set_num_threads(1 + repetition % 4)
            results.append([tensor for group in (*case.read(), *case.write_read()) for tensor in group])
    finally:
        torch.set_num_threads(threads)
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_a_fused_read_keeps_the_stream_and_one_or_two_numbers_per_token(compiled: torch.device) -> None:
    """Neither z nor what the norm would have kept; without gradients the same bits."""
    for kind, numbers in (("RMSNorm", 1), ("LayerNorm", 2)):
        case = Case(compiled, kind, (6,), 20, torch.float32)
        kept: list[Tensor] = []

        def keep(tensor: Tensor, kept: list[Tensor] = kept) -> Tensor:
            kept.append(tensor)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            found = streamwise_sigmoid_read(case.inputs["x"], case.inputs["r"], K, norm=case.norm)
        new = [t for t in kept if not any(t is given for given in (*case.inputs.values(), *case.parameters))]
        assert sum(t.numel() for t in new) == 6 * numbers
        with torch.no_grad():
            assert torch.equal(found, streamwise_sigmoid_read(case.inputs["x"], case.inputs["r"], K, norm=case.norm))


class _ZeroCentred(torch.nn.RMSNorm):
    """A norm that computes something else than its parent class."""

    def forward(self, x: Tensor) -> Tensor:
        assert self.weight is not None
        return torch.nn.functional.rms_norm(x, self.normalized_shape, self.weight + 1, self.eps)


def _hooked(register: str) -> torch.nn.Module:
    module = torch.nn.LayerNorm(4)
    getattr(module, register)(lambda *_: None)
    return module


@pytest.mark.parametrize(
    "module",
    [
        _ZeroCentred(4, eps=EPS),
        torch.nn.RMSNorm(4),
        torch.nn.LayerNorm((2, 4)),
        torch.nn.Identity(),
        *map(_hooked, ("register_forward_hook", "register_forward_pre_hook", "register_full_backward_hook")),
    ],
    ids=["subclass", "no eps", "two dimensions", "no norm", "hook", "pre-hook", "backward hook"],
)
def test_a_module_that_must_be_called_is_not_taken_for_its_formula(module: torch.nn.Module) -> None:
    assert stream_norm_of(module) is None


def test_norms_without_parameters_and_frozen_ones_are_fused_too(compiled: torch.device) -> None:
    x, r = normal(5, K * 6, dtype=torch.float32, seed=1, device=compiled), torch.zeros(K)
    for kind in KINDS:
        bare = stream_norm_of(getattr(torch.nn, kind)(6, eps=EPS, elementwise_affine=False))
        frozen = norm_of(kind, 6, torch.float32, compiled)
        for parameter in (frozen.weight_d, frozen.bias_d):
            if parameter is not None:
                parameter.requires_grad_(False)
        for norm in (bare, frozen):
            assert norm is not None
            found, wanted = streamwise_sigmoid_read(x, r, K, norm=norm), norm(streamwise_sigmoid_read(x, r, K))
            torch.testing.assert_close(found, wanted)
            grads = [torch.autograd.grad(out.square().sum(), x)[0] for out in (found, wanted)]
            torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_each_misuse_has_its_own_error() -> None:
    x, logits = torch.ones(2, 8), torch.zeros(4)
    for norm, kind, message in (
        (torch.nn.RMSNorm(2), TypeError, "norm must be a StreamNorm .*got RMSNorm"),
        (StreamNorm("RMSNorm", 3, EPS), ValueError, "branch width 2, got one over 3"),
        (
            StreamNorm("RMSNorm", 2, EPS, torch.ones(2, device="meta")),
            ValueError,
            "norm.weight_d must be on .*got meta",
        ),
    ):
        with pytest.raises(kind, match=message):
            streamwise_sigmoid_read(x, logits, 4, norm=norm)  # type: ignore[arg-type]
        with pytest.raises(kind, match=message):
            streamwise_sigmoid_write_read(x, torch.ones(2, 2), logits, logits, 4, norm=norm)  # type: ignore[arg-type]
