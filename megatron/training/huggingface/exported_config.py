"""config.json of an exported model: what Megatron's arguments say, and around it what only the original folder knew.

    config = exported_config(model, "bfloat16", reference_config(args, like=None))

What always holds: where the model is still the reference's, every field of the reference is written as it stood.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from megatron.training.huggingface.errors import HuggingFaceError
from megatron.training.huggingface.folder_reader import read_config_json
from megatron.training.huggingface.model_arguments import config_json
from megatron.training.huggingface.model_configs import WIDE_FIELDS, WIDE_PREFIX, HfModel, read_config
from megatron.training.huggingface.name_tables import Family

CLASSES: dict[Family, str] = {"llama": "Llama", "mamba2": "Mamba2"}
_WIDE_NAMES = {name for name, *_ in WIDE_FIELDS}


def reference_config(args: Namespace, like: Path | None) -> dict[str, Any] | None:
    """Return config.json of `like`, or of the folder that the checkpoint was imported from, or None."""
    return getattr(args, "hf_config", None) if like is None else read_config_json(like)


def _ordinary_reference(reference: Mapping[str, Any], family: Family) -> dict[str, Any]:
    """Return the reference without what belongs to wide streams."""
    config = {name: value for name, value in reference.items() if name not in _WIDE_NAMES | {"auto_map"}}
    return config | {"model_type": family, "architectures": [f"{CLASSES[family]}ForCausalLM"]}


def _ordinary(model: HfModel) -> HfModel:
    return replace(model, fields={name: value for name, value in model.fields.items() if name not in _WIDE_NAMES})


def _wide_fields(model: HfModel) -> dict[str, Any]:
    name = CLASSES[model.family]
    return {
        "model_type": WIDE_PREFIX + model.family,
        "architectures": [f"Wide{name}ForCausalLM"],
        "auto_map": {
            "AutoConfig": f"configuration_wide_{model.family}.Wide{name}Config",
            "AutoModelForCausalLM": f"modeling_wide_{model.family}.Wide{name}ForCausalLM",
        },
        **{field: model.fields[field] for field, *_ in WIDE_FIELDS if field in model.fields},
    }


def exported_config(model: HfModel, dtype: str, reference: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return config.json of a model.

    Args:
        model: what it computes.
        dtype: "float32", "bfloat16" or "float16".
        reference: config.json to take everything else from.

    Raises:
        HuggingFaceError: the reference is of another family.
    """
    ordinary, fresh = _ordinary(model), config_json(model, dtype)
    if reference is None:
        config = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None} | fresh
    else:
        known = read_config(reference)
        if known.family != model.family:
            raise HuggingFaceError(f"the reference config.json is a {known.family}'s, the model is a {model.family}.")
        config = _ordinary_reference(reference, model.family)
        if _ordinary(known) != ordinary:
            config = {name: value for name, value in config.items() if name not in ("rope_theta", "rope_scaling")}
            config |= fresh
        if "torch_dtype" in config:
            del config["torch_dtype"]
            config["torch_dtype"] = dtype
        else:
            config["dtype"] = dtype
    return config | _wide_fields(model) if model.is_wide else config
