"""Tiny random models of transformers, as folders on disk.

    folder = save_model(tmp_path / "llama", llama(vocab_size=97))
    logits_bsv = hf_logits(folder, token_batch)

What always holds: one seed gives one model; vectors (norms, biases, mixers' parameters) are moved away from the values
that they start from, so that a mapping which mixes two of them up changes the logits.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Mamba2Config,
    Mamba2ForCausalLM,
    PreTrainedModel,
)
from transformers.utils import logging

logging.disable_progress_bar()  # it draws on the standard error that tests read

LENGTH, VOCABULARY = 21, 97

TINY_LLAMA: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 64,
}
TINY_MAMBA2: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 16,
    "n_groups": 2,
    "vocab_size": VOCABULARY,
}


def _moved(model: PreTrainedModel, seed: int) -> PreTrainedModel:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                noise = 0.2 * torch.randn(parameter.shape, generator=generator)
                parameter.add_(noise.to(parameter.dtype))
    return model.eval()


def llama(seed: int = 3, **options: Any) -> PreTrainedModel:
    """A random LlamaForCausalLM; options override TINY_LLAMA."""
    torch.manual_seed(seed)
    return _moved(LlamaForCausalLM(LlamaConfig(**{**TINY_LLAMA, **options})), seed)


def mamba2(seed: int = 4, **options: Any) -> PreTrainedModel:
    """A random Mamba2ForCausalLM; options override TINY_MAMBA2."""
    torch.manual_seed(seed)
    return _moved(Mamba2ForCausalLM(Mamba2Config(**{**TINY_MAMBA2, **options})), seed)


def save_model(folder: Path, model: PreTrainedModel, **options: Any) -> Path:
    """Save as transformers does; returns the folder."""
    model.save_pretrained(folder, **options)
    return folder


def tokens(batch: int = 2, length: int = LENGTH, vocabulary: int = VOCABULARY) -> Tensor:
    """Random tokens [b, s]."""
    return torch.randint(0, vocabulary, (batch, length), generator=torch.Generator().manual_seed(11))


def hf_logits(folder: Path, tokens_bs: Tensor, **options: Any) -> Tensor:
    """Logits [b, s, v] of a folder's model in fp32, run by transformers."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, **options)
    with torch.no_grad():
        logits_bsv: Tensor = model.eval()(tokens_bs).logits
    return logits_bsv


def stored_tensors(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder, by safetensors' own reader."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def stored_config(folder: Path) -> dict[str, Any]:
    """config.json."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return config


def change_config(folder: Path, **fields: Any) -> Path:
    """Overwrite fields of config.json; returns the folder."""
    (folder / "config.json").write_text(json.dumps({**stored_config(folder), **fields}), encoding="utf-8")
    return folder


def assert_same_folder(found: Path, wanted: Path) -> None:
    """Fail unless two folders hold the same tensors, bit for bit, and the same config.json."""
    one, other = stored_tensors(found), stored_tensors(wanted)
    assert one.keys() == other.keys(), f"names differ: {sorted(one.keys() ^ other.keys())}"
    for name, tensor in other.items():
        assert one[name].dtype == tensor.dtype, f"{name} came back as {one[name].dtype}, it was {tensor.dtype}"
        assert torch.equal(one[name], tensor), f"{name} came back with other values"
    assert stored_config(found) == stored_config(wanted)
