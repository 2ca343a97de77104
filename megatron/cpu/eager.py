"""Upstream's jit-fused functions run as plain Python functions on the CPU host.

Upstream decorates about thirty small functions (bias+gelu, bias+dropout+add, router helpers) with `torch.compile` when
its modules are imported. On a CPU each first call would start a C++ compiler for many seconds, which a laptop need not
even have. `install_eager(replaced)` puts the undecorated function in place of every one, wherever it was imported to.
It touches modules of the pip package alone: our own compiled functions stay compiled.
"""

from __future__ import annotations

import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import megatron.core
import megatron.core.jit as jit
from megatron.cpu.replacements import Replacements

_COMPILED_FROM = "_torchdynamo_orig_callable"


def _upstream_modules() -> list[ModuleType]:
    """Imported modules whose file lies in the pip package's `megatron` folder."""
    root = Path(megatron.core.__file__).resolve().parents[1]
    return [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.")
        and getattr(module, "__file__", None)
        and Path(module.__file__).is_relative_to(root)  # type: ignore[arg-type]
    ]


def _uncompile(owner: Any, replaced: Replacements) -> None:
    for name, value in list(vars(owner).items()):
        plain = vars(value).get(_COMPILED_FROM) if inspect.isfunction(value) else None
        if plain is not None:
            replaced.set(owner, name, plain)


def install_eager(replaced: Replacements) -> None:
    """Replace compiled upstream functions by their plain form until `replaced` is restored."""
    replaced.set(jit, "jit_fuser", jit.noop_decorator)  # for modules that are imported later
    for module in _upstream_modules():
        _uncompile(module, replaced)
        for value in list(vars(module).values()):
            if inspect.isclass(value) and value.__module__ == module.__name__:
                _uncompile(value, replaced)
