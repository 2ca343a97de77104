"""Upstream's torch norm works under sequence parallelism.

`WrappedTorchNorm` is what the local layer specs, the block's final norm and the backends name; its constructor refuses
sequence parallelism outright. Giving each of those places another norm would mean copying the specs. Without sequence
parallelism upstream's own constructor runs. Installed by the CPU host alone.
"""

from __future__ import annotations

from typing import Any

from megatron.patches import UpstreamPatch


def _allow_sequence_parallel(original: Any) -> Any:
    construct = original.__func__ if isinstance(original, staticmethod) else original

    def new(cls: type, config: Any, hidden_size: int, eps: float = 1e-5, **options: Any) -> Any:
        if not config.sequence_parallel:
            return construct(cls, config, hidden_size, eps, **options)
        from megatron.cpu.norms import sequence_parallel_norm

        return sequence_parallel_norm(config, hidden_size, eps)

    return staticmethod(new)


PATCH = UpstreamPatch(
    module="megatron.core.transformer.torch_norm",
    name="WrappedTorchNorm.__new__",
    reason="refuses sequence parallelism, named by every local spec",
    source_sha256="d3dc509021de5acab6be755a93ad91d8e08c50202fa15d69fed09beb624bfc10",
    make=_allow_sequence_parallel,
)
