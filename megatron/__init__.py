"""The overlay root: makes this tree and the pip package `megatron-core` one importable package.

`megatron/` here holds only modules that the pip package lacks. Importing anything below `megatron` works the same from
a bare checkout, an editable install and a built wheel:

    from megatron.core.transformer.transformer_config import TransformerConfig      # the pip package
    from megatron.core.transformer.wide_residual_config import WideResidualConfig   # this tree

What always holds: the pip package wins. The finder below stands last on `sys.meta_path`, so it is asked only for a
module that no one else has; nothing here can shadow an upstream module by accident. A Python, a megatron-core or a
second `megatron` package that would make something else come out of an import is an ImportError that says what to do.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from pkgutil import extend_path
from types import ModuleType

__path__ = extend_path(__path__, __name__)

MEGATRON_CORE_REQUIREMENT = ">=0.19.2,<0.20"
_OLDEST_PYTHON = (3, 12)
_OVERLAY_ROOT = Path(__file__).resolve().parent


def _check_python() -> None:
    """Raise ImportError when this Python is older than any that megatron-core can be installed on."""
    if sys.version_info < _OLDEST_PYTHON:
        wanted = ".".join(map(str, _OLDEST_PYTHON))
        raise ImportError(
            f"Python {sys.version.split()[0]} ({sys.executable}) is running, {wanted} or newer is wanted. "
            "./scripts/setup.sh finds one and makes .venv with it; then use .venv/bin/python."
        )


def _check_no_second_overlay() -> None:
    """Raise ImportError when another folder of `megatron.__path__` is an overlay root like this one.

    Typically a wheel of this project lies in site-packages while a checkout runs. Its modules below `megatron.core`
    lie beside megatron-core's own and would be taken in place of the checkout's, without a word.
    """
    for folder in map(Path, __path__):
        if (folder / "__init__.py").is_file() and folder.resolve() != _OVERLAY_ROOT:
            raise ImportError(
                f"two `megatron` packages with an __init__.py are on sys.path: {_OVERLAY_ROOT} is running, but modules "
                f"of {folder} would mix with it. Remove the second; for an installed copy of this project: "
                f"{sys.executable} -m pip uninstall megatron-wide-residual"
            )


def _check_megatron_core() -> None:
    """Raise ImportError unless the `megatron.core` that an import would bring is a suitable one.

    The version is read beside the module itself, so that a Megatron-LM clone on PYTHONPATH is judged as what it is
    and not by the metadata of some other installed release.
    """
    wanted = f"megatron-core{MEGATRON_CORE_REQUIREMENT}"
    remedy = f'Install it with: {sys.executable} -m pip install "{wanted}" (or run ./scripts/setup.sh).'
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:  # None, or only folders without an __init__.py such as our own
        raise ImportError(f"megatron-core is not installed, {wanted} is wanted. {remedy}")
    from packaging.specifiers import SpecifierSet  # a dependency of megatron-core, so it is here by now

    package = Path(spec.origin).parent
    *release, pre_release = runpy.run_path(str(package / "package_info.py"))["VERSION"]
    found = ".".join(map(str, release)) + pre_release
    if found not in SpecifierSet(MEGATRON_CORE_REQUIREMENT):
        raise ImportError(f"megatron-core {found} is found at {package}, {wanted} is wanted. {remedy}")


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


_check_python()
_check_no_second_overlay()
_check_megatron_core()
if not any(getattr(finder, "__module__", None) == __name__ for finder in sys.meta_path):
    sys.meta_path.append(_OverlayFinder)
