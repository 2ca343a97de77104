"""What tools/benchmark_streams.py times: each streamwise operator in each direction, and steps around a branch.

    for case in operator_cases(shape, backends, retention=False): with using_backend(case.backend): case.run()
    for case in step_cases(shape, backends, package=True): with using_backend(case.backend): case.run()
    for case in stock_cases(cases): with stock_malloc(), using_backend(case.backend): case.run()

A step reads the branch input from K streams, runs an identity branch and writes its output back, forward and backward:
the job of one residual connection. `hyper-connections` is the PyPI package of that name (Hyper-Connections, arXiv
2409.19606, and the manifold-constrained ones), on the same numbers of streams, tokens and features:

- dynamic: its HyperConnections, which mixes the streams by weights that it computes from them.
- static: the same without the computed weights, that is with its static_alpha and static_beta alone. The package has
  no switch for this; here is the sum that it then computes, around its own depth connection.
- constrained: its ManifoldConstrainedHyperConnections.

Tensor names: n tokens, k streams, d branch width, t branch input and streams.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_backends import BACKEND_VARIABLE
from megatron.core.transformer.streamwise_residual_ops import (
    stream_norm_of,
    streamwise_sigmoid_read,
    streamwise_sigmoid_write_read,
    streamwise_sigmoid_writeback,
)

NAIVE, INDUCTOR = "naive", "inductor"
PLAIN = (NAIVE, INDUCTOR)  # formulas as one writes them down, in eager mode and under torch.compile
MAX_FORGET = 0.1
NORMS: dict[str, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}
PACKAGE = "hyper-connections"  # begins the names of its variants
THEN = " then "  # in the name of an operation whose norm runs after it


STOCK = " stock"  # ends the names of ways with stock malloc


def is_other(backend: str) -> bool:
    """Whether a backend is what this repository's operators are compared with."""
    return backend in PLAIN or backend.startswith(PACKAGE)


@dataclass(frozen=True)
class Shape:
    """One set of sizes."""

    num_streams: int
    hidden_size: int
    tokens: int
    dtype: torch.dtype
    device: str = "cpu"

    @property
    def unit(self) -> int:
        """Bytes of a branch tensor [n, d]."""
        return self.tokens * self.hidden_size * self.dtype.itemsize


@dataclass(frozen=True)
class Case:
    """One operation in one direction: how to run it once, in `using_backend(backend)`, and how many bytes that moves.

    `stock` cases are to be run with malloc as PyTorch leaves it, the others with malloc as the process has it.
    """

    op: str
    direction: str
    backend: str
    retention: bool
    bytes_moved: int
    run: Callable[[], Any]
    stock: bool = False

    @property
    def way(self) -> str:
        """The backend, and whether with stock malloc."""
        return f"{self.backend}{STOCK}" if self.stock else self.backend


class using_backend:  # noqa: N801
    """Context in which the operators use a backend, the one of a model for what is no backend of theirs."""

    def __init__(self, name: str) -> None:
        self._name = "auto" if is_other(name) else name

    def __enter__(self) -> None:
        self._before = os.environ.get(BACKEND_VARIABLE)
        os.environ[BACKEND_VARIABLE] = self._name

    def __exit__(self, *_: object) -> None:
        if self._before is None:
            del os.environ[BACKEND_VARIABLE]
        else:
            os.environ[BACKEND_VARIABLE] = self._before


def naive_read(x: Tensor, logits: Tensor, num_streams: int) -> Tensor:
    """z = sum_k sigmoid(r_k) X_k as one writes it down."""
    factors = logits[:num_streams].sigmoid().to(x.dtype)
    return torch.einsum("nkd,k->nd", x.unflatten(-1, (num_streams, -1)), factors)


def naive_write(x: Tensor, u: Tensor, logits: Tensor, num_streams: int, retention: Tensor | None) -> Tensor:
    """Y_k = g_k X_k + 2 sigmoid(s_k) u as one writes it down."""
    factors = (2 * logits[:num_streams].sigmoid()).to(x.dtype)[:, None]
    kept = x.unflatten(-1, (num_streams, -1))
    if retention is not None:
        kept = (1 - MAX_FORGET * (-retention[:num_streams]).sigmoid()).to(x.dtype)[:, None] * kept
    return (kept + factors * u.unsqueeze(-2)).flatten(-2)


@dataclass(frozen=True)
class Operators:
    """Read, write, and a write and the read after it, on one backend."""

    backend: str
    num_streams: int

    def read(self, x: Tensor, logits: Tensor) -> Tensor:
        """[n, k d] -> [n, d]."""
        if self.backend in PLAIN:
            return self._plain(naive_read)(x, logits, self.num_streams)
        return streamwise_sigmoid_read(x, logits, self.num_streams)

    def write(self, x: Tensor, u: Tensor, logits: Tensor, retention: Tensor | None = None) -> Tensor:
        """[n, k d], [n, d] -> [n, k d]."""
        if self.backend in PLAIN:
            return self._plain(naive_write)(x, u, logits, self.num_streams, retention)
        return streamwise_sigmoid_writeback(
            x, u, logits, self.num_streams, retention_logits=retention, retention_max_forget=MAX_FORGET
        )

    def write_read(self, x: Tensor, u: Tensor, write_logits: Tensor, read_logits: Tensor) -> tuple[Tensor, Tensor]:
        """[n, k d], [n, d] -> [n, k d], [n, d]."""
        if self.backend in PLAIN:
            return self._plain(_naive_write_read)(x, u, write_logits, read_logits, self.num_streams)
        return streamwise_sigmoid_write_read(x, u, write_logits, read_logits, self.num_streams)

    def read_norm(self, x: Tensor, logits: Tensor, norm: torch.nn.Module) -> Tensor:
        """[n, k d] -> [n, d], normed; in one operation where the backend has one."""
        if self.backend in PLAIN:
            return self._plain(_naive_read_norm)(x, logits, self.num_streams, norm)
        return streamwise_sigmoid_read(x, logits, self.num_streams, norm=stream_norm_of(norm))

    def write_read_norm(
        self, x: Tensor, u: Tensor, write_logits: Tensor, read_logits: Tensor, norm: torch.nn.Module
    ) -> tuple[Tensor, Tensor]:
        """[n, k d], [n, d] -> [n, k d], [n, d], the second normed; in one operation where the backend has one."""
        if self.backend in PLAIN:
            return self._plain(_naive_write_read_norm)(x, u, write_logits, read_logits, self.num_streams, norm)
        return streamwise_sigmoid_write_read(
            x, u, write_logits, read_logits, self.num_streams, norm=stream_norm_of(norm)
        )

    def step(self, x: Tensor, read_logits: Tensor, write_logits: Tensor) -> Tensor:
        """A residual connection around an identity branch: [n, k d] -> [n, k d]."""
        if self.backend in PLAIN:
            return self._plain(_naive_step)(x, read_logits, write_logits, self.num_streams)
        return self.write(x, self.read(x, read_logits), write_logits)

    def _plain(self, function: Callable[..., Any]) -> Callable[..., Any]:
        return _compiled(function) if self.backend == INDUCTOR else function


def _naive_write_read(x: Tensor, u: Tensor, write_logits: Tensor, read_logits: Tensor, num_streams: int) -> Any:
    y = naive_write(x, u, write_logits, num_streams, None)
    return y, naive_read(y, read_logits, num_streams)


def _naive_read_norm(x: Tensor, logits: Tensor, num_streams: int, norm: torch.nn.Module) -> Any:
    return norm(naive_read(x, logits, num_streams))


def _naive_write_read_norm(
    x: Tensor, u: Tensor, write_logits: Tensor, read_logits: Tensor, num_streams: int, norm: torch.nn.Module
) -> Any:
    y, z = _naive_write_read(x, u, write_logits, read_logits, num_streams)
    return y, norm(z)


def _naive_step(x: Tensor, read_logits: Tensor, write_logits: Tensor, num_streams: int) -> Tensor:
    return naive_write(x, naive_read(x, read_logits, num_streams), write_logits, num_streams, None)


_COMPILED: dict[Callable[..., Any], Callable[..., Any]] = {}


def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    if function not in _COMPILED:
        import torch._functorch.config

        torch._functorch.config.donated_buffer = False  # a backward is timed again and again on one graph
        _COMPILED[function] = torch.compile(function, dynamic=False, fullgraph=True)
    return _COMPILED[function]


def _inputs(shape: Shape) -> tuple[Tensor, Tensor, list[Tensor]]:
    """X [n, k d], u [n, d], and three controllers."""
    k, d, n = shape.num_streams, shape.hidden_size, shape.tokens
    generator = torch.Generator(shape.device).manual_seed(1)

    def random(*sizes: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(sizes, generator=generator, device=shape.device).to(dtype).requires_grad_()

    x, u = random(n, k * d, dtype=shape.dtype), random(n, d, dtype=shape.dtype)
    return x, u, [random(max(128, k)) for _ in range(3)]


def operator_cases(
    shape: Shape, backends: list[str], *, retention: bool, norms: tuple[str, ...] = ()
) -> Iterator[Case]:
    """Every operator, direction and backend, on one set of inputs; reads also with these norms behind them."""
    k, unit = shape.num_streams, shape.unit
    x, u, (r, s, q) = _inputs(shape)
    for backend in backends:
        ops = Operators(backend, k)
        yield from _both("read", backend, False, partial(ops.read, x, r), [x, r], ((k + 1) * unit, (2 * k + 1) * unit))
        kept = partial(ops.write, x, u, s)
        yield from _both("write", backend, False, kept, [x, u, s], ((2 * k + 1) * unit, (k + 2) * unit))
        if retention:
            scaled, moved = partial(ops.write, x, u, s, q), ((2 * k + 1) * unit, (3 * k + 2) * unit)
            yield from _both("write", backend, True, scaled, [x, u, s, q], moved)
        fused, moved = partial(ops.write_read, x, u, s, r), ((2 * k + 2) * unit, (3 * k + 3) * unit)
        yield from _both("write_read", backend, False, fused, [x, u, s, r], moved)
        for name in norms:
            yield from _norm_cases(shape, ops, name, (x, u, r, s))


def _norm_cases(shape: Shape, ops: Operators, name: str, inputs: tuple[Tensor, ...]) -> Iterator[Case]:
    """A read, and a write and read, with a norm behind: as one operation, and with the module after the operator."""
    x, u, r, s = inputs
    k, unit, backend = shape.num_streams, shape.unit, ops.backend
    norm = NORMS[name](shape.hidden_size, eps=1e-5).to(shape.device, shape.dtype)
    both, all_inputs = [x, r, *norm.parameters()], [x, u, s, r, *norm.parameters()]

    def apart(call: Callable[..., Any], *arguments: Tensor) -> Any:
        *y, z = call(*arguments) if call == ops.write_read else [call(*arguments)]
        return (*y, norm(z))

    # apart, the norm reads z and writes n, and its backward reads gN and z and writes gZ
    for op, call, arguments, used, moved in (
        ("read", ops.read, (x, r), both, (k + 1, 2 * k + 1)),
        ("write_read", ops.write_read, (x, u, s, r), all_inputs, (2 * k + 2, 3 * k + 3)),
    ):
        fused: Callable[..., Any] = ops.read_norm if op == "read" else ops.write_read_norm
        forward, backward = moved
        moved_bytes = (forward * unit, backward * unit)
        yield from _both(f"{op} {name}", backend, False, partial(fused, *arguments, norm), used, moved_bytes)
        moved_bytes = ((forward + 2) * unit, (backward + 3) * unit)
        yield from _both(f"{op}{THEN}{name}", backend, False, partial(apart, call, *arguments), used, moved_bytes)


def _both(
    op: str,
    backend: str,
    retention: bool,
    call: Callable[[], Any],
    inputs: list[Tensor],
    bytes_moved: tuple[int, int],
) -> Iterator[Case]:
    def forward() -> Any:
        with torch.no_grad():
            return call()

    with using_backend(backend):
        results = call()  # its graph is kept, so that a repetition of the backward is the backward alone
    results = results if isinstance(results, tuple) else (results,)
    gradients = [torch.ones_like(result).contiguous() for result in results]

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(results, inputs, gradients, retain_graph=True)

    yield Case(op, "forward", backend, retention, bytes_moved[0], forward)
    yield Case(op, "backward", backend, retention, bytes_moved[1], backward)


def step_cases(shape: Shape, backends: list[str], *, package: bool) -> Iterator[Case]:
    """Forward and backward of a residual connection around an identity branch: ours, and with `package` theirs.

    The bytes are what ours moves: read and write, their backward, and the sum of the two gradients of the stream.
    """
    k, d, n = shape.num_streams, shape.hidden_size, shape.tokens
    x, _, (r, s, _) = _inputs(shape)
    moved = (9 * k + 5) * shape.unit
    for backend in backends:
        step = partial(Operators(backend, k).step, x, r, s)
        yield Case("step", "both", backend, False, moved, partial(_step, step, [x, r, s]))
    if not package:
        return
    streams = torch.randn(k, n, d, device=shape.device).to(shape.dtype).requires_grad_()
    for name, module in package_modules(shape).items():
        used = [streams, *module.parameters()]
        yield Case("step", "both", name, False, moved, partial(_step, partial(module, streams), used))


def stock_cases(cases: Iterable[Case]) -> list[Case]:
    """The cases that this repository's operators are compared with, once more for stock malloc."""
    return [replace(case, stock=True) for case in cases if is_other(case.backend)]


def _step(call: Callable[[], Tensor], inputs: list[Tensor]) -> tuple[Tensor | None, ...]:
    y = call()
    return torch.autograd.grad(y, inputs, torch.ones_like(y), allow_unused=True)


def package_modules(shape: Shape) -> dict[str, torch.nn.Module]:
    """The variants of hyper-connections around an identity branch; they take [k, n, d]. Raises ImportError."""
    from hyper_connections import HyperConnections, ManifoldConstrainedHyperConnections

    class Static(HyperConnections):
        """HyperConnections whose weights are its static parameters alone."""

        def width_connection(self, residuals: Tensor) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
            mixed_nktd = torch.einsum("kt,knd->ntd", self.static_alpha, residuals)
            beta = self.static_beta.view(1, 1, 1, -1, 1).expand(1, residuals.shape[1], 1, -1, 1)
            return mixed_nktd[None, :, 0], mixed_nktd[:, 1:].transpose(0, 1), {"beta": beta}

    options = {"dim": shape.hidden_size, "layer_index": 0, "branch": torch.nn.Identity()}
    classes = {"dynamic": HyperConnections, "static": Static, "constrained": ManifoldConstrainedHyperConnections}
    return {
        f"{PACKAGE} {name}": module(shape.num_streams, **options).to(shape.device, shape.dtype)
        for name, module in classes.items()
    }
