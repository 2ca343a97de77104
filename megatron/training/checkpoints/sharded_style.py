"""How a torch_dist checkpoint of a model spells its keys: stacked layers, fused norms, older controller names.

    style = ShardedStyle.of_reader(reader)          # as a checkpoint does
    style = ShardedStyle.of_model(common, names)    # as a run with these arguments would

What always holds: a GPT whose layers all have the same tensors is stacked, a hybrid is not; a norm has the name of the
linear layer behind it where Transformer Engine fuses the two or the local layers store it so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from megatron.training.checkpoints.checkpoint_state import Common
from megatron.training.checkpoints.stored_names import combined_controller_name, stored_key
from megatron.training.checkpoints.tensor_table import TensorPlace, find_tensor

if TYPE_CHECKING:
    from megatron.training.checkpoints.sharded_reader import ShardedReader


def hybrid_pattern(common: Common) -> str | None:
    """Return the layer pattern of a hybrid model, None for a GPT."""
    args = common.args
    return getattr(args, "hybrid_layer_pattern", None) or getattr(args, "hybrid_override_pattern", None)


@dataclass(frozen=True)
class ShardedStyle:
    """Spelling of keys.

    Args:
        stacked: decoder layers are one tensor.
        fused_router_norms: the norm before an MoE layer has the fused name too.
        combined: controllers have their older names.
    """

    stacked: bool
    fused_router_norms: bool
    combined: bool = False

    @classmethod
    def of_reader(cls, reader: ShardedReader) -> ShardedStyle:
        """Return how an existing checkpoint spells them."""
        keys = list(reader.keys.values())
        routed = {key.place.prefix for key in keys if key.place.row.name == "mlp.router.weight"}
        norms = [key for key in keys if key.place.row.name == "pre_mlp_layernorm.weight" and key.place.prefix in routed]
        return cls(
            any(key.stacked for key in keys),
            any(key.fused for key in norms) if norms else hybrid_pattern(reader.common) is None,
            any(key.combined for key in keys),
        )

    @classmethod
    def of_model(cls, common: Common, names: Iterable[str]) -> ShardedStyle:
        """Return how a run with these arguments spells them."""
        layers: dict[int, set[str]] = {}
        for name in names:
            place = find_tensor(name)
            if place.in_decoder:
                layers.setdefault(place.layer or 0, set()).add(place.at(layer=0).name)
        same = all(layer == layers[0] for layer in layers.values()) if 0 in layers else False
        frequency = getattr(common.args, "moe_layer_freq", 1)
        hybrid = hybrid_pattern(common) is not None
        even = same and frequency in (None, 1)
        local = getattr(common.args, "transformer_impl", "local") == "local"
        return cls(even and not hybrid, local and not hybrid)

    def fused(self, place: TensorPlace, routed: bool) -> bool:
        """Return whether a norm has the fused name; `routed`: its layer has a router."""
        return self.fused_router_norms or not (routed and place.row.name.startswith("pre_mlp_layernorm."))

    def key(self, place: TensorPlace, slot: str, *, routed: bool, section: int | None = None) -> str:
        """Return the torch_dist key of a tensor."""
        key = stored_key(place, slot, stacked=self.stacked, fused=self.fused(place, routed), section=section)
        return combined_controller_name(key) if self.combined and place.row.controller else key
