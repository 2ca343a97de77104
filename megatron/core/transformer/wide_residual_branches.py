"""What every layer on wide residual streams shares: its reads, its writes and their replay.

    class WideResidualMambaLayer(WideResidualBranches, MambaLayer):
        def __init__(self, config, ...):
            super().__init__(config, ...)
            self._add_branches(("mamba",), norms={"mamba": BranchNorm(self.norm)}, pg_collection=..., name=...)

        def forward(self, hidden_states, ...):
            return self._run_branch("mamba", super().forward, hidden_states, ...)

A branch is run by upstream's own forward on z (width D), which the read takes from the stream x (width K*D). The write
stands where upstream calls the branch's bias-dropout-add, in the attribute `<branch>_bda`. A layer of two branches runs
the first branch's write and the second one's read as one operation, in forwards within `_reading_ahead()`: with and
without replay, with and without gradients. The last write does so for the next layer where a stack says which that is
(residual_read_ahead).

A norm that upstream calls on what was read may be part of the read (streamwise_residual_norm): upstream is then given
norm(z) as its branch input, and its call of the norm returns it as it is. Upstream uses the branch input for nothing
but the norm and the residual, which a write does not need.

What always holds: a branch adds `residual_read*` and `residual_write*` to the layer and nothing else; building them
draws no random numbers; after a forward, also one that raised, the layer holds no activation.

Shape suffixes: s sequence, b batch, d branch width D, w stream width K*D.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer.identity_op import IdentityOp
from torch import Tensor

from megatron.core.transformer.residual_connection import ResidualBranchOutput, ResidualConnectionState
from megatron.core.transformer.residual_recompute import (
    ResidualStreamRecomputeContext,
    checkpoint_residual_read,
    checkpoint_residual_read_norm,
    checkpoint_residual_write,
    checkpoint_residual_write_read,
)
from megatron.core.transformer.streamwise_residual_norm import (
    StreamNorm,
    is_prepared,
    is_stream_norm,
    is_watched,
    stream_norm_of,
)
from megatron.core.transformer.wide_residual import StreamwiseSigmoidWideResidualConnection, load_residual_state
from megatron.core.transformer.wide_residual_config import RESIDUAL_STREAM_MODULE

# The suffix of a branch's parameters in the state dict: a Mamba layer has one branch and needs no name for it.
_STATE_SUFFIX = {"self_attn": "_self_attn", "mlp": "_mlp", "mamba": ""}


@dataclass(frozen=True)
class BranchNorm:
    """The norm that the read of a branch feeds.

    Args:
        module: the norm, or IdentityOp.
        recomputed: whether the parent recomputes it itself.
        offloaded: whether the parent puts its input on the host.
    """

    module: Any
    recomputed: bool = False
    offloaded: bool = False


@dataclass(slots=True)
class _Held:
    """What a layer holds during its forward, apart from the module, whose attributes are slow to set.

    Args:
        carried: of each branch that runs, the stream that its write goes into.
        reads_ahead: whether the write of a branch also reads for the next one.
        read_ahead: a stream, what was read from it, and whether that is normed.
        normed: a branch input that its norm will be called with and must return.
        following: the layer whose first branch the last write reads for (residual_read_ahead).
    """

    carried: dict[str, ResidualConnectionState] = field(default_factory=dict)
    reads_ahead: bool = False
    read_ahead: tuple[Tensor, Tensor, bool] | None = None
    normed: Tensor | None = None
    following: WideResidualBranches | None = None


class WideResidualBranches:
    """Mixin, left of a megatron-core layer class, that puts its branches on a stream of shape [s, b, K*D]."""

    config: Any
    layer_number: int

    def _add_branches(
        self,
        branches: Iterable[str],
        *,
        norms: Mapping[str, BranchNorm],
        pg_collection: ProcessGroupCollection | None,
        name: str | None,
    ) -> None:
        """Build the connections of the branches that the layer really has; call it at the end of __init__.

        Args:
            branches: "self_attn", "mlp" or "mamba", in the order of the forward.
            norms: of each branch; it has to be called with what `_run_branch` hands to the parent.
            pg_collection: the layer's process groups.
            name: the layer's name, as upstream passes it down.
        """
        self._held = _Held()
        self._norms: dict[str, tuple[Any, Callable[..., Any]]] = {}  # that a read can take, with their forwards
        self.residual_stream_recompute_context: ResidualStreamRecomputeContext | None = None
        self._branches = tuple(branches)
        for branch in self._branches:
            self._add_connections(branch, pg_collection, name)
        for branch in self._branches:
            self._take_norm(branch, norms[branch])
        self.register_load_state_dict_pre_hook(load_residual_state)  # type: ignore[attr-defined]
        # The parent enables gradients around the bias-dropout-add even in evaluation. A write saves tensors for its
        # backward, so it follows the caller's grad mode instead.
        self.bias_dropout_add_exec_handler = nullcontext

    def _take_norm(self, branch: str, norm: BranchNorm) -> None:
        """Make a norm part of the branch's read where it can be, and of replay in forwards for which that is active."""
        module = norm.module
        if isinstance(module, IdentityOp) or norm.recomputed:
            return
        fuses = is_stream_norm(module) and not norm.offloaded
        if fuses or RESIDUAL_STREAM_MODULE in (self.config.recompute_modules or ()):
            module.forward = partial(self._normalize, module.forward)
        if fuses:
            self._norms[branch] = (module, module.forward)

    def _norm_of(self, branch: str, read: torch.nn.Module, stream_dtype: torch.dtype) -> StreamNorm | None:
        """The norm that the branch's read takes now; None where the parent's call of the module has to compute it.

        That is so, too, where hooks look at what is read, where the module's forward was replaced, and where the
        parent may cast the branch input, which is then no longer the tensor that was read.
        """
        module, forward = self._norms.get(branch, (None, None))
        dtype = self.config.params_dtype if self.config.fp32_residual_connection else stream_dtype
        if module is None or dtype is not self.config.params_dtype or is_watched(read):
            return None
        return stream_norm_of(module) if vars(module).get("forward") is forward else None

    def _add_connections(self, branch: str, pg_collection: ProcessGroupCollection | None, name: str | None) -> None:
        """Build the read and the write of a branch, and put the write where the bias-dropout-add stood."""
        for operation in ("read", "write"):
            attribute = f"residual_{operation}{_STATE_SUFFIX[branch]}"
            connection = StreamwiseSigmoidWideResidualConnection(
                self.config,
                self.layer_number,
                branch,
                pg_collection,
                f"{name}.{attribute}" if name is not None else None,
                operation=operation,
            )
            setattr(self, attribute, connection)
        # Bound methods, not closures: a deep copy of the layer then writes to its own maps.
        delattr(self, f"{branch}_bda")
        setattr(self, f"{branch}_bda", partial(self._bias_dropout_write, branch))

    def _connection(self, operation: str, branch: str) -> StreamwiseSigmoidWideResidualConnection:
        modules: dict[str, Any] = self._modules  # type: ignore[attr-defined]
        connection: StreamwiseSigmoidWideResidualConnection = modules[f"residual_{operation}{_STATE_SUFFIX[branch]}"]
        return connection

    def _bias_dropout_write(
        self, branch: str, training: bool, fused: bool
    ) -> Callable[[ResidualBranchOutput, Tensor, float], Tensor]:
        """Stand in for get_bias_dropout_add, whose `fused` has no meaning for a write."""
        del fused
        return partial(self._write, branch, training)

    def _normalize(self, norm: Callable[..., Any], z_sbd: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Run the forward of a norm, under replay where it is active and z has a gradient to pass on.

        What its read has normed already is returned as it is.
        """
        normed, self._held.normed = self._held.normed, None
        if normed is z_sbd:
            return z_sbd
        if normed is not None:
            raise RuntimeError("the branch input was normed by its read, and another tensor was given to the norm")
        context = self.residual_stream_recompute_context
        if context is None or not z_sbd.requires_grad:
            return norm(z_sbd, *args, **kwargs)
        return context.checkpoint(partial(norm, **kwargs), z_sbd, *args)

    def _read(self, branch: str, x_sbw: Tensor) -> Tensor:
        """Read the branch input from the stream and keep the stream for the write."""
        read = self._connection("read", branch)
        fp32_residual = bool(self.config.fp32_residual_connection)
        ahead, self._held.read_ahead = self._held.read_ahead, None
        if ahead is not None and ahead[0] is x_sbw:
            self._held.carried[branch] = ResidualConnectionState(x_sbw.float() if fp32_residual else x_sbw)
            self._held.normed = ahead[1] if ahead[2] else None
            return ahead[1]
        context = self.residual_stream_recompute_context
        norm = self._norm_of(branch, read, x_sbw.dtype)
        options: dict[str, Any] = {"fp32_residual_connection": fp32_residual}
        if context is None:
            z_sbd, state = read(x_sbw, norm=norm, **options)
        elif norm is None:
            z_sbd, state = checkpoint_residual_read(read, x_sbw, context, **options)
        else:
            z_sbd, state = checkpoint_residual_read_norm(read, x_sbw, norm, context, **options)
        self._held.carried[branch] = state
        self._held.normed = None if norm is None else z_sbd
        return z_sbd

    def _write(
        self,
        branch: str,
        training: bool,
        branch_output: ResidualBranchOutput,
        z_sbd: Tensor,
        dropout_probability: float,
    ) -> Tensor:
        """Write the branch output into the stream that its read kept; the parent's residual, z, is not needed.

        The last write of a replay block is its live boundary: it stays in ordinary autograd and ends the block.
        """
        del z_sbd
        write = self._connection("write", branch)
        state = self._held.carried.pop(branch)
        options: dict[str, Any] = {"dropout_probability": dropout_probability, "training": training}
        context = self.residual_stream_recompute_context
        reader, following = self._reader_after(branch, write)
        if reader is not None:
            read = reader._connection("read", following)
            norm = reader._norm_of(following, read, state.residual.dtype)
            if context is None:
                x_sbw, z_sbd = write(branch_output=branch_output, state=state, next_read=read, norm=norm, **options)
            else:
                x_sbw, z_sbd = checkpoint_residual_write_read(
                    write, branch_output, state, read, norm, context, **options
                )
            reader._held.read_ahead = x_sbw, z_sbd, norm is not None
            return x_sbw
        ends_block = context is not None and context.is_block_end and branch == self._branches[-1]
        if context is not None and not ends_block:
            return checkpoint_residual_write(write, branch_output, state, context, **options)
        y_sbw: Tensor = write(branch_output=branch_output, state=state, **options)
        if context is not None:
            context.finalize(y_sbw)
        return y_sbw

    def _reader_after(
        self, branch: str, write: StreamwiseSigmoidWideResidualConnection
    ) -> tuple[WideResidualBranches | None, str]:
        """(the layer, its branch) that a branch's write reads for; no layer where none may.

        Across layers without retention alone, whose gradient needs the stream before the write; where no hook waits for
        the read to be called, and none prepares the next layer (FSDP gathers its parameters there).
        """
        if branch != self._branches[-1]:
            return (self if self._held.reads_ahead else None), self._branches[self._branches.index(branch) + 1]
        reader = self._held.following
        if reader is None or write.retention is not None:
            return None, branch
        first = reader._branches[0]
        waits = is_watched(reader._connection("read", first)) or is_prepared(cast(torch.nn.Module, reader))
        return (None if waits else reader), first

    @contextmanager
    def _reading_ahead(self) -> Iterator[None]:
        """A forward of the whole layer: each branch but the first runs on the stream that the one before wrote."""
        self._held.reads_ahead = True
        try:
            yield
        finally:
            self._held.reads_ahead, self._held.read_ahead = False, None

    def _run_branch(self, branch: str, run_parent: Callable[..., Any], x_sbw: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Read, run the parent's code of the branch on the branch input, and leave nothing behind."""
        if branch not in self._branches:
            return run_parent(x_sbw, *args, **kwargs)
        try:
            return run_parent(self._read(branch, x_sbw), *args, **kwargs)
        finally:
            self._held.carried.pop(branch, None)
            self._held.normed = None
