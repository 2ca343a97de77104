"""Writes that read for the next layer: the last write of a layer and the first read of the one behind it in one pass.

    attach_read_ahead(decoder, config)                 # decoder.layers are layers on wide residual streams

Within a layer a write reads for the next branch by itself (wide_residual_branches). Across layers that is for the stack
to say, since only it knows what comes next and that nothing stands between: it tells each layer in a hook around its
own forward. The stream between two layers is then read once in the forward, not twice.

What always holds: results, gradients and what is kept for the backward are those of layers that read for themselves,
bit for bit. A layer that hooks prepare, or that is given another stream than the one that was read from, reads for
itself. No layer holds another one outside a forward of the stack.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron.core.transformer.residual_recompute import residual_stream_recompute_enabled
from megatron.core.transformer.wide_residual_branches import WideResidualBranches


def reads_ahead_across_layers(config: TransformerConfig, training: bool) -> bool:
    """Whether layers of this config run one behind the other in plain autograd, each on what the one before returned.

    Not under replay, whose blocks end at layers; under full recomputation, which runs layers again by themselves; nor
    where activations are put on the host between layers.
    """
    offloads = config.cpu_offloading or getattr(config, "fine_grained_activation_offloading", False)
    is_whole = config.recompute_granularity != "full" and not offloads
    return is_whole and not residual_stream_recompute_enabled(config, training)


def attach_read_ahead(stack: torch.nn.Module, config: TransformerConfig) -> None:
    """Let each of stack.layers read for the one behind it in every forward of stack for which that is allowed."""

    def tell(module: Any, *_: Any) -> None:
        if reads_ahead_across_layers(config, module.training):
            for layer, following in pairwise(module.layers):
                if isinstance(layer, WideResidualBranches) and isinstance(following, WideResidualBranches):
                    layer._held.following = following if following._branches else None

    def forget(module: Any, *_: Any) -> None:
        for layer in module.layers:
            if isinstance(layer, WideResidualBranches):
                layer._held.following = layer._held.read_ahead = None

    stack.register_forward_pre_hook(tell)
    stack.register_forward_hook(forget, always_call=True)
