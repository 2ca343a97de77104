"""Parameters, connections and model-boundary helpers of wide residual streams.

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

from collections.abc import Callable
from typing import cast

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
from megatron.core.transformer.residual_recompute import (
    ResidualStreamRecomputeContext,
    residual_stream_recompute_enabled,
)
from megatron.core.transformer.streamwise_residual_checked import read_through, write, write_read
from megatron.core.transformer.streamwise_residual_checks import check_norm
from megatron.core.transformer.streamwise_residual_norm import StreamNorm
from megatron.core.transformer.streamwise_residual_ops import streamwise_sigmoid_read
from megatron.core.transformer.streamwise_residual_protocol import WriteOptions
from megatron.core.transformer.wide_residual_config import get_wide_residual_config, require_wide_residual_config
from megatron.core.transformer.wide_residual_maps import (
    _MIN_CONTROLLER_NUMEL,
    LearnedWideResidualRetention,
    StreamwiseSigmoidMap,
    _active_vector,
    _make_padded_vector,
    _mark_replicated_tp_parameter,
    _mark_residual_map_parameter,
    _mark_retention_parameter,
)
from megatron.core.transformer.wide_residual_state import _RESIDUAL_STATE_PREFIXES, load_residual_state

__all__ = [
    "_MIN_CONTROLLER_NUMEL",
    "_RESIDUAL_STATE_PREFIXES",
    "LearnedWideResidualRetention",
    "StreamwiseSigmoidMap",
    "StreamwiseSigmoidResidualReadout",
    "StreamwiseSigmoidWideResidualConnection",
    "StreamwiseSigmoidWideResidualRead",
    "_active_vector",
    "_make_padded_vector",
    "_mark_replicated_tp_parameter",
    "_mark_residual_map_parameter",
    "_mark_retention_parameter",
    "build_wide_residual_readout",
    "expand_wide_residual_stream",
    "load_residual_state",
    "wide_residual_recompute_enabled",
]


def _branch_dtype(config: TransformerConfig, fp32_residual_connection: bool | None, stream: Tensor) -> torch.dtype:
    """Return the dtype that branches compute in: that of the stream, unless it is an fp32 one beside them."""
    return config.params_dtype if fp32_residual_connection else stream.dtype


def _check_width(owner: str, x_sbw: Tensor, config: TransformerConfig, read_map: StreamwiseSigmoidMap) -> None:
    """Raise ValueError unless x_sbw has the K*D features of this model's streams."""
    wanted = read_map.num_streams * config.hidden_size
    if x_sbw.dim() < 1 or x_sbw.shape[-1] != wanted:
        raise ValueError(f"{owner} was given shape {tuple(x_sbw.shape)}; a last dimension of {wanted} is wanted")


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

    def forward(self, hidden_states: Tensor, *, norm: StreamNorm | None = None) -> Tensor:
        """Read in branch precision; the operator fixes the output shape and dtype: [..., K*D] -> [..., D].

        With a norm what was read is normed.
        """
        _check_width(f"layer {self.layer_number} {self.branch_name}", hidden_states, self.config, self.read_map)
        return streamwise_sigmoid_read(
            hidden_states,
            self.read_map(return_logits=True),
            self.read_map.num_streams,
            output_dtype=_branch_dtype(self.config, self.config.fp32_residual_connection, hidden_states),
            norm=norm,
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
        return self._read_norm(
            hidden_states,
            None,
            fp32_residual_connection=fp32_residual_connection,
            branch_input_dtype=branch_input_dtype,
        )

    def _read_norm(
        self,
        hidden_states: Tensor,
        norm: StreamNorm | None,
        *,
        fp32_residual_connection: bool,
        branch_input_dtype: torch.dtype | None,
    ) -> tuple[Tensor, ResidualConnectionState]:
        """Read as _read and norm what is read, if anything does."""
        check_norm(norm, hidden_states, self.num_streams)
        dtype = branch_input_dtype or _branch_dtype(self.config, fp32_residual_connection, hidden_states)
        logit_p = self.read_map(return_logits=True)
        z_sbd, x_sbw = read_through(hidden_states, logit_p, self.num_streams, dtype, norm)
        return z_sbd, ResidualConnectionState(x_sbw.float() if fp32_residual_connection else x_sbw)

    def _write(
        self,
        branch_output: ResidualBranchOutput,
        state: ResidualConnectionState,
        *,
        dropout_probability: float,
        training: bool,
    ) -> Tensor:
        """Add the bias, drop out (one mask for all streams), then write."""
        update_sbd, bias_d = branch_output
        controllers, options = self._controllers(), self._write_options(dropout_probability, training)
        return write(state.residual, update_sbd, bias_d, *controllers, options)

    def _write_read(
        self,
        branch_output: ResidualBranchOutput,
        state: ResidualConnectionState,
        next_read: ResidualConnection,
        norm: StreamNorm | None,
        *,
        dropout_probability: float,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """Write as _write, and read (and norm) the next branch's input in the same pass over the stream."""
        update_sbd, bias_d = branch_output
        x_sbw = state.residual
        check_norm(norm, x_sbw, self.num_streams)
        read_p = cast(StreamwiseSigmoidWideResidualConnection, next_read).read_map(return_logits=True)
        options = self._write_options(dropout_probability, training)
        if next_read.layer_number != self.layer_number and self.retention is None:
            options = options._replace(keeps_y=True)  # the next layer keeps its input anyway
        dtype = _branch_dtype(self.config, self.config.fp32_residual_connection, x_sbw)
        return write_read(x_sbw, update_sbd, bias_d, *self._controllers(), read_p, options, dtype, norm)

    def _controllers(self) -> tuple[Tensor, Tensor | None]:
        """The logits of the write and of retention."""
        retention = self.retention
        return self.write_map(return_logits=True), None if retention is None else retention(return_logits=True)

    def _write_options(self, dropout_probability: float, training: bool) -> WriteOptions:
        """What both kinds of write tell the operator."""
        max_forget = 0.0 if self.retention is None else self.retention.max_forget
        return WriteOptions(self.num_streams, True, max_forget, float(dropout_probability) if training else 0.0)

    def _checkpoint_read(
        self,
        hidden_states: Tensor,
        context: ResidualStreamRecomputeContext,
        *,
        fp32_residual_connection: bool,
        branch_input_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, ResidualConnectionState]:
        """Replay WR's read while retaining its incoming residual stream.

        An optional branch-input dtype request is captured by the replay closure so eager execution and backward
        reconstruction produce the same branch dtype. A stream without gradient is read without replay: a replayed
        operation passes gradients on only where one of its inputs has one.
        """

        def read(x_sbw: Tensor) -> tuple[Tensor, ResidualConnectionState]:
            return self(x_sbw, fp32_residual_connection=fp32_residual_connection, branch_input_dtype=branch_input_dtype)

        return _replayed_read(read, hidden_states, context, fp32_residual_connection)

    def _checkpoint_read_norm(
        self,
        hidden_states: Tensor,
        norm: StreamNorm,
        context: ResidualStreamRecomputeContext,
        *,
        fp32_residual_connection: bool,
    ) -> tuple[Tensor, ResidualConnectionState]:
        """Replay a read and its norm as one operation, like _checkpoint_read."""

        def read(x_sbw: Tensor) -> tuple[Tensor, ResidualConnectionState]:
            return self(x_sbw, fp32_residual_connection=fp32_residual_connection, norm=norm)

        return _replayed_read(read, hidden_states, context, fp32_residual_connection)

    def _checkpoint_write(
        self,
        branch_output: ResidualBranchOutput,
        state: ResidualConnectionState,
        context: ResidualStreamRecomputeContext,
        *,
        dropout_probability: float,
        training: bool,
    ) -> Tensor:
        """Replay WR's whole write, whose output has independent storage; not replayed where no input has a gradient."""

        def write(update_sbd: Tensor, bias_d: Tensor | None, residual_sbw: Tensor) -> Tensor:
            return self(
                branch_output=(update_sbd, bias_d),
                state=ResidualConnectionState(residual_sbw, state.write_state),
                dropout_probability=dropout_probability,
                training=training,
            )

        return _replayed(write, branch_output, state, context)

    def _checkpoint_write_read(
        self,
        branch_output: ResidualBranchOutput,
        state: ResidualConnectionState,
        next_read: ResidualConnection,
        norm: StreamNorm | None,
        context: ResidualStreamRecomputeContext,
        *,
        dropout_probability: float,
        training: bool,
    ) -> tuple[Tensor, Tensor]:
        """Replay a write, the read after it and its norm as one operation, like _checkpoint_write."""

        def write_read(update_sbd: Tensor, bias_d: Tensor | None, residual_sbw: Tensor) -> tuple[Tensor, Tensor]:
            return self(
                branch_output=(update_sbd, bias_d),
                state=ResidualConnectionState(residual_sbw, state.write_state),
                dropout_probability=dropout_probability,
                training=training,
                next_read=next_read,
                norm=norm,
            )

        return _replayed(write_read, branch_output, state, context)


def _replayed_read(
    read: Callable[[Tensor], tuple[Tensor, ResidualConnectionState]],
    x_sbw: Tensor,
    context: ResidualStreamRecomputeContext,
    fp32_residual_connection: bool,
) -> tuple[Tensor, ResidualConnectionState]:
    """read(stream) under replay, with the stream itself as state; as it is where the stream has no gradient."""
    if not x_sbw.requires_grad:
        return read(x_sbw)
    z_sbd = context.checkpoint(lambda stream_sbw: read(stream_sbw)[0], x_sbw)
    return z_sbd, ResidualConnectionState(x_sbw.float() if fp32_residual_connection else x_sbw)


def _replayed[R](
    write: Callable[..., R],
    branch_output: ResidualBranchOutput,
    state: ResidualConnectionState,
    context: ResidualStreamRecomputeContext,
) -> R:
    """write(update, bias, stream) under replay, or as it is where none of them has a gradient."""
    tensors = (*branch_output, state.residual)
    if not any(tensor is not None and tensor.requires_grad for tensor in tensors):
        return write(*tensors)
    return context.checkpoint(write, *tensors)


class StreamwiseSigmoidResidualReadout(torch.nn.Module):
    """Learned streamwise readout from D' to D before final normalization; the exact mean at the start."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        self.exit_map = StreamwiseSigmoidMap(config, map_kind="read")

    def forward(self, hidden_states: Tensor) -> Tensor:
        """Mix the full-width streams into one backbone-width activation: [s, b, K*D] -> [s, b, D], params_dtype
        beside an fp32 stream, else the dtype of the stream."""
        _check_width("the readout", hidden_states, self.config, self.exit_map)
        return streamwise_sigmoid_read(
            hidden_states,
            self.exit_map(return_logits=True),
            self.exit_map.num_streams,
            output_dtype=_branch_dtype(self.config, self.config.fp32_residual_connection, hidden_states),
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


def wide_residual_recompute_enabled(config: TransformerConfig, training: bool) -> bool:
    """Return whether selective residual-stream replay is active for this forward."""
    return residual_stream_recompute_enabled(config, training)
