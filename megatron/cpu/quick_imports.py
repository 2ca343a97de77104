"""Upstream imported for the CPU host: without PyTorch's compiler, which only compiled functions need.

    import_upstream()            # before anything of megatron.core or megatron.training is imported

Upstream decorates small functions with `torch.compile` when its modules are imported, and the first decoration imports
Inductor: a third of a process's start. The CPU host runs these functions undecorated anyway (eager.py), so where it
will be the host they are imported undecorated.

What always holds: where a GPU is used, and where upstream is imported already, nothing happens; `torch.compile` itself
is as it was once this returns.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any

from megatron.cpu.host import HostChoiceError, choose_host
from megatron.cpu.replacements import Replacements


def _undecorated(function: Callable[..., Any] | None = None, **_: Any) -> Any:
    """Stands for torch.compile, with and without arguments."""
    return (lambda later: later) if function is None else function


def import_upstream() -> None:
    """Import the trainer; quicker where the host will be the CPU."""
    if "megatron.core" in sys.modules:
        return
    import torch

    try:
        host, _ = choose_host(os.environ, torch.cuda.device_count())
    except HostChoiceError:
        return  # training_host raises it, where it is turned into one line
    if host == "cuda":
        return
    with Replacements() as replaced:
        replaced.set(torch, "compile", _undecorated)
        import megatron.core.jit as jit
        import megatron.training.training  # noqa: F401
    # Every optimizer imports it; once the CPU host answers for torch.cuda it no longer could.
    import torch._dynamo

    if jit.jit_fuser is _undecorated:
        jit.jit_fuser = torch.compile
