"""What a checkpoint with optimizer states has for every trained weight: all states of its optimizer, in one dtype.

    flaw = flaw_of(reader)              # "exp_avg_sq of decoder.layers.0... is missing", or None

What belongs together, as upstream saves it:

    moments         exp_avg and exp_avg_sq (one alone where no weight has the other), or momentum_buffer: Muon trains
                    matrices with the latter and what is left with Adam
    master copies   fp32_param or param: every weight in half precision has one; one in fp32 has one where its like
                    has (all controllers, all tensors of its kind, all weights of an fp32 model), and always with the
                    distributed optimizer, which calls it param
    dtypes          one for all tensors of a slot; a weight has the run's params_dtype, or is fp32 (controllers are,
                    and what a model keeps in fp32)

What always holds: buffers have no states; buckets, which name no tensors, and checkpoints without optimizer states are
not looked at for states; what one of several real optimizers could have written is accepted.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from megatron.training.checkpoints.checkpoint_state import WEIGHT, Entry, TensorInfo
from megatron.training.checkpoints.tensor_table import find_tensor

MASTER_SLOTS = ("fp32_param", "param")
"""Optimizer states that are the weight itself, in fp32."""
_ADAM, _MOMENTUM = ("exp_avg", "exp_avg_sq"), ("momentum_buffer",)
_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def _shown(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _params_dtype(args: Any) -> torch.dtype | None:
    """Return the dtype of a run's weights; None when its arguments do not tell."""
    told = getattr(args, "params_dtype", None)
    if isinstance(told, torch.dtype):
        return told
    for name, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        if getattr(args, name, False):
            return dtype
    return torch.float32 if hasattr(args, "bf16") and hasattr(args, "fp16") else None


def _weight_flaws(weights: Mapping[str, TensorInfo], args: Any) -> Iterator[str]:
    wanted = _params_dtype(args)
    if wanted is None:
        return
    allowed = {wanted, torch.float32}
    odd = {name: info for name, info in weights.items() if info.dtype in _FLOATS and info.dtype not in allowed}
    base = [name for name in weights if find_tensor(name).row.controller is None]
    if odd and not set(base) <= set(odd):  # all in another dtype: converted as a whole, the arguments are older
        name = min(odd)
        yield f"{name} is {_shown(odd[name].dtype)}, the run's weights are {_shown(wanted)}"


def _dtype_flaws(entries: Mapping[Entry, TensorInfo]) -> Iterator[str]:
    dtypes: dict[str, Counter[torch.dtype]] = defaultdict(Counter)
    for entry, info in entries.items():
        dtypes[entry.slot][info.dtype] += 1
    for entry, info in entries.items():
        ((usual, count), *others) = dtypes[entry.slot].most_common()
        if entry.slot != WEIGHT and others and info.dtype != usual:
            yield f"{entry} is {_shown(info.dtype)}, {count} others of its kind are {_shown(usual)}"


def _moment_flaws(weights: Mapping[str, TensorInfo], slots: Mapping[str, set[str]]) -> Iterator[str]:
    there = set().union(*slots.values())
    families = [kept for kind in (_ADAM, _MOMENTUM) if (kept := [slot for slot in kind if slot in there])]
    if not families:
        return
    for name in weights:
        missing = [[slot for slot in kind if slot not in slots[name]] for kind in families]
        if all(missing):
            yield f"{Entry(name, min(missing, key=len)[0])} is missing"


def _like(name: str, half_model: bool) -> str:
    """Return what names the fp32 weights that have a master copy together or not at all."""
    row = find_tensor(name).row
    return "" if not half_model else "controller" if row.controller is not None else row.name


def _master_flaws(weights: Mapping[str, TensorInfo], slots: Mapping[str, set[str]]) -> Iterator[str]:
    half = {name for name, info in weights.items() if info.dtype in (torch.float16, torch.bfloat16)}
    copied = {name for name in weights if slots[name] & set(MASTER_SLOTS)}
    there = set().union(*slots.values()) & set(MASTER_SLOTS)
    slot = min(there, default=MASTER_SLOTS[0])
    alike = {_like(name, bool(half)) for name in copied - half}
    for name in weights:
        if name not in copied and (name in half or there == {"param"} or _like(name, bool(half)) in alike):
            yield f"{Entry(name, slot)} is missing"


def _trained(entries: Mapping[Entry, TensorInfo]) -> dict[str, TensorInfo]:
    return {
        entry.name: info
        for entry, info in entries.items()
        if entry.slot == WEIGHT and not find_tensor(entry.name).row.buffer
    }


def _state_flaws(entries: Mapping[Entry, TensorInfo], buckets: bool) -> Iterator[str]:
    weights = _trained(entries)
    slots: dict[str, set[str]] = defaultdict(set)
    for entry in entries:
        if entry.slot != WEIGHT:
            slots[entry.name].add(entry.slot)
    if buckets or not slots:
        return
    for name in slots:
        if Entry(name) not in entries:
            yield f"{name} is missing, and {min(slots[name])} of it is there"
    yield from _moment_flaws(weights, slots)
    yield from _master_flaws(weights, slots)
    yield from _dtype_flaws(entries)


def weight_flaw_of(reader: Any) -> str | None:
    """Return which weight of an open checkpoint has a dtype that its run's weights cannot have; None when none."""
    return _phrase(list(_weight_flaws(_trained(reader.entries), reader.common.args)))


def flaw_of(reader: Any) -> str | None:
    """Return what an open checkpoint lacks or holds in a wrong dtype, and how much more of it; None when nothing."""
    return weight_flaw_of(reader) or _phrase(list(_state_flaws(reader.entries, bool(reader.bucket_keys))))


def _phrase(flaws: list[str]) -> str | None:
    if not flaws:
        return None
    return flaws[0] + (f" (and {len(flaws) - 1} more)" if len(flaws) > 1 else "")
