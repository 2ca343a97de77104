"""The compiled CPU kernels: roundings, mixtures of dtypes, repetition, and the vectors of older processors.

    pytest tests/test_streamwise_residual_compiled.py

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import platform

import pytest
import torch
from torch import Tensor

from megatron.core.transformer import streamwise_residual_compiled, streamwise_residual_kernels
from megatron.core.transformer.streamwise_residual_compiled import CompiledKernels, load_library
from megatron.core.transformer.streamwise_residual_norm import NormCall, StreamNorm
from megatron.core.transformer.streamwise_residual_protocol import NormingStreamwiseKernels

N, K, D = 37, 5, 83  # nothing is a multiple of anything
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(scope="module")
def kernels() -> CompiledKernels:
    return CompiledKernels(load_library())


def everything(kernels: NormingStreamwiseKernels, stream: torch.dtype, branch: torch.dtype) -> list[Tensor]:
    """Every result of every kernel, with retention, without and with norms, for the same inputs."""
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    held = torch.float64 if torch.float64 in (stream, branch) else torch.float32
    x, y = (random(N, K, D, dtype=stream) for _ in range(2))
    u, z = (random(N, D, dtype=branch) for _ in range(2))
    w, g, r = (random(K, dtype=held) for _ in range(3))
    parameters = [random(D, dtype=held) for _ in range(2)]
    found = [
        kernels.read_forward(x, r, branch),
        *kernels.read_backward(z, x, r, stream, wants_grad_x=True),
        kernels.write_forward(x, u, w, g),
        *kernels.write_backward(y, x, u, w, g, branch, wants_grad_u=True),
        *kernels.write_read_forward(x, u, w, g, r, branch),
        *kernels.write_read_backward(y, z, x, u, w, g, r),
    ]
    assert all(result is not None for result in found)
    if kernels.fuses_norm(stream, branch, held):
        for norm in (StreamNorm("RMSNorm", D, 1e-5, parameters[0]), StreamNorm("LayerNorm", D, 1e-5, *parameters)):
            call, other = NormCall(norm, held), NormCall(norm, held)
            found += [
                kernels.read_forward(x, r, branch, call),
                *kernels.read_backward(z, x, r, stream, wants_grad_x=True, norm=call),
                *kernels.write_read_forward(x, u, w, g, r, branch, other),
                *kernels.write_read_backward(y, z, x, u, w, g, r, other),
            ]
            for made in (call, other):
                found += [made.mean_n, made.scale_n, made.grad_weight_d, made.grad_bias_d]
    return [result for result in found if result is not None]


def test_bf16_is_rounded_as_pytorch_rounds_it_subnormals_and_nan_included(kernels: CompiledKernels) -> None:
    """A write of one stream by 1 into zeros is the conversion from fp32 to bf16, and a read the one back."""
    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64)  # every exponent, both signs, infinities, NaN
    values_nd = bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)[None]
    rounded = kernels.read_forward(values_nd[:, None].contiguous(), torch.ones(1), torch.bfloat16)
    wanted = values_nd.to(torch.bfloat16)
    is_number = ~wanted.isnan()
    assert torch.equal(rounded.isnan(), wanted.isnan())
    assert torch.equal(rounded[is_number].view(torch.int16), wanted[is_number].view(torch.int16))
    subnormal_nkd = torch.tensor([1, 2, 127, -32767], dtype=torch.int16).view(torch.bfloat16)[None, None].contiguous()
    read = kernels.read_forward(subnormal_nkd, torch.ones(1), torch.float32)
    assert torch.equal(read, subnormal_nkd[0].float()), "subnormal bf16 numbers changed"


@pytest.mark.parametrize("stream", DTYPES, ids=str)
@pytest.mark.parametrize("branch", [*DTYPES, torch.float16], ids=str)
def test_twenty_repetitions_give_the_same_bits_in_every_mixture_of_dtypes(
    kernels: CompiledKernels, stream: torch.dtype, branch: torch.dtype
) -> None:
    first = everything(kernels, stream, branch)
    for _ in range(19):
        for one, other in zip(first, everything(kernels, stream, branch), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("d", [1, 15, 16, 17, 1023, 1024, 1025, 2100])
def test_rows_of_any_length_give_what_the_eager_kernels_give(kernels: CompiledKernels, d: int) -> None:
    x, u = torch.randn(3, 4, d), torch.randn(3, d)
    f, g = torch.rand(4), torch.rand(4)
    for found, wanted in (
        (kernels.read_forward(x, f, torch.float32), streamwise_residual_kernels.read_forward(x, f, torch.float32)),
        (kernels.write_forward(x, u, f, g), streamwise_residual_kernels.write_forward(x, u, f, g)),
    ):
        torch.testing.assert_close(found, wanted)
    found_k = kernels.write_backward(x, x, u, f, g, torch.float32, wants_grad_u=True)
    wanted_k = streamwise_residual_kernels.write_backward(x, x, u, f, g, torch.float32, wants_grad_u=True)
    for one, other in zip(found_k, wanted_k, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-4)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
def test_narrower_vectors_give_the_same_results(
    kernels: CompiledKernels, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The build for processors without AVX; one with AVX2 differs from it in the size of a vector alone."""
    flags = tuple("-march=x86-64" if flag == "-march=native" else flag for flag in streamwise_residual_compiled.FLAGS)
    monkeypatch.setattr(streamwise_residual_compiled, "FLAGS", flags)
    monkeypatch.setenv(streamwise_residual_compiled.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
    narrow = CompiledKernels(load_library())
    for dtype in (torch.float32, torch.bfloat16):
        for one, other in zip(everything(kernels, dtype, dtype), everything(narrow, dtype, dtype), strict=True):
            tolerance = 1e-5 if one.dtype is not torch.bfloat16 else 1e-2
            error = (one.double() - other.double()).abs().max() / one.double().abs().max()
            assert error < tolerance, f"{dtype}: {error} of the largest element"
