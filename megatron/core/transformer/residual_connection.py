"""The residual-connection protocol: how a layer reads its branch input from the residual and writes the output back.

A connection object is built for one operation. A layer owns two per branch:

    z_sbd, state = read_connection(x_sbw, fp32_residual_connection=False)
    update_with_bias = branch(norm(z_sbd))                               # Megatron's (output, bias or None)
    x_sbw = write_connection(branch_output=update_with_bias, state=state, dropout_probability=0.1, training=True)

A write that is given the read connection of the branch after it, `next_read=...`, may do both in one pass over the
stream and returns (x_sbw, z_sbd). With `norm=stream_norm_of(module)` what is read is normed already, in the same pass
where the backend can.

What always holds: each argument belongs to one operation, and a call with a missing, foreign or ill-shaped argument
raises a TypeError or ValueError that names it; the carried stream is never changed in place. Calls go through
`__call__`, so module hooks see them.

Shape suffixes: s sequence, b batch, d branch width D, w width of the carried stream (K*D; D for an ordinary one).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from megatron.core.transformer.streamwise_residual_checks import check_bias

if TYPE_CHECKING:
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron.core.transformer.residual_recompute import ResidualStreamRecomputeContext
    from megatron.core.transformer.streamwise_residual_norm import StreamNorm

ResidualConnectionOperation = Literal["read", "write"]

ResidualBranchOutput = tuple[Tensor, Tensor | None]
"""What a branch returns: the update [s, b, D] and the bias [D] still to be added, or None."""

ResidualConnectionWriteState = Tensor | tuple[Tensor, ...] | None
"""What a read computed for its write beside the stream (None for static maps, which need nothing)."""


@dataclass(frozen=True)
class ResidualConnectionState:
    """What a read hands to the write of the same branch.

    Args:
        residual: the carried stream [s, b, w], fp32 under fp32_residual_connection.
        write_state: what the read computed for the write, if anything.
    """

    residual: Tensor
    write_state: ResidualConnectionWriteState = None


_FOREIGN = {
    "read": ("branch_output", "state", "dropout_probability", "training", "next_read"),
    "write": ("hidden_states", "fp32_residual_connection", "branch_input_dtype"),
}
_REQUIRED = {
    "read": ("hidden_states", "fp32_residual_connection"),
    "write": ("branch_output", "state", "dropout_probability", "training"),
}


class ResidualConnection(torch.nn.Module):
    """One operation, read or write, of a branch's residual connection. Subclasses bring `_read` and `_write`.

    Args:
        config: its hidden_size is the branch width D.
        layer_number: 1-based, for error messages.
        branch_name: "self_attn", "mlp", "mamba", ...
        pg_collection: the process groups of the layer.
        name: the module's name in the model, for error messages.
        operation: which of the two operations this object is for.

    Raises:
        ValueError: operation is neither "read" nor "write".
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
        super().__init__()
        if operation not in get_args(ResidualConnectionOperation):
            raise ValueError(f'operation is {operation!r}; "read" or "write" is wanted')
        self.config = config
        self.layer_number = layer_number
        self.branch_name = branch_name
        self.pg_collection = pg_collection
        self.name = name or f"layer {layer_number} {branch_name}"
        self.operation: ResidualConnectionOperation = operation

    @property
    def residual_width(self) -> int:
        """Features of the carried stream in its last dimension."""
        return self.config.hidden_size

    def forward(
        self,
        hidden_states: Tensor | None = None,
        *,
        fp32_residual_connection: bool | None = None,
        branch_input_dtype: torch.dtype | None = None,
        branch_output: ResidualBranchOutput | None = None,
        state: ResidualConnectionState | None = None,
        dropout_probability: float | None = None,
        training: bool | None = None,
        next_read: ResidualConnection | None = None,
        norm: StreamNorm | None = None,
    ) -> Any:
        """Run the operation that this object was built for.

        Read: hidden_states [s, b, w] and fp32_residual_connection, optionally branch_input_dtype; returns
        (branch input [s, b, D], ResidualConnectionState).
        Write: branch_output (update [s, b, D], bias [D] or None), state, dropout_probability and training; returns the
        new stream [s, b, w] in the dtype of state.residual. With next_read, the connection that reads this stream next
        (under the config's fp32_residual_connection), returns (new stream, its branch input [s, b, D]).
        Both take a norm of the branch input that they return.

        Raises:
            TypeError: a missing argument, one of the other operation, or one of the wrong type.
            ValueError: a wrong shape, or a dropout probability outside [0, 1].
        """
        if self.operation == "read":
            of_a_write = (branch_output, state, dropout_probability, training, next_read)
            self._check_arguments((hidden_states, fp32_residual_connection), of_a_write)
            assert hidden_states is not None
            assert fp32_residual_connection is not None
            self._check_stream("hidden_states", hidden_states)
            if branch_input_dtype is not None and not branch_input_dtype.is_floating_point:
                raise TypeError(f"{self.name}: branch_input_dtype is {branch_input_dtype}; a floating dtype is wanted")
            options: dict[str, Any] = {
                "fp32_residual_connection": fp32_residual_connection,
                "branch_input_dtype": branch_input_dtype,
            }
            if norm is not None:
                return self._read_norm(hidden_states, norm, **options)
            return self._read(hidden_states, **options)
        of_a_read = (hidden_states, fp32_residual_connection, branch_input_dtype)
        self._check_arguments((branch_output, state, dropout_probability, training), of_a_read)
        assert branch_output is not None
        assert state is not None
        assert dropout_probability is not None
        assert training is not None
        self._check_write(branch_output, state, dropout_probability)
        if next_read is None:
            if norm is not None:
                raise TypeError(f"{self.name}: norm was given without next_read; a write alone returns no branch input")
            return self._write(branch_output, state, dropout_probability=dropout_probability, training=training)
        if not isinstance(next_read, ResidualConnection) or next_read.operation != "read":
            raise TypeError(f"{self.name}: next_read is {next_read!r}; a connection built for a read is wanted")
        return self._write_read(
            branch_output, state, next_read, norm, dropout_probability=dropout_probability, training=training
        )

    def _read(
        self, hidden_states: Tensor, *, fp32_residual_connection: bool, branch_input_dtype: torch.dtype | None
    ) -> tuple[Tensor, ResidualConnectionState]:
        raise NotImplementedError(f"{type(self).__name__} brings no _read")

    def _read_norm(
        self,
        hidden_states: Tensor,
        norm: StreamNorm,
        *,
        fp32_residual_connection: bool,
        branch_input_dtype: torch.dtype | None,
    ) -> tuple[Tensor, ResidualConnectionState]:
        raise NotImplementedError(f"{type(self).__name__} brings no _read_norm")

    def _write(
        self,
        branch_output: ResidualBranchOutput,
        state: ResidualConnectionState,
        *,
        dropout_probability: float,
        training: bool,
    ) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} brings no _write")

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
        raise NotImplementedError(f"{type(self).__name__} brings no _write_read")

    def _checkpoint_read(
        self,
        hidden_states: Tensor,
        context: ResidualStreamRecomputeContext,
        *,
        fp32_residual_connection: bool,
        branch_input_dtype: torch.dtype | None = None,
    ) -> tuple[Tensor, ResidualConnectionState]:
        raise NotImplementedError(f"{type(self).__name__} cannot replay its read")

    def _checkpoint_read_norm(
        self,
        hidden_states: Tensor,
        norm: StreamNorm,
        context: ResidualStreamRecomputeContext,
        *,
        fp32_residual_connection: bool,
    ) -> tuple[Tensor, ResidualConnectionState]:
        raise NotImplementedError(f"{type(self).__name__} cannot replay its read and norm")

    def _checkpoint_write(
        self,
        branch_output: ResidualBranchOutput,
        state: ResidualConnectionState,
        context: ResidualStreamRecomputeContext,
        *,
        dropout_probability: float,
        training: bool,
    ) -> Tensor:
        raise NotImplementedError(f"{type(self).__name__} cannot replay its write")

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
        raise NotImplementedError(f"{type(self).__name__} cannot replay its write and read")

    def _check_arguments(self, required: tuple[Any, ...], foreign: tuple[Any, ...]) -> None:
        """Refuse an argument of the other operation, a missing one, and a last required one that is no bool."""
        names = _REQUIRED[self.operation]
        for argument, value in zip(_FOREIGN[self.operation], foreign, strict=True):
            if value is not None:
                raise TypeError(
                    f"{self.name}: {argument} was given, which is not an argument of a residual {self.operation}; "
                    f"a {self.operation} takes {', '.join(names)}"
                )
        for argument, value in zip(names, required, strict=True):
            if value is None:
                raise TypeError(f"{self.name}: a residual {self.operation} needs {argument}, which is missing")
        if not isinstance(required[-1], bool):
            raise TypeError(f"{self.name}: {names[-1]} is {required[-1]!r}; True or False is wanted")

    def _check_stream(self, argument: str, x_sbw: Tensor) -> None:
        if not isinstance(x_sbw, Tensor):
            raise TypeError(f"{self.name}: {argument} is a {type(x_sbw).__name__}; a tensor is wanted")
        if not x_sbw.is_floating_point():
            raise TypeError(f"{self.name}: {argument} has dtype {x_sbw.dtype}; a floating dtype is wanted")
        if x_sbw.dim() < 1 or x_sbw.shape[-1] != self.residual_width:
            raise ValueError(
                f"{self.name}: {argument} has shape {tuple(x_sbw.shape)}; a last dimension of {self.residual_width} "
                f"is wanted (the stream of this model, branch width {self.config.hidden_size})"
            )

    def _check_write(
        self, branch_output: ResidualBranchOutput, state: ResidualConnectionState, dropout_probability: float
    ) -> None:
        if not isinstance(state, ResidualConnectionState):
            raise TypeError(f"{self.name}: state is a {type(state).__name__}; a ResidualConnectionState is wanted")
        if not isinstance(branch_output, tuple) or len(branch_output) != 2:
            raise TypeError(f"{self.name}: branch_output is {type(branch_output).__name__}; (update, bias) is wanted")
        self._check_stream("state.residual", state.residual)
        update_sbd, bias_d = branch_output
        width = self.config.hidden_size
        if not isinstance(update_sbd, Tensor):
            raise TypeError(f"{self.name}: the update is a {type(update_sbd).__name__}; a tensor is wanted")
        if not update_sbd.is_floating_point():
            raise TypeError(f"{self.name}: the update has dtype {update_sbd.dtype}; a floating dtype is wanted")
        wanted = (*state.residual.shape[:-1], width)
        if update_sbd.shape != wanted:
            raise ValueError(
                f"{self.name}: the update has shape {tuple(update_sbd.shape)}; {wanted} is wanted beside a stream of "
                f"shape {tuple(state.residual.shape)}"
            )
        if bias_d is not None and not isinstance(bias_d, Tensor):
            raise TypeError(f"{self.name}: the bias is a {type(bias_d).__name__}; a tensor or None is wanted")
        if bias_d is not None and (bias_d.dim() < 1 or bias_d.shape[-1] != width):
            raise ValueError(
                f"{self.name}: the bias has shape {tuple(bias_d.shape)}; a last dimension of {width} is wanted"
            )
        check_bias(bias_d, update_sbd)
        if update_sbd.device != state.residual.device:
            raise ValueError(
                f"{self.name}: the update is on {update_sbd.device}; the stream's {state.residual.device} is wanted"
            )
        if isinstance(dropout_probability, bool) or not isinstance(dropout_probability, int | float):
            raise TypeError(f"{self.name}: dropout_probability is {dropout_probability!r}; a number is wanted")
        if not 0 <= dropout_probability <= 1:
            raise ValueError(f"{self.name}: dropout_probability is {dropout_probability}; 0 <= p <= 1 is wanted")
