"""Which host runs Megatron, and the CPU host itself.

    from megatron.cpu.host import training_host

    with training_host() as host:      # host is "cuda" or "cpu"
        pretrain(...)

The choice: the environment variable MEGATRON_DEVICE (`cuda` or `cpu`) where it is set, else a CUDA device when PyTorch
finds one, else the CPU. One line on rank 0 says which host is in use and why.

What always holds: with a CUDA device nothing is replaced. On the CPU host everything that is replaced is recorded and
put back on exit, also when the body raises.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Literal

Host = Literal["cuda", "cpu"]

DEVICE_VARIABLE = "MEGATRON_DEVICE"

_cpu_host_is_in_use = False


class HostChoiceError(RuntimeError):
    """MEGATRON_DEVICE asks for something that is not there."""


def choose_host(environment: Mapping[str, str], cuda_device_count: int) -> tuple[Host, str]:
    """The host to use and the reason, from the environment and the number of CUDA devices that PyTorch finds."""
    wanted = environment.get(DEVICE_VARIABLE, "")
    if wanted not in ("", "cuda", "cpu"):
        raise HostChoiceError(f"{DEVICE_VARIABLE} is {wanted!r}: set it to cuda or cpu, or unset it.")
    if wanted == "cuda" and cuda_device_count == 0:
        raise HostChoiceError(
            f"{DEVICE_VARIABLE} is cuda, but PyTorch finds no CUDA device: unset it (or set it to cpu) to run on the "
            f"CPU, or check the driver and CUDA_VISIBLE_DEVICES."
        )
    if wanted == "cpu":
        return "cpu", f"{DEVICE_VARIABLE}=cpu"
    if cuda_device_count == 0:
        return "cpu", "no CUDA device found"
    return "cuda", f"{cuda_device_count} CUDA device{'s' if cuda_device_count > 1 else ''}"


@contextmanager
def cpu_host() -> Iterator[None]:
    """Run Megatron's unmodified trainer on the CPU inside this context."""
    # Everything upstream that is patched is imported first, so that names bound at import are the real ones.
    import megatron.training.training  # noqa: F401
    from megatron.cpu.device import install_device
    from megatron.cpu.eager import install_eager
    from megatron.cpu.memory import install_memory
    from megatron.cpu.optimizers import install_optimizers
    from megatron.cpu.replacements import Replacements
    from megatron.cpu.rng import install_rng
    from megatron.patches import (
        apply_patches,
        initialize_without_cuda,
        prebuilt_dataset_helpers,
        sequence_parallel_torch_norm,
        token_split_sizes,
    )

    global _cpu_host_is_in_use
    if _cpu_host_is_in_use:
        raise RuntimeError("the CPU host is in use already: enter cpu_host() once, around the whole run.")
    patches = (initialize_without_cuda, prebuilt_dataset_helpers, sequence_parallel_torch_norm, token_split_sizes)
    with Replacements() as replaced, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")  # upstream always asks
        # Upstream's arguments demand it for tensor parallelism; it means nothing to a CPU.
        replaced.set_environment_default("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        apply_patches((module.PATCH for module in patches), replaced)
        install_eager(replaced)
        install_memory(replaced)
        install_optimizers(replaced)
        install_rng(replaced)
        install_device(replaced)
        _cpu_host_is_in_use = True
        try:
            yield
        finally:
            _cpu_host_is_in_use = False


@contextmanager
def training_host() -> Iterator[Host]:
    """Choose the host, say so on rank 0, and install the CPU host where it is the one. Yields "cuda" or "cpu"."""
    import torch

    host, reason = choose_host(os.environ, torch.cuda.device_count())
    if int(os.environ.get("RANK", "0")) == 0:
        detail = "; gloo, memory lines show this process's resident memory" if host == "cpu" else ""
        print(f"> host: {host} ({reason}{detail})", flush=True)
    if host == "cuda":
        yield host
        return
    with cpu_host():
        yield host
