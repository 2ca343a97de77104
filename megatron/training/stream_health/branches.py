"""The branches of a wide model that its streams are seen at, with what they are read and written by.

    for branch in local_branches(model_chunks):
        branch.key, branch.read, branch.write, branch.watch(lambda x_sbw: ...)

A stream is taken where it is a public value: the first branch of a layer sees the layer's input, the second the stream
that its write carries on, the readout and the routed read of a shortcut pair their own input. An operator that fuses a
write with the next read changes none of these.

What always holds: keys sort in the order of the forward, the readout last, and are the same in every parallel layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core.utils import unwrap_model
from torch import Tensor

from megatron.core.transformer.wide_residual import (
    StreamwiseSigmoidResidualReadout,
    StreamwiseSigmoidWideResidualConnection,
    StreamwiseSigmoidWideResidualRead,
)
from megatron.core.transformer.wide_residual_branches import WideResidualBranches
from megatron.core.transformer.wide_residual_maps import LearnedWideResidualRetention, StreamwiseSigmoidMap

READOUT = "readout"
_ORDER = {"self_attn": 0, "mamba": 0, "shortcut": 1, "mlp": 2}

Watcher = Callable[[torch.nn.Module, Tensor], None]


def branch_key(layer_number: int, branch_name: str) -> str:
    """Return the stable name of a branch: "003.mlp"."""
    return f"{layer_number:03d}.{branch_name}"


def key_order(key: str) -> tuple[int, int]:
    """Return what sorts keys in the order of the forward."""
    if key == READOUT:
        return (1 << 30, 0)
    layer, name = key.split(".")
    return int(layer), _ORDER.get(name, len(_ORDER))


@dataclass
class StreamBranch:
    """One branch of this rank.

    Args:
        key: its stable name.
        read: the map that it reads with.
        write, retention: what its output is written with; None for a read alone.
        watch: registers a function of (module, stream [s, b, w]) that is called whenever a forward is about to read.
    """

    key: str
    read: StreamwiseSigmoidMap
    write: StreamwiseSigmoidMap | None
    retention: LearnedWideResidualRetention | None
    watch: Callable[[Watcher], Any]

    def controllers(self) -> dict[str, torch.nn.Parameter]:
        """Return the branch's padded controllers by kind."""
        found = {"read": self.read.logit}
        if self.write is not None:
            found["write"] = self.write.logit
        if self.retention is not None:
            found["retention"] = self.retention.retention_logit
        return found


def _watch_input(module: torch.nn.Module) -> Callable[[Watcher], Any]:
    """Watch the first argument of a module."""

    def watch(see: Watcher) -> Any:
        def hook(owner: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            see(owner, kwargs["hidden_states"] if "hidden_states" in kwargs else args[0])

        return module.register_forward_pre_hook(hook, with_kwargs=True)

    return watch


def _watch_carried(write: torch.nn.Module) -> Callable[[Watcher], Any]:
    """Watch the stream that a write carries on."""

    def watch(see: Watcher) -> Any:
        def hook(owner: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            del args
            see(owner, kwargs["state"].residual)

        return write.register_forward_pre_hook(hook, with_kwargs=True)

    return watch


def _layer_branches(layer: Any) -> Iterator[StreamBranch]:
    connections = [child for child in layer.children() if isinstance(child, StreamwiseSigmoidWideResidualConnection)]
    writes = {child.branch_name: child for child in connections if child.operation == "write"}
    first = True
    for read in connections:
        if read.operation != "read":
            continue
        write = writes[read.branch_name]
        watch = _watch_input(layer) if first else _watch_carried(write)
        key = branch_key(layer.layer_number, read.branch_name)
        yield StreamBranch(key, read.read_map, write.write_map, write.retention, watch)
        first = False
    for child in layer.children():
        if isinstance(child, StreamwiseSigmoidWideResidualRead):
            key = branch_key(layer.layer_number, child.branch_name)
            yield StreamBranch(key, child.read_map, None, None, _watch_input(child))


def local_branches(model_chunks: Iterable[torch.nn.Module]) -> list[StreamBranch]:
    """Return the branches of this rank's model chunks, in no particular order."""
    branches: list[StreamBranch] = []
    for chunk in model_chunks:
        for module in unwrap_model(chunk).modules():
            if isinstance(module, WideResidualBranches):
                branches += _layer_branches(module)
            elif isinstance(module, StreamwiseSigmoidResidualReadout):
                branches.append(StreamBranch(READOUT, module.exit_map, None, None, _watch_input(module)))
    return branches
