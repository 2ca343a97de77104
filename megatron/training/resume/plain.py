"""A plain checkpoint (--ckpt-format torch) beside the model and the optimizer that a run wants to load it into.

    state = with_split_keys(state)                      # older combined residual keys renamed, in a copy
    found = plain_differences(models, optimizer, state)

What always holds: the state dict given is not changed. An optimizer's state has no names here: what is compared is the
number of parameter groups, and shapes and dtypes of the moments of every parameter in the optimizer's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from megatron.core.transformer.wide_residual import load_residual_state
from megatron.training.resume.differences import Differences, Entry, differences

_MOMENTS = ("exp_avg", "exp_avg_sq")
_MAIN_COPIES = "fp32_from_fp16_params"


def model_keys(count: int) -> list[str]:
    """Return the keys of a checkpoint under which the chunks of a model stand."""
    return ["model"] if count == 1 else [f"model{index}" for index in range(count)]


def _entries(prefix: str, tensors: Mapping[str, Any]) -> dict[str, Entry]:
    return {f"{prefix}{name}": Entry.of(value) for name, value in tensors.items()}


def _layer_prefixes(names: Sequence[str]) -> set[str]:
    """Return what stands before `residual_connection` in the names."""
    return {name[: name.index("residual_connection")] for name in names if "residual_connection" in name}


def with_split_keys(state: Mapping[str, Any], count: int) -> dict[str, Any]:
    """Return a checkpoint whose models' older combined residual keys have today's names."""
    renamed = dict(state)
    for key in model_keys(count):
        if key in state:
            renamed[key] = split_names(state[key])
    return renamed


def split_names(model_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's state with older combined residual keys renamed, as load_residual_state documents."""
    names = dict(model_state)
    for prefix in _layer_prefixes(list(names)):
        load_residual_state(None, names, prefix, {}, True, [], [], [])  # type: ignore[arg-type]
    return names


def _inner_states(optimizer: Any, saved: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the optimizers that a (chained) optimizer stands for, each with its part of the saved state."""
    chained = getattr(optimizer, "chained_optimizers", None)
    if chained is None:
        yield optimizer, saved
    elif len(chained) == 1:
        yield chained[0], saved
    else:
        parts = saved if isinstance(saved, list) else list(saved.values()) if isinstance(saved, dict) else []
        for index, one in enumerate(chained):
            yield one, parts[index] if index < len(parts) else {}


def _names(optimizer: Any) -> tuple[str, ...]:
    """Return what the inner optimizer keeps of every parameter, as far as its state is compared."""
    if isinstance(optimizer.optimizer, torch.optim.Adam | torch.optim.AdamW):
        return ("step", *_MOMENTS)
    return _MOMENTS if "Adam" in type(optimizer.optimizer).__name__ else ()


def _moment(name: str, value: Any) -> Entry:
    return Entry() if name == "step" else Entry.of(value)


def _parameter_state(optimizer: Any, saved: Any) -> tuple[dict[str, Entry], dict[str, Entry]]:
    """Return (wanted, stored) moments and main copies by the position of their parameter."""
    names = _names(optimizer)
    parameters = [parameter for group in optimizer.optimizer.param_groups for parameter in group["params"]]
    wanted = {f"state.{i}.{name}": _moment(name, one) for i, one in enumerate(parameters) for name in names}
    stored = {
        f"state.{i}.{name}": _moment(name, value)
        for i, kept in saved.get("optimizer", saved).get("state", {}).items()
        for name, value in kept.items()
        if name in names
    }
    for part, state in ((wanted, optimizer.state_dict()), (stored, saved)):
        for group, copies in enumerate(state.get(_MAIN_COPIES, ())):
            part |= {f"{_MAIN_COPIES}.{group}.{i}": Entry.of(copy) for i, copy in enumerate(copies)}
    return wanted, stored


def _optimizer_differences(optimizer: Any, saved: Any) -> Differences:
    """The state of one optimizer; of a distributed one the groups alone, its moments stand in a file of their own."""
    if not isinstance(saved, dict):
        saved = {}
    wanted, stored = ({}, {}) if hasattr(optimizer, "gbuf_ranges") else _parameter_state(optimizer, saved)
    wanted["param_groups"] = Entry((len(optimizer.param_groups),))
    groups = saved.get("optimizer", saved).get("param_groups")
    if groups is not None:
        stored["param_groups"] = Entry((len(groups),))
    return differences(wanted, stored)


def buffer_differences(optimizer: Any, saved: Any) -> Differences:
    """Compare a distributed optimizer's buffers with what distrib_optim.pt holds."""
    wanted: dict[str, Entry] = {}
    stored: dict[str, Entry] = {}
    one: Any
    kept: Any
    for position, (one, kept) in enumerate(_inner_states(optimizer, saved)):
        for index, dtypes in enumerate(one.gbuf_ranges):
            for dtype in dtypes:
                whole = Entry((one.buffers[index].numel_unpadded,), torch.float32)
                wanted |= {f"buffer.{position}.{index}.{dtype}.{name}": whole for name in ("param", *_MOMENTS)}
        for index, dtypes in (kept or {}).items():
            if isinstance(dtypes, dict):
                for dtype, tensors in dtypes.items():
                    stored |= {
                        f"buffer.{position}.{index}.{dtype}.{name}": Entry.of(value)
                        for name, value in tensors.items()
                        if isinstance(value, torch.Tensor)
                    }
    return differences(wanted, stored)


def plain_differences(models: Sequence[Any], optimizer: Any, state: Mapping[str, Any]) -> Differences:
    """Compare models (unwrapped chunks) and optimizer (None: not loaded) with a plain checkpoint's state."""
    wanted: dict[str, Entry] = {}
    stored: dict[str, Entry] = {}
    for key, model in zip(model_keys(len(models)), models, strict=True):
        prefix = "" if key == "model" else f"{key}."
        wanted |= _entries(prefix, model.state_dict())
        stored |= _entries(prefix, state.get(key, {}))
    found = differences(wanted, stored)
    if optimizer is None or getattr(optimizer, "is_stub_optimizer", False):
        return found
    for position, (one, saved) in enumerate(_inner_states(optimizer, state.get("optimizer", {}))):
        part = _optimizer_differences(one, saved)
        found.add(part, prefix=f"optimizer.{position}.")
    return found


def without_misfits(state: Mapping[str, Any], count: int, misfits: set[str]) -> dict[str, Any]:
    """Return a checkpoint without the model tensors of these names (--load-non-strict)."""
    kept = dict(state)
    for key in model_keys(count):
        prefix = "" if key == "model" else f"{key}."
        if key in state:
            kept[key] = {name: value for name, value in state[key].items() if f"{prefix}{name}" not in misfits}
    return kept
