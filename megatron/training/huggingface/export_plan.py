"""From a Megatron checkpoint to a Hugging Face folder, tensor by tensor.

    plan = plan_export(stored_args, {"decoder.final_layernorm.weight": (shape, dtype), ...}, host)
    write_export(plan, read=reader, output=Path("out"))       # reader(name) returns one tensor

A wide model's folder has the ordinary model's tensors, its controllers without their padding, and the modelling files
that run them (remote_code/).

What always holds: names and shapes are checked before anything is written; values are never rounded; the folder
appears when it is whole.
"""

from __future__ import annotations

import json
import shutil
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.huggingface.errors import HuggingFaceError
from megatron.training.huggingface.exported_config import exported_config, reference_config
from megatron.training.huggingface.folder_reader import CONFIG, TOKENIZER_FILES
from megatron.training.huggingface.folder_writer import MAX_SHARD_BYTES, Planned, SafetensorsWriter, unfinished_folder
from megatron.training.huggingface.import_plan import cast_exactly, listed
from megatron.training.huggingface.model_arguments import model_of_arguments
from megatron.training.huggingface.model_configs import HfModel
from megatron.training.huggingface.name_tables import Family, TensorPair, tensor_table

Shapes = Mapping[str, tuple[tuple[int, ...], torch.dtype]]

REMOTE_CODE: dict[Family, tuple[str, ...]] = {
    "llama": ("wide_streams.py", "configuration_wide_llama.py", "modeling_wide_llama.py"),
    "mamba2": ("wide_streams.py", "configuration_wide_mamba2.py", "modeling_wide_mamba2.py"),
}
"""Files of remote_code/ that a wide model's folder gets."""


@dataclass(frozen=True)
class ExportPlan:
    """What will be written."""

    model: HfModel
    pairs: list[TensorPair]
    dtype: torch.dtype
    config: dict[str, Any]
    tokenizer: Path | None

    def dtype_of(self, pair: TensorPair) -> torch.dtype:
        """Return the dtype of a pair's tensors in the folder."""
        return torch.float32 if pair.is_controller else self.dtype

    def planned(self) -> list[Planned]:
        """Return all tensors of the folder in their order."""
        return [
            Planned(name, shape, self.dtype_of(pair))
            for pair in self.pairs
            for name, shape in zip(pair.hf, pair.hf_shapes, strict=True)
        ]


def _vocabulary(args: Namespace, reference: Mapping[str, Any] | None, given: int | None) -> int:
    """Return the rows of the embedding that are tokens: given, of the reference, or of the tokenizer."""
    if given is not None:
        return given
    if reference is not None:
        return int(reference["vocab_size"])
    if args.tokenizer_type == "NullTokenizer" and args.vocab_size:
        return int(args.vocab_size)
    from megatron.training.data.errors import DataError
    from megatron.training.data.tokenizers import build_tokenizer

    try:
        return int(build_tokenizer(Namespace(**{**vars(args), "rank": 1})).vocab_size)
    except DataError as error:
        raise HuggingFaceError(f"the size of the vocabulary is unknown: {error} Give --vocab-size N.") from error


def _check_stored(pairs: list[TensorPair], stored: Shapes) -> None:
    wanted = {pair.megatron: pair.megatron_shape for pair in pairs}
    problems = []
    if missing := set(wanted) - set(stored):
        problems.append(f"missing: {listed(missing)}")
    if unknown := set(stored) - set(wanted):
        problems.append(f"unknown: {listed(unknown)}")
    problems += [
        f"{name} has shape {list(stored[name][0])}, {list(shape)} is wanted"
        for name, shape in sorted(wanted.items())
        if name in stored and tuple(stored[name][0]) != shape
    ]
    if problems:
        raise HuggingFaceError(f"the checkpoint's tensors are not those of its arguments: {'; '.join(problems)}.")


def _tokenizer_folder(args: Namespace) -> Path | None:
    if args.tokenizer_type != "HuggingFaceTokenizer" or not args.tokenizer_model:
        return None
    path = Path(args.tokenizer_model)
    return path if path.is_dir() else path.parent if path.is_file() else None


def plan_export(
    args: Namespace,
    stored: Shapes,
    host: Any,
    *,
    like: Path | None = None,
    vocabulary: int | None = None,
) -> ExportPlan:
    """Check a checkpoint and say what it becomes.

    Args:
        args: the arguments that it stores.
        stored: shape and dtype of every tensor of the model, named as in its state dict.
        host: "cuda" or "cpu".
        like: a Hugging Face folder whose config.json gives what says nothing about the function (token ids and the
            like) and whose tokenizer is taken; default: the folder that the checkpoint was imported from, as stored.
        vocabulary: tokens of the model; the rows after them are padding.

    Raises:
        HuggingFaceError: a model that `transformers` does not have; tensors that are not the model's.
    """
    reference = reference_config(args, like)
    model = model_of_arguments(args, vocabulary=_vocabulary(args, reference, vocabulary), host=host)
    embedding = "embedding.word_embeddings.weight"
    if embedding not in stored:
        raise HuggingFaceError(f"the checkpoint has no {embedding}.")
    (padded, *_), dtype = stored[embedding]
    if padded < model.fields["vocab_size"]:
        raise HuggingFaceError(
            f"the checkpoint's embedding has {padded} rows, fewer than the {model.fields['vocab_size']} tokens wanted: "
            "give --vocab-size N."
        )
    pairs = tensor_table(model.family, model.sizes(padded), model.switches)
    _check_stored(pairs, stored)
    config = exported_config(model, str(dtype).removeprefix("torch."), reference)
    return ExportPlan(model, pairs, dtype, config, like or _tokenizer_folder(args))


def write_export(
    plan: ExportPlan,
    read: Callable[[str], Tensor],
    output: Path,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    progress: Callable[[int], None] = lambda nbytes: None,
) -> None:
    """Write the folder; `read` returns one tensor of the checkpoint, `progress` is told the bytes written.

    Raises:
        HuggingFaceError: the folder is there already or cannot be written; a value that the dtype cannot hold.
    """
    with unfinished_folder(output) as folder:
        with SafetensorsWriter(folder, plan.planned(), max_shard_bytes) as writer:
            for pair in plan.pairs:
                parts = pair.to_hf(read(pair.megatron))
                for name, part in zip(pair.hf, parts, strict=True):
                    writer.write(name, cast_exactly(part, plan.dtype_of(pair), name))
                    progress(part.numel() * part.element_size())
        (folder / CONFIG).write_text(json.dumps(plan.config, indent=2) + "\n", encoding="utf-8")
        if plan.model.is_wide:
            for name in REMOTE_CODE[plan.model.family]:
                shutil.copyfile(Path(__file__).with_name("remote_code") / name, folder / name)
        for name in (*TOKENIZER_FILES, "generation_config.json"):
            if plan.tokenizer is not None and (plan.tokenizer / name).is_file():
                shutil.copyfile(plan.tokenizer / name, folder / name)
