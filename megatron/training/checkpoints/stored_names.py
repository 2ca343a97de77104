"""The keys of torch_dist checkpoints and the table's names: which part of which stored tensor is which whole tensor.

    parse_key("optimizer.state.exp_avg.decoder.layers.mlp.linear_fc1.weight")
        # StoredKey: slot exp_avg, the row of fc1, stacked over layers
    stored_key(place, slot, stacked=True)              # the way back

A GPT's layers are stacked there (a leading layer axis, no number in the key), a hybrid's and the prediction depths' are
not; experts have an axis before the tensor's own; a Mamba projection is stored as one tensor a section.

What always holds: a key that fits no row is a ConversionError, but for those of `is_object_key`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

from megatron.training.checkpoints.checkpoint_state import WEIGHT
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.tensor_splits import Sectioned
from megatron.training.checkpoints.tensor_table import BLOCKS, Row, TensorPlace, unknown_name

_OPTIMIZER = re.compile(
    r"(?:chained_\d+\.)?optimizer\.state\.(?P<slot>exp_avg_sq|exp_avg|fp32_param|param|momentum_buffer)\."
)
_BUCKETS = re.compile(r"(?:chained_\d+\.)?optimizer\.distributed\.")
_SHARD = re.compile(r"/shard_[\d.]+_[\d.]+$")
_NUMBER = re.compile(r"(?<=\.)(\d+)(?=\.)")

COMBINED = {  # older names of the wide residual controllers: (combined, split read, split write)
    "residual_connection_self_attn.": ("residual_read_self_attn.", "residual_write_self_attn."),
    "residual_connection_mlp.": ("residual_read_mlp.", "residual_write_mlp."),
    "residual_connection.": ("residual_read.", "residual_write."),
}
_COMBINED_NAME = re.compile(r"(?P<owner>residual_connection(?:_self_attn|_mlp)?\.)(?=(read_map|write_map|retention)\.)")
_SPLIT_NAME = re.compile(
    r"residual_(?P<side>read|write)(?P<owner>_self_attn|_mlp)?\.(?=(?:read_map|write_map|retention)\.)"
)


def split_controller_name(name: str) -> str:
    """Return the current name of a controller that may have its older, combined one."""

    def renamed(found: re.Match[str]) -> str:
        return COMBINED[found["owner"]][0 if found[2] == "read_map" else 1]

    return _COMBINED_NAME.sub(renamed, name)


def combined_controller_name(name: str) -> str:
    """Return the older, combined name of a controller; other names as they are."""
    return _SPLIT_NAME.sub(lambda found: f"residual_connection{found['owner'] or ''}.", name)


@dataclass(frozen=True)
class StoredKey:
    """What a stored tensor holds.

    Args:
        place: the row; its layer (stacked) and expert are those of the first part.
        slot: "" or the optimizer state.
        stacked: the first axis is the layer.
        section: the number of a Sectioned split's section that this is, else None.
        combined: the key has a controller's older name.
        fused: the key has the name of a norm that is part of a linear layer.
    """

    place: TensorPlace
    slot: str
    stacked: bool
    section: int | None = None
    combined: bool = False
    fused: bool = False

    @property
    def leading_axes(self) -> int:
        """The number of axes before the tensor's own."""
        return len(self.leading_names)

    @property
    def leading_names(self) -> list[str]:
        """What those axes count: "layer", "expert"."""
        return [name for name, there in (("layer", self.stacked), ("expert", self.place.row.expert)) if there]


@cache
def _index() -> dict[str, tuple[int, Row, int | None, bool, bool]]:
    """Masked key -> (block, row, section, stacked, fused)."""
    index: dict[str, tuple[int, Row, int | None, bool, bool]] = {}
    for block, (_, prefix, rows) in enumerate(BLOCKS):
        for row in rows:
            if not row.shape:
                continue
            for name, fused in (
                (row.stored or row.name, row.stored is not None and row.fused == row.stored),
                (row.name, False),
            ):
                if "{expert}" in name:
                    continue
                keys = row.split.keys if isinstance(row.split, Sectioned) else ()
                for stacked in (False, True) if block == 1 else (False,):
                    start = re.sub(r"\{\w+\}", "N", prefix)
                    start = start.replace("layers.N.", "layers.") if stacked else start
                    if keys:
                        for number, key in enumerate(keys):
                            index.setdefault(f"{start}{name}.{key}", (block, row, number, stacked, fused))
                    else:
                        index.setdefault(start + name, (block, row, None, stacked, fused))
    return index


def is_object_key(key: str) -> bool:
    """Whether the key belongs to an object (no tensor) that is not part of a layer: common state, RNG, rerun state."""
    return key.startswith(("common_state/", "rng_state/", "rerun_state_machine_state/"))


def is_bucket_key(key: str) -> bool:
    """Whether it is optimizer state in the distributed optimizer's own buckets, which no tensor can be told from."""
    return _BUCKETS.match(key) is not None


def is_extra_state_key(key: str) -> bool:
    """Whether it is the `_extra_state` of a linear layer."""
    return _SHARD.sub("", key).endswith("._extra_state")


def parse_key(key: str) -> StoredKey:
    """Return what a stored tensor holds.

    Raises:
        ConversionError: no row has this key.
    """
    found = _OPTIMIZER.match(key)
    name = key[found.end() :] if found else key
    split = split_controller_name(name)
    row = _index().get(_NUMBER.sub("N", split))
    if row is None:
        raise unknown_name(key if found is None else name, _index())
    block, kind, section, stacked, fused = row
    numbers = [int(number) for number in _NUMBER.findall(split)]
    wanted = [symbol for symbol in re.findall(r"\{(\w+)\}", BLOCKS[block][1]) if not (stacked and symbol == "layer")]
    if len(numbers) != len(wanted):
        raise unknown_name(key, _index())
    place = TensorPlace(kind, block, **dict(zip(wanted, numbers, strict=True)))
    return StoredKey(place, found["slot"] if found else WEIGHT, stacked, section, split != name, fused)


def stored_key(place: TensorPlace, slot: str, *, stacked: bool, fused: bool = True, section: int | None = None) -> str:
    """Return the torch_dist key of a tensor (of one section of it, for a Sectioned split that is stored in parts)."""
    row = place.row
    is_norm = (
        row.stored is not None and row.stored == row.fused and row.stored.rpartition(".")[2].startswith("layer_norm")
    )
    name = row.name if is_norm and not fused else (row.stored or row.name)
    prefix = BLOCKS[place.block][1]
    if stacked and place.in_decoder:
        prefix = prefix.replace("layers.{layer}.", "layers.")
    key = prefix.format(layer=place.layer, depth=place.depth) + name
    if section is not None:
        if not isinstance(row.split, Sectioned):
            raise ConversionError(f"{key} is stored as one tensor")
        key += "." + row.split.keys[section]
    return key if slot == WEIGHT else f"optimizer.state.{slot}.{key}"
