"""The compiled CPU kernels: roundings, mixtures of dtypes, repetition, and the vectors of older processors.

    pytest tests/test_streamwise_residual_compiled.py

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import platform

import pytest
import torch
from torch import Tensor

from megatron.core.transformer import streamwise_residual_kernels, streamwise_residual_library
from megatron.core.transformer.streamwise_residual_compiled import CompiledOperators
from megatron.core.transformer.streamwise_residual_controllers import Controller, ControllerKind
from megatron.core.transformer.streamwise_residual_factor_operators import FactorOperators
from megatron.core.transformer.streamwise_residual_library import load_library
from megatron.core.transformer.streamwise_residual_norm import NormCall, NormKind, StreamNorm
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseOperators, StreamwiseUpdate

N, K, D = 37, 5, 83  # nothing is a multiple of anything
P = 9  # length of a padded controller
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(scope="module")
def kernels() -> CompiledOperators:
    return CompiledOperators(load_library())


def everything(
    kernels: StreamwiseOperators,
    stream: torch.dtype,
    branch: torch.dtype,
    *,
    norms: bool = True,
    values: torch.dtype | None = None,
    d: int = D,
) -> list[Tensor]:
    """Every result of every operator, with retention, without and with a bias and norms, for the same inputs."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    held = torch.float64 if torch.float64 in (stream, branch, values) else torch.float32
    x, y, through = (random(N, K * d, dtype=stream) for _ in range(3))
    u, z = (random(N, d, dtype=branch) for _ in range(2))
    kinds: tuple[ControllerKind, ...] = ("write", "retention", "read")
    w, g, r = (Controller(random(P, dtype=values or held), K, kind, held, 0.1) for kind in kinds)
    bias_d = random(d, dtype=branch)
    parameters = [random(d, dtype=held) for _ in range(2)]
    plain = StreamwiseUpdate(u, u.dtype)
    updates = [plain, StreamwiseUpdate(u, u.dtype, bias_d)] if kernels.fuses_bias(stream, branch) else [plain]
    found: list[Tensor | None] = [kernels.read_forward(x, r, branch)]
    for added in (None, through):
        found += kernels.read_backward(z, x, r, stream, wants_grad_x=True, through=added)
    for update in updates:
        has_bias = update.bias_d is not None
        found += [
            kernels.write_forward(x, update, w, g),
            *kernels.write_backward(y, x, update, w, g, wants_grad_x=True, wants_grad_u=True)[: 4 + has_bias],
            *kernels.write_read_forward(x, update, w, g, r, branch),
            *kernels.write_read_backward(y, z, x, update, w, g, r)[: 5 + has_bias],
        ]
    assert all(result is not None for result in found)
    if norms and kernels.fuses_norm(d, stream, branch, held):
        for norm in (StreamNorm("RMSNorm", d, 1e-5, parameters[0]), StreamNorm("LayerNorm", d, 1e-5, *parameters)):
            call, other = NormCall(norm, held), NormCall(norm, held)
            found += [
                kernels.read_forward(x, r, branch, call),
                *kernels.read_backward(z, x, r, stream, wants_grad_x=True, through=through, norm=call),
                *kernels.write_read_forward(x, plain, w, g, r, branch, other),
                *kernels.write_read_backward(y, z, x, plain, w, g, r, other),
            ]
            for made in (call, other):
                found += [made.mean_n, made.scale_n, made.grad_weight_d, made.grad_bias_d]
    return [result for result in found if result is not None]


def test_bf16_is_rounded_as_pytorch_rounds_it_subnormals_and_nan_included(kernels: CompiledOperators) -> None:
    """A write of one stream by 1 into zeros is the conversion from fp32 to bf16, and a read the one back."""
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64)  # every exponent, both signs, infinities, NaN
    values_nd = bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)[None]
    whole = Controller(torch.ones(1), 1, "factor", torch.float32)
    rounded = kernels.read_forward(values_nd, whole, torch.bfloat16)
    wanted = values_nd.to(torch.bfloat16)
    is_number = ~wanted.isnan()
    assert torch.equal(rounded.isnan(), wanted.isnan())
    assert torch.equal(rounded[is_number].view(torch.int16), wanted[is_number].view(torch.int16))
    subnormal_nd = torch.tensor([[1, 2, 127, -32767]], dtype=torch.int16).view(torch.bfloat16)
    read = kernels.read_forward(subnormal_nd, whole, torch.float32)
    assert torch.equal(read, subnormal_nd.float()), "subnormal bf16 numbers changed"


@pytest.mark.parametrize("stream", DTYPES, ids=str)
@pytest.mark.parametrize("branch", [*DTYPES, torch.float16], ids=str)
def test_twenty_repetitions_give_the_same_bits_in_every_mixture_of_dtypes(
    kernels: CompiledOperators, stream: torch.dtype, branch: torch.dtype
) -> None:
    first = everything(kernels, stream, branch)
    for _ in range(19):
        for one, other in zip(first, everything(kernels, stream, branch), strict=True):
            assert torch.equal(one, other)


def _without_biases(kernels: CompiledOperators) -> CompiledOperators:
    """The same operators, of which `everything` asks no bias."""
    kernels = CompiledOperators(load_library())
    kernels.fuses_bias = lambda *_: False  # type: ignore[method-assign]
    return kernels


@pytest.mark.parametrize("d", [1, 15, 16, 17, 1023, 1024, 1025, 2100])
@pytest.mark.parametrize("values", [torch.float32, torch.float64], ids=str)
def test_rows_of_any_length_give_what_the_eager_kernels_give(
    kernels: CompiledOperators, d: int, values: torch.dtype
) -> None:
    stream = values  # fp64 controllers beside an fp32 stream run on the eager kernels
    compiled, eager = _without_biases(kernels), FactorOperators("eager", streamwise_residual_kernels)
    for found, wanted in zip(
        everything(compiled, stream, stream, norms=False, values=values, d=d),
        everything(eager, stream, stream, norms=False, values=values, d=d),
        strict=True,
    ):
        assert found.dtype is wanted.dtype
        tolerance = 1e-5 if stream is torch.float32 else 1e-13
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16], ids=str)
def test_a_gradient_that_passes_through_a_read_is_added_with_the_bits_of_an_addition(
    kernels: CompiledOperators, stream: torch.dtype, branch: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(2)
    x, through = (torch.randn(N, K * D, generator=generator).to(stream) for _ in range(2))
    z = torch.randn(N, D, generator=generator).to(branch)
    read = Controller(torch.randn(P, generator=generator), K, "read", torch.float32)
    weight_d, bias_d = torch.randn(2, D, generator=generator)
    for norm in (None, StreamNorm("RMSNorm", D, 1e-5, weight_d), StreamNorm("LayerNorm", D, 1e-5, weight_d, bias_d)):
        calls = [None, None] if norm is None else [NormCall(norm, torch.float32), NormCall(norm, torch.float32)]
        for call in calls:
            kernels.read_forward(x, read, branch, call)
        alone, wanted = kernels.read_backward(z, x, read, stream, wants_grad_x=True, norm=calls[0])
        joined, found = kernels.read_backward(z, x, read, stream, wants_grad_x=True, through=through, norm=calls[1])
        assert alone is not None
        assert joined is not None
        assert torch.equal(joined, alone + through), "one rounding is missing: the read's, or the addition's"
        assert found is not None
        assert wanted is not None
        assert torch.equal(found, wanted), "the controller's gradient depends on what passes through"


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_in_the_write_gives_the_bits_of_an_addition_before_it(
    kernels: CompiledOperators, stream: torch.dtype
) -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(N, K * D, generator=generator).to(stream) for _ in range(2))
    u, z, bias = (torch.randn(*s, generator=generator).to(stream) for s in ((N, D), (N, D), (D,)))
    w, r = (Controller(torch.randn(P, generator=generator), K, kind, torch.float32) for kind in ("write", "read"))
    assert kernels.fuses_bias(stream, stream)
    results, gradients = [], []
    for update in (StreamwiseUpdate(u, stream, bias), StreamwiseUpdate(u + bias, stream)):
        *of_write, grad_bias_d = kernels.write_backward(y, None, update, w, None, wants_grad_x=True, wants_grad_u=True)
        *of_both, other_bias_d = kernels.write_read_backward(y, z, x, update, w, None, r)
        gradients += [(of_write[1], grad_bias_d), (of_both[1], other_bias_d)]
        forwards = [
            kernels.write_forward(x, update, w, None),
            *kernels.write_read_forward(x, update, w, None, r, stream),
        ]
        results.append([*forwards, *of_write, *of_both])
    for fused, apart in zip(*results, strict=True):
        assert (fused is None) == (apart is None)
        assert fused is None or torch.equal(fused, apart)
    for grad_u, grad_bias_d in gradients[:2]:
        assert grad_u is not None
        assert grad_bias_d is not None
        torch.testing.assert_close(grad_bias_d, grad_u.float().sum(0), rtol=1e-5, atol=1e-5)
    assert all(grad_bias_d is None for _, grad_bias_d in gradients[2:]), "a gradient of a bias that is not there"


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
def test_narrower_vectors_give_the_same_results(
    kernels: CompiledOperators, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build for processors without AVX; one with AVX2 differs from it in the size of a vector alone."""
    flags = tuple("-march=x86-64" if flag == "-march=native" else flag for flag in streamwise_residual_library.FLAGS)
    monkeypatch.setattr(streamwise_residual_library, "FLAGS", flags)
    monkeypatch.setenv(streamwise_residual_library.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
    narrow = CompiledOperators(load_library())
    for dtype in (torch.float32, torch.bfloat16):
        for one, other in zip(everything(kernels, dtype, dtype), everything(narrow, dtype, dtype), strict=True):
            tolerance = 1e-5 if one.dtype is not torch.bfloat16 else 1e-2
            error = (one.double() - other.double()).abs().max() / one.double().abs().max()
            assert error < tolerance, f"{dtype}: {error} of the largest element"


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [4, 5, 9])
@pytest.mark.parametrize("kind", [None, "RMSNorm"])
@pytest.mark.parametrize("retained", [False, True], ids=["kept whole", "retention"])
def test_a_large_stream_has_the_bits_of_its_parts(
    kernels: CompiledOperators, stream: torch.dtype, k: int, kind: NormKind | None, retained: bool
) -> None:
    """A stream that goes past the caches, whole, and in parts small enough to stay in them."""
    d, parts = 128, 4
    n = parts * 800 * (2 if stream is torch.bfloat16 else 1)
    assert n * k * d * stream.itemsize > 4 << 20 > n * k * d * stream.itemsize // parts, "the sizes are off"
    generator = torch.Generator().manual_seed(4)
    x, y, through = (torch.randn(n, k * d, generator=generator).to(stream) for _ in range(3))
    u, z = (torch.randn(n, d, generator=generator).to(stream) for _ in range(2))
    kinds: tuple[ControllerKind, ...] = ("write", "read", "retention")
    w, r, q = (Controller(torch.randn(P, generator=generator), k, kind, torch.float32, 0.1) for kind in kinds)
    g = q if retained else None
    norm = None if kind is None else StreamNorm(kind, d, 1e-5, torch.randn(d, generator=generator))

    def results(rows: slice) -> list[Tensor]:
        x_nw, y_nw, u_nd, z_nd = x[rows], y[rows], u[rows], z[rows]
        update = StreamwiseUpdate(u_nd, stream)
        read_call, fused_call = (None if norm is None else NormCall(norm, torch.float32) for _ in range(2))
        found: list[Tensor | None] = [kernels.read_forward(x_nw, r, stream, read_call)]
        for added in (None, through[rows]):
            found.append(
                kernels.read_backward(z_nd, x_nw, r, stream, wants_grad_x=True, through=added, norm=read_call)[0]
            )
        found.append(kernels.write_forward(x_nw, update, w, g))
        found += kernels.write_backward(y_nw, x_nw, update, w, g, wants_grad_x=True, wants_grad_u=True)[:2]
        found += kernels.write_backward(y_nw, None, update, w, None, wants_grad_x=True, wants_grad_u=True)[:2]
        found += kernels.write_read_forward(x_nw, update, w, g, r, stream, fused_call)
        found += kernels.write_read_backward(y_nw, z_nd, x_nw, update, w, g, r, fused_call)[:2]
        assert all(result is not None for result in found)
        return [result for result in found if result is not None]

    whole = results(slice(None))
    length = n // parts
    in_parts = [results(slice(start, start + length)) for start in range(0, n, length)]
    for index, one in enumerate(whole):
        other = torch.cat([part[index] for part in in_parts])
        assert torch.equal(one, other), f"result {index} has other bits in a large stream"
