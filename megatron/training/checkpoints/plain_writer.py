"""Writes a plain (--ckpt-format torch) checkpoint, a file for every rank of a layout, one whole tensor at a time.

    writer = PlainWriter(folder, entries, common, layout)
    for entry in entries: writer.write(entry, tensor)
    writer.finish()

The files are made at their full size from the declared entries; tensors are filled in as they come.

What always holds: finish() fails while a declared tensor is missing; names, their order and the optimizer's numbering
are those that a run on this layout writes.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoints.checkpoint_state import WEIGHT, Common, Entry, TensorInfo
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.model_sizes import model_sizes
from megatron.training.checkpoints.optimizer_chain import OptimizerPart, parts_of
from megatron.training.checkpoints.plain_ranks import (
    EMBEDDING,
    FILE,
    OUTPUT,
    Rank,
    check_plain_layout,
    even_stages,
    folder_name,
    local_name,
    optimizer_order,
    ranks_of,
    stage_of,
)
from megatron.training.checkpoints.rank_file import RankFile, placeholder
from megatron.training.checkpoints.stored_names import combined_controller_name
from megatron.training.checkpoints.stored_rows import StoredRows, axis_runs, copy_rows, positions
from megatron.training.checkpoints.tensor_splits import Replicated
from megatron.training.checkpoints.tensor_table import TensorPlace, find_tensor, registration_order

_ORDER = ("args", "checkpoint_version", "iteration")


class PlainWriter:
    """A plain checkpoint that is being written; arguments as ShardedWriter.

    Raises:
        ConversionError: a layout, optimizer or model that the plain format cannot hold.
    """

    format = "torch"

    def __init__(self, folder: Path, entries: Mapping[Entry, TensorInfo], common: Common, layout: Layout) -> None:
        check_plain_layout(layout)
        self.folder, self.entries, self.common, self.layout = folder, dict(entries), common, layout
        self.sizes = model_sizes(common.args)
        self._missing = set(self.entries)
        self._names = sorted({entry.name for entry in self.entries if entry.slot == WEIGHT}, key=registration_order)
        places = [find_tensor(name) for name in self._names]
        layers = 1 + max((place.layer or 0 for place in places if place.in_decoder), default=-1)
        self._stages = even_stages(layers, layout.pipeline)
        if layout.pipeline > 1 and any(name.startswith("mtp.") for name in self._names):
            raise ConversionError("multi-token prediction on several pipeline ranks is not served in the plain format")
        impl = getattr(common.args, "transformer_impl", "local")
        self._fused = impl == "transformer_engine"
        self._grouped = self._fused and bool(getattr(common.args, "moe_grouped_gemm", False))
        self._parts = self._optimizer_parts()
        self._tied = not getattr(common.args, "untie_embeddings_and_output_weights", False)
        # entry -> (file, the placeholder in it, tensor rank)
        self._targets: dict[Entry, list[tuple[RankFile, Tensor, int]]] = {entry: [] for entry in self.entries}
        self._files: list[RankFile] = []
        for rank in ranks_of(layout):
            self._create(rank)

    def _optimizer_parts(self) -> list[OptimizerPart]:
        slots = {entry.slot for entry in self.entries} - {WEIGHT}
        optimizer = self.common.state.get("optimizer")
        if optimizer is None or not slots:
            return []
        parts = parts_of(optimizer)
        if any(part.distributed for part in parts):
            raise ConversionError(
                "the plain format keeps a distributed optimizer's states in its own buckets, which are not written "
                "here: keep torch_dist, or convert with --weights-only"
            )
        if self._fused:
            raise ConversionError(
                "the order of Transformer Engine's optimizer states is not known here: keep torch_dist, or convert "
                "with --weights-only"
            )
        return parts

    def _first_expert(self, rank: Rank) -> int:
        return rank.expert * self.sizes.get("E", 0) // self.layout.expert

    def _is_on(self, place: TensorPlace, rank: Rank) -> bool:
        if stage_of(place, self._stages) != rank.pipeline:
            return False
        if place.expert is None:
            return True
        each = self.sizes["E"] // self.layout.expert
        return place.expert // each == rank.expert

    def _rank_names(self, rank: Rank) -> list[tuple[str, str]]:
        """Return what the rank holds, in its model's order: (the table's name, whose tensor it is)."""
        names = [(name, name) for name in self._names if self._is_on(find_tensor(name), rank)]
        last = rank.pipeline == self.layout.pipeline - 1
        if self._tied and self.layout.pipeline > 1 and last:
            names.append((OUTPUT, EMBEDDING))  # the last stage has a copy of tied embeddings
        return names

    def _shard(self, entry: Entry) -> Tensor:
        info = self.entries[entry]
        split = find_tensor(entry.name).split(self.sizes["g"] == 2)
        return placeholder(split.shard_shape(info.shape, self.layout.tensor), info.dtype)

    def _create(self, rank: Rank) -> None:
        own: list[tuple[Entry, Tensor]] = []
        names = self._rank_names(rank)
        model: OrderedDict[str, Any] = OrderedDict()
        first_layer = self._stages[rank.pipeline].start
        for number, (name, source) in enumerate(names):
            place = find_tensor(name)
            local = local_name(place, first_layer, self._first_expert(rank), fused=self._fused, grouped=self._grouped)
            if self.common.combined_names and place.row.controller:
                local = combined_controller_name(local)
            shard = self._shard(Entry(source))
            own.append((Entry(source), shard))
            model[local] = shard
            module = name.rpartition(".")[0]
            following = names[number + 1][0] if number + 1 < len(names) else ""
            if place.row.linear and following.rpartition(".")[0] != module and name != OUTPUT:
                model[local.rpartition(".")[0] + "._extra_state"] = None
        if rank.pipeline == self.layout.pipeline - 1:
            model["output_layer._extra_state"] = None
        state = {key: self.common.state[key] for key in _ORDER if key in self.common.state}
        state["model"] = model
        if self._parts:
            chain = [self._optimizer(part, order, names, own) for part, order in self._orders(names)]
            state["optimizer"] = chain[0] if len(chain) == 1 else chain
        left_out = {"optimizer", "rerun_state_machine", "content_metadata", *state}
        state.update({key: value for key, value in self.common.state.items() if key not in left_out})
        if (rank.pipeline, rank.tensor) in self.common.rng:
            state["rng_state"] = self.common.rng[rank.pipeline, rank.tensor]
        file = RankFile.create(self.folder / folder_name(rank, self.layout) / FILE, state)
        self._files.append(file)
        for entry, shard in own:
            self._targets[entry].append((file, shard, rank.tensor))

    def _orders(self, names: list[tuple[str, str]]) -> list[tuple[OptimizerPart, list[list[str]]]]:
        sources = dict(names)
        order = optimizer_order(
            [name for name, _ in names], lambda name: len(self.entries[Entry(sources[name])].shape), self._parts
        )
        return list(zip(self._parts, order, strict=True))

    def _optimizer(
        self,
        part: OptimizerPart,
        groups: list[list[str]],
        names: list[tuple[str, str]],
        own: list[tuple[Entry, Tensor]],
    ) -> dict[str, Any]:
        """Return the state dict of one optimizer of a rank, with placeholders."""
        sources = dict(names)
        slots = sorted({entry.slot for entry in self.entries} - {WEIGHT})
        masters: list[list[Tensor]] = []
        states: dict[int, dict[str, Any]] = {}
        described = []
        for group, members in zip(part.groups, groups, strict=True):
            described.append({**copy.deepcopy(group), "params": list(range(len(states), len(states) + len(members)))})
            masters.append([])
            for name in members:
                held: dict[str, Any] = {} if part.step is None else {"step": torch.as_tensor(part.step).clone()}
                for slot in slots:
                    entry = Entry(sources[name], slot)
                    if entry not in self.entries:
                        raise ConversionError(f"there is no {entry}: convert with --weights-only")
                    shard = self._shard(entry)
                    own.append((entry, shard))
                    if slot == "fp32_param":
                        masters[-1].append(shard)
                    else:
                        held[slot] = shard
                states[len(states)] = held
        inner = {"state": states, "param_groups": described}
        if not part.has_master_weights:
            return inner
        rest = {key: value for key, value in part.state.items() if key != "optimizer"}
        return {"optimizer": inner, "fp32_from_fp16_params": masters, **rest}

    def write(self, entry: Entry, whole: Tensor) -> None:
        """Write a whole tensor to every rank that holds a part of it."""
        info = self.entries[entry]
        if (tuple(whole.shape), whole.dtype) != info:
            raise ConversionError(f"{entry} is {TensorInfo(tuple(whole.shape), whole.dtype)}, {info} was declared")
        split = find_tensor(entry.name).split(self.sizes["g"] == 2)
        shard: Tensor | None = None
        done = -1
        for file, target, rank in sorted(self._targets[entry], key=lambda target: target[2]):
            if rank != done or shard is None:
                shard, done = split.shard(whole, self.layout.tensor, rank, self.sizes), rank
            file.write(target, shard)
        self._missing.discard(entry)

    def write_rows(self, entry: Entry, rows: StoredRows) -> bool:
        """Copy a whole tensor from the files that hold it; False: it has to be written."""
        info = self.entries[entry]
        split = find_tensor(entry.name).split(self.sizes["g"] == 2)
        source = rows.along(rows.axis if isinstance(split, Replicated) else split.axis)
        if source is None or rows.info != info:
            return False
        along = positions(info.shape, source.axis)
        target = []
        for file, own, rank in self._targets[entry]:
            pieces = split.pieces(along, self.layout.tensor, rank, self.sizes)
            target.append(file.place_of(own, axis_runs(pieces)))
        copy_rows(source, target)
        self._missing.discard(entry)
        return True

    def start_writing(self) -> None:
        """Let the kernel begin to put on the disk what has been written so far."""
        for file in self._files:
            file.start_writing()

    def finish(self) -> None:
        """Make sure that everything is on the disk.

        Raises:
            ConversionError: a declared tensor has not been written.
        """
        if self._missing:
            raise ConversionError(
                f"{len(self._missing)} tensors have not been written, {min(self._missing)} among them"
            )
        for file in self._files:
            file.close(sync=True)

    def abandon(self) -> None:
        """Close what is open; the folder is the caller's to remove."""
        for file in self._files:
            file.close()
