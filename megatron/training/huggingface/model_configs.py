"""What config.json says of a model and what Megatron's arguments say of it: one table a family, read both ways.

    model = read_config(json.loads(config_json))       # HfModel: family, fields, sizes, switches
    flags = megatron_flags(model)                      # ["--num-layers", "2", ...]
    model = model_of_arguments(stored_args, vocabulary=32000)

A field that changes what a model computes and that Megatron cannot express is refused by name, and so is a field that
transformers' own configuration class does not know; fields that say nothing about the function (token ids,
initialisation, caching) are left alone and kept for the way back.

What always holds: `model_of_arguments(arguments(megatron_flags(m))) == m`, field by field.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron.training.huggingface.errors import HuggingFaceError
from megatron.training.huggingface.name_tables import Family, Sizes

WIDE_PREFIX = "wide_"
"""model_type of a folder with wide streams: this, then the ordinary family's."""

# Field of config.json, attribute of Megatron's arguments, flag.
NUMBER_FIELDS: dict[Family, tuple[tuple[str, str, str], ...]] = {
    "llama": (
        ("num_hidden_layers", "num_layers", "--num-layers"),
        ("hidden_size", "hidden_size", "--hidden-size"),
        ("intermediate_size", "ffn_hidden_size", "--ffn-hidden-size"),
        ("num_attention_heads", "num_attention_heads", "--num-attention-heads"),
        ("num_key_value_heads", "num_query_groups", "--num-query-groups"),
        ("head_dim", "kv_channels", "--kv-channels"),
        ("max_position_embeddings", "max_position_embeddings", "--max-position-embeddings"),
        ("rms_norm_eps", "layernorm_epsilon", "--norm-epsilon"),
        ("attention_dropout", "attention_dropout", "--attention-dropout"),
    ),
    "mamba2": (
        ("hidden_size", "hidden_size", "--hidden-size"),
        ("num_heads", "mamba_num_heads", "--mamba-num-heads"),
        ("head_dim", "mamba_head_dim", "--mamba-head-dim"),
        ("state_size", "mamba_state_dim", "--mamba-state-dim"),
        ("n_groups", "mamba_num_groups", "--mamba-num-groups"),
        ("layer_norm_epsilon", "layernorm_epsilon", "--norm-epsilon"),
    ),
}

WIDE_FIELDS = (
    ("num_streams", "wide_residual", "--wide-residual"),
    (
        "streamwise_sigmoid_init_scale",
        "wide_residual_streamwise_sigmoid_init_scale",
        "--wide-residual-streamwise-sigmoid-init-scale",
    ),
    ("learned_retention", "wide_residual_learned_retention", "--wide-residual-learned-retention"),
    ("retention_init", "wide_residual_retention_init", "--wide-residual-retention-init"),
    ("retention_max_forget", "wide_residual_retention_max_forget", "--wide-residual-retention-max-forget"),
)

# Fields with one value that Megatron's model has: field, wanted, why.
REQUIRED: dict[Family, tuple[tuple[str, Any, str], ...]] = {
    "llama": (("hidden_act", "silu", "--swiglu gates with SiLU"),),
    "mamba2": (
        ("hidden_act", "silu", "Megatron's mixer has SiLU"),
        ("use_bias", False, "Megatron's mixer has no biases in in_proj and out_proj"),
        ("use_conv_bias", True, "Megatron's mixer has a bias in its convolution"),
        ("conv_kernel", 4, "Megatron's mixer convolves four tokens"),
        ("layer_norm_epsilon", 1e-5, "the epsilon of the mixer's gated norm is fixed in Megatron"),
    ),
}

# Layers of the function that Megatron has not, under names that Llama-like configurations use for them.
KNOWN_UNSUPPORTED = {
    "sliding_window": "Megatron's window of attention differs in what it covers",
    "quantization_config": "quantised weights are no weights to train",
    "num_local_experts": "this family has one MLP a layer",
    "partial_rotary_factor": "all channels of a head rotate",
}

LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""What Megatron's --use-rope-scaling has built in."""


@dataclass(frozen=True)
class HfModel:
    """A model as config.json describes it: `fields` are all that say what it computes, normalised."""

    family: Family
    fields: Mapping[str, Any]

    @property
    def is_wide(self) -> bool:
        """Whether it carries wide residual streams."""
        return "num_streams" in self.fields

    @property
    def switches(self) -> frozenset[str]:
        """The switches of the name table that are on."""
        fields = self.fields
        on = {
            "wide": self.is_wide,
            "retention": bool(fields.get("learned_retention")),
            "bias": bool(fields.get("attention_bias")),
            "untied": not fields["tie_word_embeddings"],
        }
        return frozenset(name for name, value in on.items() if value)

    def sizes(self, padded_vocabulary: int) -> Sizes:
        """Return the sizes that the name table takes."""
        fields = self.fields
        sizes = {
            "layers": fields["num_hidden_layers"],
            "width": fields["hidden_size"],
            "vocabulary": fields["vocab_size"],
            "padded_vocabulary": padded_vocabulary,
            "streams": fields.get("num_streams", 1),
            "one": 1,
        }
        if self.family == "llama":
            head = fields["head_dim"]
            return sizes | {
                "groups": fields["num_key_value_heads"],
                "head_channels": head,
                "queries": fields["num_attention_heads"] * head,
                "keys": fields["num_key_value_heads"] * head,
                "feed_forward": fields["intermediate_size"],
            }
        inner = fields["num_heads"] * fields["head_dim"]
        convolved = inner + 2 * fields["n_groups"] * fields["state_size"]
        return sizes | {
            "inner": inner,
            "convolved": convolved,
            "projected": inner + convolved + fields["num_heads"],
            "heads": fields["num_heads"],
            "kernel": 4,
        }


def _config_class(family: Family) -> Any:
    from transformers import LlamaConfig, Mamba2Config

    return {"llama": LlamaConfig, "mamba2": Mamba2Config}[family]


def _family(config: Mapping[str, Any]) -> tuple[Family, bool]:
    kind = config.get("model_type")
    base = str(kind).removeprefix(WIDE_PREFIX)
    if base not in NUMBER_FIELDS:
        raise HuggingFaceError(
            f"config.json has model_type {kind!r}; llama and mamba2 can be converted (and wide_llama, wide_mamba2 of "
            "export-hf)."
        )
    wide = base != kind
    architecture = {"llama": "LlamaForCausalLM", "mamba2": "Mamba2ForCausalLM"}[base]
    names = config.get("architectures") or [architecture]
    if [str(name).removeprefix("Wide") for name in names] != [architecture]:
        raise HuggingFaceError(f"config.json has architectures {names}; {architecture} is wanted.")
    if not wide and config.get("auto_map"):
        raise HuggingFaceError(
            f"config.json has an auto_map ({', '.join(config['auto_map'])}): the model is run by code of its own, "
            "which may compute anything."
        )
    return base, wide


def _check_known(config: Mapping[str, Any], known: Any, wide: bool) -> None:
    """Refuse fields that transformers' class does not know, unless they are switched off."""
    names = set(known) | {"rope_theta", "rope_scaling", "torch_dtype", "auto_map", "rms_norm", "norm_before_gate"}
    names |= {name for name, *_ in WIDE_FIELDS} if wide else set()
    for name, value in config.items():
        off = value is None or value is False
        if name in KNOWN_UNSUPPORTED and not off:
            raise HuggingFaceError(
                f"config.json has {name} = {value!r}, which cannot be converted: {KNOWN_UNSUPPORTED[name]}."
            )
        if name not in names and not off and not name.startswith("_"):
            raise HuggingFaceError(
                f"config.json has {name} = {value!r}, which transformers' own configuration of this family does not "
                "know. Remove it if it says nothing about what the model computes."
            )


def _rope(rope: Mapping[str, Any]) -> dict[str, Any]:
    """Return the rotary fields as Megatron can express them."""
    kind = rope.get("rope_type", "default")
    theta = rope["rope_theta"]
    if theta != int(theta):
        raise HuggingFaceError(f"config.json has rope_theta = {theta!r}; --rotary-base takes whole numbers.")
    unknown = set(rope) - {"rope_type", "type", "rope_theta", "factor", *LLAMA3_ROPE}
    if unknown:
        raise HuggingFaceError(f"config.json's rotary embedding has {', '.join(sorted(unknown))}, unknown to Megatron.")
    found: dict[str, Any] = {"rope_theta": int(theta), "rope_type": kind}
    if kind == "default":
        return found
    if kind == "linear":
        if rope["factor"] != int(rope["factor"]):
            raise HuggingFaceError(
                f"config.json has linear rope scaling by {rope['factor']!r}; --rotary-seq-len-interpolation-factor "
                "takes whole numbers."
            )
        return found | {"rope_factor": int(rope["factor"])}
    if kind != "llama3":
        raise HuggingFaceError(
            f"config.json has rope scaling of type {kind!r}; default, linear and llama3 can be expressed in Megatron."
        )
    for name, wanted in LLAMA3_ROPE.items():
        if rope[name] != wanted:
            raise HuggingFaceError(
                f"config.json has {name} = {rope[name]!r} in its llama3 rope scaling; Megatron has {wanted} built in."
            )
    return found | {"rope_factor": float(rope["factor"])}


def _check_biases(config: Any) -> bool:
    if config.attention_bias != config.mlp_bias:
        raise HuggingFaceError(
            f"config.json has attention_bias = {config.attention_bias} and mlp_bias = {config.mlp_bias}: Megatron has "
            "linear biases everywhere in a layer or nowhere."
        )
    return bool(config.attention_bias)


def _check_required(family: Family, config: Any) -> None:
    for name, wanted, why in REQUIRED[family]:
        found = getattr(config, name)
        if found != wanted:
            raise HuggingFaceError(f"config.json has {name} = {found!r}; {wanted!r} is wanted: {why}.")
    if family == "mamba2":
        low, high = config.time_step_limit
        if float(low) != 0 or float(high) != float("inf"):
            raise HuggingFaceError(
                f"config.json has time_step_limit = {[low, high]!r}; Megatron's mixer does not limit its time steps."
            )


def _special_floats(value: Any) -> Any:
    """Return value with what transformers writes for infinities and NaN, {"__float__": "Infinity"}, as numbers."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {name: _special_floats(item) for name, item in value.items()}
    return [_special_floats(item) for item in value] if isinstance(value, list) else value


def wide_layout(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a layout of streams without bounds of a retention that is not learned, as Megatron's flags want it."""
    learned = bool(given.get("learned_retention"))
    return {name: value for name, value in given.items() if learned or "retention" not in name}


def _wide_fields(raw: Mapping[str, Any]) -> dict[str, Any]:
    if raw.get("num_streams") is None:
        raise HuggingFaceError("config.json has no num_streams: a wide model's has one.")
    return wide_layout({name: raw[name] for name, *_ in WIDE_FIELDS if raw.get(name) is not None})


def read_config(raw: Mapping[str, Any]) -> HfModel:
    """Return the model that a config.json (parsed) describes.

    Raises:
        HuggingFaceError: another family, a field that Megatron cannot express, an unknown field; the message names it.
    """
    family, wide = _family(raw)
    kind = _config_class(family)
    _check_known(raw, kind().to_dict(), wide)
    plain = _special_floats(
        {name: value for name, value in raw.items() if name not in ("auto_map", "model_type", "architectures")}
    )
    try:
        config = kind.from_dict(plain)
    except Exception as error:  # its validators raise all kinds
        raise HuggingFaceError(f"config.json cannot be read: {' '.join(str(error).split())[:300]}") from error
    _check_required(family, config)
    fields = {name: getattr(config, name) for name, *_ in NUMBER_FIELDS[family]}
    fields |= {
        "num_hidden_layers": config.num_hidden_layers,
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": bool(config.tie_word_embeddings),
    }
    if family == "llama":
        fields |= _rope(config.rope_parameters) | {"attention_bias": _check_biases(config)}
    return HfModel(family, fields | (_wide_fields(raw) if wide else {}))
