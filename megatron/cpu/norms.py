"""PyTorch's LayerNorm and RMSNorm, usable under sequence parallelism.

Under sequence parallelism each tensor-parallel rank normalises its share of the sequence with a replicated weight, so
the weight's gradients must be summed over the ranks. Megatron does that for parameters that carry the attribute
`sequence_parallel`; that mark is all that upstream's torch norm lacks.
"""

from __future__ import annotations

import torch

from megatron.core.transformer.transformer_config import TransformerConfig

_NORMS: dict[str, type[torch.nn.Module]] = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


def sequence_parallel_norm(config: TransformerConfig, hidden_size: int, eps: float = 1e-5) -> torch.nn.Module:
    """The torch norm that `config.normalization` names, its parameters marked for sequence parallelism.

    Input and output (s/tp, b, hidden_size). Raises ValueError for options that PyTorch's norms do not have.
    """
    for option in ("layernorm_zero_centered_gamma", "persist_layer_norm", "memory_efficient_layer_norm"):
        if getattr(config, option):
            raise ValueError(f"{option} is set, but torch norms do not have it: unset it (or use Transformer Engine).")
    if config.normalization not in _NORMS:
        raise ValueError(
            f"normalization is {config.normalization!r}, but a torch norm with sequence parallelism is one of "
            f"{', '.join(sorted(_NORMS))}."
        )
    norm = _NORMS[config.normalization](hidden_size, eps=eps)
    for parameter in norm.parameters():
        setattr(parameter, "sequence_parallel", config.sequence_parallel)  # noqa: B010
    return norm
