"""Which tensor of Megatron's stands for which tensors of `transformers`: one table a model family, read both ways.

    table = tensor_table("llama", sizes)                 # list of TensorPair, in the order of the model
    fused = table[2].to_megatron([q, k, v])              # one Megatron tensor
    q, k, v = table[2].to_hf(fused)                      # and back, bit-equal

`RULES` is the table as people read it: `{i}` is a layer's number, sizes are names (`SIZES` says what they mean). What a
rule does beside renaming is its `Layout`. Megatron's names are those of its model's state dict without Transformer
Engine; a controller's tail of zeros (wide_residual.py) is trimmed on the way out and put back on the way in.

What always holds: every tensor of either side belongs to exactly one pair; a name that the table lacks is unknown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from megatron.training.huggingface.tensor_layouts import (
    fuse_gate_up,
    fuse_qkv,
    pad_rows,
    split_gate_up,
    split_qkv,
    strip_rows,
)

Family = Literal["llama", "mamba2"]
Sizes = Mapping[str, int]
Layout = Literal["same", "qkv", "gate_up", "vocabulary", "controller"]

CONTROLLER_ELEMENTS = 128
"""Elements of a stored controller vector, whose first num_streams are in use."""

SIZES = {
    "width": "hidden_size",
    "vocabulary": "vocab_size; Megatron's table has padded_vocabulary rows",
    "queries": "num_attention_heads * head_dim",
    "keys": "num_key_value_heads * head_dim",
    "feed_forward": "intermediate_size",
    "inner": "num_heads * head_dim of a Mamba-2 mixer",
    "convolved": "inner + 2 * n_groups * state_size: x, B, C",
    "projected": "inner + convolved + num_heads: z, x, B, C, dt",
    "heads": "num_heads of a Mamba-2 mixer",
    "kernel": "conv_kernel",
    "one": "1",
    "streams": "num_streams",
}


@dataclass(frozen=True)
class Rule:
    """One row: Megatron's name, the names in a Hugging Face folder with their shapes, and how they lie in each other.

    `when` names a switch that has to be on ("wide", "retention", "bias", "untied"); empty means always.
    """

    megatron: str
    hf: tuple[str, ...]
    shapes: tuple[tuple[str, ...], ...]
    layout: Layout = "same"
    when: str = ""


def _row(megatron: str, hf: str, shape: str, layout: Layout = "same", when: str = "") -> Rule:
    """Read a row: names separated by spaces, shapes "rows columns" separated by commas."""
    shapes = tuple(tuple(part.split()) for part in shape.split(","))
    return Rule(megatron, tuple(hf.split()), shapes, layout, when)


def _controllers(hf_layers: str, hf_stack: str, branches: Sequence[str]) -> tuple[Rule, ...]:
    rows = []
    for branch in branches:
        for part, when in (
            (f"residual_read{branch}.read_map.logit", "wide"),
            (f"residual_write{branch}.write_map.logit", "wide"),
            (f"residual_write{branch}.retention.retention_logit", "retention"),
        ):
            rows.append(_row("decoder.layers.{i}." + part, f"{hf_layers}.{{i}}.{part}", "streams", "controller", when))
    readout = "residual_stream_readout.exit_map.logit"
    rows.append(_row(f"decoder.{readout}", f"{hf_stack}.{readout}", "streams", "controller", "wide"))
    return tuple(rows)


_LLAMA_LAYER = "decoder.layers.{i}"
_HF_LLAMA_LAYER = "model.layers.{i}"
_ATTENTION = f"{_LLAMA_LAYER}.self_attention"
_HF_ATTENTION = f"{_HF_LLAMA_LAYER}.self_attn"
_HF_QKV = " ".join(f"{_HF_ATTENTION}.{part}_proj.{{kind}}" for part in "qkv")
_HF_GATE_UP = " ".join(f"{_HF_LLAMA_LAYER}.mlp.{part}_proj.{{kind}}" for part in ("gate", "up"))
_MIXER = "decoder.layers.{i}.mixer"
_HF_MIXER = "backbone.layers.{i}.mixer"


def _kind(names: str, kind: str) -> str:
    return names.replace("{kind}", kind)


RULES: dict[Family, tuple[Rule, ...]] = {
    "llama": (
        _row("embedding.word_embeddings.weight", "model.embed_tokens.weight", "vocabulary width", "vocabulary"),
        _row(f"{_LLAMA_LAYER}.input_layernorm.weight", f"{_HF_LLAMA_LAYER}.input_layernorm.weight", "width"),
        _row(
            f"{_ATTENTION}.linear_qkv.weight",
            _kind(_HF_QKV, "weight"),
            "queries width, keys width, keys width",
            "qkv",
        ),
        _row(f"{_ATTENTION}.linear_qkv.bias", _kind(_HF_QKV, "bias"), "queries, keys, keys", "qkv", "bias"),
        _row(f"{_ATTENTION}.linear_proj.weight", f"{_HF_ATTENTION}.o_proj.weight", "width queries"),
        _row(f"{_ATTENTION}.linear_proj.bias", f"{_HF_ATTENTION}.o_proj.bias", "width", when="bias"),
        _row(f"{_LLAMA_LAYER}.pre_mlp_layernorm.weight", f"{_HF_LLAMA_LAYER}.post_attention_layernorm.weight", "width"),
        _row(
            f"{_LLAMA_LAYER}.mlp.linear_fc1.weight",
            _kind(_HF_GATE_UP, "weight"),
            "feed_forward width, feed_forward width",
            "gate_up",
        ),
        _row(
            f"{_LLAMA_LAYER}.mlp.linear_fc1.bias",
            _kind(_HF_GATE_UP, "bias"),
            "feed_forward, feed_forward",
            "gate_up",
            "bias",
        ),
        _row(f"{_LLAMA_LAYER}.mlp.linear_fc2.weight", f"{_HF_LLAMA_LAYER}.mlp.down_proj.weight", "width feed_forward"),
        _row(f"{_LLAMA_LAYER}.mlp.linear_fc2.bias", f"{_HF_LLAMA_LAYER}.mlp.down_proj.bias", "width", when="bias"),
        *_controllers("model.layers", "model", ("_self_attn", "_mlp")),
        _row("decoder.final_layernorm.weight", "model.norm.weight", "width"),
        _row("output_layer.weight", "lm_head.weight", "vocabulary width", "vocabulary", "untied"),
    ),
    "mamba2": (
        _row("embedding.word_embeddings.weight", "backbone.embeddings.weight", "vocabulary width", "vocabulary"),
        _row("decoder.layers.{i}.norm.weight", "backbone.layers.{i}.norm.weight", "width"),
        _row(f"{_MIXER}.in_proj.weight", f"{_HF_MIXER}.in_proj.weight", "projected width"),
        _row(f"{_MIXER}.conv1d_weight", f"{_HF_MIXER}.conv1d.weight", "convolved one kernel"),
        _row(f"{_MIXER}.conv1d_bias", f"{_HF_MIXER}.conv1d.bias", "convolved"),
        _row(f"{_MIXER}.dt_bias", f"{_HF_MIXER}.dt_bias", "heads"),
        _row(f"{_MIXER}.A_log", f"{_HF_MIXER}.A_log", "heads"),
        _row(f"{_MIXER}.D", f"{_HF_MIXER}.D", "heads"),
        _row(f"{_MIXER}.norm.weight", f"{_HF_MIXER}.norm.weight", "inner"),
        _row(f"{_MIXER}.out_proj.weight", f"{_HF_MIXER}.out_proj.weight", "width inner"),
        *_controllers("backbone.layers", "backbone", ("",)),
        _row("decoder.final_norm.weight", "backbone.norm_f.weight", "width"),
        _row("output_layer.weight", "lm_head.weight", "vocabulary width", "vocabulary", "untied"),
    ),
}

DERIVED = {"llama": (".rotary_emb.inv_freq",), "mamba2": ()}
"""Endings of names that old folders hold and that say nothing: transformers computes these tensors from config.json."""

ALIASES = {"backbone.embedding.weight": "backbone.embeddings.weight"}
"""Names of older folders -> today's, as transformers renames them itself."""


@dataclass(frozen=True)
class TensorPair:
    """One Megatron tensor and the tensors of a Hugging Face folder that hold the same numbers."""

    megatron: str
    hf: tuple[str, ...]
    hf_shapes: tuple[tuple[int, ...], ...]
    layout: Layout
    sizes: Sizes

    @property
    def is_controller(self) -> bool:
        """Whether this is a controller of wide streams: fp32 in every model."""
        return self.layout == "controller"

    @property
    def megatron_shape(self) -> tuple[int, ...]:
        """Shape of Megatron's tensor, padding included."""
        rows = sum(shape[0] for shape in self.hf_shapes)
        if self.layout == "vocabulary":
            rows = self.sizes["padded_vocabulary"]
        elif self.layout == "controller":
            rows = max(rows, CONTROLLER_ELEMENTS)
        return (rows, *self.hf_shapes[0][1:])

    def to_megatron(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return Megatron's tensor of those of the folder, given in the order of `hf`."""
        return _TO_MEGATRON[self.layout](tensors, self)

    def to_hf(self, tensor: Tensor) -> tuple[Tensor, ...]:
        """Return the folder's tensors of Megatron's, in the order of `hf`."""
        return _TO_HF[self.layout](tensor, self)


def _fuse_qkv(tensors: Sequence[Tensor], pair: TensorPair) -> Tensor:
    q, k, v = tensors
    return fuse_qkv(q, k, v, groups=pair.sizes["groups"])


def _split_qkv(tensor: Tensor, pair: TensorPair) -> tuple[Tensor, ...]:
    return split_qkv(tensor, groups=pair.sizes["groups"], head_channels=pair.sizes["head_channels"])


def _pad(tensors: Sequence[Tensor], pair: TensorPair) -> Tensor:
    return pad_rows(tensors[0], pair.megatron_shape[0])


def _strip(tensor: Tensor, pair: TensorPair) -> tuple[Tensor, ...]:
    return (strip_rows(tensor, pair.hf_shapes[0][0]),)


_TO_MEGATRON: dict[Layout, Callable[[Sequence[Tensor], TensorPair], Tensor]] = {
    "same": lambda tensors, pair: tensors[0],
    "qkv": _fuse_qkv,
    "gate_up": lambda tensors, pair: fuse_gate_up(*tensors),
    "vocabulary": _pad,
    "controller": _pad,
}
_TO_HF: dict[Layout, Callable[[Tensor, TensorPair], tuple[Tensor, ...]]] = {
    "same": lambda tensor, pair: (tensor,),
    "qkv": _split_qkv,
    "gate_up": lambda tensor, pair: split_gate_up(tensor),
    "vocabulary": _strip,
    "controller": _strip,
}


def _rows_of_model(rules: Sequence[Rule], layers: int) -> Iterator[tuple[Rule, int | None]]:
    """Yield the rules in the order of the model: what comes before the layers, every layer, the rest."""
    per_layer = [rule for rule in rules if "{i}" in rule.megatron]
    first = rules.index(per_layer[0])
    yield from ((rule, None) for rule in rules[:first])
    for layer in range(layers):
        yield from ((rule, layer) for rule in per_layer)
    yield from ((rule, None) for rule in rules[first:] if "{i}" not in rule.megatron)


def tensor_table(family: Family, sizes: Sizes, switches: frozenset[str] = frozenset()) -> list[TensorPair]:
    """Return all pairs of a model, in its order.

    Args:
        family: row of RULES.
        sizes: "layers", the sizes that the shapes name, "padded_vocabulary", and of a Llama "groups", "head_channels".
        switches: of "wide", "retention", "bias", "untied" those that are on.
    """
    pairs = []
    for rule, layer in _rows_of_model(RULES[family], sizes["layers"]):
        if rule.when and rule.when not in switches:
            continue
        number = "" if layer is None else str(layer)
        names = [name.replace("{i}", number) for name in (rule.megatron, *rule.hf)]
        shapes = tuple(tuple(sizes[size] for size in shape) for shape in rule.shapes)
        pairs.append(TensorPair(names[0], tuple(names[1:]), shapes, rule.layout, sizes))
    return pairs
