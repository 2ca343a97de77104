"""Megatron's arguments for a model of config.json, and back.

    args, parser = parse_flags(megatron_flags(model), host)     # a whole namespace, as a training run stores it
    model = model_of_arguments(args, vocabulary=32000, host=host)     # HuggingFaceError where transformers has none

On the way back no list says what is not supported: the arguments are rebuilt from what config.json could say, and every
argument that describes a model must come out as it was.

What always holds: the namespace is made by upstream's parser and validation, so nothing that training reads is missing.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from argparse import Namespace
from typing import Any

from megatron.training.huggingface.errors import HuggingFaceError
from megatron.training.huggingface.model_configs import LLAMA3_ROPE, NUMBER_FIELDS, WIDE_FIELDS, HfModel
from megatron.training.huggingface.name_tables import Family

# Describe training, sampling or the tokenizer, or are derived: they may differ without another function.
_NOT_THE_FUNCTION = {
    *("attention_dropout", "hidden_dropout", "init_method_std", "embedding_init_method_std", "seq_length"),
    *("vocab_size", "padded_vocab_size", "pad_vocab_size", "make_vocab_size_divisible_by", "vocab_extra_ids"),
    *("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "metadata_path", "special_tokens"),
    *("tiktoken_pattern", "tiktoken_num_special_tokens", "null_tokenizer_eod_id", "null_tokenizer_pad_id"),
    *("tokenizer_hf_no_include_special_tokens", "tokenizer_hf_no_use_fast", "trust_remote_code", "chat_template"),
    *("tokenizer_sentencepiece_ignore_extra_whitespaces", "tokenizer_sentencepiece_legacy"),
    *("fp16", "bf16", "fp32_residual_connection", "attention_softmax_in_fp32", "enable_experimental"),
    *("apply_query_key_layer_scaling", "disable_bf16_reduced_precision_matmul", "bert_binary_head"),
    *("clone_scatter_output_in_embedding", "hybrid_override_pattern", "use_rotary_position_embeddings"),
    *("moe_aux_loss_coeff", "mtp_loss_scaling_factor", "qk_clip_alpha", "qk_clip_threshold"),
}
# Describe attention, of which a stack of Mamba layers has none.
_ATTENTION_ONLY = {
    *("num_attention_heads", "num_query_groups", "group_query_attention", "kv_channels", "ffn_hidden_size", "swiglu"),
    *("rotary_base", "rotary_percent", "rotary_interleaved", "use_rope_scaling", "rope_scaling_factor", "qk_layernorm"),
    *("window_size", "squared_relu", "openai_gelu", "max_position_embeddings", "add_qkv_bias", "add_bias_linear"),
    *("rotary_seq_len_interpolation_factor", "mamba_num_heads"),
}


def megatron_flags(model: HfModel, *, sequence_length: int) -> list[str]:
    """Return the command line that builds this model, but for tokenizer and precision."""
    fields = model.fields
    flags: list[str] = []
    for name, _, flag in NUMBER_FIELDS[model.family]:
        flags += [flag, repr(fields[name])]
    if model.family == "llama":
        flags += ["--group-query-attention", "--swiglu", "--position-embedding-type", "rope", "--rotary-percent", "1.0"]
        flags += ["--rotary-base", str(fields["rope_theta"])]
        if fields["rope_type"] == "linear":
            flags += ["--rotary-seq-len-interpolation-factor", str(fields["rope_factor"])]
        elif fields["rope_type"] == "llama3":
            flags += ["--use-rope-scaling", "--rope-scaling-factor", repr(fields["rope_factor"])]
    else:
        heads = fields["num_heads"] if fields["hidden_size"] % fields["num_heads"] == 0 else 1
        flags += ["--hybrid-layer-pattern", "M" * fields["num_hidden_layers"], "--position-embedding-type", "none"]
        flags += ["--num-attention-heads", str(heads), "--max-position-embeddings", str(sequence_length)]
        flags += ["--attention-dropout", "0.0"]
    flags += ["--normalization", "RMSNorm", "--hidden-dropout", "0.0", "--seq-length", str(sequence_length)]
    if not fields.get("attention_bias"):
        flags.append("--disable-bias-linear")
    if not fields["tie_word_embeddings"]:
        flags.append("--untie-embeddings-and-output-weights")
    return flags + _wide_flags(fields)


def _wide_flags(fields: Any) -> list[str]:
    flags: list[str] = []
    for name, _, flag in WIDE_FIELDS:
        value = fields.get(name)
        if value is True:
            flags.append(flag)
        elif value is not None and value is not False:
            flags += [flag, repr(value)]
    return flags


def parse_flags(flags: list[str], host: Any) -> tuple[Namespace, argparse.ArgumentParser]:
    """Return the validated arguments of a command line, and the parser that read it.

    Raises:
        HuggingFaceError: an option that cannot work.
    """
    from megatron.cpu.replacements import Replacements
    from megatron.training.pretrain_entry import ARGUMENT_EXTENSIONS, ArgumentExtension, validated_arguments

    parsers: list[argparse.ArgumentParser] = []

    def keep(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        parsers.append(parser)
        return parser

    extensions = [*(ArgumentExtension(extension.add) for extension in ARGUMENT_EXTENSIONS), ArgumentExtension(keep)]
    said = io.StringIO()
    with Replacements() as replaced, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        replaced.set(sys, "argv", ["convert", "--micro-batch-size", "1", *flags])
        try:
            args = validated_arguments(host, extensions)
        except (Exception, SystemExit) as error:
            reason = str(error) if isinstance(error, Exception) else said.getvalue().strip().splitlines()[-1]
            raise HuggingFaceError(f"Megatron refuses the model ({' '.join(reason.split())[:400]}).") from error
    return args, parsers[0]


def family_of_arguments(args: Namespace) -> Family:
    """Return the family that a checkpoint's arguments belong to.

    Raises:
        HuggingFaceError: a hybrid of other layers than Mamba-2.
    """
    pattern = getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)
    if pattern is None:
        return "llama"
    pattern = pattern.replace("|", "")
    if set(pattern) != {"M"}:
        raise HuggingFaceError(
            f"the checkpoint's layer pattern is {pattern!r}; transformers' Mamba-2 has layers of the kind M alone."
        )
    return "mamba2"


def _rope_fields(args: Namespace) -> dict[str, Any]:
    base = {"rope_theta": int(getattr(args, "rotary_base", 10000)), "rope_type": "default"}
    interpolation = getattr(args, "rotary_seq_len_interpolation_factor", None)
    if getattr(args, "use_rope_scaling", False):
        return base | {"rope_type": "llama3", "rope_factor": float(args.rope_scaling_factor)}
    if interpolation not in (None, 1):
        return base | {"rope_type": "linear", "rope_factor": int(interpolation)}
    return base


def model_of_arguments(args: Namespace, *, vocabulary: int, host: Any) -> HfModel:
    """Return the model of config.json that a checkpoint's stored arguments describe.

    Raises:
        HuggingFaceError: an argument that no model of the family has; the message names it.
    """
    family = family_of_arguments(args)
    fields: dict[str, Any] = {name: getattr(args, attribute, None) for name, attribute, _ in NUMBER_FIELDS[family]}
    fields |= {
        "vocab_size": vocabulary,
        "num_hidden_layers": args.num_layers,
        "tie_word_embeddings": not args.untie_embeddings_and_output_weights,
    }
    if family == "llama":
        if not args.group_query_attention:
            fields["num_key_value_heads"] = args.num_attention_heads
        fields |= _rope_fields(args) | {"attention_bias": bool(args.add_bias_linear)}
    else:
        fields["num_heads"] = args.mamba_num_heads or 2 * args.hidden_size // args.mamba_head_dim
        inner = fields["num_heads"] * args.mamba_head_dim
        if inner % args.hidden_size:
            raise HuggingFaceError(
                f"the mixer's width {inner} is no multiple of the hidden size "
                f"{args.hidden_size}: transformers' Mamba-2 has a whole expansion factor."
            )
    if getattr(args, "wide_residual", None) is not None:
        fields |= {
            name: value for name, attribute, _ in WIDE_FIELDS if (value := getattr(args, attribute, None)) is not None
        }
    model = HfModel(family, fields)
    _check_nothing_else(args, model, host)
    return model


def _check_nothing_else(args: Namespace, model: HfModel, host: Any) -> None:
    """Refuse arguments that describe another function than the one that config.json can tell."""
    from megatron.training.model_argument_names import model_argument_names

    rebuilt, parser = parse_flags(
        [*megatron_flags(model, sequence_length=args.seq_length), "--padded-vocab-size", "128"], host
    )
    ignored = _NOT_THE_FUNCTION | {attribute for _, attribute, _ in WIDE_FIELDS}
    if model.family == "mamba2":
        ignored |= _ATTENTION_ONLY
    differing = [
        f"{name} = {getattr(args, name)!r} ({getattr(rebuilt, name)!r} is wanted)"
        for name in sorted(model_argument_names(parser) - ignored)
        if hasattr(args, name) and getattr(args, name) != getattr(rebuilt, name)
    ]
    if differing:
        raise HuggingFaceError(
            f"transformers' {model.family} has no such model: the checkpoint's arguments say {'; '.join(differing)}."
        )


def config_json(model: HfModel, dtype: str) -> dict[str, Any]:
    """Return config.json of a model, without what says nothing about its function (token ids and the like)."""
    names = [name for name, *_ in NUMBER_FIELDS[model.family]]
    fields = model.fields
    config: dict[str, Any] = {
        "architectures": [{"llama": "LlamaForCausalLM", "mamba2": "Mamba2ForCausalLM"}[model.family]],
        "model_type": model.family,
        "dtype": dtype,
        **{name: fields[name] for name in (*names, "num_hidden_layers", "vocab_size", "tie_word_embeddings")},
    }
    if model.family == "llama":
        rope: dict[str, Any] = {"rope_theta": float(fields["rope_theta"]), "rope_type": fields["rope_type"]}
        if fields["rope_type"] != "default":
            rope["factor"] = float(fields["rope_factor"])
        if fields["rope_type"] == "llama3":
            rope |= LLAMA3_ROPE
        config |= {"rope_parameters": rope, "hidden_act": "silu"}
        config |= {"attention_bias": fields["attention_bias"], "mlp_bias": fields["attention_bias"]}
    else:
        config["expand"] = fields["num_heads"] * fields["head_dim"] // fields["hidden_size"]
    return config
