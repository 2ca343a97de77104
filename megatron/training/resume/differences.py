"""The keys, shapes and dtypes of a checkpoint beside those of a model: what differs, in words.

    found = differences(wanted, stored)      # two dicts: name -> Entry
    if found: raise CheckpointError(refusal(found, folder))

What always holds: a name that is on one side only is reported with the nearest name of the other side; only TE's
`_extra_state` may differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

NON_STRICT_FLAG = "--load-non-strict"
_EXTRA_STATE = "_extra_state"
_LISTED = 20
# difflib compares each name with all others: of thousands, only those with the same last part.
_NAMES_COMPARED = 500


@dataclass(frozen=True)
class Entry:
    """Shape and dtype of a stored or wanted tensor; None for an object that has neither."""

    shape: tuple[int, ...] | None = None
    dtype: Any = None

    @classmethod
    def of(cls, tensor: Any) -> Entry:
        """Return the entry of a tensor, or of anything else."""
        return cls(tuple(tensor.shape), tensor.dtype) if hasattr(tensor, "dtype") else cls()

    def __str__(self) -> str:
        if self.shape is None:
            return "no tensor"
        return f"{str(self.dtype).removeprefix('torch.')} {list(self.shape)}"


@dataclass
class Differences:
    """What differs; every list holds (name, the rest of the line)."""

    missing: dict[str, str] = field(default_factory=dict)
    unexpected: dict[str, str] = field(default_factory=dict)
    other_shape: dict[str, str] = field(default_factory=dict)
    other_dtype: dict[str, str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.missing, self.unexpected, self.other_shape, self.other_dtype))

    def _groups(self) -> Iterator[tuple[str, dict[str, str]]]:
        yield "not in the checkpoint", self.missing
        yield "not in the model", self.unexpected
        yield "another shape", self.other_shape
        yield "another dtype", self.other_dtype

    def add(self, other: Differences, prefix: str) -> None:
        """Take over what another comparison found, its names prefixed."""
        for (_, mine), (_, theirs) in zip(self._groups(), other._groups(), strict=True):
            mine.update({f"{prefix}{name}": rest for name, rest in theirs.items()})

    def names(self) -> set[str]:
        """Return every name that differs."""
        return {name for _, group in self._groups() for name in group}

    def describe(self, separator: str = "\n  ") -> str:
        """Return the lists, at most _LISTED names each, joined by the separator."""
        parts = []
        for what, group in self._groups():
            names = sorted(group)
            parts += [f"{what}: {name}{group[name]}" for name in names[:_LISTED]]
            if len(names) > _LISTED:
                parts.append(f"{what}: and {len(names) - _LISTED} more")
        return separator.join(parts)


def is_extra_state(name: str) -> bool:
    """Return whether a name belongs to what Transformer Engine keeps beside parameters."""
    return _EXTRA_STATE in name


def _nearest(name: str, others: list[str]) -> str:
    if len(others) > _NAMES_COMPARED:
        last = name.rsplit(".", 1)[-1]
        others = [other for other in others if other.rsplit(".", 1)[-1] == last][:_NAMES_COMPARED]
    close = get_close_matches(name, others, n=1, cutoff=0.6)
    return f" (nearest: {close[0]})" if close else ""


def differences(wanted: Mapping[str, Entry], stored: Mapping[str, Entry]) -> Differences:
    """Compare what a model wants with what a checkpoint stores, by name."""
    found = Differences()
    absent = sorted(name for name in wanted.keys() - stored.keys() if not is_extra_state(name))
    surplus = sorted(name for name in stored.keys() - wanted.keys() if not is_extra_state(name))
    # A renamed key has its counterpart among the names that are on the other side alone.
    for name in absent:
        found.missing[name] = _nearest(name, surplus) or _nearest(name, sorted(stored))
    for name in surplus:
        found.unexpected[name] = _nearest(name, absent) or _nearest(name, sorted(wanted))
    for name in wanted.keys() & stored.keys():
        if is_extra_state(name):
            continue
        here, there = wanted[name], stored[name]
        if here.shape != there.shape:
            found.other_shape[name] = f" ({there} in the checkpoint, {here} in the model)"
        elif here.dtype != there.dtype:
            found.other_dtype[name] = f" ({there} in the checkpoint, {here} in the model)"
    return found


def refusal(found: Differences, folder: Any) -> str:
    """Return the message that ends a run whose model is not the checkpoint's."""
    return (
        f"{folder} is not this model's; nothing was loaded.\n  {found.describe()}\n"
        f"Give the flags that it was trained with (or --use-checkpoint-args). {NON_STRICT_FLAG} loads what fits and "
        "prints what it skips."
    )


def skipped_line(found: Differences, folder: Any) -> str:
    """Return what --load-non-strict prints."""
    return f"> {NON_STRICT_FLAG}: of {folder}, what differs is not loaded (another dtype is converted):\n  " + (
        found.describe()
    )
