"""Mamba-2 layers without mamba-ssm: MambaMixer's operators replaced by PyTorch ones.

    with Replacements() as replaced:
        use_torch_mamba_operators(replaced, host)      # host: "cuda" or "cpu", as training_host() yields it
        ...build and run models with `M` layers...

megatron-core's MambaMixer asks for mamba-ssm when it is imported, and `import megatron.training` imports it. It looks
its operators up by name at every call, so they are replaced in its module, at any time before a model is built; no
module that is not installed is ever pretended to be.

- CPU host: all operators, the decoding step included (mamba-ssm's and megatron-core's own are Triton kernels).
- CUDA without mamba-ssm: those of mamba-ssm; megatron-core's Triton decoding step stays.
- CUDA with mamba-ssm: nothing is changed.

What always holds: `replaced.restore()` puts everything back. One line on rank 0 says that PyTorch operators are in use.
Dynamic-batching inference still needs mamba-ssm and says so.
"""

from __future__ import annotations

import importlib
import os
from typing import Any

import torch
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint

from megatron.core.ssm.torch_causal_conv1d import causal_conv1d_fn, causal_conv1d_update
from megatron.core.ssm.torch_gated_norm import RMSNorm
from megatron.core.ssm.torch_mamba_scan import mamba_chunk_scan_combined, mamba_split_conv1d_scan_combined
from megatron.core.ssm.torch_selective_state_update import selective_state_update
from megatron.cpu.host import Host
from megatron.cpu.replacements import Replacements

_MIXER = "megatron.core.ssm.mamba_mixer"


class ShardedRMSNorm(RMSNorm):
    """The gated norm as MambaMixer wants it: its weight is sharded over tensor parallelism in checkpoints."""

    tp_group: torch.distributed.ProcessGroup  # set by the mixer

    def sharded_state_dict(
        self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        """The weight, split along its only dimension, under `prefix`."""
        return make_sharded_tensors_for_checkpoint(
            {"weight": self.weight},
            prefix,
            tensor_parallel_layers_axis_map={"weight": 0},
            sharded_offsets=sharded_offsets,
            tp_group=self.tp_group,
            dp_cp_group=(metadata or {}).get("dp_cp_group"),
        )


def _packing_support(for_inference_not_training: bool = True) -> tuple[bool, str | None]:
    """Packed sequences can be trained on; dynamic batching would need kernels that are not here."""
    if for_inference_not_training:
        return (
            False,
            "dynamic-batching inference of Mamba layers needs mamba-ssm and causal-conv1d: use static batching.",
        )
    return True, None


_SCAN_OPERATORS = {
    "HAVE_MAMBA_SSM": True,
    "MAMBA_HAS_STATE_DTYPE": True,
    "RMSNormGated": RMSNorm,
    "ExtendedRMSNorm": ShardedRMSNorm,
    "causal_conv1d_fn": causal_conv1d_fn,
    "mamba_chunk_scan_combined": mamba_chunk_scan_combined,
    "mamba_split_conv1d_scan_combined": mamba_split_conv1d_scan_combined,
    "_check_mamba_sequence_packing_support": _packing_support,
}
_DECODING_OPERATORS = {
    "causal_conv1d_update": causal_conv1d_update,
    "selective_state_update": selective_state_update,
}


def use_torch_mamba_operators(replaced: Replacements, host: Host) -> bool:
    """Let MambaMixer use PyTorch operators where its own cannot run; `replaced` puts the originals back.

    Returns whether they are in use. Calling it again while they are changes nothing. Raises RuntimeError where
    megatron-core's mixer no longer has a name that would be replaced.
    """
    mixer = importlib.import_module(_MIXER)
    if mixer.mamba_chunk_scan_combined is mamba_chunk_scan_combined:
        return True
    if host == "cuda" and mixer.HAVE_MAMBA_SSM:
        return False
    operators = _SCAN_OPERATORS if host == "cuda" else _SCAN_OPERATORS | _DECODING_OPERATORS
    missing = [name for name in operators if not hasattr(mixer, name)]
    if missing:
        raise RuntimeError(
            f"{_MIXER} of the installed megatron-core has no {', '.join(missing)}, which the PyTorch Mamba operators "
            "replace. Install the version of constraints.txt."
        )
    reason = "the kernels of mamba-ssm need CUDA" if mixer.HAVE_MAMBA_SSM else "mamba-ssm is not installed"
    for name, operator in operators.items():
        replaced.set(mixer, name, operator)
    if int(os.environ.get("RANK", "0")) == 0:
        print(f"> Mamba operators: PyTorch ({reason})", flush=True)
    return True
