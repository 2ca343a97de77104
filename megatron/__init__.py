"""The overlay root: makes this tree and the pip package `megatron-core` one importable package.

`megatron/` here holds only modules that the pip package lacks. Importing anything below `megatron` works the same from
a bare checkout, an editable install and a built wheel:

    from megatron.core.transformer.transformer_config import TransformerConfig      # the pip package
    from megatron.core.transformer.wide_residual_config import WideResidualConfig   # this tree

What always holds: the pip package wins. The finder below stands last on `sys.meta_path`, so it is asked only for a
module that no one else has; nothing here can shadow an upstream module by accident.
"""

from __future__ import annotations

import importlib.machinery
import importlib.metadata
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType

__path__ = extend_path(__path__, __name__)

MEGATRON_CORE_REQUIREMENT = ">=0.19.2,<0.20"
_OVERLAY_ROOT = Path(__file__).resolve().parent


def _check_megatron_core() -> None:
    """Raise ImportError, naming what was found and what is wanted, unless a suitable megatron-core is installed."""
    wanted = f"megatron-core{MEGATRON_CORE_REQUIREMENT}"
    remedy = f'Install it with: {sys.executable} -m pip install "{wanted}" (or run ./scripts/setup.sh).'
    try:
        found = importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        raise ImportError(f"megatron-core is not installed, {wanted} is wanted. {remedy}") from None
    from packaging.specifiers import SpecifierSet  # a dependency of megatron-core, so it is here by now

    if found not in SpecifierSet(MEGATRON_CORE_REQUIREMENT):
        raise ImportError(f"megatron-core {found} is installed, {wanted} is wanted. {remedy}")


class _OverlayFinder:
    """Finds `megatron.X.Y` in this tree when the packages that own `megatron.X` do not have it.

    A regular package such as `megatron.core` has one folder in its `__path__`; modules that this tree adds below it
    live in another folder, which Python's own path finder never visits in a checkout or an editable install.
    """

    @staticmethod
    def find_spec(
        fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        parent, _, _ = fullname.rpartition(".")
        if not parent.startswith(__name__ + "."):
            return None  # `megatron.X` itself is found through `megatron.__path__`
        folder = _OVERLAY_ROOT.joinpath(*parent.split(".")[1:])
        return importlib.machinery.PathFinder.find_spec(fullname, [str(folder)], target)


_check_megatron_core()
if not any(getattr(finder, "__module__", None) == __name__ for finder in sys.meta_path):
    sys.meta_path.append(_OverlayFinder)
