"""Parameters, connections and model-boundary helpers of wide residual streams (DESIGN section 3).

    read = StreamwiseSigmoidWideResidualConnection(config, layer_number, "mlp", operation="read")
    write = StreamwiseSigmoidWideResidualConnection(config, layer_number, "mlp", operation="write")
    z_sbd, state = read(x_sbw, fp32_residual_connection=False)
    x_sbw = write(branch_output=branch(z_sbd), state=state, dropout_probability=0.0, training=True)

The maths, for stream k of K:
    read     z   = sum_k sigmoid(r_k) X_k          r_k starts at log((1/K)/(1 - 1/K)): every factor is 1/K
    write    Y_k = g_k X_k + 2 sigmoid(s_k) u      s starts at linspace(-scale, +scale, K)
    retain   g_k = 1 - F sigmoid(-q_k)             F = retention_max_forget; g_k = 1 without learned retention
    readout  sigmoid(e_k) summed over X_k          starts as the exact mean

What always holds: building these modules draws no random number. Controllers (r, s, q, e) are fp32 vectors, zero-padded
to at least 128 elements; they stay fp32 in bf16 and fp16 models, the tail has no gradient and stays zero. Maps are
replicated across tensor-parallel ranks and their gradients are averaged there (summed with sequence parallelism).

Shape suffixes: s sequence, b batch, d branch width D, k streams, w stream width K*D, p padded controller.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron.core.transformer.residual_connection import (
    ResidualBranchOutput,
    ResidualConnection,
    ResidualConnectionOperation,
    ResidualConnectionState,
)
from megatron.core.transformer.streamwise_residual_ops import streamwise_sigmoid_read, streamwise_sigmoid_writeback
from megatron.core.transformer.wide_residual_config import get_wide_residual_config, require_wide_residual_config

_MIN_CONTROLLER_NUMEL = 128
"""Controllers are padded to this many elements, so that the distributed optimizer never shards one below its
alignment."""

_RESIDUAL_STATE_PREFIXES = (
    # (prefix of the older combined connection, prefix of today's read, prefix of today's write)
    ("residual_connection_self_attn.", "residual_read_self_attn.", "residual_write_self_attn."),
    ("residual_connection_mlp.", "residual_read_mlp.", "residual_write_mlp."),
    ("residual_connection.", "residual_read.", "residual_write."),
)
"""Key prefixes of a layer's residual connections, older and current. The first pairs belong to Transformer layers, the
last to Mamba layers."""


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
    if param.dim() != 1 or param.numel() < length:
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
                _check_tail(prefix + name, stored_p, self.num_streams)
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)


def _check_tail(key: str, stored_p: Tensor, num_streams: int) -> None:
    """Raise ValueError when stored_p has values behind its first num_streams elements.

    Controllers are padded, so a checkpoint of another stream count has the same shapes. A tail that is not zero says
    that it was written by a model with more streams.
    """
    used = int(stored_p.nonzero().max()) + 1 if stored_p.any() else 0
    if used > num_streams:
        raise ValueError(
            f"{key} holds values for at least {used} streams, this model has {num_streams}: the checkpoint was written "
            f"with another --wide-residual. Load it with --wide-residual {used}, or convert it first."
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
        _mark_residual_map_parameter(self.logit, config)

    def factors(self) -> Tensor:
        """Return one positive factor for every full-width residual stream: [K], fp32."""
        factor_k = torch.sigmoid(_active_vector(self.logit, self.num_streams))
        return factor_k if self.map_kind == "read" else 2 * factor_k

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
        _mark_retention_parameter(self.retention_logit, config)

    def factors(self) -> Tensor:
        """Return one FP32 retention factor for every full-width stream: [K], 1 - F < g_k < 1."""
        return 1.0 - self.max_forget * torch.sigmoid(-_active_vector(self.retention_logit, self.num_streams))

    def forward(self, *, return_logits: bool = False) -> Tensor:
        """Return padded logits ([128], for the operators) or materialized retention factors ([K])."""
        return self.retention_logit if return_logits else self.factors()


def _branch_dtype(config: TransformerConfig, fp32_residual_connection: bool) -> torch.dtype | None:
    """Return the dtype that branches compute in beside an fp32 stream, or None: that of the stream."""
    return config.params_dtype if fp32_residual_connection else None


class StreamwiseSigmoidWideResidualRead(torch.nn.Module):
    """Learn an independent ordinary-width read from a wide residual stream.

    Args:
        config: carries the WideResidualConfig.
        layer_number, branch_name: where it stands, for error messages.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, branch_name: str) -> None:
        super().__init__()
        self.config = config
        self.layer_number = layer_number
        self.branch_name = branch_name
        self.read_map = StreamwiseSigmoidMap(config, map_kind="read")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Read in branch precision; the operator fixes the output shape and dtype: [..., K*D] -> [..., D]."""
        return streamwise_sigmoid_read(
            hidden_states,
            self.read_map(return_logits=True),
            self.read_map.num_streams,
            output_dtype=_branch_dtype(self.config, self.config.fp32_residual_connection),
        )


class StreamwiseSigmoidWideResidualConnection(ResidualConnection):
    """Streamwise residual maps restricted to a read or write at construction.

    A read owns `read_map`; a write owns `write_map` and, with learned retention, `retention`.
    Arguments and errors as ResidualConnection; the carried stream has K*D features.
    """

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        branch_name: str,
        pg_collection: ProcessGroupCollection | None = None,
        name: str | None = None,
        *,
        operation: ResidualConnectionOperation,
    ) -> None:
        super().__init__(config, layer_number, branch_name, pg_collection, name, operation=operation)
        wide_residual = require_wide_residual_config(config, type(self).__name__)
        self.num_streams = wide_residual.num_streams
        self.retention: LearnedWideResidualRetention | None = None
        if operation == "read":
            self.read_map = StreamwiseSigmoidMap(config, map_kind="read")
        else:
            self.write_map = StreamwiseSigmoidMap(config, map_kind="write")
            if wide_residual.learned_retention:
                self.retention = LearnedWideResidualRetention(
                    config, layer_number, branch_name, num_streams=self.num_streams
                )

    @property
    def residual_width(self) -> int:
        """K*D."""
        return self.num_streams * self.config.hidden_size

    def _read(
        self, hidden_states: Tensor, *, fp32_residual_connection: bool, branch_input_dtype: torch.dtype | None
    ) -> tuple[Tensor, ResidualConnectionState]:
        """Read in branch precision before promoting the carried residual."""
        z_sbd = streamwise_sigmoid_read(
            hidden_states,
            self.read_map(return_logits=True),
            self.num_streams,
            output_dtype=branch_input_dtype or _branch_dtype(self.config, fp32_residual_connection),
        )
        residual_sbw = hidden_states.float() if fp32_residual_connection else hidden_states
        return z_sbd, ResidualConnectionState(residual_sbw)

    def _write(
        self,
        branch_output: ResidualBranchOutput,
        state: ResidualConnectionState,
        *,
        dropout_probability: float,
        training: bool,
    ) -> Tensor:
        """Add the bias, drop out (one mask for all streams), then write; rounded like the ordinary model's add."""
        update_sbd, bias_d = branch_output
        drops_out = training and dropout_probability > 0
        if update_sbd.dtype != state.residual.dtype and (bias_d is not None or drops_out):
            # The ordinary model adds the bias and drops out in the stream's dtype. Without both, the operator fuses
            # this cast.
            update_sbd = update_sbd.to(state.residual.dtype)
        if bias_d is not None:
            update_sbd = update_sbd + bias_d.to(update_sbd.dtype)
        if drops_out:
            update_sbd = torch.nn.functional.dropout(update_sbd, p=dropout_probability, training=True)
        return streamwise_sigmoid_writeback(
            state.residual,
            update_sbd,
            self.write_map(return_logits=True),
            self.num_streams,
            retention_logits=None if self.retention is None else self.retention(return_logits=True),
            retention_max_forget=0.0 if self.retention is None else self.retention.max_forget,
        )


class StreamwiseSigmoidResidualReadout(torch.nn.Module):
    """Learned streamwise readout from D' to D before final normalization; the exact mean at the start."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.exit_map = StreamwiseSigmoidMap(config, map_kind="read")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Mix the full-width streams into one backbone-width activation: [s, b, K*D] -> [s, b, D], params_dtype
        beside an fp32 stream, else the dtype of the stream."""
        return streamwise_sigmoid_read(
            hidden_states,
            self.exit_map(return_logits=True),
            self.exit_map.num_streams,
            output_dtype=_branch_dtype(self.config, self.config.fp32_residual_connection),
        )


def build_wide_residual_readout(config: TransformerConfig) -> StreamwiseSigmoidResidualReadout | None:
    """Build the streamwise model-boundary readout when wide residuals are enabled, else return None."""
    return None if get_wide_residual_config(config) is None else StreamwiseSigmoidResidualReadout(config)


def expand_wide_residual_stream(hidden_states: Tensor, num_streams: int) -> Tensor:
    """Replicate an ordinary-width activation into contiguous residual streams: [..., D] -> [..., K*D].

    Raises:
        TypeError: num_streams is no int.
        ValueError: num_streams is below 1, or hidden_states has no dimension.
    """
    if isinstance(num_streams, bool) or not isinstance(num_streams, int):
        raise TypeError(f"num_streams is {num_streams!r} ({type(num_streams).__name__}); an int is wanted")
    if num_streams < 1:
        raise ValueError(f"num_streams is {num_streams}; 1 or more is wanted")
    if hidden_states.dim() < 1:
        raise ValueError("hidden_states is a scalar; a last dimension of the branch width is wanted")
    return hidden_states.repeat(*[1] * (hidden_states.dim() - 1), num_streams)


def load_residual_state(
    module: torch.nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    strict: bool,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Accept existing residual model keys with strict loading.

    A load_state_dict pre-hook of the layers (`register_load_state_dict_pre_hook(load_residual_state)`): keys of the
    older combined layout, `residual_connection[_self_attn|_mlp].{read_map,write_map,retention}...`, are renamed to the
    split one in the working copy that `load_state_dict` makes of the caller's dict. A key that is there in both
    layouts is left in both, so that the old one is reported as unexpected.
    """
    for combined, read, write in _RESIDUAL_STATE_PREFIXES:
        for key in [key for key in state_dict if key.startswith(prefix + combined)]:
            rest = key[len(prefix) + len(combined) :]
            target = prefix + (read if rest.startswith("read_map.") else write) + rest
            if rest.split(".", 1)[0] in ("read_map", "write_map", "retention") and target not in state_dict:
                state_dict[target] = state_dict.pop(key)
