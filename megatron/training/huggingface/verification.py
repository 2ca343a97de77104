"""Whether a Hugging Face folder and a checkpoint compute the same: `--verify` of import-hf and export-hf.

    difference, tolerance = compare_with_folder(Path("llama"), Path("runs/llama"))
    difference.largest_relative <= tolerance

transformers runs the folder, Megatron the checkpoint, on the same tokens, both in the folder's precision: in half
precision the two round in other places, so the tolerance is wider; a wrong row or constant shows there too.
"""

from __future__ import annotations

from pathlib import Path

import torch

from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.verification import Difference, logits_of
from megatron.training.huggingface.logits import folder_logits

TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Largest difference of logits in units of the largest logit."""


def compare_with_folder(folder: Path, checkpoint: Path, step: int | None = None) -> tuple[Difference, float]:
    """Return by how much the logits of a checkpoint differ from those of a folder, and the tolerance to hold it to.

    Raises:
        ConversionError: one of the two cannot be loaded, or its logits are not finite.
    """
    found, tokens = logits_of(checkpoint, step)
    wanted, dtype = folder_logits(folder, tokens)
    rows = min(found.shape[-1], wanted.shape[-1])
    wanted = wanted[0, :, :rows].double()
    difference = (found[:, :rows] - wanted).abs().max()
    if not torch.isfinite(difference):
        raise ConversionError("logits are not finite: the model had diverged, or its tensors are damaged")
    relative = float(difference / wanted.abs().max().clamp_min(1e-30))
    return Difference(float(difference), relative, tokens.shape[1]), TOLERANCE[dtype]
