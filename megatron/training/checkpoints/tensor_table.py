"""The table of every tensor that a checkpoint's model can have: name, shape, sharding, optimizer companions.

    place = find_tensor("decoder.layers.3.mlp.linear_fc1.weight")       # TensorPlace: the row, with layer 3
    place.row.split, place.row.shape, place.decays                      # Sectioned(0, ("F", "F")), ("g*F", "D"), True
    sorted(names, key=registration_order)                               # the order of a model's state dict

Names here are those of the plain format of a model on one process without Transformer Engine, with global layer and
expert numbers. A row lists what other formats call it: `fused`, the plain name under Transformer Engine, where norms
are part of the linear layer behind them; `stored`, the torch_dist key. Rows stand in the order in which the modules
register their parameters, which is the order of the plain optimizer's states.

How to add a tensor: a Row in the table of its block, in its place. What always holds: a name without a row is a
ConversionError that says which known names are nearest.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.tensor_splits import Replicated, Sectioned, Sharded, Split

_ALL, _ROWS, _COLUMNS = Replicated(), Sharded(0), Sharded(1)
_GATED = Sectioned(0, sections=("F", "F"))
_IN_PROJ = Sectioned(0, sections=("I", "I", "G*S", "G*S", "H"), keys=("z", "x", "B", "C", "dt"))
_CONV = Sectioned(0, sections=("I", "G*S", "G*S"), keys=("x", "B", "C"))


@dataclass(frozen=True)
class Row:
    """A kind of tensor.

    Args:
        name: inside its block; {expert} stands for a number.
        shape: of the whole tensor, in model_sizes.
        split: over tensor-parallel ranks. `gated_split` is taken instead where the model's activation is gated.
        stored: the torch_dist key inside the block, when it is another.
        fused: the plain name under Transformer Engine, when it is another.
        decays: whether weight decay applies; None: when it has more than one dimension.
        linear: the module behind is a linear layer, which has an `_extra_state` beside its last tensor.
        buffer: no parameter; the optimizer has nothing for it.
        controller: "read", "write", "retention" or "exit" for the parameters of wide streams.
    """

    name: str
    shape: tuple[str, ...]
    split: Split = _ALL
    gated_split: Split | None = None
    stored: str | None = None
    fused: str | None = None
    decays: bool | None = None
    linear: bool = False
    buffer: bool = False
    controller: str | None = None

    @property
    def expert(self) -> bool:
        """Whether there is one for each expert, sharded over expert-parallel ranks."""
        return "{expert}" in self.name


def _linear(
    name: str, out: str, into: str, split: Split, gated: Split | None = None, stored: str | None = None
) -> list[Row]:
    """Weight and bias of a linear layer; a bias is whole where the input dimension is sharded."""
    bias_split = split if split.__class__ is not Sharded or getattr(split, "axis", 0) == 0 else _ALL
    weight, bias = (None if stored is None else f"{stored}.{kind}" for kind in ("weight", "bias"))
    return [
        Row(f"{name}.weight", (out, into), split, gated, stored=weight, linear=True),
        Row(f"{name}.bias", (out,), bias_split, gated, stored=bias, decays=False, linear=True),
    ]


def _norm(name: str, shape: str = "D", split: Split = _ALL, fused: str | None = None) -> list[Row]:
    """Weight and bias of a norm; `fused` is the linear layer that Transformer Engine makes it part of."""
    rows = []
    for kind in ("weight", "bias"):
        alias = None if fused is None else f"{fused}.layer_norm_{kind}"
        rows.append(Row(f"{name}.{kind}", (shape,), split, stored=alias, fused=alias, decays=False))
    return rows


def _controllers(suffix: str) -> list[Row]:
    return [
        Row(f"residual_read{suffix}.read_map.logit", ("p",), decays=False, controller="read"),
        Row(f"residual_write{suffix}.write_map.logit", ("p",), decays=False, controller="write"),
        Row(f"residual_write{suffix}.retention.retention_logit", ("p",), decays=True, controller="retention"),
    ]


_EXPERT, _EXPERT_STORED = "mlp.experts.local_experts.{expert}", "mlp.experts.experts"

LAYER_ROWS: tuple[Row, ...] = (
    # Mamba-2 layers
    Row("mixer.conv1d_weight", ("I+2*G*S", "1", "W"), _CONV, stored="mixer.conv1d.weight"),
    Row("mixer.conv1d_bias", ("I+2*G*S",), _CONV, stored="mixer.conv1d.bias", decays=False),
    Row("mixer.dt_bias", ("H",), _ROWS, decays=False),
    Row("mixer.A_log", ("H",), _ROWS, decays=False),
    Row("mixer.D", ("H",), _ROWS, decays=False),
    *_linear("mixer.in_proj", "2*I+2*G*S+H", "D", _IN_PROJ),
    Row("mixer.norm.weight", ("I",), _ROWS, decays=False),
    *_linear("mixer.out_proj", "D", "I", _COLUMNS),
    *_norm("norm", fused="mixer.in_proj"),
    # attention
    *_norm("input_layernorm", fused="self_attention.linear_qkv"),
    *_linear("self_attention.linear_proj", "D", "A", _COLUMNS),
    *_linear("self_attention.linear_qkv", "Q", "D", _ROWS),
    *_norm("self_attention.q_layernorm", "h"),
    *_norm("self_attention.k_layernorm", "h"),
    # MLP and MoE
    *_norm("pre_mlp_layernorm", fused="mlp.linear_fc1"),
    Row("mlp.router.weight", ("E", "D")),
    Row("mlp.router.bias", ("E",), decays=False),
    Row("mlp.router.expert_bias", ("E",), buffer=True),
    *_linear("mlp.linear_fc1", "g*F", "D", _ROWS, _GATED),
    *_linear("mlp.linear_fc2", "D", "F", _COLUMNS),
    *_linear(f"{_EXPERT}.linear_fc1", "g*f", "D", _ROWS, _GATED, stored=f"{_EXPERT_STORED}.linear_fc1"),
    *_linear(f"{_EXPERT}.linear_fc2", "D", "f", _COLUMNS, stored=f"{_EXPERT_STORED}.linear_fc2"),
    Row("mlp.shared_experts.gate_weight", ("1", "D")),
    *_linear("mlp.shared_experts.linear_fc1", "g*s", "D", _ROWS, _GATED),
    *_linear("mlp.shared_experts.linear_fc2", "D", "s", _COLUMNS),
    *_norm("shortcut_layernorm"),
    *_norm("shortcut_output_layernorm"),
    # wide streams
    *_controllers(""),
    *_controllers("_self_attn"),
    *_controllers("_mlp"),
    Row("residual_read_shortcut.read_map.logit", ("p",), decays=False, controller="read"),
)

ROOT_ROWS: tuple[Row, ...] = (
    Row("embedding.word_embeddings.weight", ("V", "D"), _ROWS),
    Row("embedding.position_embeddings.weight", ("P", "D")),
    Row("decoder.layers", ()),  # stands for the layers in the order
    *_norm("decoder.final_layernorm"),
    *_norm("decoder.final_norm"),
    Row("decoder.residual_stream_readout.exit_map.logit", ("p",), decays=False, controller="exit"),
    Row("mtp.layers", ()),
    *_linear("output_layer", "V", "D", _ROWS),
)

DEPTH_ROWS: tuple[Row, ...] = (  # of a multi-token prediction depth, around its layers
    *_norm("enorm"),
    *_norm("hnorm"),
    *_linear("eh_proj", "D", "2*D", _ROWS),
    Row("mtp_model_layer", ()),
    *_norm("final_layernorm"),
)

# Where rows stand: (pattern of the block in table names, the same in torch_dist keys, rows). {layer} and {depth} are
# numbers. In torch_dist the layers of a GPT are stacked: one tensor for all, without a number.
BLOCKS: tuple[tuple[str, str, tuple[Row, ...]], ...] = (
    ("", "", ROOT_ROWS),
    ("decoder.layers.{layer}.", "decoder.layers.{layer}.", LAYER_ROWS),
    ("mtp.layers.{depth}.", "mtp.layers.{depth}.", DEPTH_ROWS),
    ("mtp.layers.{depth}.mtp_model_layer.", "mtp.layers.{depth}.transformer_layer.", LAYER_ROWS),
    (
        "mtp.layers.{depth}.mtp_model_layer.layers.{layer}.",
        "mtp.layers.{depth}.mtp_model_layer.layers.{layer}.",
        LAYER_ROWS,
    ),
)

_NUMBER = {name: rf"(?P<{name}>\d+)" for name in ("layer", "depth", "expert")}


@dataclass(frozen=True)
class TensorPlace:
    """A tensor's row with the numbers of its place."""

    row: Row
    block: int
    layer: int | None = None
    depth: int | None = None
    expert: int | None = None

    @property
    def name(self) -> str:
        """The table's name, with its numbers."""
        numbers = {"layer": self.layer, "depth": self.depth, "expert": self.expert}
        return (BLOCKS[self.block][0] + self.row.name).format(**numbers)

    @property
    def prefix(self) -> str:
        """The table's name of the block, with a dot at its end: where the layer's other tensors are."""
        return BLOCKS[self.block][0].format(layer=self.layer, depth=self.depth)

    @property
    def in_decoder(self) -> bool:
        """Whether it belongs to a layer of the decoder, which pipeline stages divide."""
        return self.block == 1

    def split(self, gated: bool) -> Split:
        """Return how tensor-parallel ranks divide it."""
        return self.row.gated_split if gated and self.row.gated_split is not None else self.row.split

    def decays(self, dimensions: int) -> bool:
        """Return whether weight decay applies to it, given the number of its dimensions."""
        return dimensions > 1 if self.row.decays is None else self.row.decays

    def at(self, **numbers: Any) -> TensorPlace:
        """Return the same row elsewhere."""
        return replace(self, **numbers)


def pattern_of(template: str) -> str:
    """Return the regular expression of a name with {layer}, {depth} and {expert}."""
    return re.sub(r"\\\{(\w+)\\\}", lambda found: _NUMBER[found[1]], re.escape(template))


@cache
def _index() -> dict[str, tuple[int, Row]]:
    """Names with N for every number -> (block, row). Both plain spellings are there."""
    index = {}
    for block, (prefix, _, rows) in enumerate(BLOCKS):
        for row in rows:
            if not row.shape:
                continue
            index[re.sub(r"\{\w+\}", "N", prefix + row.name)] = (block, row)
            if row.fused is not None:
                index[re.sub(r"\{\w+\}", "N", prefix + row.fused)] = (block, row)
            if row.expert:  # Transformer Engine's grouped experts: mlp.experts.linear_fc1.weight0
                index[re.sub(r"\{\w+\}", "N", prefix) + grouped_name(row, "N")] = (block, row)
    return index


def grouped_name(row: Row, expert: int | str) -> str:
    """Return the plain name, inside its block, of an expert's tensor under Transformer Engine's grouped experts."""
    return row.name.replace(".local_experts.{expert}", "") + str(expert)


def find_tensor(name: str) -> TensorPlace:
    """Return the place of a plain name (either spelling).

    Raises:
        ConversionError: no row has this name.
    """
    grouped = re.fullmatch(r"(.*\.experts\.linear_fc\d\.(?:weight|bias))(\d+)", name)
    masked = re.sub(r"(?<=\.)\d+(?=\.)", "N", name) if grouped is None else ""
    if grouped is not None:
        masked = re.sub(r"(?<=\.)\d+(?=\.)", "N", grouped[1]) + "N"
    found = _index().get(masked)
    if found is None:
        raise unknown_name(name)
    block, row = found
    numbers = [int(text) for text in re.findall(r"(?<=\.)(\d+)(?=\.)", name)]
    if grouped is not None:
        numbers.append(int(grouped[2]))
    wanted = re.findall(r"\{(\w+)\}", BLOCKS[block][0] + row.name)
    return TensorPlace(row, block, **dict(zip(wanted, numbers, strict=True)))


def unknown_name(name: str, known: Iterable[str] | None = None) -> ConversionError:
    """Return the error for a name without a row, with the nearest known ones."""
    masked = re.sub(r"(?<=\.)\d+(?=\.)", "N", name)
    nearest = difflib.get_close_matches(masked, list(_index() if known is None else known), n=2, cutoff=0.5)
    numbers = iter(re.findall(r"(?<=\.)(\d+)(?=\.)", name))
    shown = [re.sub(r"\bN\b", lambda _: next(numbers, "N"), near) for near in nearest[:1]] + nearest[1:]
    hint = f"; nearest known: {', '.join(shown)}" if shown else ""
    return ConversionError(f"{name} is no tensor that this converter knows{hint}")


@cache
def _positions() -> dict[tuple[int, str], int]:
    positions = {}
    for block, (_, _, rows) in enumerate(BLOCKS):
        for position, row in enumerate(rows):
            positions[block, row.name] = position
    return positions


def registration_order(name: str) -> tuple[int, ...]:
    """Sort key: the order in which a model registers its tensors (experts one after another)."""
    place = find_tensor(name)
    position = _positions()[place.block, place.row.name]
    if place.row.expert:
        first = _positions()[place.block, f"{_EXPERT}.linear_fc1.weight"]
        inner: tuple[int, ...] = (first, place.expert or 0, position)
    else:
        inner = (position, 0, 0)
    if place.block == 0:
        return (position,)
    root = _positions()[0, "decoder.layers" if place.block == 1 else "mtp.layers"]
    if place.block == 1:
        return (root, place.layer or 0, *inner)
    if place.block == 2:
        return (root, place.depth or 0, *inner)
    return (root, place.depth or 0, _positions()[2, "mtp_model_layer"], place.layer or 0, *inner)
