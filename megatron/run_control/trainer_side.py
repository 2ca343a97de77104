"""What a training process does for its run: continue one wandb run, and leave with a status that says why.

    ArgumentExtension(no_flags, after_validation=identify_run)
    with leaving_on_request():
        pretrain(...)

Upstream's trainer ends with status 0 after it has saved on a signal, exactly as after its last step.
`leaving_on_request` turns that into SAVED_ON_REQUEST (exit_status.py), so that a launcher can tell the two apart.

What always holds: all ranks leave with the same status, and none before every rank has saved and closed its logs.
Without `--exit-signal-handler` nothing is different from upstream.
"""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from megatron.run_control.exit_status import FINISHED, SAVED_ON_REQUEST
from megatron.run_control.wandb_identity import WandbPlace, check_id, check_run_id, use_stable_run_id


def identify_run(args: argparse.Namespace) -> None:
    """Give wandb the run id of the save folder on the rank that logs, the last one; all ranks find a wrong one.

    What flags say of the wandb run (id, group, tags, job type) reaches wandb in its own environment variables.
    """
    if not args.wandb_project:
        return
    said = {
        "WANDB_RUN_ID": args.wandb_run_id,
        "WANDB_RUN_GROUP": args.wandb_group,
        "WANDB_TAGS": None if args.wandb_tags is None else ",".join(args.wandb_tags),
        "WANDB_JOB_TYPE": args.wandb_job_type,
    }
    os.environ.update({name: value for name, value in said.items() if value is not None})
    if args.wandb_run_id is not None:
        os.environ.setdefault("WANDB_RESUME", "allow")
    named_by = "WANDB_RUN_ID" if args.wandb_run_id is None else "--wandb-run-id"
    check_id(os.environ.get("WANDB_RUN_ID"), named_by)
    if not args.save:
        return
    place = WandbPlace(args.wandb_project, args.wandb_entity or os.environ.get("WANDB_ENTITY") or None)
    check_run_id(Path(args.save), os.environ.get("WANDB_RUN_ID"), place, named_by)
    if args.rank == args.world_size - 1:
        use_stable_run_id(Path(args.save), os.environ, place)


def _receive_blocked(number: signal.Signals) -> None:
    """Call the handler of a signal that the launcher has blocked, from a thread that waits for it.

    The signal stays blocked in the main thread and in every process that this one starts (data loaders, checkpoint
    writers, wandb): srun sends it to all of them, and its default action would end them. One that came while this
    process still imported has waited and is received now.
    """
    if number not in signal.pthread_sigmask(signal.SIG_BLOCK, ()):
        return  # started without a launcher: upstream's handler is called as usual

    def receive() -> None:
        while True:
            signal.sigwait({number})
            handler = signal.getsignal(number)
            if callable(handler):
                handler(number, None)

    threading.Thread(target=receive, name="save-signal", daemon=True).start()


@contextmanager
def leaving_on_request() -> Iterator[None]:
    """Enter when the arguments are global; after a save that a signal asked for SystemExit(SAVED_ON_REQUEST) leaves."""
    import torch

    from megatron.training.global_vars import get_args, get_signal_handler

    args = get_args()
    if not args.exit_signal_handler:
        yield
        return
    _receive_blocked(args.exit_signal)
    try:
        yield
    except SystemExit as leaving:
        if leaving.code not in (None, FINISHED):
            raise
        requested = any(get_signal_handler().signals_received())
        torch.distributed.barrier()
        raise SystemExit(SAVED_ON_REQUEST if requested else FINISHED) from None
