"""Adam on the CPU host is PyTorch's own in one pass: equal steps, equal bits for threads and shards, old states."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import Parameter

from megatron.cpu.host import cpu_host

PLAIN: dict[str, Any] = {"Adam": torch.optim.Adam, "AdamW": torch.optim.AdamW}
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1, "capturable": False}
SIZES = (7, 128, 4099, 70001)


@pytest.fixture
def host() -> Iterator[None]:
    with cpu_host():
        yield


def _gradients(steps: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(size, generator=generator) for size in SIZES] for _ in range(steps)]


def _parameters() -> list[Parameter]:
    generator = torch.Generator().manual_seed(2)
    return [Parameter(torch.randn(size, generator=generator)) for size in SIZES]


def _train(
    optimizer: torch.optim.Optimizer, parameters: list[Parameter], gradients: list[list[Tensor]]
) -> list[Tensor]:
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        optimizer.step()
    return [parameter.detach().clone() for parameter in parameters]


@pytest.mark.parametrize("name", PLAIN)
def test_the_hosts_adam_is_pytorchs_and_fused(host: None, name: str) -> None:
    ours, plain = _parameters(), _parameters()
    optimizer = getattr(torch.optim, name)(ours, **OPTIONS)
    assert isinstance(optimizer, PLAIN[name])
    assert isinstance(optimizer, torch.optim.Adam), "AdamW is an Adam"
    assert optimizer.defaults["decoupled_weight_decay"] is (name == "AdamW")
    assert all(group["fused"] for group in optimizer.param_groups)
    found = _train(optimizer, ours, _gradients(5))
    wanted = _train(PLAIN[name](plain, **OPTIONS), plain, _gradients(5))
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)


def test_threads_and_shards_change_no_bit(host: None) -> None:
    whole, gradients = _parameters(), _gradients(5)
    parts: list[Parameter] = []
    try:
        torch.set_num_threads(2)
        found = _train(torch.optim.AdamW(whole, **OPTIONS), whole, gradients)
    finally:
        torch.set_num_threads(1)
    single = _parameters()
    for one, other in zip(found, _train(torch.optim.AdamW(single, **OPTIONS), single, gradients), strict=True):
        assert torch.equal(one, other), "another number of threads gives other bits"
    for parameter in _parameters():  # the distributed optimizer cuts at multiples of 64
        cut = parameter.numel() // 128 * 64
        parts += [Parameter(piece.detach().clone()) for piece in (parameter[:cut], parameter[cut:])]
    pieces = [
        [piece for g in step for piece in (g[: len(g) // 128 * 64], g[len(g) // 128 * 64 :])] for step in gradients
    ]
    sharded = _train(torch.optim.AdamW(parts, **OPTIONS), parts, pieces)
    for number, one in enumerate(found):
        assert torch.equal(one, torch.cat(sharded[2 * number : 2 * number + 2])), "another shard gives other bits"


def test_a_state_of_the_plain_optimizer_goes_on_fused(host: None) -> None:
    plain, gradients = _parameters(), _gradients(5)
    first = PLAIN["AdamW"](plain, **OPTIONS)
    _train(first, plain, gradients[:3])
    ours = [Parameter(parameter.detach().clone()) for parameter in plain]
    second = torch.optim.AdamW(ours, **OPTIONS)
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    assert all(group["fused"] for group in second.param_groups)
    found, wanted = _train(second, ours, gradients[3:]), _train(first, plain, gradients[3:])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-7)
