"""From a Hugging Face folder to Megatron's tensors: everything is checked before the first one is read.

    with HfFolder.open("llama") as folder:
        plan = plan_import(folder, host)
        plan.args                                   # a whole namespace for pretrain_*.py and tools/generate.py
        for name, tensor in plan.tensors(folder):   # one at a time, named as in the model's state dict
            ...

What always holds: a tensor that the table does not know, one that is missing and one of another shape are refused by
name; values are never rounded.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.core.transformer.wide_residual_config import WideResidualConfig
from megatron.training.checkpoints.controllers import fresh_controller
from megatron.training.huggingface.errors import HuggingFaceError
from megatron.training.huggingface.folder_reader import DTYPES, Entry, HfFolder, has_tokenizer
from megatron.training.huggingface.model_arguments import megatron_flags, parse_flags
from megatron.training.huggingface.model_configs import WIDE_FIELDS, HfModel, read_config, wide_layout
from megatron.training.huggingface.name_tables import ALIASES, DERIVED, TensorPair, tensor_table

DEFAULT_VOCABULARY_MULTIPLE = 128
DEFAULT_MAMBA_SEQUENCE = 2048
_DTYPE_FLAGS = {torch.float32: [], torch.bfloat16: ["--bf16"], torch.float16: ["--fp16"]}


@dataclass(frozen=True)
class ImportPlan:
    """What will be written: `pairs` in the order of the model, all in `dtype` but for controllers, which are fp32."""

    model: HfModel
    pairs: list[TensorPair]
    dtype: torch.dtype
    args: Namespace
    flags: list[str]
    names: dict[str, str]
    tied_copy: str | None
    fresh: WideResidualConfig | None

    def dtype_of(self, pair: TensorPair) -> torch.dtype:
        """Return the dtype of a pair's Megatron tensor."""
        return torch.float32 if pair.is_controller else self.dtype

    def tensor(self, folder: HfFolder, pair: TensorPair) -> Tensor:
        """Return Megatron's tensor of a pair.

        Raises:
            HuggingFaceError: a value that the model's dtype cannot hold, a copy of tied embeddings that differs.
        """
        if pair.is_controller and self.fresh is not None:
            return fresh_controller(pair.megatron, self.fresh)
        if pair.megatron.endswith("word_embeddings.weight") and self.tied_copy is not None:
            _require_same(folder.tensor(self.names[pair.hf[0]]), folder.tensor(self.tied_copy), self.tied_copy)
        rows = pair.megatron_shape[0] if len(pair.hf) == 1 else None  # a vocabulary's padding, a controller's tail
        parts = [folder.tensor(self.names[name], rows) for name in pair.hf]
        tensor = pair.to_megatron([cast_exactly(part, self.dtype_of(pair), pair.hf[0]) for part in parts])
        assert tuple(tensor.shape) == pair.megatron_shape, pair.megatron
        return tensor

    def describe(self, pair: TensorPair) -> str:
        """Return where a pair's Megatron tensor comes from."""
        if pair.is_controller and self.fresh is not None:
            return "new"
        return ", ".join(self.names[name] for name in pair.hf)

    def tensors(self, folder: HfFolder) -> Iterator[tuple[str, Tensor]]:
        """Yield Megatron's tensors one at a time."""
        for pair in self.pairs:
            yield pair.megatron, self.tensor(folder, pair)


def _widened(model: HfModel, wide: WideResidualConfig | None) -> HfModel:
    """Return the model with wide streams; HuggingFaceError when the folder's has them already."""
    if wide is None:
        return model
    if model.is_wide:
        raise HuggingFaceError(
            f"the folder's model has {model.fields['num_streams']} streams already: leave --num-streams out; "
            "convert.py resize changes their number."
        )
    layout = wide_layout({name: getattr(wide, name) for name, *_ in WIDE_FIELDS})
    return replace(model, fields={**model.fields, **layout})


def cast_exactly(tensor: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """Return tensor in dtype; HuggingFaceError naming it when that changes a value."""
    cast = tensor.to(dtype)
    if tensor.dtype != dtype and not torch.equal(cast.to(tensor.dtype), tensor):
        found, wanted = (str(kind).removeprefix("torch.") for kind in (tensor.dtype, dtype))
        raise HuggingFaceError(
            f"{name} is {found} and the model {wanted}, which cannot hold its values. Save the folder in one dtype "
            "first (AutoModelForCausalLM.from_pretrained(FOLDER, dtype=...).save_pretrained(OTHER))."
        )
    return cast


def _require_same(embedding: Tensor, copy: Tensor, name: str) -> None:
    if embedding.shape != copy.shape or not torch.equal(embedding, copy):
        raise HuggingFaceError(
            f"config.json has tie_word_embeddings = true, but {name} differs from the embedding: one of the two "
            "is wrong."
        )


def listed(names: Iterable[str]) -> str:
    """Return the first five names, and how many more there are."""
    names = sorted(names)
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(names[:5]) + more


def _stored_names(model: HfModel, entries: dict[str, Entry]) -> dict[str, str]:
    """Return today's name -> name in the folder, without tensors that say nothing."""
    return {ALIASES.get(name, name): name for name in entries if not name.endswith(DERIVED[model.family])}


def _check_tensors(pairs: list[TensorPair], names: dict[str, str], folder: HfFolder) -> None:
    wanted = {name: shape for pair in pairs for name, shape in zip(pair.hf, pair.hf_shapes, strict=True)}
    problems = []
    if missing := set(wanted) - set(names):
        problems.append(f"missing: {listed(missing)}")
    if unknown := set(names) - set(wanted):
        problems.append(f"unknown: {listed(names[name] for name in unknown)}")
    shapes = {name: (folder.entries[names[name]].shape, wanted[name]) for name in set(names) & set(wanted)}
    problems += [
        f"{name} has shape {list(found)}, {list(shape)} is wanted"
        for name, (found, shape) in sorted(shapes.items())
        if found != shape
    ]
    dtypes = {entry.dtype for entry in folder.entries.values()} - set(DTYPES)
    if dtypes:
        problems.append(f"tensors of dtype {listed(dtypes)}; F32, BF16 or F16 are wanted")
    if problems:
        raise HuggingFaceError(f"the tensors of {folder.path} are not those of its config.json: {'; '.join(problems)}.")


def _model_dtype(folder: HfFolder, embedding: str) -> torch.dtype:
    """Return the dtype of config.json, or that of the embedding where it has none."""
    named = folder.config.get("dtype", folder.config.get("torch_dtype"))
    if named is None:
        return DTYPES[folder.entries[embedding].dtype]
    for dtype in DTYPES.values():
        if str(named).removeprefix("torch.") == str(dtype).removeprefix("torch."):
            return dtype
    raise HuggingFaceError(f"config.json has dtype {named!r}; float32, bfloat16 or float16 is wanted.")


def _tokenizer_flags(path: Path, vocabulary: int) -> list[str]:
    if has_tokenizer(path):
        return ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(path.resolve())]
    return ["--tokenizer-type", "NullTokenizer", "--vocab-size", str(vocabulary)]


def plan_import(
    folder: HfFolder,
    host: Any,
    *,
    vocabulary_multiple: int = DEFAULT_VOCABULARY_MULTIPLE,
    sequence_length: int | None = None,
    wide: WideResidualConfig | None = None,
) -> ImportPlan:
    """Check a folder and say what it becomes.

    Args:
        folder: open.
        host: "cuda" or "cpu", whose defaults the arguments get.
        vocabulary_multiple: the embedding gets zero rows up to a multiple of it (--make-vocab-size-divisible-by).
        sequence_length: --seq-length of the arguments; default: the longest context of a Llama, 2048 for Mamba-2.

        wide: widen the model on the way, to this layout at its start.

    Raises:
        HuggingFaceError: a configuration or tensors that cannot be converted; the message names what.
    """
    model = _widened(read_config(folder.config), wide)
    vocabulary = model.fields["vocab_size"]
    padded = -(-vocabulary // vocabulary_multiple) * vocabulary_multiple
    pairs = tensor_table(model.family, model.sizes(padded), model.switches)
    names = _stored_names(model, folder.entries)
    tied_copy = None if "untied" in model.switches else names.pop("lm_head.weight", None)
    _check_tensors([pair for pair in pairs if wide is None or not pair.is_controller], names, folder)
    dtype = _model_dtype(folder, names[pairs[0].hf[0]])
    length = sequence_length or model.fields.get("max_position_embeddings") or DEFAULT_MAMBA_SEQUENCE
    flags = [
        *megatron_flags(model, sequence_length=length),
        *_DTYPE_FLAGS[dtype],
        *_tokenizer_flags(folder.path, vocabulary),
        *("--make-vocab-size-divisible-by", str(vocabulary_multiple)),
    ]
    args, _ = parse_flags([*flags, "--padded-vocab-size", str(padded)], host)
    args.hf_config = folder.config
    return ImportPlan(model, pairs, dtype, args, flags, names, tied_copy, wide)
