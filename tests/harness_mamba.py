"""Mamba-2's recurrence token by token, and random inputs for it: what the operators are compared with.

    case = scan_case(length=50, groups=2)
    y, final = recurrence(**case)

What always holds: `recurrence` follows equation 2 of Dao & Gu 2024 (arXiv 2405.21060) one token at a time, in the dtype
of its inputs, and shares no code with the operators.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Where the operators are tested: the same tests check a GPU where there is one.
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """Normal numbers that need a gradient."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype).requires_grad_()


def scan_case(
    *,
    batch: int = 2,
    length: int = 50,
    heads: int = 4,
    head_dim: int = 3,
    groups: int = 1,
    state: int = 5,
    gate: bool = True,
    skip: str | None = "h",
    initial: bool = True,
    packed: bool = False,
    dtype: torch.dtype = torch.float64,
    seed: int = 0,
) -> dict[str, Any]:
    """Keyword arguments of `recurrence`: x, dt, A, B, C, D, z, dt_bias, initial_states, seq_idx."""
    case: dict[str, Any] = {
        "x": random(batch, length, heads, head_dim, seed=seed, dtype=dtype),
        "dt": random(batch, length, heads, seed=seed + 1, dtype=dtype),
        "A": (-random(heads, seed=seed + 2).detach().abs() * 4).requires_grad_(),
        "B": random(batch, length, groups, state, seed=seed + 3, dtype=dtype),
        "C": random(batch, length, groups, state, seed=seed + 4, dtype=dtype),
        "D": None,
        "z": random(batch, length, heads, head_dim, seed=seed + 5, dtype=dtype) if gate else None,
        "dt_bias": random(heads, seed=seed + 6),
        "initial_states": random(batch, heads, head_dim, state, seed=seed + 7) if initial else None,
        "seq_idx": None,
    }
    if skip is not None:
        case["D"] = random(*((heads, head_dim) if skip == "hp" else (heads,)), seed=seed + 8)
    if packed:
        generator = torch.Generator().manual_seed(seed)
        case["seq_idx"] = torch.randint(0, 4, (batch, length), generator=generator).sort(dim=1)[0].to(DEVICE)
    return case


def recurrence(
    x: Tensor,
    dt: Tensor,
    A: Tensor,  # noqa: N803
    B: Tensor,  # noqa: N803
    C: Tensor,  # noqa: N803
    D: Tensor | None = None,  # noqa: N803
    z: Tensor | None = None,
    dt_bias: Tensor | None = None,
    initial_states: Tensor | None = None,
    seq_idx: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """y and the last state; the step size is softplus(dt + dt_bias)."""
    heads_per_group = x.shape[2] // B.shape[2]
    step = torch.nn.functional.softplus(dt if dt_bias is None else dt + dt_bias)
    state = x.new_zeros(x.shape[0], *x.shape[2:], B.shape[3]) if initial_states is None else initial_states
    outputs = []
    for t in range(x.shape[1]):
        if seq_idx is not None and t > 0:
            state = state * (seq_idx[:, t] == seq_idx[:, t - 1])[:, None, None, None]
        b, c = (tensor[:, t].repeat_interleave(heads_per_group, dim=1)[:, :, None, :] for tensor in (B, C))
        state = state * (step[:, t] * A).exp()[..., None, None] + (step[:, t, :, None] * x[:, t])[..., None] * b
        y = (state * c).sum(3)
        if D is not None:
            y = y + (D if D.dim() == 2 else D[:, None]) * x[:, t]
        outputs.append(y)
    y = torch.stack(outputs, dim=1)
    return (y if z is None else y * torch.nn.functional.silu(z)), state


def wide(case: dict[str, Any]) -> dict[str, Any]:
    """The same numbers in fp64, each needing a gradient of its own."""
    return {
        name: value.detach().double().requires_grad_()
        if isinstance(value, Tensor) and value.is_floating_point()
        else value
        for name, value in case.items()
    }


def gradients(outputs: tuple[Tensor, ...], case: dict[str, Any]) -> dict[str, Tensor]:
    """Gradients of a fixed weighted sum of the outputs, by name of the input."""
    total = sum((y * random(*y.shape, seed=90 + i).detach().to(y.dtype)).sum() for i, y in enumerate(outputs))
    inputs = {name: value for name, value in case.items() if isinstance(value, Tensor) and value.requires_grad}
    assert isinstance(total, Tensor)
    return dict(zip(inputs, torch.autograd.grad(total, list(inputs.values())), strict=True))


def relative_error(found: Tensor, wanted: Tensor) -> float:
    """The largest difference over the largest element wanted; NaN where something found is NaN."""
    return ((found.double() - wanted.double()).abs().max() / wanted.double().abs().max().clamp(min=1e-30)).item()
