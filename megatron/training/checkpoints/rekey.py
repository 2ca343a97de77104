"""Controllers' names: the older combined ones and today's.

    plan_rekey(reader, "combined")      # residual_read_mlp.read_map.logit -> residual_connection_mlp.read_map.logit
    plan_rekey(reader, "split")

What always holds: values are not touched: there and back is bit-equal.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from megatron.training.checkpoints.conversion import Plan, copy_step, ordered, weights_only
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import Reader
from megatron.training.checkpoints.widen import stored_streams, style_of

Names = Literal["combined", "split"]


def plan_rekey(reader: Reader, names: Names, *, keep_optimizer: bool = True) -> Plan:
    """Return the plan that renames controllers.

    Raises:
        ConversionError: an ordinary checkpoint, or one that has these names already.
    """
    if stored_streams(reader.common, reader.folder) is None:
        raise ConversionError(f"{reader.folder} has an ordinary residual stream and no controllers to rename")
    if reader.combined == (names == "combined"):
        raise ConversionError(f"{reader.folder} has {names} names already")
    common = reader.common.copied()
    common.combined_names = names == "combined"
    style = style_of(reader)
    plan = Plan(
        f"rekey: {reader.folder} to {names} names",
        ordered([copy_step(entry, info) for entry, info in reader.entries.items()]),
        common,
        Layout.of(common.args),
        reader.format,
        None if style is None else replace(style, combined=names == "combined"),
        keeps_buckets=True,
    )
    if not keep_optimizer:
        weights_only(reader, plan)
    return plan
