"""Upstream's start-up does not run `make` for a dataset helper that imports already.

The wheel ships the compiled helper, yet `compile_helpers()` runs `make` in site-packages, which needs a compiler and a
writable installation. It is imported by name inside the function that calls it: no seam. Where the helper does not
import, upstream's own compilation runs. Installed by the CPU host alone.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from megatron.patches import UpstreamPatch


def _unless_importable(compile_helpers: Callable[[], None]) -> Callable[[], None]:
    def compile_missing_helpers() -> None:
        if importlib.util.find_spec("megatron.core.datasets.helpers_cpp") is None:
            compile_helpers()

    return compile_missing_helpers


PATCH = UpstreamPatch(
    module="megatron.core.datasets.utils",
    name="compile_helpers",
    reason="called by name from start-up, always runs make",
    source_sha256="84029a50ae8cfac18dfe03efaf3c3977e82d3a51682ae4d410616b4c01f16f63",
    make=_unless_importable,
)
