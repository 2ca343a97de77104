"""Training builds its tokenizer with the builder that preprocessing uses.

Upstream's start-up calls `build_tokenizer` by name and takes no tokenizer from its caller: no seam. The replacement
(megatron/training/data/tokenizers.py) hands every type to upstream but GPT2BPETokenizer with both its files (upstream
asks the Hugging Face hub for "gpt2" all the same), HuggingFaceTokenizer with a tokenizer.json, and ByteLevelTokenizer
(upstream has the library but no type name). Applied to every run, on GPUs too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.patches import UpstreamPatch


def _with_ours(upstream_build_tokenizer: Callable[..., Any]) -> Callable[..., Any]:
    from megatron.training.data.tokenizers import build_tokenizer

    return build_tokenizer  # it calls upstream's own for all else


PATCH = UpstreamPatch(
    module="megatron.training.global_vars",
    name="build_tokenizer",
    reason="start-up builds the tokenizer itself and takes none from its caller",
    source_sha256="8f75e55822c6a198bba553f0ccf63e9ffa5a14fcea3040b02f5600c9dc1de39e",
    make=_with_ours,
)
