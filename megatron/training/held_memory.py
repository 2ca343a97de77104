"""Counts the bytes that autograd keeps for a backward: after a forward, and the most at any moment.

    with HeldForBackward(model.parameters()) as held:
        loss = model(x).sum()
        after_forward = held.now()
        loss.backward()
    most = held.most

A tensor counts while autograd keeps it; its storage counts once, with all of its bytes, however many saved tensors look
at it. Parameters do not count. Gradients on their way do not count either: they are nobody's saved tensor.

What always holds: what is computed is not changed. `most` is sampled whenever the backward takes up a saved tensor,
which is after a replay and before anything that it rebuilt is let go.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks


class _Saved:
    """What autograd keeps in place of a saved tensor; it goes when autograd lets go of it."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # an output that kept its own graph would never be freed


class HeldForBackward:
    """Context in which tensors that autograd saves are counted. excluded: tensors that do not count."""

    def __init__(self, excluded: Iterable[Tensor] = ()) -> None:
        self._excluded = {tensor.untyped_storage().data_ptr() for tensor in excluded}
        self._alive: weakref.WeakSet[_Saved] = weakref.WeakSet()
        self.most = 0

    def __enter__(self) -> HeldForBackward:
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> _Saved:
        saved = _Saved(tensor)
        self._alive.add(saved)
        return saved

    def _unpack(self, saved: _Saved) -> Tensor:
        self.now()
        return saved.tensor

    def storages(self) -> dict[int, int]:
        """Address and bytes of every storage that is held."""
        found = {}
        for saved in self._alive:
            storage = saved.tensor.untyped_storage()
            # Storages that replay gave back share their memory: the address tells, not the storage object.
            if storage.nbytes() and storage.data_ptr() not in self._excluded:
                found[storage.data_ptr()] = storage.nbytes()
        return found

    def now(self) -> int:
        """Bytes held now."""
        held = sum(self.storages().values())
        self.most = max(self.most, held)
        return held


def saved_by(module: torch.nn.Module, x: Tensor) -> tuple[int, bool]:
    """Return the bytes that module(x) keeps for its backward, its parameters excluded, and whether x is among them."""
    with HeldForBackward(module.parameters()) as held:
        output = module(x.requires_grad_())
        storages = held.storages()
    del output
    return sum(storages.values()), x.untyped_storage().data_ptr() in storages
