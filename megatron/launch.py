"""What the pretraining scripts do first, in one place.

    sys.exit(pretrain("hybrid"))

What always holds: importing this module checks Python and megatron-core (megatron/__init__.py) and loads nothing else.
"""

from __future__ import annotations

import warnings


def pretrain(kind: str) -> int:
    """Train a model of this kind, "gpt" or "hybrid", as the command line says; returns the exit status."""
    from megatron.run_control.heartbeat import join_run

    join_run()  # first, so that the watchdog can ask a process that hangs in its imports where it stands
    # Said in one line of the log (defaults for this machine) rather than by every upstream module that is imported.
    warnings.filterwarnings(
        "ignore", message="(Transformer Engine and )?Apex (is|are) not|Only transformer-engine|Could not determine rank"
    )
    from megatron.cpu.quick_imports import import_upstream

    import_upstream()
    from megatron.training.model_kinds import MODEL_KINDS
    from megatron.training.pretrain_entry import main

    return main(MODEL_KINDS[kind])
