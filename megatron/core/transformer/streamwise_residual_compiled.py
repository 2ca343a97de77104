"""Compiled CPU kernels of the streamwise operators: builds streamwise_residual_cpu.cpp once and calls it.

Chosen by streamwise_residual_backends for CPU tensors, used by streamwise_residual_ops. The first use on a machine runs
the C++ compiler (`$CXX`, else c++; about 4 s) and keeps the library under `$MEGATRON_STREAMWISE_CACHE`, by default
~/.cache/megatron-wide-residual; later processes load it from there. The file's name is a digest of the source, the
compiler, its flags and the CPU's features, so a home folder shared by different machines is safe, and it is renamed
into place, so processes that build at once do not disturb each other.

What always holds: results are the same bits for any number of threads. Pairs of dtypes that the source does not
instantiate (those with fp16) run on the eager kernels.

Tensor names: n tokens, k streams, d branch width.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from megatron.core.transformer import streamwise_residual_kernels as eager
from megatron.core.transformer.streamwise_residual_compiled_norm import CompiledNorm
from megatron.core.transformer.streamwise_residual_norm import NormCall

CACHE_VARIABLE = "MEGATRON_STREAMWISE_CACHE"
SOURCE = Path(__file__).with_name("streamwise_residual_cpu.cpp")
_HEADERS = tuple(SOURCE.with_name(f"streamwise_residual_{name}.h") for name in ("norm", "vectors"))
FLAGS = ("-std=c++17", "-O3", "-march=native", "-fopenmp", "-fPIC", "-shared")
TOKEN_BLOCK = 16  # of the C++ source: tokens per partial sum

_NAMES = {torch.float32: "float", torch.bfloat16: "bf16", torch.float64: "double"}
_POINTERS = {  # arguments of each function behind n, k, d and the number of threads
    "read_forward": 4,
    "read_backward": 7,
    "write_backward": 10,
    "write_read_forward": 8,
    "write_read_backward": 14,
}


class CompiledKernelsError(RuntimeError):
    """The compiled kernels cannot be had here; the message says why and what to do."""


def load_library() -> ctypes.CDLL:
    """Load the kernels, built first unless a build for this source and machine exists; else CompiledKernelsError."""
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        raise CompiledKernelsError(
            f"no C++ compiler {os.environ.get('CXX', 'c++')!r} on PATH; install g++ or clang++, or point CXX at one"
        )
    library = _cache_folder() / f"streamwise_{_digest(compiler)}.so"
    if not library.exists():
        _build(compiler, library)
    try:
        loaded = ctypes.CDLL(str(library))
    except OSError as error:
        raise CompiledKernelsError(f"{library} does not load ({error}); delete it to have it built again") from error
    return loaded


def _cache_folder() -> Path:
    folder = Path(os.environ.get(CACHE_VARIABLE) or Path.home() / ".cache" / "megatron-wide-residual")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise CompiledKernelsError(f"{folder} cannot be made ({error}); set {CACHE_VARIABLE} to a folder") from error
    return folder


def _digest(compiler: str) -> str:
    """Names a build: source, compiler and its version, flags, CPU features."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=False).stdout
    sources = [path.read_text() for path in (SOURCE, *_HEADERS)]
    parts = [*sources, compiler, version, *FLAGS, _cpu_features()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _cpu_features() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return f"{platform.machine()} {platform.processor()}"
    kept = ("model name", "flags", "Features", "CPU part")
    return "\n".join(sorted({line for line in cpuinfo.read_text().splitlines() if line.startswith(kept)}))


def _build(compiler: str, library: Path) -> None:
    try:
        with tempfile.TemporaryDirectory(dir=library.parent, prefix="build-") as folder:
            built = Path(folder) / library.name
            command = [compiler, *FLAGS, str(SOURCE), "-o", str(built)]
            run = subprocess.run(command, capture_output=True, text=True, check=False)
            if run.returncode:
                reason = (run.stderr.strip().splitlines() or ["no message"])[0]
                raise CompiledKernelsError(f"{' '.join(command[:-2])} failed: {reason}")
            os.replace(built, library)
    except OSError as error:
        raise CompiledKernelsError(
            f"{library.parent} cannot be written ({error}); set {CACHE_VARIABLE} to a folder that can"
        ) from error


class CompiledKernels:
    """StreamwiseKernels (streamwise_residual_backends) for CPU tensors, through the library."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        self._function = cache(self._find)

    def _find(self, name: str, x: torch.dtype, u: torch.dtype, held: torch.dtype) -> Callable[..., None] | None:
        """The library's function for these dtypes of stream, branch and factors; None where it has none."""
        symbol = f"{name}_{_NAMES.get(x)}_{_NAMES.get(u)}"
        wanted = torch.float64 if torch.float64 in (x, u) else torch.float32
        if held is not wanted or not hasattr(self._library, symbol):
            return None
        function = self._library[symbol]
        function.argtypes = [ctypes.c_int64] * 3 + [ctypes.c_int] + [ctypes.c_void_p] * _POINTERS[name]
        function.restype = None
        return function

    def fuses_norm(self, stream: torch.dtype, branch: torch.dtype, held: torch.dtype) -> bool:
        """Whether there are kernels for these dtypes of stream, branch and factors: all of them take a norm."""
        return self._function("read_forward", stream, branch, held) is not None

    def read_forward(
        self, x_nkd: Tensor, factor_k: Tensor, output_dtype: torch.dtype, norm: NormCall | None = None
    ) -> Tensor:
        n, k, d = x_nkd.shape
        call = self._function("read_forward", x_nkd.dtype, output_dtype, factor_k.dtype)
        if call is None:
            assert norm is None
            return eager.read_forward(x_nkd, factor_k, output_dtype)
        z_nd = x_nkd.new_empty((n, d), dtype=output_dtype)
        normed = None if norm is None else CompiledNorm.forward(norm, n)
        call(n, k, d, torch.get_num_threads(), *map(_pointer, (x_nkd, factor_k, z_nd, normed)))
        return z_nd

    def read_backward(
        self,
        grad_z_nd: Tensor,
        x_nkd: Tensor | None,
        factor_k: Tensor,
        x_dtype: torch.dtype,
        *,
        wants_grad_x: bool,
        norm: NormCall | None = None,
    ) -> tuple[Tensor | None, Tensor | None]:
        n, d = grad_z_nd.shape
        k = factor_k.shape[0]
        call = self._function("read_backward", x_dtype, grad_z_nd.dtype, factor_k.dtype)
        if call is None:
            return eager.read_backward(grad_z_nd, x_nkd, factor_k, x_dtype, wants_grad_x=wants_grad_x)
        grad_x_nkd = grad_z_nd.new_empty((n, k, d), dtype=x_dtype) if wants_grad_x else None
        grad_factor_k = None if x_nkd is None else _sums(k)
        partial = _partial_sums(n, k)
        normed = None if norm is None else CompiledNorm.backward(norm, token_blocks(n))
        call(
            *(n, k, d, torch.get_num_threads()),
            *map(_pointer, (grad_z_nd, x_nkd, factor_k, grad_x_nkd, partial, grad_factor_k, normed)),
        )
        return grad_x_nkd, grad_factor_k

    def write_forward(self, x_nkd: Tensor, u_nd: Tensor, factor_k: Tensor, retention_k: Tensor | None) -> Tensor:
        n, k, d = x_nkd.shape
        call = self._function("write_read_forward", x_nkd.dtype, u_nd.dtype, factor_k.dtype)
        if call is None:
            return eager.write_forward(x_nkd, u_nd, factor_k, retention_k)
        y_nkd = torch.empty_like(x_nkd)
        pointers = map(_pointer, (x_nkd, u_nd, factor_k, retention_k, None, y_nkd, None, None))
        call(n, k, d, torch.get_num_threads(), *pointers)
        return y_nkd

    def write_backward(
        self,
        grad_y_nkd: Tensor,
        x_nkd: Tensor | None,
        u_nd: Tensor | None,
        factor_k: Tensor,
        retention_k: Tensor | None,
        u_dtype: torch.dtype,
        *,
        wants_grad_u: bool,
    ) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        n, k, d = grad_y_nkd.shape
        call = self._function("write_backward", grad_y_nkd.dtype, u_dtype, factor_k.dtype)
        if call is None:
            return eager.write_backward(
                grad_y_nkd, x_nkd, u_nd, factor_k, retention_k, u_dtype, wants_grad_u=wants_grad_u
            )
        grad_x_nkd = None if retention_k is None else torch.empty_like(grad_y_nkd)
        grad_u_nd = grad_y_nkd.new_empty((n, d), dtype=u_dtype) if wants_grad_u else None
        grad_factor_k = None if u_nd is None else _sums(k)
        grad_retention_k = None if x_nkd is None else _sums(k)
        inputs = (grad_y_nkd, x_nkd, u_nd, factor_k, retention_k)
        outputs = (grad_x_nkd, grad_u_nd, _partial_sums(n, 2 * k), grad_factor_k, grad_retention_k)
        call(n, k, d, torch.get_num_threads(), *map(_pointer, inputs + outputs))
        return grad_x_nkd, grad_u_nd, grad_factor_k, grad_retention_k

    def write_read_forward(
        self,
        x_nkd: Tensor,
        u_nd: Tensor,
        write_factor_k: Tensor,
        retention_k: Tensor | None,
        read_factor_k: Tensor,
        z_dtype: torch.dtype,
        norm: NormCall | None = None,
    ) -> tuple[Tensor, Tensor]:
        n, k, d = x_nkd.shape
        call = None
        if u_nd.dtype is z_dtype:
            call = self._function("write_read_forward", x_nkd.dtype, z_dtype, write_factor_k.dtype)
        if call is None:
            y_nkd = self.write_forward(x_nkd, u_nd, write_factor_k, retention_k)
            return y_nkd, self.read_forward(y_nkd, read_factor_k, z_dtype, norm)
        y_nkd, z_nd = torch.empty_like(x_nkd), torch.empty_like(u_nd)
        normed = None if norm is None else CompiledNorm.forward(norm, n)
        pointers = map(_pointer, (x_nkd, u_nd, write_factor_k, retention_k, read_factor_k, y_nkd, z_nd, normed))
        call(n, k, d, torch.get_num_threads(), *pointers)
        return y_nkd, z_nd

    def write_read_backward(
        self,
        grad_y_nkd: Tensor,
        grad_z_nd: Tensor,
        x_nkd: Tensor,
        u_nd: Tensor,
        write_factor_k: Tensor,
        retention_k: Tensor | None,
        read_factor_k: Tensor,
        norm: NormCall | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        n, k, d = x_nkd.shape
        call = None
        if u_nd.dtype is grad_z_nd.dtype:
            call = self._function("write_read_backward", x_nkd.dtype, u_nd.dtype, write_factor_k.dtype)
        if call is None:
            return self._separate_backward(
                grad_y_nkd, grad_z_nd, x_nkd, u_nd, write_factor_k, retention_k, read_factor_k, norm
            )
        grad_x_nkd, grad_u_nd = torch.empty_like(x_nkd), torch.empty_like(u_nd)
        grad_write_k, grad_read_k = _sums(k), _sums(k)
        grad_retention_k = None if retention_k is None else _sums(k)
        inputs = (grad_y_nkd, grad_z_nd, x_nkd, u_nd, write_factor_k, retention_k, read_factor_k)
        outputs = (grad_x_nkd, grad_u_nd, _partial_sums(n, 3 * k), grad_write_k, grad_retention_k, grad_read_k)
        normed = None if norm is None else CompiledNorm.backward(norm, token_blocks(n))
        call(n, k, d, torch.get_num_threads(), *map(_pointer, (*inputs, *outputs, normed)))
        return grad_x_nkd, grad_u_nd, grad_write_k, grad_retention_k, grad_read_k

    def _separate_backward(
        self,
        grad_y_nkd: Tensor,
        grad_z_nd: Tensor,
        x_nkd: Tensor,
        u_nd: Tensor,
        write_factor_k: Tensor,
        retention_k: Tensor | None,
        read_factor_k: Tensor,
        norm: NormCall | None = None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]:
        """write_read_backward by the backward of the read and then of the write, for dtypes without a kernel."""
        y_nkd = self.write_forward(x_nkd, u_nd, write_factor_k, retention_k)
        grad_nkd, grad_read_k = self.read_backward(
            grad_z_nd, y_nkd, read_factor_k, x_nkd.dtype, wants_grad_x=True, norm=norm
        )
        assert grad_nkd is not None
        assert grad_read_k is not None
        grad_nkd += grad_y_nkd
        kept_nkd = None if retention_k is None else x_nkd
        grad_x_nkd, grad_u_nd, grad_write_k, grad_retention_k = self.write_backward(
            grad_nkd, kept_nkd, u_nd, write_factor_k, retention_k, u_nd.dtype, wants_grad_u=True
        )
        assert grad_u_nd is not None
        assert grad_write_k is not None
        grad_x_nkd = grad_nkd if grad_x_nkd is None else grad_x_nkd
        return grad_x_nkd, grad_u_nd, grad_write_k, grad_retention_k, grad_read_k


def _pointer(x: Tensor | CompiledNorm | None) -> int | None:
    return x.pointer() if isinstance(x, CompiledNorm) else None if x is None else x.data_ptr()


def _sums(k: int) -> Tensor:
    return torch.empty(k, dtype=torch.float64)


def token_blocks(n: int) -> int:
    """Blocks of tokens that have partial sums."""
    return (n + TOKEN_BLOCK - 1) // TOKEN_BLOCK


def _partial_sums(n: int, k: int) -> Tensor:
    """Room for the sums of every block of tokens."""
    return torch.empty(token_blocks(n) * k, dtype=torch.float64)
