"""Random numbers on the CPU host: one generator for the model, another for the data loader.

Every operation of the model (dropout, initialisation) draws from PyTorch's default CPU generator here, so that one is
the device's generator: `torch.cuda`'s RNG calls, Megatron's RNG tracker and its activation recomputation read and set
it. On a GPU the data loader draws from another one. Here it gets its own too: creating an iterator draws a base seed,
and a resumed run creates its iterators after the checkpoint's state was loaded, which shifted every later dropout mask.

What always holds: creating a DataLoader iterator leaves the default generator as it was, so a resumed run draws what
the uninterrupted one draws.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils.data import DataLoader

import megatron.core.tensor_parallel.random as tensor_parallel_random
from megatron.cpu.replacements import Replacements

_TRACKER_WARNING = "CPU RNG state changed within GPU RNG context"


def _get_rng_state(device: Any = "cuda") -> torch.Tensor:
    return torch.get_rng_state()


def _set_rng_state(new_state: torch.Tensor, device: Any = "cuda") -> None:
    torch.set_rng_state(new_state)


def _manual_seed(seed: int) -> None:
    torch.default_generator.manual_seed(int(seed))


def _seed() -> None:
    torch.default_generator.seed()


_CUDA_RNG_ANSWERS: dict[str, Any] = {
    "get_rng_state": _get_rng_state,
    "set_rng_state": _set_rng_state,
    "get_rng_state_all": lambda: [torch.get_rng_state()],
    "set_rng_state_all": lambda states: torch.set_rng_state(next(iter(states))),
    "manual_seed": _manual_seed,
    "manual_seed_all": _manual_seed,
    "seed": _seed,
    "seed_all": _seed,
    "initial_seed": lambda: torch.default_generator.initial_seed(),
}


class _LoaderGenerator:
    """The state of the data loader's generator, put in the default generator's place while an iterator is created."""

    def __init__(self) -> None:
        self._state: torch.Tensor | None = None

    def wrap(self, make_iterator: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(make_iterator)
        def iterate(loader: DataLoader[Any]) -> Any:
            device_state = torch.get_rng_state()
            if self._state is None:
                torch.default_generator.manual_seed(torch.default_generator.initial_seed())
            else:
                torch.set_rng_state(self._state)
            try:
                return make_iterator(loader)
            finally:
                self._state = torch.get_rng_state()
                torch.set_rng_state(device_state)

        return iterate


def _is_no_tracker_warning(record: logging.LogRecord) -> bool:
    """False for the tracker's remark that the CPU's state changed: here it is the state that the tracker manages."""
    return record.getMessage() != _TRACKER_WARNING


def install_rng(replaced: Replacements) -> None:
    """Make the default CPU generator the device's and give DataLoader its own until `replaced` is restored."""
    modules: Iterable[Any] = (torch.cuda, torch.cuda.random)
    for module in modules:
        for name, answer in _CUDA_RNG_ANSWERS.items():
            replaced.set(module, name, answer)
    replaced.set(torch.cuda, "default_generators", (torch.default_generator,))
    # Bound by `from torch.cuda import ...` in upstream's module: they would start a CUDA context.
    replaced.set(tensor_parallel_random, "_lazy_init", lambda: None)
    replaced.set(tensor_parallel_random, "_lazy_call", lambda call, **_: call())
    replaced.set(DataLoader, "__iter__", _LoaderGenerator().wrap(DataLoader.__iter__))
    logger = logging.getLogger(tensor_parallel_random.__name__)
    logger.addFilter(_is_no_tracker_warning)
    replaced.on_restore(lambda: logger.removeFilter(_is_no_tracker_warning))
