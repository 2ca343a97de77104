"""What a checkpoint stores beside its tensors: training arguments, iteration, what the optimizer needs.

    stored_common(location)["args"]
    stored_arguments(location)           # None when it stores none

What always holds: tensors of a plain checkpoint are mapped, not read; damage is a CheckpointError.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.location import PLAIN_FILE, CheckpointLocation


@contextmanager
def damage_reported(location: CheckpointLocation) -> Iterator[None]:
    """Turn what the readers raise on a damaged file (they raise all kinds, and exit) into a CheckpointError."""
    from torch.distributed.checkpoint.api import CheckpointException

    try:
        yield
    except CheckpointError:
        raise
    except CheckpointException as error:  # no Exception; its text holds the tracebacks of all ranks
        reason = str(error).strip().splitlines()[-1][:300]
        raise CheckpointError(f"{location.folder} cannot be read ({reason}). Is it whole?") from error
    except (Exception, SystemExit) as error:
        if "Could not find parameter group" in str(error):
            raise CheckpointError(
                f"{location.folder} has other parameter groups in its optimizer than this run: a flag that shapes them "
                "(--lr, --min-lr, --weight-decay, --decoupled-lr, ...; with experts also whether "
                "--expert-model-parallel-size is 1) differs from the checkpoint's. Give the checkpoint's values, "
                "convert it (tools/checkpoint/convert.py reshard), or give --no-load-optim for a fresh optimizer."
            ) from error
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        raise CheckpointError(f"{location.folder} cannot be read ({reason}). Is it whole?") from error


def stored_common(location: CheckpointLocation) -> dict[str, Any]:
    """Return the state that is no tensor of a torch_dist checkpoint, or a plain checkpoint's first rank, mapped.

    Raises:
        CheckpointError: it cannot be read.
    """
    import torch
    from megatron.core.safe_globals import register_safe_globals

    from megatron.core import dist_checkpointing

    register_safe_globals()
    with damage_reported(location):
        if location.format == "torch_dist":
            state = dist_checkpointing.load_common_state_dict(str(location.folder))
        else:
            file = min(location.folder.glob(f"mp_rank_*/{PLAIN_FILE}"))
            state = torch.load(file, map_location="cpu", mmap=True)
        if not isinstance(state, dict):
            raise TypeError(f"a dict is wanted, a {type(state).__name__} was found")
        return state


def stored_arguments(location: CheckpointLocation) -> Namespace | None:
    """Return the training arguments that a checkpoint stores, or None."""
    return stored_common(location).get("args")
