"""Logits of a Hugging Face folder, run by transformers, for comparing conversions.

    logits_bsv, dtype = folder_logits(Path("llama"), tokens_bs)

A wide folder is run by this package's own modelling files, never by code that lies in the folder.

Shape suffixes: b batch, s sequence, v vocabulary.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.huggingface.exported_config import CLASSES
from megatron.training.huggingface.folder_reader import read_config_json
from megatron.training.huggingface.model_configs import read_config


def model_class(folder: Path) -> Any:
    """Return the class of transformers, or of remote_code for wide streams, that runs a folder's model."""
    model = read_config(read_config_json(folder))
    name = f"{CLASSES[model.family]}ForCausalLM"
    if model.is_wide:
        module = importlib.import_module(f"megatron.training.huggingface.remote_code.modeling_wide_{model.family}")
        return getattr(module, f"Wide{name}")
    return getattr(importlib.import_module("transformers"), name)


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


@torch.no_grad()
def folder_logits(folder: Path, tokens_bs: Tensor) -> tuple[Tensor, torch.dtype]:
    """Return logits [b, s, v] in fp32 of a folder's model, run on the CPU, and the dtype that it computed in.

    Raises:
        HuggingFaceError: config.json of another family.
    """
    with _without_progress_bars():
        model = model_class(folder).from_pretrained(folder, dtype="auto", local_files_only=True)
    logits_bsv: Tensor = model.eval()(tokens_bs, use_cache=False).logits.float()
    return logits_bsv, model.dtype
