"""The record of what was replaced: set attributes of modules and classes, and put every one of them back.

    with Replacements() as replaced:
        replaced.set(torch.cuda, "synchronize", lambda device=None: None)

What always holds: after `restore()` each owner's own dictionary has the very objects it had before (an attribute that
the owner only inherited, or did not have, is deleted again), in reverse order of setting.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

_ABSENT = object()


@dataclass
class Replacements:
    """Attributes replaced so far; a context manager that restores them on exit."""

    _undo: list[Callable[[], None]] = field(default_factory=list)
    _names: list[tuple[Any, str]] = field(default_factory=list)

    @property
    def names(self) -> list[tuple[Any, str]]:
        """(owner, attribute name) of everything that stands replaced, in order of replacement."""
        return list(self._names)

    def set(self, owner: Any, name: str, value: Any) -> None:
        """Set `owner.name = value` and remember what the owner itself held under that name."""
        previous = vars(owner).get(name, _ABSENT)
        setattr(owner, name, value)
        self._names.append((owner, name))

        def undo() -> None:
            if previous is _ABSENT:
                delattr(owner, name)
            else:
                setattr(owner, name, previous)

        self._undo.append(undo)

    def set_environment_default(self, name: str, value: str) -> None:
        """Set an environment variable that the user has not set, and remove it on restore."""
        if name in os.environ:
            return
        os.environ[name] = value

        def undo() -> None:
            os.environ.pop(name, None)

        self._undo.append(undo)

    def on_restore(self, undo: Callable[[], None]) -> None:
        """Remember one more thing to undo."""
        self._undo.append(undo)

    def restore(self) -> None:
        """Put everything back, last first."""
        while self._undo:
            self._undo.pop()()
        self._names.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.restore()
