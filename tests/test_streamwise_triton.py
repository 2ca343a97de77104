"""The Triton kernels of the streamwise operators give the fp64 equations, forward and backward.

    pytest tests/test_streamwise_triton.py                   # on a GPU compiled, else through Triton's interpreter

Tensor names: n tokens, k streams, d branch width, p padded controller.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from harness_triton import EPSILON, MAX_FORGET, normal, reference_read, reference_write, triton_device
from torch import Tensor

from megatron.core.transformer.streamwise_residual_ops import (
    streamwise_read,
    streamwise_sigmoid_read,
    streamwise_sigmoid_write_read,
    streamwise_sigmoid_writeback,
    streamwise_writeback,
)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> torch.device:
    return triton_device(monkeypatch)


def assert_close(name: str, found: Tensor, wanted: Tensor, dtype: torch.dtype, floor: float = 0.0) -> None:
    """Within one rounding to `dtype`, the error of fp32 sums, and `floor`.

    The interpreter truncates to bf16 where a GPU rounds.
    """
    assert found.dtype is dtype, f"{name} has dtype {found.dtype}, wanted {dtype}"
    assert found.shape == wanted.shape
    if found.numel():
        rounding = EPSILON[dtype] / (2 if found.is_cuda else 1)
        summed = 64 * EPSILON[torch.float64 if dtype is torch.float64 else torch.float32] * (1 + largest(wanted))
        error = (found.double() - wanted).abs()
        assert (error <= rounding * wanted.abs() + summed + floor).all(), f"{name} is off by up to {error.max()}"


def largest(t: Tensor) -> float:
    """Largest magnitude; 0 for an empty tensor."""
    return float(t.detach().double().abs().max()) if t.numel() else 0.0


class Case:
    """Inputs of one call of every operator, with the same in fp64."""

    def __init__(
        self,
        device: torch.device,
        leading: tuple[int, ...],
        k: int,
        d: int,
        stream: torch.dtype = torch.float32,
        branch: torch.dtype = torch.float32,
        *,
        retained: bool = True,
        biased: bool = True,
        padded: int | None = None,
    ) -> None:
        held = torch.float64 if torch.float64 in (stream, branch) else torch.float32
        length = padded or k
        self.k, self.stream, self.branch, self.held = k, stream, branch, held
        self.inputs: dict[str, Tensor] = {
            "x": normal(*leading, k * d, dtype=stream, seed=1, device=device),
            "u": normal(*leading, d, dtype=branch, seed=2, device=device),
            "r": normal(length, dtype=held, seed=3, device=device),
            "s": normal(length, dtype=held, seed=4, device=device),
        }
        if retained:
            self.inputs["q"] = normal(length, dtype=held, seed=5, device=device)
        if biased:
            self.inputs["b"] = normal(d, dtype=branch, seed=6, device=device)
        self.grad_y = normal(*leading, k * d, dtype=stream, seed=7, device=device).detach()
        self.grad_z = normal(*leading, d, dtype=branch, seed=8, device=device).detach()

    def options(self) -> dict[str, Any]:
        options: dict[str, Any] = {"bias": self.inputs.get("b")}
        if "q" in self.inputs:
            options |= {"retention_logits": self.inputs["q"], "retention_max_forget": MAX_FORGET}
        return options

    def check(self) -> None:
        """Compare read, write, and write with read, and all their gradients, with the equations."""
        self.compare("read", *self.outputs_of_read())
        self.compare("write", *self.outputs_of_write())
        self.compare("write and read", *self.outputs_of_write_read())

    def outputs_of_read(self) -> tuple[list[Tensor], list[Tensor]]:
        x, r = self.inputs["x"], self.inputs["r"]
        return [streamwise_sigmoid_read(x, r, self.k, output_dtype=self.branch)], [self.grad_z]

    def outputs_of_write(self) -> tuple[list[Tensor], list[Tensor]]:
        x, u, s = (self.inputs[name] for name in "xus")
        return [streamwise_sigmoid_writeback(x, u, s, self.k, **self.options())], [self.grad_y]

    def outputs_of_write_read(self) -> tuple[list[Tensor], list[Tensor]]:
        x, u, s, r = (self.inputs[name] for name in "xusr")
        outputs = streamwise_sigmoid_write_read(x, u, s, r, self.k, output_dtype=self.branch, **self.options())
        return list(outputs), [self.grad_y, self.grad_z]

    def compare(self, operator: str, found: list[Tensor], output_gradients: list[Tensor]) -> None:
        exact = {name: t.detach().double().requires_grad_() for name, t in self.inputs.items()}
        if operator == "read":
            wanted = [reference_read(exact["x"], exact["r"], self.k)]
        else:
            v = exact["u"] + exact["b"] if "b" in exact else exact["u"]
            wanted = [reference_write(exact["x"], v, exact["s"], self.k, exact.get("q"))]
            if operator == "write and read":
                wanted.append(reference_read(wanted[0], exact["r"], self.k))
        names = [name for name in self.inputs if name in {"read": "xr", "write": "xusqb"}.get(operator, "xusrqb")]
        gradients = torch.autograd.grad(found, [self.inputs[name] for name in names], output_gradients)
        references = torch.autograd.grad(
            wanted, [exact[name] for name in names], [gradient.double() for gradient in output_gradients]
        )
        dtypes = {"read": [self.branch], "write": [self.stream]}.get(operator, [self.stream, self.branch])
        # z and dr follow from Y as it is stored, rounded to the stream's dtype; db sums gradients as they are stored.
        of_y = 4 * EPSILON[self.stream] * largest(wanted[-1])
        floors = {"r": 1e-4 * largest(references[names.index("r")]) if "r" in names else 0.0, "b": 0.0}
        if operator == "write and read":
            floors["r"] += 4 * EPSILON[self.stream] * (1 + float(self.grad_z.double().abs().sum()))
        if "b" in names:
            floors["b"] = 8 * EPSILON[self.branch] * largest(references[names.index("b")])
        for index, (got, want, dtype) in enumerate(zip(found, wanted, dtypes, strict=True)):
            assert_close(f"{operator}: result {index}", got, want, dtype, of_y if index else 0.0)
        for name, got, want in zip(names, gradients, references, strict=True):
            dtype = self.inputs[name].dtype
            assert_close(f"{operator}: gradient of {name}", got, want, dtype, floors.get(name, 0.0))


DTYPES = [
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float16),
    (torch.float32, torch.float16),
    (torch.float64, torch.float64),
]


@pytest.mark.parametrize(("stream", "branch"), DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
def test_every_dtype_gives_the_equations(device: torch.device, stream: torch.dtype, branch: torch.dtype) -> None:
    Case(device, (5, 2), 4, 24, stream, branch).check()


@pytest.mark.parametrize("k", range(1, 17))
def test_every_number_of_streams_gives_the_equations(device: torch.device, k: int) -> None:
    case = Case(device, (3,), k, 5)
    case.compare("write and read", *case.outputs_of_write_read())
    case.compare("read", *case.outputs_of_read())


@pytest.mark.parametrize("retained", [False, True], ids=["kept whole", "retention"])
@pytest.mark.parametrize("biased", [False, True], ids=["no bias", "bias"])
def test_every_combination_of_retention_and_bias_gives_the_equations(
    device: torch.device, retained: bool, biased: bool
) -> None:
    Case(device, (3, 2), 3, 9, retained=retained, biased=biased).check()


@pytest.mark.parametrize(
    ("leading", "d"), [((1,), 1), ((), 7), ((2, 1, 3), 6), ((37,), 65), ((0,), 8), ((3, 0), 8)], ids=str
)
def test_any_shape_gives_the_equations(device: torch.device, leading: tuple[int, ...], d: int) -> None:
    Case(device, leading, 2, d).check()


def test_factors_given_as_they_are_give_the_equations(device: torch.device) -> None:
    case = Case(device, (4,), 3, 6, biased=False)
    x, u, r, s, q = (case.inputs[name] for name in "xursq")
    z, y = streamwise_read(x, r), streamwise_writeback(x, u, s, retention_factors=q)
    x_nkd = x.double().view(4, 3, 6)
    assert_close("z", z, (x_nkd * r.double()[:, None]).sum(1), torch.float32)
    wanted = (x_nkd * q.double()[:, None] + s.double()[:, None] * u.double()[:, None]).flatten(1)
    assert_close("Y", y, wanted, torch.float32)
    grad_r, grad_s = torch.autograd.grad(z, r, case.grad_z)[0], torch.autograd.grad(y, s, case.grad_y)[0]
    assert_close("dr", grad_r, (x_nkd * case.grad_z.double()[:, None]).sum((0, 2)), torch.float32)
    grad_y_nkd = case.grad_y.double().view(4, 3, 6)
    assert_close("ds", grad_s, (grad_y_nkd * u.double()[:, None]).sum((0, 2)), torch.float32)


def test_tail_of_a_padded_controller_has_exactly_zero_gradient(device: torch.device) -> None:
    case = Case(device, (4,), 3, 6, padded=128)
    outputs, output_gradients = case.outputs_of_write_read()
    for gradient in torch.autograd.grad(outputs, [case.inputs[name] for name in "srq"], output_gradients):
        assert (gradient[:3] != 0).all()
        assert (gradient[3:] == 0).all()


@pytest.mark.parametrize("k", [2, 4, 8])
def test_reading_equal_streams_at_the_start_returns_the_stream(device: torch.device, k: int) -> None:
    x = normal(6, 10, dtype=torch.float32, seed=1, device=device).detach()
    logits = torch.full((128,), 1 / k, dtype=torch.float64, device=device).logit().float()
    assert torch.equal(streamwise_sigmoid_read(x.repeat(1, k), logits, k), x)


def test_rows_apart_in_memory_give_the_bits_of_contiguous_ones(device: torch.device) -> None:
    """Inputs and gradients with the tokens transposed, rows with gaps, and a gradient of one element."""
    case = Case(device, (4, 3), 2, 10)
    wanted_outputs, output_gradients = case.outputs_of_write_read()
    names = list(case.inputs)
    wanted = torch.autograd.grad(wanted_outputs, list(case.inputs.values()), output_gradients)

    def transposed(t: Tensor) -> Tensor:
        return t.detach().transpose(0, 1).contiguous().transpose(0, 1)

    def gapped(t: Tensor) -> Tensor:
        return torch.nn.functional.pad(t.detach(), (0, 3))[..., : t.shape[-1]]

    for scattered in (transposed, gapped):
        for name in "xu":
            case.inputs[name] = scattered(case.inputs[name]).requires_grad_()
            assert not case.inputs[name].is_contiguous()
        outputs, _ = case.outputs_of_write_read()
        assert all(map(torch.equal, outputs, wanted_outputs))
        found = torch.autograd.grad(outputs, list(case.inputs.values()), [scattered(g) for g in output_gradients])
        for name, a, b in zip(names, found, wanted, strict=True):
            assert torch.equal(a, b), f"{scattered.__name__}: gradient of {name}"
    z = case.outputs_of_read()[0][0]
    (grad_x,) = torch.autograd.grad(z.sum(), case.inputs["x"])
    assert_close("dX", grad_x[..., :10], case.inputs["r"][0].double().sigmoid().expand(4, 3, 10), torch.float32)


def test_one_pass_gives_the_bits_of_the_two_operators(device: torch.device) -> None:
    case = Case(device, (5,), 3, 20, torch.bfloat16, torch.bfloat16)
    y, z = case.outputs_of_write_read()[0]
    assert torch.equal(y, case.outputs_of_write()[0][0])
    assert torch.equal(z, streamwise_sigmoid_read(y, case.inputs["r"], 3))


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_twenty_repetitions_give_the_same_bits(device: torch.device, stream: torch.dtype) -> None:
    case = Case(device, (17,), 2, 33, stream, stream)
    results = []
    for _ in range(20):
        outputs, output_gradients = case.outputs_of_write_read()
        results.append([*outputs, *torch.autograd.grad(outputs, list(case.inputs.values()), output_gradients)])
    for result in results[1:]:
        assert all(map(torch.equal, result, results[0]))


def test_sums_of_many_tiles_are_those_of_few(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the level between tiles and streams, which long batches need, forced on a short one."""
    case = Case(device, (70,), 2, 64)
    outputs, output_gradients = case.outputs_of_write_read()
    controllers = [case.inputs[name] for name in "srq"]
    wanted = torch.autograd.grad(outputs, controllers, output_gradients, retain_graph=True)
    from megatron.core.fusions import streamwise_triton_launch

    monkeypatch.setattr(streamwise_triton_launch, "_FOLD_BLOCK", 2)
    found = torch.autograd.grad(outputs, controllers, output_gradients)
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


def test_more_than_sixteen_streams_are_refused(device: torch.device) -> None:
    with pytest.raises(ValueError, match="up to 16 streams, got 17"):
        streamwise_sigmoid_read(torch.ones(1, 17, device=device), torch.ones(17, device=device), 17)
