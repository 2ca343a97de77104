"""The cache of sample indices (--data-cache-path): what a killed run left unfinished is removed and so built again.

Upstream takes an index for cached as soon as its files are there, and a killed run leaves one that is too short, on
which every later run would end with an error of NumPy's.

What always holds: the first rank alone removes, before it builds; all others wait for it (upstream's builder).
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import torch

# What upstream's BlendedDataset caches.
BLEND_INDICES = "*-BlendedDataset-*.npy"


def _is_whole(file: Path) -> bool:
    try:
        np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, OSError, EOFError):
        return False
    return True


def remove_unfinished_indices(folder: str | os.PathLike[str], pattern: str) -> list[Path]:
    """Remove the .npy files of the pattern in a folder whose content is shorter than their header says; returns them.

    On the first rank; on any other nothing is done.
    """
    if torch.distributed.is_initialized() and torch.distributed.get_rank() != 0:
        return []
    unfinished = [file for file in sorted(Path(folder).glob(pattern)) if not _is_whole(file)]
    for file in unfinished:
        file.unlink()
        print(f"> {file} was not finished by an earlier run: built again", flush=True)
    return unfinished
