"""Controllers of wide residual streams as tensors: which ones a model has, their start, how another K changes them.

    for name in controller_names(weights, args): start = fresh_controller(name, config)
    widened = duplicate(logit_p, "read", 2, 4)           # K=2 -> K=4, the same function
    merged = average(logit_p, "write", 4, 2)

The maths, for m new streams in the place of each old one, all equal to it: a read (or exit) of sigmoid(r)/m on each of
the m adds up to the old one; a write of 2 sigmoid(s) and a retention g are what each of them gets as before.

What always holds: values are computed in float64 and rounded to float32 once; the padding is zero.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.wide_residual_config import WideResidualConfig
from megatron.core.transformer.wide_residual_maps import LearnedWideResidualRetention, StreamwiseSigmoidMap
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.model_sizes import MIN_CONTROLLER
from megatron.training.checkpoints.tensor_table import find_tensor

READS = ("read", "exit")


def controller_names(weights: Iterable[str], config: WideResidualConfig, args: Namespace) -> list[str]:
    """Return the controllers that the wide model of an ordinary one has, from the ordinary one's tensors."""
    layers: dict[str, set[str]] = {}
    for name in weights:
        place = find_tensor(name)
        if place.in_decoder:
            layers.setdefault(place.prefix, set()).add(place.row.name)
    names = []
    for prefix, rows in layers.items():
        suffixes = []
        if "mixer.in_proj.weight" in rows:
            suffixes.append("")
        if "self_attention.linear_qkv.weight" in rows:
            suffixes.append("_self_attn")
        routed = "mlp.router.weight" in rows
        if routed or "mlp.linear_fc1.weight" in rows:
            suffixes.append("_mlp")
        if not suffixes:
            raise ConversionError(
                f"{prefix[:-1]} is no layer that wide streams serve (its tensors: {', '.join(sorted(rows))})"
            )
        for suffix in suffixes:
            names.append(f"{prefix}residual_read{suffix}.read_map.logit")
            names.append(f"{prefix}residual_write{suffix}.write_map.logit")
            if config.learned_retention:
                names.append(f"{prefix}residual_write{suffix}.retention.retention_logit")
        if routed and getattr(args, "moe_shortcut_connection", False):
            names.append(f"{prefix}residual_read_shortcut.read_map.logit")
    names.append("decoder.residual_stream_readout.exit_map.logit")
    return names


def fresh_controller(name: str, config: WideResidualConfig) -> Tensor:
    """Return a controller as a new model has it: [p], fp32."""
    kind = find_tensor(name).row.controller
    carrier: Any = SimpleNamespace(wide_residual=config, sequence_parallel=False)
    if kind == "retention":
        owner = LearnedWideResidualRetention(carrier, 0, "converted", num_streams=config.num_streams)
        return owner.retention_logit.detach()
    return StreamwiseSigmoidMap(carrier, map_kind="write" if kind == "write" else "read").logit.detach()


def padded(values: Tensor) -> Tensor:
    """Return logits as a stored controller: fp32, zero-padded to 128 or more."""
    whole = torch.zeros(max(values.numel(), MIN_CONTROLLER), dtype=torch.float32)
    whole[: values.numel()] = values
    return whole


def active(stored_p: Tensor, num_streams: int, name: str) -> Tensor:
    """Return the logits of the streams in float64; ConversionError for values behind them or that are not finite."""
    if not torch.isfinite(stored_p).all():
        raise ConversionError(
            f"{name} holds values that are not finite: the checkpoint is damaged or its run had diverged"
        )
    if stored_p[num_streams:].any():
        used = int(stored_p.nonzero().max()) + 1
        raise ConversionError(f"{name} holds values for {used} streams; the stored arguments say {num_streams}")
    return stored_p[:num_streams].double()


def factors(logits: Tensor, kind: str, max_forget: float) -> Tensor:
    """Return what logits stand for: read, exit sigmoid; write 2 sigmoid; retention 1 - F sigmoid(-q)."""
    if kind in READS:
        return torch.sigmoid(logits)
    if kind == "write":
        return 2 * torch.sigmoid(logits)
    return 1 - max_forget * torch.sigmoid(-logits)


def duplicate(stored_p: Tensor, kind: str, streams: int, copies: int, name: str, spread: float = 0.0) -> Tensor:
    """Return a controller with every stream `copies` times: the model's function is the same.

    Args:
        spread: write factors of the copies of a stream are spread around it by up to this share, with their mean kept,
            so that the copies can learn to differ. The function stays the same, for all copies are read alike.
    """
    logits = active(stored_p, streams, name).repeat_interleave(copies)
    if kind in READS:
        # logit(sigmoid(r)/m) = -log(m (1 + exp(-r)) - 1)
        logits = -torch.log(copies * (1 + torch.exp(-logits)) - 1)
    elif kind == "write" and spread:
        share = torch.linspace(-spread, spread, copies, dtype=torch.float64).repeat(streams)
        half = torch.sigmoid(logits) * (1 + share)
        if (half >= 1).any():
            raise ConversionError(
                f"{name}: a write factor of {2 * float(half.max()):.3f} is not below 2; give a smaller --spread"
            )
        logits = torch.logit(half)
    return padded(logits)


def moment_scale(stored_p: Tensor, kind: str, streams: int, copies: int, name: str) -> Tensor:
    """Return by what the gradient of each logit of `duplicate` differs from the old one's: [p].

    A stream's gradient is shared by its copies (1/m each); a read's also has the slope of another sigmoid.
    """
    old = active(stored_p, streams, name).repeat_interleave(copies)
    if kind in READS:
        new = torch.sigmoid(old) / copies
        scale = new * (1 - new) / (torch.sigmoid(old) * torch.sigmoid(-old))
    else:
        scale = torch.full_like(old, 1 / copies)
    return padded(scale)


def average(stored_p: Tensor, kind: str, streams: int, group: int, name: str) -> Tensor:
    """Return a controller in which every `group` neighbouring streams are one: the mean stream, lossy.

    Reads add up; write factors and retention are averaged.
    """
    logits = active(stored_p, streams, name).view(streams // group, group)
    if kind in READS:
        total = torch.sigmoid(logits).sum(1)
        if (total >= 1).any():
            raise ConversionError(f"{name}: merged read factors add up to {float(total.max()):.4f}; a read is below 1")
        return padded(torch.logit(total))
    return padded(torch.logit(torch.sigmoid(logits).mean(1)))  # linear in both kinds' factors


def spread_within(stored_p: Tensor, kind: str, streams: int, group: int, name: str, max_forget: float) -> float:
    """Return how much the factors that `average` merges differ: the largest distance from their mean."""
    values = factors(active(stored_p, streams, name), kind, max_forget).view(streams // group, group)
    return float((values - values.mean(1, keepdim=True)).abs().max())
