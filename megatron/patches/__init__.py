"""Replacements of upstream functions that offer no seam, one small file each.

A file here defines `PATCH`, an `UpstreamPatch`: the upstream name that it replaces, why no seam serves, the hash of the
upstream source that it was written for, and what goes in its place. `apply_patches(patches, replaced)` installs them.

What always holds: a patch whose upstream source is not the one it was written for is never applied; it raises
UpstreamChangedError, which names the function and the file to look at.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron.cpu.replacements import Replacements


class UpstreamChangedError(RuntimeError):
    """The upstream source is not the one that a patch was written for."""


@dataclass(frozen=True)
class UpstreamPatch:
    """One replaced upstream attribute.

    `module` and `name` say where it is ("a.b", "Class.method"); `source_of` names what is hashed when that differs (a
    function imported into another module); `make` takes the original and returns what replaces it.
    """

    module: str
    name: str
    reason: str
    source_sha256: str
    make: Callable[[Any], Any]

    def owner(self) -> tuple[Any, str]:
        """The module or class that holds the attribute, and the attribute's own name."""
        owner: Any = importlib.import_module(self.module)
        *path, attribute = self.name.split(".")
        for part in path:
            owner = getattr(owner, part)
        return owner, attribute

    def check(self) -> None:
        """Raise UpstreamChangedError unless the upstream source is the one this patch was written for."""
        owner, attribute = self.owner()
        found = source_sha256(getattr(owner, attribute))
        if found != self.source_sha256:
            raise UpstreamChangedError(
                f"{self.module}.{self.name} of the installed megatron-core is not the one that its patch was written "
                f"for (sha256 of its source {found[:12]}..., wanted {self.source_sha256[:12]}...). Install the version "
                f"of constraints.txt, or review the patch under megatron/patches/ and update its hash."
            )


def source_sha256(function: Any) -> str:
    """SHA-256 of a function's source text as installed."""
    return hashlib.sha256(inspect.getsource(function).encode()).hexdigest()


def apply_patches(patches: Iterable[UpstreamPatch], replaced: Replacements) -> None:
    """Check and install the patches; `replaced` puts the originals back."""
    for patch in patches:
        patch.check()
        owner, attribute = patch.owner()
        replaced.set(owner, attribute, patch.make(vars(owner)[attribute]))
