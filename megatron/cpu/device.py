"""The CUDA device, played by the CPU: device names, streams, events and device queries.

`install_device(replaced)` makes "cuda", "cuda:N", an ordinal and `torch.device("cuda")` mean the CPU wherever PyTorch
takes a device, and answers `torch.cuda`'s questions for one device without compute capability. Work on the CPU is
finished when a call returns, so streams and events have nothing to wait for.

What always holds: `torch.cuda.is_available()` is False (a True switches on pinning in DataLoader and CUDA code in
torch.compile), and a call that names no CUDA device reaches PyTorch's own function with its arguments untouched.
"""

from __future__ import annotations

import functools
import time
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import psutil
import torch
import torch.utils._device

from megatron.cpu.replacements import Replacements

_CPU = torch.device("cpu")

# Functions that take a keyword argument `device`.
# fmt: off
_FACTORIES = (
    "arange", "as_tensor", "asarray", "empty", "empty_like", "empty_strided", "eye", "full", "full_like",
    "linspace", "logspace", "ones", "ones_like", "rand", "rand_like", "randint", "randint_like", "randn",
    "randn_like", "randperm", "range", "scalar_tensor", "sparse_coo_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros", "zeros_like",
)
# fmt: on
_TENSOR_FACTORIES = ("new_empty", "new_empty_strided", "new_full", "new_ones", "new_tensor", "new_zeros")


def host_device(device: Any) -> Any:
    """The CPU for anything that names a CUDA device (ordinals included), everything else unchanged."""
    if isinstance(device, bool) or device is None:
        return device
    if isinstance(device, int):
        return _CPU
    if isinstance(device, str):
        return _CPU if device == "cuda" or device.startswith("cuda:") else device
    if isinstance(device, torch.device):
        return _CPU if device.type == "cuda" else device
    return device


def _with_device_keyword(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, whose keyword argument `device` may name a CUDA device."""

    @functools.wraps(function)
    def on_host(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        return function(*args, **kwargs)

    return on_host


def _tensor_to(function: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.to`: the device may also be the first positional argument."""

    @functools.wraps(function)
    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if args and not isinstance(args[0], torch.Tensor | torch.dtype):
            args = (host_device(args[0]), *args[1:])
        if "device" in kwargs:
            kwargs["device"] = host_device(kwargs["device"])
        return function(self, *args, **kwargs)

    return to


def _tensor_cuda(
    self: torch.Tensor,
    device: Any = None,
    non_blocking: bool = False,
    memory_format: torch.memory_format = torch.preserve_format,
) -> torch.Tensor:
    """`Tensor.cuda`: the tensor itself when it is on the CPU, as CUDA answers for a tensor that is there already."""
    return self.to(_CPU, non_blocking=non_blocking, memory_format=memory_format)


def _tensor_type(function: Callable[..., Any]) -> Callable[..., Any]:
    """`Tensor.type()` without arguments names the device that the CPU plays.

    Upstream's optimizers and gradient clipping accept a parameter by this name only ("torch.cuda.FloatTensor").
    """

    @functools.wraps(function)
    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = function(self, *args, **kwargs)
        if not args and not kwargs and answer.count(".") == 1:
            return answer.replace("torch.", "torch.cuda.", 1)
        return answer

    return type_


class HostStream:
    """A stream of work that is done by the time a call returns: waiting is nothing."""

    def __init__(self, device: Any = None, priority: int = 0, **_: Any) -> None:
        self.device = _CPU
        self.priority = priority
        self.cuda_stream = 0

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def record_event(self, event: HostEvent | None = None) -> HostEvent:
        event = HostEvent() if event is None else event
        event.record(self)
        return event

    def __enter__(self) -> HostStream:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing to leave."""


class HostEvent:
    """A point in time; `elapsed_time` is measured on the wall clock."""

    def __init__(self, *_: Any, **__: Any) -> None:
        self._seconds = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._seconds = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for."""

    def synchronize(self) -> None:
        """Nothing to wait for."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: HostEvent) -> float:
        """Milliseconds from this event to `end`."""
        return (end._seconds - self._seconds) * 1000.0


_DEFAULT_STREAM = HostStream()


@contextmanager
def _device_context(device: Any = None) -> Iterator[None]:
    yield


def _stream_context(stream: Any) -> HostStream:
    return _DEFAULT_STREAM


def _device_properties(device: Any = None) -> types.SimpleNamespace:
    """What a device without compute capability says of itself."""
    return types.SimpleNamespace(
        name="cpu",
        major=0,
        minor=0,
        total_memory=psutil.virtual_memory().total,
        multi_processor_count=torch.get_num_threads(),
    )


def _nothing() -> Callable[..., None]:
    """A function for what is asked of a device and done already on the CPU.

    A new one for every name: torch.compile looks functions up by identity, and refuses one with two meanings.
    """
    return lambda *_, **__: None


_CUDA_ANSWERS: dict[str, Any] = {
    "is_available": lambda: False,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": _nothing(),
    "device": _device_context,
    "get_device_name": lambda device=None: "cpu",
    "get_device_capability": lambda device=None: (0, 0),
    "get_device_properties": _device_properties,
    "synchronize": _nothing(),
    "empty_cache": _nothing(),
    "ipc_collect": _nothing(),
    "Stream": HostStream,
    "ExternalStream": HostStream,
    "Event": HostEvent,
    "current_stream": lambda device=None: _DEFAULT_STREAM,
    "default_stream": lambda device=None: _DEFAULT_STREAM,
    "set_stream": _nothing(),
    "stream": _stream_context,
    "is_current_stream_capturing": lambda: False,
}


def install_device(replaced: Replacements) -> None:
    """Let the CPU stand for the CUDA device until `replaced` is restored."""
    # torch.device("meta") as a context compares with a cached set of factories: fill it with the real ones first.
    torch.utils._device._device_constructors()
    for name in _FACTORIES:
        replaced.set(torch, name, _with_device_keyword(getattr(torch, name)))
    for name in _TENSOR_FACTORIES:
        replaced.set(torch.Tensor, name, _with_device_keyword(getattr(torch.Tensor, name)))
    replaced.set(torch.Tensor, "to", _tensor_to(torch.Tensor.to))
    replaced.set(torch.Tensor, "cuda", _tensor_cuda)
    replaced.set(torch.Tensor, "type", _tensor_type(torch.Tensor.type))
    replaced.set(torch.Tensor, "record_stream", _nothing())
    replaced.set(torch.Tensor, "pin_memory", lambda self, device=None: self)
    for name, answer in _CUDA_ANSWERS.items():
        replaced.set(torch.cuda, name, answer)
    # Where a GPU is there but not to be used, nothing may ask it for pinned memory.
    replaced.set(torch.accelerator, "is_available", lambda: False)
    for name in ("range_push", "range_pop", "mark"):
        replaced.set(torch.cuda.nvtx, name, _nothing())
