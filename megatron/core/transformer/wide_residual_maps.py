"""The learned controllers of wide residual streams: padded vectors, sigmoid maps and retention.

    factor_k = StreamwiseSigmoidMap(config, map_kind="read").factors()

Imported through `megatron.core.transformer.wide_residual`, whose docstring has the maths. What always holds:
controllers are fp32 vectors, zero-padded to at least 128 elements; they stay fp32 in bf16 and fp16 models, the tail has
no gradient and stays zero. They are replicated across tensor-parallel ranks. Building them draws no random number.

Shape suffixes: k streams, p padded controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.core.transformer.streamwise_residual_ops import (
    sigmoid_read_factors,
    sigmoid_retention_factors,
    sigmoid_write_factors,
)
from megatron.core.transformer.wide_residual_config import require_wide_residual_config

_MIN_CONTROLLER_NUMEL = 128
"""Controllers are padded to this many elements, so that the distributed optimizer never shards one below its
alignment."""


def _make_padded_vector(values: Tensor) -> torch.nn.Parameter:
    """Create a parameter vector padded for small distributed-optimizer shards.

    Args:
        values: [length], any real dtype.

    Returns:
        fp32 parameter of max(length, 128) elements: values, then zeros.

    Raises:
        ValueError: values is not a vector, or empty.
    """
    if values.dim() != 1 or values.numel() == 0:
        raise ValueError(f"controller values have shape {tuple(values.shape)}; a vector of one or more is wanted")
    padded_p = torch.zeros(max(values.numel(), _MIN_CONTROLLER_NUMEL), dtype=torch.float32, device=values.device)
    padded_p[: values.numel()] = values
    return torch.nn.Parameter(padded_p)


def _active_vector(param: Tensor, length: int) -> Tensor:
    """Return the active prefix of a potentially padded vector parameter.

    Raises:
        ValueError: param is not a vector, or shorter than length.
    """
    if param.dim() != 1 or not 0 <= length <= param.numel():
        raise ValueError(f"a controller of shape {tuple(param.shape)} cannot hold {length} streams")
    return param[:length]


def _mark_replicated_tp_parameter(param: torch.nn.Parameter, config: TransformerConfig) -> None:
    """Mark a replicated controller for the correct TP gradient reduction.

    With sequence parallelism each rank sees its own tokens, so gradients are summed; without it every rank computes
    the same gradient and averaging only keeps the copies in step.
    """
    sequence_parallel = bool(config.sequence_parallel)
    param.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
    param.average_gradients_across_tp_domain = not sequence_parallel  # type: ignore[attr-defined]


def _mark_residual_map_parameter(param: torch.nn.Parameter, config: TransformerConfig) -> None:
    """Attach optimizer and TP-gradient metadata to a replicated residual map.

    Being a vector keeps it away from Muon and, in Megatron's standard groups, from weight decay.
    """
    _mark_replicated_tp_parameter(param, config)
    param.residual_controller = "map"  # type: ignore[attr-defined]


def _mark_retention_parameter(param: torch.nn.Parameter, config: TransformerConfig) -> None:
    """Attach optimizer and TP-gradient metadata to a replicated retention parameter.

    Weight decay applies to it (`megatron/patches/retention_weight_decay.py`); being a vector keeps it away from Muon.
    """
    _mark_replicated_tp_parameter(param, config)
    param.residual_controller = "retention"  # type: ignore[attr-defined]
    param.follows_weight_decay = True  # type: ignore[attr-defined]


class _Controller(torch.nn.Module):
    """A module that owns one padded fp32 vector and keeps it fp32 when the model around it is cast to bf16 or fp16.

    Cast to bf16 the K=3 read factors would sum to 1.0012 and the exact start would be lost.
    """

    num_streams: int
    starts_at_zero: bool
    """Whether every logit is zero when the controller is built."""

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> _Controller:
        """Follow device moves and widening casts, undo narrowing ones."""
        before = {name: param.data for name, param in self.named_parameters(recurse=False)}
        super()._apply(fn, recurse)
        for name, param in self.named_parameters(recurse=False):
            if param.dtype in (torch.bfloat16, torch.float16):
                param.data = before[name].to(device=param.device)
        return self

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any) -> None:
        """Load, after checking that the stored vector belongs to this many streams."""
        for name, _ in self.named_parameters(recurse=False):
            stored_p = state_dict.get(prefix + name)
            if isinstance(stored_p, Tensor) and stored_p.dim() == 1:
                _check_stream_count(prefix + name, stored_p, self.num_streams, self.starts_at_zero)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _check_stream_count(key: str, stored_p: Tensor, num_streams: int, starts_at_zero: bool) -> None:
    """Raise ValueError when stored_p was written by a model with another number of streams.

    Controllers are padded, so a checkpoint of another stream count has the same shapes. What tells them apart: behind
    its streams a controller is exactly zero, and its last stream's logit, which starts away from zero, is not. (A read
    map of two streams starts at zero.)
    """
    if not torch.isfinite(stored_p).all():
        raise ValueError(f"{key} holds values that are not finite: the checkpoint is damaged or its run had diverged")
    used = int(stored_p.nonzero().max()) + 1 if stored_p.any() else 0
    if used == num_streams or (used == 0 and starts_at_zero):
        return
    raise ValueError(
        f"{key} holds values for {used} streams, this model has {num_streams}: the checkpoint was written with another "
        "--wide-residual. Give the checkpoint's, or convert it first."
    )


class StreamwiseSigmoidMap(_Controller):
    """Positive scalar controller for each contiguous full-width stream.

    Args:
        config: carries the WideResidualConfig.
        map_kind: "read" maps streams to the branch (factor sigmoid(logit), 1/K at the start); "write" maps the branch
            to streams (factor 2 sigmoid(logit), spread around 1 at the start).

    Raises:
        ValueError: an ordinary config, or an unknown map_kind.
    """

    def __init__(self, config: TransformerConfig, *, map_kind: Literal["read", "write"]) -> None:
        super().__init__()
        wide_residual = require_wide_residual_config(config, type(self).__name__)
        self.num_streams = wide_residual.num_streams
        self.map_kind = map_kind
        if map_kind == "read":
            # log((1/K) / (1 - 1/K)), written without the rounding of 1/K
            logit_k = torch.full((self.num_streams,), -math.log(self.num_streams - 1), dtype=torch.float64)
        elif map_kind == "write":
            scale = wide_residual.streamwise_sigmoid_init_scale
            logit_k = torch.linspace(-scale, scale, self.num_streams, dtype=torch.float64)
        else:
            raise ValueError(f'map_kind is {map_kind!r}; "read" or "write" is wanted')
        self.logit = _make_padded_vector(logit_k)
        self.starts_at_zero = not bool(logit_k.any())
        _mark_residual_map_parameter(self.logit, config)

    def factors(self) -> Tensor:
        """Return one positive factor for every full-width residual stream: [K], fp32."""
        to_factors = sigmoid_read_factors if self.map_kind == "read" else sigmoid_write_factors
        return to_factors(_active_vector(self.logit, self.num_streams), self.num_streams)

    def forward(self, *, return_logits: bool = False) -> Tensor:
        """Return padded logits ([128], for the operators) or one positive factor per full-width stream ([K])."""
        return self.logit if return_logits else self.factors()


class LearnedWideResidualRetention(_Controller):
    """Bounded learned retention with one controller per full-width stream: g_k = 1 - F sigmoid(-q_k).

    Args:
        config: carries the WideResidualConfig with the start and the bound F.
        layer_number, branch_name: where it stands, for error messages.
        num_streams: K.

    Raises:
        ValueError: an ordinary config, or a stream count that is not the config's.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, branch_name: str, *, num_streams: int) -> None:
        super().__init__()
        wide_residual = require_wide_residual_config(config, type(self).__name__)
        if num_streams != wide_residual.num_streams:
            raise ValueError(
                f"retention of layer {layer_number} {branch_name} was asked for {num_streams} streams, the config has "
                f"{wide_residual.num_streams}"
            )
        self.num_streams = num_streams
        self.layer_number = layer_number
        self.branch_name = branch_name
        self.max_forget = float(wide_residual.retention_max_forget)
        forgotten = (1.0 - wide_residual.retention_init) / self.max_forget  # sigmoid(-q) at the start
        start = math.log((1.0 - forgotten) / forgotten)
        self.retention_logit = _make_padded_vector(torch.full((num_streams,), start, dtype=torch.float64))
        self.starts_at_zero = start == 0
        _mark_retention_parameter(self.retention_logit, config)

    def factors(self) -> Tensor:
        """Return one FP32 retention factor for every full-width stream: [K], 1 - F < g_k < 1."""
        logit_k = _active_vector(self.retention_logit, self.num_streams)
        return sigmoid_retention_factors(logit_k, self.num_streams, self.max_forget)

    def forward(self, *, return_logits: bool = False) -> Tensor:
        """Return padded logits ([128], for the operators) or materialized retention factors ([K])."""
        return self.retention_logit if return_logits else self.factors()
