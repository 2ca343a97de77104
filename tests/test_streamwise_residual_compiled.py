"""The compiled CPU operators: roundings, mixtures of dtypes, repetition, and the vectors of older processors.

    pytest tests/test_streamwise_residual_compiled.py

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import itertools
import platform
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer import streamwise_residual_kernels, streamwise_residual_library
from megatron.core.transformer.streamwise_residual_autograd import AutogradOperators
from megatron.core.transformer.streamwise_residual_compiled import CompiledOperators
from megatron.core.transformer.streamwise_residual_factor_operators import FactorOperators
from megatron.core.transformer.streamwise_residual_library import load_library
from megatron.core.transformer.streamwise_residual_norm import NormKind, StreamNorm
from megatron.core.transformer.streamwise_residual_protocol import StreamwiseOperators, WriteOptions

N, K, D = 37, 5, 83  # nothing is a multiple of anything
P = 9  # length of a padded controller
DTYPES = (torch.float32, torch.bfloat16, torch.float64)


@pytest.fixture(scope="module")
def operators() -> CompiledOperators:
    return CompiledOperators(load_library())


class Case:
    """Random inputs of one size, and every operator on them with its gradients."""

    def __init__(
        self,
        stream: torch.dtype,
        branch: torch.dtype,
        *,
        values: torch.dtype | None = None,
        n: int = N,
        k: int = K,
        d: int = D,
        seed: int = 1,
    ) -> None:
        self.held = torch.float64 if torch.float64 in (stream, branch, values) else torch.float32
        self.k, self.branch, generator = k, branch, torch.Generator().manual_seed(seed)

        def random(*shape: int, dtype: torch.dtype) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

        self.x, self.grad_y, self.through = (random(n, k * d, dtype=stream) for _ in range(3))
        self.u, self.grad_z = (random(n, d, dtype=branch) for _ in range(2))
        self.write_p, self.retention_p, self.read_p = (random(P, dtype=values or self.held) for _ in range(3))
        self.bias_d = random(d, dtype=branch)
        weight_d, shift_d = (random(d, dtype=self.held).requires_grad_() for _ in range(2))
        self.norms: dict[NormKind | None, StreamNorm | None] = {
            None: None,
            "RMSNorm": StreamNorm("RMSNorm", d, 1e-5, weight_d),
            "LayerNorm": StreamNorm("LayerNorm", d, 1e-5, weight_d, shift_d),
        }
        for tensor in (self.x, self.u, self.write_p, self.retention_p, self.read_p, self.bias_d):
            tensor.requires_grad_()
        self.rows = slice(None)

    def read(self, operators: StreamwiseOperators, kind: NormKind | None = None, *, through: bool = False) -> Found:
        """z and the gradients of the stream, the controller and the norm."""
        norm, x, grad_z = self.norms[kind], self.x[self.rows], self.grad_z[self.rows]
        made: Any = operators.read(
            x, self.read_p, norm, num_streams=self.k, is_logit=True, z_dtype=self.branch, passes=through
        )
        outputs, gradients = (made, [grad_z, self.through[self.rows]]) if through else ([made], [grad_z])
        return self._found(outputs[:1], outputs, gradients, x=x, read=self.read_p, **_parameters(norm))

    def write(
        self,
        operators: StreamwiseOperators,
        *,
        retained: bool = True,
        biased: bool = False,
        update: Tensor | None = None,
    ) -> Found:
        """Y and the gradients of the stream, the update, the controllers and the bias."""
        x, inputs, options = self.x[self.rows], self._inputs(retained, biased, update), WriteOptions(self.k, True, 0.1)
        y = operators.write(x, inputs["u"], inputs.get("bias"), None, self.write_p, inputs.get("retention"), options)
        return self._found([y], [y], [self.grad_y[self.rows]], x=x, **inputs)

    def write_read(
        self,
        operators: StreamwiseOperators,
        kind: NormKind | None = None,
        *,
        retained: bool = True,
        biased: bool = False,
        update: Tensor | None = None,
    ) -> Found:
        """Y, z and all gradients."""
        x, inputs, options = self.x[self.rows], self._inputs(retained, biased, update), WriteOptions(self.k, True, 0.1)
        norm = self.norms[kind]
        u, bias, retention = inputs["u"], inputs.get("bias"), inputs.get("retention")
        outputs = operators.write_read(
            x, u, bias, None, self.write_p, retention, self.read_p, norm, options, self.branch
        )
        gradients = [self.grad_y[self.rows], self.grad_z[self.rows]]
        return self._found(outputs, outputs, gradients, x=x, read=self.read_p, **inputs, **_parameters(norm))

    def _inputs(self, retained: bool, biased: bool, update: Tensor | None) -> dict[str, Tensor]:
        given = {"u": self.u[self.rows] if update is None else update, "write": self.write_p}
        given |= {"retention": self.retention_p} if retained else {}
        return given | ({"bias": self.bias_d} if biased else {})

    def _found(self, results: Any, outputs: Any, gradients: list[Tensor], **inputs: Tensor) -> Found:
        found = torch.autograd.grad(outputs, list(inputs.values()), gradients)
        named = {f"grad_{name}": gradient for name, gradient in zip(inputs, found, strict=True)}
        return {**{f"result {i}": result.detach() for i, result in enumerate(results)}, **named}


Found = dict[str, Tensor]


def _parameters(norm: StreamNorm | None) -> Found:
    if norm is None or norm.weight_d is None:
        return {}
    return {"weight": norm.weight_d} | ({} if norm.bias_d is None else {"shift": norm.bias_d})


def everything(operators: StreamwiseOperators, case: Case, *, fused: bool = True) -> list[Tensor]:
    """Every result of every operator, with and without retention; where `fused`, with biases and norms too."""
    stream = case.x.dtype
    biases = [False, True] if fused and operators.fuses_bias(stream, case.branch) else [False]
    norms = [None, "RMSNorm", "LayerNorm"] if operators.fuses_norm(D, stream, case.branch, case.held) else [None]
    found: list[Found] = []
    for kind in norms if fused else [None]:
        found += [case.read(operators, kind, through=through) for through in (False, True)]  # type: ignore[arg-type]
        found += [case.write_read(operators, kind, biased=biased) for biased in biases]  # type: ignore[arg-type]
    for retained in (False, True):
        found += [case.write(operators, retained=retained, biased=biased) for biased in biases]
    return [result for results in found for result in results.values()]


def test_bf16_is_rounded_as_pytorch_rounds_it_subnormals_and_nan_included(operators: CompiledOperators) -> None:
    """A read of one stream by 1 is the conversion from fp32 to bf16, and the one back."""

    def converted(x_nd: Tensor, to: torch.dtype) -> Tensor:
        z: Tensor = operators.read(x_nd, torch.ones(1), None, num_streams=1, is_logit=False, z_dtype=to, passes=False)
        return z

    bits = torch.arange(0, 1 << 32, 65521, dtype=torch.int64)  # every exponent, both signs, infinities, NaN
    values_nd = bits.where(bits < 1 << 31, bits - (1 << 32)).to(torch.int32).view(torch.float32)[None]
    rounded, wanted = converted(values_nd, torch.bfloat16), values_nd.to(torch.bfloat16)
    is_number = ~wanted.isnan()
    assert torch.equal(rounded.isnan(), wanted.isnan())
    assert torch.equal(rounded[is_number].view(torch.int16), wanted[is_number].view(torch.int16))
    subnormal_nd = torch.tensor([[1, 2, 127, -32767]], dtype=torch.int16).view(torch.bfloat16)
    assert torch.equal(converted(subnormal_nd, torch.float32), subnormal_nd.float()), "subnormal bf16 numbers changed"


@pytest.mark.parametrize("stream", DTYPES, ids=str)
@pytest.mark.parametrize("branch", [*DTYPES, torch.float16], ids=str)
def test_twenty_repetitions_give_the_same_bits_in_every_mixture_of_dtypes(
    operators: CompiledOperators, stream: torch.dtype, branch: torch.dtype
) -> None:
    case = Case(stream, branch)
    first = everything(operators, case)
    for _ in range(19):
        for one, other in zip(first, everything(operators, case), strict=True):
            assert torch.equal(one, other)


@pytest.mark.parametrize("d", [1, 15, 16, 17, 1023, 1024, 1025, 2100])
@pytest.mark.parametrize("values", [torch.float32, torch.float64], ids=str)
def test_rows_of_any_length_give_what_the_eager_kernels_give(
    operators: CompiledOperators, d: int, values: torch.dtype
) -> None:
    eager = AutogradOperators(FactorOperators("eager", streamwise_residual_kernels))
    case = Case(values, values, values=values, d=d)
    for found, wanted in zip(
        everything(operators, case, fused=False), everything(eager, case, fused=False), strict=True
    ):
        assert found.dtype is wanted.dtype
        tolerance = 1e-5 if values is torch.float32 else 1e-13
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance * float(wanted.abs().max()))


@pytest.mark.parametrize("update", [*DTYPES[:2], torch.float16], ids=str)
@pytest.mark.parametrize("branch", [*DTYPES[:2], torch.float16], ids=str)
@pytest.mark.parametrize("stream", DTYPES[:2], ids=str)
def test_an_update_of_another_dtype_than_the_next_read_gives_the_bits_of_two_operators(
    operators: CompiledOperators, stream: torch.dtype, branch: torch.dtype, update: torch.dtype
) -> None:
    """With dropout beside an fp32 stream, the update is fp32 and the branch half precision."""
    case = Case(stream, branch)
    u = case.u.detach().to(update).requires_grad_()
    case.norms = {None: None, "RMSNorm": case.norms["RMSNorm"]}
    fused = operators.fuses_norm(D, stream, branch, torch.float32)
    for kind in (None, "RMSNorm") if fused else (None,):
        found = case.write_read(operators, kind, update=u)
        y = operators.write(case.x, u, None, None, case.write_p, case.retention_p, WriteOptions(K, True, 0.1))
        z, through = operators.read(
            y,
            case.read_p,
            case.norms[kind],
            num_streams=K,
            is_logit=True,
            z_dtype=branch,
            passes=True,
        )
        inputs = {"x": case.x, "u": u, "write": case.write_p, "retention": case.retention_p, "read": case.read_p}
        wanted = torch.autograd.grad((z, through), list(inputs.values()), (case.grad_z, case.grad_y))
        assert torch.equal(found["result 0"], y), "Y differs"
        assert torch.equal(found["result 1"], z), "z differs"
        for name, gradient in zip(inputs, wanted, strict=True):
            assert found[f"grad_{name}"].dtype is gradient.dtype
            torch.testing.assert_close(found[f"grad_{name}"], gradient, rtol=1e-2, atol=2e-2, msg=name)


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("branch", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", [None, "RMSNorm", "LayerNorm"])
def test_a_gradient_that_passes_through_a_read_is_added_with_the_bits_of_an_addition(
    operators: CompiledOperators, stream: torch.dtype, branch: torch.dtype, kind: NormKind | None
) -> None:
    case = Case(stream, branch, seed=2)
    alone, joined = case.read(operators, kind), case.read(operators, kind, through=True)
    assert torch.equal(joined.pop("grad_x"), alone.pop("grad_x") + case.through), "a rounding is missing"
    assert alone.keys() == joined.keys()
    for name, wanted in alone.items():
        assert torch.equal(joined[name], wanted), f"{name} depends on what passes through"


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_in_the_write_gives_the_bits_of_an_addition_before_it(
    operators: CompiledOperators, stream: torch.dtype
) -> None:
    case = Case(stream, stream, seed=3)
    assert operators.fuses_bias(stream, stream)
    added = (case.u + case.bias_d).detach().requires_grad_()
    for operator in (case.write, case.write_read):
        fused = operator(operators, biased=True, retained=False)
        apart = operator(operators, update=added, retained=False)
        grad_bias_d = fused.pop("grad_bias")
        torch.testing.assert_close(grad_bias_d.float(), fused["grad_u"].float().sum(0), rtol=1e-2, atol=1e-4)
        assert fused.keys() == apart.keys()
        for name, wanted in apart.items():
            assert torch.equal(fused[name], wanted), name


@pytest.mark.parametrize("stream", DTYPES, ids=str)
@pytest.mark.parametrize("k", [1, 3, 4, 5, 8])
@pytest.mark.parametrize("kind", [None, "RMSNorm", "LayerNorm"])
@pytest.mark.parametrize("n", [N, 3000], ids=["in the caches", "past them"])
def test_a_write_and_read_that_keeps_its_stream_has_the_bits_of_two_operators(
    operators: CompiledOperators, stream: torch.dtype, k: int, kind: NormKind | None, n: int
) -> None:
    """Gradients too, which the other write and read rounds once less."""
    branch = torch.bfloat16 if stream is torch.float32 and k == 8 else stream
    d = D if n == N else 128
    case = Case(stream, branch, n=n, k=k, d=d)
    bias_d = case.bias_d if operators.fuses_bias(stream, branch) else None
    options, norm = WriteOptions(k, True, keeps_y=True), case.norms[kind]
    inputs = {"x": case.x, "u": case.u, "write": case.write_p, "read": case.read_p, **_parameters(norm)}
    inputs |= {} if bias_d is None else {"bias": bias_d}
    gradients = (case.grad_y, case.grad_z)
    one = operators.write_read(case.x, case.u, bias_d, None, case.write_p, None, case.read_p, norm, options, branch)
    found = torch.autograd.grad(one, list(inputs.values()), gradients)
    y = operators.write(case.x, case.u, bias_d, None, case.write_p, None, options)
    z, through = operators.read(y, case.read_p, norm, num_streams=k, is_logit=True, z_dtype=branch, passes=True)
    wanted = torch.autograd.grad((through, z), list(inputs.values()), gradients)
    for result, apart in zip(one, (y, z), strict=True):
        assert torch.equal(result, apart), "the forward differs"
    for name, gradient, apart in zip(inputs, found, wanted, strict=True):
        assert torch.equal(gradient, apart), f"the gradient of {name} differs"


def test_only_what_a_wanted_gradient_needs_is_saved(operators: CompiledOperators) -> None:
    """A write without retention keeps its update alone, one whose map is frozen nothing; a write and read never Y."""
    case, saved = Case(torch.float32, torch.float32), []

    def note(tensor: Tensor) -> Tensor:
        saved.append(tensor.data_ptr())
        return tensor

    options, wide = WriteOptions(K, True, 0.1), {case.x.data_ptr(): "x", case.u.data_ptr(): "u"}

    def kept() -> list[str]:
        names = sorted(wide[pointer] for pointer in saved if pointer in wide)
        others = [pointer for pointer in saved if pointer not in wide]
        saved.clear()
        return [*names, *("Y" for pointer in others if pointer == y.data_ptr())]

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        y = operators.write(case.x, case.u, None, None, case.write_p, None, options)
        assert kept() == ["u"]
        y = operators.write(case.x, case.u, None, None, case.write_p, case.retention_p, options)
        assert kept() == ["u", "x"]
        y = operators.write(case.x, case.u, None, None, case.write_p.detach(), None, options)
        assert kept() == []
        y, _ = operators.write_read(
            case.x, case.u, None, None, case.write_p, None, case.read_p, case.norms["RMSNorm"], options, torch.float32
        )
        assert kept() == ["u", "x"]
        y, _ = operators.write_read(
            case.x,
            case.u,
            None,
            None,
            case.write_p,
            None,
            case.read_p,
            None,
            options._replace(keeps_y=True),
            torch.float32,
        )
        assert kept() == ["u", "Y"]


@pytest.mark.skipif(platform.machine() != "x86_64", reason="the flags are those of x86-64")
@pytest.mark.parametrize("level", ["x86-64", "x86-64-v3"], ids=["without AVX", "AVX2"])
def test_narrower_vectors_give_the_same_results(
    operators: CompiledOperators,
    level: str,
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The builds for processors with smaller registers."""
    if level == "x86-64-v3" and " avx2 " not in Path("/proc/cpuinfo").read_text():
        pytest.skip("this processor has no AVX2")
    flags = tuple(f"-march={level}" if flag == "-march=native" else flag for flag in streamwise_residual_library.FLAGS)
    monkeypatch.setattr(streamwise_residual_library, "FLAGS", flags)
    monkeypatch.setenv(streamwise_residual_library.CACHE_VARIABLE, str(tmp_path_factory.mktemp("cache")))
    narrow = CompiledOperators(load_library())
    small, past = {"n": N, "k": K, "d": D}, {"n": 6000, "k": 4, "d": 128}  # which goes past the caches
    for dtype, sizes in itertools.product((torch.float32, torch.bfloat16), (small, past)):
        case = Case(dtype, dtype, n=sizes["n"], k=sizes["k"], d=sizes["d"])
        for one, other in zip(everything(operators, case), everything(narrow, case), strict=True):
            tolerance = 1e-5 if one.dtype is not torch.bfloat16 else 1e-2
            if dtype is torch.bfloat16 and sizes is past:  # sums over 6000 tokens, some of which round the other way
                tolerance = max(tolerance, 1e-4)
            error = (one.double() - other.double()).abs().max() / one.double().abs().max()
            assert error < tolerance, f"{dtype}: {error} of the largest element"


@pytest.mark.parametrize("stream", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("k", [2, 3, 4, 8, 9])
@pytest.mark.parametrize("kind", [None, "RMSNorm"])
@pytest.mark.parametrize("retained", [False, True], ids=["kept whole", "retention"])
def test_a_large_stream_has_the_bits_of_its_parts(
    operators: CompiledOperators, stream: torch.dtype, k: int, kind: NormKind | None, retained: bool
) -> None:
    """Streams and branches that go past the caches, whole on two threads, and in parts small enough to stay in them."""
    d, parts = 128, 16
    n = parts * 520 * (2 if stream is torch.bfloat16 else 1)
    branch_bytes = n * d * stream.itemsize
    assert branch_bytes > 4 << 20 > k * branch_bytes // parts, "the sizes are off"
    case = Case(stream, stream, n=n, k=k, d=d, seed=4)

    def results(rows: slice) -> list[Tensor]:
        case.rows = rows
        found = [
            *(case.read(operators, kind, through=through) for through in (False, True)),
            case.write(operators, retained=retained),
            case.write_read(operators, kind, retained=retained),
        ]
        length = case.x[rows].shape[0]
        return [result for results in found for result in results.values() if result.shape[0] == length]

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        whole = results(slice(None))
    finally:
        torch.set_num_threads(threads)
    length = n // parts
    in_parts = [results(slice(start, start + length)) for start in range(0, n, length)]
    assert len(whole) == 2 + 2 + 3 + 4
    for index, one in enumerate(whole):
        other = torch.cat([part[index] for part in in_parts])
        assert torch.equal(one, other), f"result {index} has other bits in a large stream"
