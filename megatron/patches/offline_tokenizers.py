"""Training builds its tokenizer with the builder that preprocessing uses.

Upstream's start-up calls `build_tokenizer` by name and takes no tokenizer from its caller: no seam. The replacement
(megatron/training/data/tokenizers.py) hands every type to upstream but GPT2BPETokenizer with both its files (upstream
asks the Hugging Face hub for "gpt2" all the same), HuggingFaceTokenizer with a tokenizer.json, and ByteLevelTokenizer
(upstream has the library but no type name). Applied to every run, on GPUs too, by `install_tokenizers`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal, get_args

from megatron.patches import UpstreamChangedError, UpstreamPatch, apply_patches

if TYPE_CHECKING:
    from megatron.cpu.replacements import Replacements


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


def install_tokenizers(replaced: Replacements) -> None:
    """Apply the patch and let every parser of Megatron's arguments accept ByteLevelTokenizer.

    Upstream parses the command line more than once, each time with a parser of its own that takes the choices from the
    annotation of this field; `extra_args_provider` reaches only one of them.
    """
    from megatron.training.config import TokenizerConfig

    field = TokenizerConfig.__dataclass_fields__["tokenizer_type"]
    upstream_type = field.type
    if "GPT2BPETokenizer" not in get_args(upstream_type):
        raise UpstreamChangedError(
            "megatron.training.config.TokenizerConfig.tokenizer_type no longer lists the tokenizer types. Install the "
            "version of constraints.txt, or review megatron/patches/offline_tokenizers.py."
        )
    apply_patches((PATCH,), replaced)
    replaced.on_restore(lambda: setattr(field, "type", upstream_type))
    field.type = Literal[(*get_args(upstream_type), "ByteLevelTokenizer")]
