"""The streamwise operators keep the promises of megatron/core/transformer/streamwise_residual_ops.py, on every backend.

    pytest tests/test_streamwise_residual_ops.py

The reference everywhere is the formula written down with plain PyTorch in fp64. Tensor names: n tokens, k streams, d
branch width, w wide width K*D, p padded controller.
"""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE
from megatron.core.transformer.streamwise_residual_ops import (
    sigmoid_read_factors,
    sigmoid_retention_factors,
    sigmoid_write_factors,
    streamwise_read,
    streamwise_sigmoid_read,
    streamwise_sigmoid_writeback,
    streamwise_writeback,
)

MAX_FORGET = 0.1
EPSILON = {torch.float64: 2.0**-52, torch.float32: 2.0**-23, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}


@pytest.fixture(params=["compiled", "eager"], autouse=True)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs on both CPU backends; there is a C++ compiler wherever these tests run."""
    monkeypatch.setenv(BACKEND_VARIABLE, request.param)
    return request.param


def reference_read(x: Tensor, logits_p: Tensor, k: int) -> Tensor:
    """z = sum_k sigmoid(r_k) X_k."""
    return (x.unflatten(-1, (k, -1)) * logits_p[:k].sigmoid()[:, None]).sum(-2)


def reference_write(x: Tensor, u: Tensor, logits_p: Tensor, k: int, retention_p: Tensor | None = None) -> Tensor:
    """Y_k = g_k X_k + 2 sigmoid(s_k) u."""
    kept = x.unflatten(-1, (k, -1))
    if retention_p is not None:
        kept = kept * (1 - MAX_FORGET * torch.sigmoid(-retention_p[:k]))[:, None]
    return (kept + 2 * logits_p[:k].sigmoid()[:, None] * u.unsqueeze(-2)).flatten(-2)


def write(x: Tensor, u: Tensor, logits_p: Tensor, k: int, retention_p: Tensor | None = None) -> Tensor:
    """The operator with this file's bound on forgetting."""
    return streamwise_sigmoid_writeback(
        x, u, logits_p, k, retention_logits=retention_p, retention_max_forget=0.0 if retention_p is None else MAX_FORGET
    )


def random(*shape: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Tensor:
    """Normal values that require grad."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()


def gradients(output: Tensor, gradient: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    """Gradients of `inputs`, the graph kept."""
    return torch.autograd.grad(output, inputs, gradient, retain_graph=True)


@pytest.mark.parametrize("k", range(1, 17))
def test_gradients_are_those_of_the_equations(k: int) -> None:
    d = 3 if k % 2 else 5
    x, u = random(2, 3, k * d, seed=1), random(2, 3, d, seed=2)
    r, s, q = random(k + 3, seed=3), random(k, seed=4), random(k + 1, seed=5)
    assert torch.autograd.gradcheck(lambda x, r: streamwise_sigmoid_read(x, r, k), (x, r))
    assert torch.autograd.gradcheck(lambda x, u, s: write(x, u, s, k), (x, u, s))
    assert torch.autograd.gradcheck(lambda x, u, s, q: write(x, u, s, k, q), (x, u, s, q))
    assert torch.autograd.gradcheck(streamwise_read, (x, s))
    g = random(k, seed=6)
    assert torch.autograd.gradcheck(lambda x, u, s, g: streamwise_writeback(x, u, s, retention_factors=g), (x, u, s, g))


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    leading=st.lists(st.integers(0, 5), max_size=3),
    k=st.integers(1, 16),
    d=st.sampled_from([1, 2, 7, 64, 255, 257, 300]),
    retained=st.booleans(),
)
def test_any_leading_shape_and_width_gives_the_formula(leading: list[int], k: int, d: int, retained: bool) -> None:
    x, u = random(*leading, k * d, seed=1), random(*leading, d, seed=2)
    r, s, q = random(128, seed=3), random(128, seed=4), random(128, seed=5) if retained else None
    inputs = [x, u, s] if q is None else [x, u, s, q]
    z, y = streamwise_sigmoid_read(x, r, k), write(x, u, s, k, q)
    expected_z, expected_y = reference_read(x, r, k), reference_write(x, u, s, k, q)
    torch.testing.assert_close(z, expected_z)
    torch.testing.assert_close(y, expected_y)
    gradient_z, gradient_y = random(*z.shape, seed=7).detach(), random(*y.shape, seed=8).detach()
    torch.testing.assert_close(gradients(z, gradient_z, x, r), gradients(expected_z, gradient_z, x, r))
    torch.testing.assert_close(gradients(y, gradient_y, *inputs), gradients(expected_y, gradient_y, *inputs))


@pytest.mark.parametrize(
    ("stream", "branch"),
    [*itertools.product([torch.float32, torch.bfloat16, torch.float16], repeat=2), (torch.float32, torch.float64)],
    ids=lambda dtype: str(dtype).removeprefix("torch."),
)
def test_every_result_is_within_one_rounding_of_the_fp64_equations(stream: torch.dtype, branch: torch.dtype) -> None:
    """Allowed: half an ulp of the result's dtype for the store, plus fp32 accumulation error."""
    n, k, d = 70, 4, 96
    x, u = random(n, k * d, dtype=stream, seed=1), random(n, d, dtype=branch, seed=2)
    r, s, q = (random(128, dtype=torch.float32, seed=seed) for seed in (3, 4, 5))
    exact = [t.detach().double().requires_grad_() for t in (x, u, r, s, q)]
    z, y = streamwise_sigmoid_read(x, r, k, output_dtype=branch), write(x, u, s, k, q)
    gradient_z, gradient_y = (
        random(n, d, dtype=branch, seed=7).detach(),
        random(n, k * d, dtype=stream, seed=8).detach(),
    )
    exact_z, exact_y = reference_read(exact[0], exact[2], k), reference_write(exact[0], exact[1], exact[3], k, exact[4])
    found = (z, y, *gradients(z, gradient_z, x, r), *gradients(y, gradient_y, x, u, s, q))
    expected = (
        exact_z,
        exact_y,
        *gradients(exact_z, gradient_z.double(), exact[0], exact[2]),
        *gradients(exact_y, gradient_y.double(), exact[0], exact[1], exact[3], exact[4]),
    )
    wanted_dtypes = (branch, stream, stream, torch.float32, stream, branch, torch.float32, torch.float32)
    for index, (got, want, dtype) in enumerate(zip(found, expected, wanted_dtypes, strict=True)):
        assert got.dtype is dtype, f"result {index} has dtype {got.dtype}, wanted {dtype}"
        accumulated = 8 * k * EPSILON[torch.float32] * (1 + want.abs().max())
        error = (got.double() - want).abs()
        assert (error <= EPSILON[dtype] / 2 * want.abs() + accumulated).all(), f"result {index}: {error.max()}"


def test_controller_gradients_over_many_tokens_keep_fp32_accuracy() -> None:
    """All terms have one sign: fp32 running sums over 16384 x 64 terms would lose several digits."""
    n, k, d = 16384, 2, 64
    x = torch.rand(n, k * d).requires_grad_()
    u, r, s = torch.rand(n, d).requires_grad_(), torch.zeros(k).requires_grad_(), torch.zeros(k).requires_grad_()
    gradient = torch.rand(n, d)
    (grad_r,) = gradients(streamwise_sigmoid_read(x, r, k), gradient, r)
    (grad_s,) = gradients(write(x, u, s, k), x.detach(), s)
    x_nkd = x.detach().double().unflatten(-1, (k, d))
    torch.testing.assert_close(grad_r.double(), (x_nkd * gradient.double()[:, None]).sum((0, 2)) / 4, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        grad_s.double(), (x_nkd * u.detach().double()[:, None]).sum((0, 2)) / 2, rtol=1e-6, atol=0
    )


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_reading_equal_streams_at_the_start_returns_the_stream(k: int) -> None:
    x = torch.randn(50, 1, 40, generator=torch.Generator().manual_seed(0))
    logits = torch.full((128,), math.log((1 / k) / (1 - 1 / k)))
    z = streamwise_sigmoid_read(x.repeat(1, 1, k), logits, k)
    one_ulp = torch.nextafter(x.abs(), torch.tensor(math.inf)) - x.abs()
    assert ((z - x).abs() <= one_ulp).all(), f"off by up to {((z - x).abs() / one_ulp).max()} ulp"
    if k != 3:  # 1/K is a power of two
        assert torch.equal(z, x)


@pytest.mark.parametrize("k", [2, 3, 4, 8])
def test_writing_at_the_start_keeps_the_mean_of_the_streams_ordinary(k: int) -> None:
    x, u = torch.randn(50, 40), torch.randn(50, 40)
    y = write(x.repeat(1, k), u, torch.linspace(-0.01, 0.01, k), k)
    mean = y.double().unflatten(-1, (k, -1)).mean(-2)
    torch.testing.assert_close(mean, x.double() + u.double(), rtol=1e-6, atol=1e-6)


def test_tail_of_a_padded_controller_has_exactly_zero_gradient_and_no_influence() -> None:
    k = 4
    x, u = random(6, k * 8, dtype=torch.float32, seed=1), random(6, 8, dtype=torch.float32, seed=2)
    for operator in (
        lambda c: streamwise_sigmoid_read(x, c, k),
        lambda c: write(x, u, c, k),
        lambda c: write(x, u, u.detach()[0, :k].contiguous(), k, c),
    ):
        controller = random(128, dtype=torch.float32, seed=3)
        changed = controller.detach().clone()
        changed[k:] = math.nan
        assert torch.equal(operator(controller), operator(changed))
        output = operator(controller)
        (gradient,) = gradients(output, torch.ones_like(output), controller)
        assert gradient.shape == (128,)
        assert (gradient[:k] != 0).all()
        assert (gradient[k:] == 0).all()


def test_sigmoid_forms_and_factor_forms_give_the_same_bits() -> None:
    k = 3
    x, u = random(5, k * 7, dtype=torch.float32, seed=1), random(5, 7, dtype=torch.float32, seed=2)
    r, s, q = (random(128, dtype=torch.float32, seed=seed) for seed in (3, 4, 5))
    assert torch.equal(streamwise_sigmoid_read(x, r, k), streamwise_read(x, sigmoid_read_factors(r, k)))
    factors = streamwise_writeback(
        x, u, sigmoid_write_factors(s, k), retention_factors=sigmoid_retention_factors(q, k, MAX_FORGET)
    )
    assert torch.equal(write(x, u, s, k, q), factors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_do_not_depend_on_grad_mode_requires_grad_contiguity_or_repetition(dtype: torch.dtype) -> None:
    k, d = 4, 70
    x, u = random(9, 4, k * d, dtype=dtype, seed=1), random(9, 4, d, dtype=dtype, seed=2)
    r, s, q = (random(128, dtype=torch.float32, seed=seed) for seed in (3, 4, 5))

    def outputs(x: Tensor, u: Tensor) -> tuple[Tensor, ...]:
        return streamwise_sigmoid_read(x, r, k), write(x, u, s, k), write(x, u, s, k, q)

    def scattered(t: Tensor) -> Tensor:
        return t.detach().transpose(0, 1).contiguous().transpose(0, 1)

    wanted = outputs(x, u)
    for mode in (torch.no_grad, torch.inference_mode, torch.enable_grad):
        with mode():
            for found in (outputs(x, u), outputs(x.detach(), u.detach()), outputs(scattered(x), scattered(u))):
                assert all(map(torch.equal, found, wanted)), f"{mode.__name__} changes bits"
    gradient = random(*wanted[2].shape, dtype=dtype, seed=6).detach()
    first = gradients(wanted[2], gradient, x, u, s, q)
    for other in (gradient, scattered(gradient)):
        assert all(map(torch.equal, gradients(outputs(x, u)[2], other, x, u, s, q), first))


def test_compiled_bits_do_not_depend_on_the_number_of_threads(backend: str) -> None:
    if backend != "compiled":
        pytest.skip("PyTorch's own sums may split by threads")
    k, d = 4, 257
    x, u = random(501, k * d, dtype=torch.float32, seed=1), random(501, d, dtype=torch.float32, seed=2)
    s, q = random(k, dtype=torch.float32, seed=4), random(k, dtype=torch.float32, seed=5)
    before, results = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            y = write(x, u, s, k, q)
            results.append((y, *gradients(y, y.detach(), x, u, s, q)))
    finally:
        torch.set_num_threads(before)
    assert all(map(torch.equal, results[0], results[1]))
    assert all(map(torch.equal, results[0], results[2]))


def test_gradient_of_a_write_without_retention_is_the_incoming_tensor_itself() -> None:
    x, u, s = random(4, 12), random(4, 3), random(4)
    gradient = torch.ones(4, 12, dtype=torch.float64)
    (grad_x,) = gradients(write(x, u, s, 4), gradient, x)
    assert grad_x.data_ptr() == gradient.data_ptr()


def test_only_wanted_gradients_are_computed_and_they_are_the_same() -> None:
    k = 4
    inputs = [random(6, k * 8, seed=1), random(6, 8, seed=2), random(k, seed=3), random(k, seed=4)]
    y = write(inputs[0], inputs[1], inputs[2], k, inputs[3])
    gradient = random(*y.shape, seed=5).detach()
    everything = gradients(y, gradient, *inputs)
    for wanted in itertools.product([False, True], repeat=4):
        if any(wanted):
            chosen = [t if is_wanted else t.detach() for t, is_wanted in zip(inputs, wanted, strict=True)]
            some = gradients(
                write(chosen[0], chosen[1], chosen[2], k, chosen[3]), gradient, *(t for t in chosen if t.requires_grad)
            )
            expected = [g for g, is_wanted in zip(everything, wanted, strict=True) if is_wanted]
            torch.testing.assert_close(list(some), expected, rtol=0, atol=1e-12)


class _LargestAllocation(TorchDispatchMode):
    """Counts the outputs of at least `elements` elements that do not share memory with an input."""

    def __init__(self, elements: int) -> None:
        super().__init__()
        self.elements, self.found = elements, list[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        tensors = [t for t in torch.utils._pytree.tree_leaves((args, kwargs or {})) if isinstance(t, Tensor)]
        known = {t.untyped_storage().data_ptr() for t in tensors}
        for t in torch.utils._pytree.tree_leaves(output):
            if isinstance(t, Tensor) and t.numel() >= self.elements and t.untyped_storage().data_ptr() not in known:
                self.found.append(f"{func} {tuple(t.shape)}")
        return output


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_with_a_stream_dimension_is_allocated_but_results(dtype: torch.dtype) -> None:
    n, k, d = 32, 4, 64
    x, u = random(n, k * d, dtype=dtype, seed=1), random(n, d, dtype=dtype, seed=2)
    r, s, q = (random(k, dtype=torch.float32, seed=seed) for seed in (3, 4, 5))
    gradient = torch.ones(n, k * d, dtype=dtype)
    just_above_one_stream = n * d + 1
    with _LargestAllocation(just_above_one_stream) as count:
        z = streamwise_sigmoid_read(x, r, k)
        assert not count.found, f"the read allocated {count.found}"
        gradients(z, u.detach(), x, r)
        assert len(count.found) == 1, f"the read's backward makes dX alone, found {count.found}"
        count.found.clear()
        y = write(x, u, s, k)
        assert len(count.found) == 1, f"the write makes Y alone, found {count.found}"
        gradients(y, gradient, x, u, s)
        assert len(count.found) == 1, f"the write's backward makes nothing wide, found {count.found}"
        count.found.clear()
        y = write(x, u, s, k, q)
        gradients(y, gradient, x, u, s, q)
        assert len(count.found) == 2, f"with retention Y and dX, found {count.found}"


def test_operators_work_under_activation_checkpointing() -> None:
    k = 4
    x, u = random(6, k * 8, dtype=torch.float32, seed=1), random(6, 8, dtype=torch.float32, seed=2)
    r, s = random(128, dtype=torch.float32, seed=3), random(128, dtype=torch.float32, seed=4)

    def block(x: Tensor, u: Tensor) -> Tensor:
        return write(x, u * streamwise_sigmoid_read(x, r, k).tanh(), s, k)

    plain = block(x, u)
    wanted = gradients(plain, torch.ones_like(plain), x, u, r, s)
    for use_reentrant in (False, True):
        for t in (x, u, r, s):
            t.grad = None
        checkpointed = checkpoint(block, x, u, use_reentrant=use_reentrant)
        assert torch.equal(checkpointed, plain)
        checkpointed.backward(torch.ones_like(plain))
        for t, gradient in zip((x, u, r, s), wanted, strict=True):
            assert t.grad is not None
            assert torch.equal(t.grad, gradient)


def test_second_derivative_is_refused_with_a_clear_error() -> None:
    x, u, r, s = random(3, 8), random(3, 2), random(4), random(4)
    for output in (streamwise_sigmoid_read(x, r, 4), write(x, u, s, 4)):
        with pytest.raises(RuntimeError, match="differentiable once"):
            torch.autograd.grad(output.sum(), x, create_graph=True)
