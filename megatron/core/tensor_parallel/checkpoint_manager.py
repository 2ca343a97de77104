"""Several output-discarding checkpoints that are replayed together, in the order in which they ran.

    manager = CheckpointWithoutOutputManager()
    z = manager.checkpoint(read, x)
    n = manager.checkpoint(norm, z)
    y = branch(n)                                        # ordinary autograd, keeps n's storage in its graph
    out = write(y, x)                                    # the live boundary
    manager.discard_all_outputs_and_register_recompute(out)

Over megatron-core's CheckpointWithoutOutput, which knows one operation. What always holds: outputs are freed only when
the boundary will receive a gradient; when it does, one hook replays every operation in forward order under its own
RNG states and gives the freed storages back before autograd goes on. A manager serves one forward pass: a second
micro-batch in flight has managers of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch import Tensor

from megatron.core.tensor_parallel.storage_sharing import prepare_storage_sharing

_R = TypeVar("_R")


class CheckpointWithoutOutputManager:
    """Runs cheap operations without keeping what they return, and replays them in order in the backward."""

    def __init__(self) -> None:
        self._checkpoints: list[CheckpointWithoutOutput] = []
        self._closed = False

    def __len__(self) -> int:
        """Operations registered and not yet replayed."""
        return len(self._checkpoints)

    def checkpoint(self, function: Callable[..., _R], *args: Any, fp8: bool = False) -> _R:
        """Run function(*args) and register it for replay.

        Gradients flow to tensors in args and to parameters that function owns.

        Raises:
            RuntimeError: the manager's outputs were discarded already; a new forward needs a new manager.
        """
        if self._closed:
            raise RuntimeError(
                "this replay block is finished: its outputs were discarded. Each forward pass needs a fresh "
                "CheckpointWithoutOutputManager."
            )
        # 0.19.2 takes any value but None for "fp8 is on".
        checkpoint = CheckpointWithoutOutput(fp8=True if fp8 else None)
        output = checkpoint.checkpoint(function, *args)
        # Outside of a CUDA graph's warm-up, where the engine runs function as it is.
        if checkpoint.ctx is not None:
            self._checkpoints.append(checkpoint)
        return output

    def discard_all_outputs_and_register_recompute(self, hook_tensor: Tensor) -> None:
        """Free the registered outputs and replay them when the gradient of hook_tensor is there.

        hook_tensor must be computed from the last registered output, directly or not, so that its gradient comes before
        any use of a freed storage. When it needs no gradient nothing is freed.

        Raises:
            RuntimeError: called a second time.
        """
        if self._closed:
            raise RuntimeError("the outputs of this replay block were discarded already")
        self._closed = True
        if not hook_tensor.requires_grad:
            self._checkpoints.clear()
            return
        prepare_storage_sharing()
        for checkpoint in self._checkpoints:
            for output in checkpoint.outputs:
                output.untyped_storage().resize_(0)
        hook_tensor.register_hook(self._replay)

    def _replay(self, gradient: Tensor) -> None:
        """Recompute every output in forward order; a hook, so it leaves the gradient as it is."""
        del gradient
        if self._checkpoints and not torch.autograd._is_checkpoint_valid():
            raise RuntimeError(
                "residual-stream replay works with .backward() only; torch.autograd.grad(), or backward(inputs=...), "
                "asks for the gradient of some tensors, which a replayed operation cannot give. Call .backward(), or "
                "leave residual_stream out of --recompute-modules."
            )
        pending, self._checkpoints = self._checkpoints, []
        for checkpoint in pending:
            checkpoint._recompute(None)
