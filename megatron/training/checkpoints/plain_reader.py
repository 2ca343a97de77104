"""Reads a plain (--ckpt-format torch) checkpoint of all its ranks one whole tensor at a time.

    with PlainReader(folder) as reader: tensor = reader.read(Entry("decoder.layers.0.mlp.linear_fc1.weight"))

What always holds: every file of the layout is there; a name that the table does not know is a ConversionError; a tensor
that several ranks hold is the same on all of them, or a ConversionError when it is read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron.training.checkpoints.checkpoint_state import WEIGHT, Common, Entry, TensorInfo
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.model_sizes import model_sizes
from megatron.training.checkpoints.optimizer_chain import OptimizerPart, joined, parts_of
from megatron.training.checkpoints.plain_ranks import (
    EMBEDDING,
    FILE,
    OUTPUT,
    Rank,
    check_plain_layout,
    folder_name,
    optimizer_order,
    ranks_of,
)
from megatron.training.checkpoints.rank_file import RankFile
from megatron.training.checkpoints.stored_names import split_controller_name
from megatron.training.checkpoints.tensor_splits import Replicated, fill
from megatron.training.checkpoints.tensor_table import find_tensor

_MODEL = re.compile(r"model(\d*)")
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.")


class PlainReader:
    """An open plain checkpoint.

    Args:
        folder: of one step.

    Raises:
        ConversionError: a missing or damaged file, a name that the table does not know, optimizer states that cannot
            be told apart.
    """

    format = "torch"
    bucket_keys: tuple[str, ...] = ()

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        first = RankFile.open(self._first_file())
        if first.state.get("args") is None:
            raise ConversionError(f"{folder} stores no training arguments, so its model is unknown")
        args = first.state["args"]
        self.layout = Layout.of(args)
        check_plain_layout(self.layout)
        self.sizes = model_sizes(args)
        self._check_files()
        self.files = {
            rank: RankFile.open(folder / folder_name(rank, self.layout) / FILE) for rank in ranks_of(self.layout)
        }
        first.close()
        self.combined = False
        self._first_layers = self._count_layers()
        # entry -> tensor rank -> where it is; the first place is read, the others must hold the same
        self._places: dict[Entry, dict[int, list[tuple[Rank, Tensor]]]] = {}
        for rank, file in self.files.items():
            self._add_rank(rank, file)
        self.entries = {entry: self._info(entry) for entry in self._places}
        self.common = self._read_common()
        if self._has_buckets():
            self.bucket_keys = ("distrib_optim.pt",)

    def __enter__(self) -> PlainReader:
        return self

    def __exit__(self, *error: object) -> None:
        for file in self.files.values():
            file.close()

    def _first_file(self) -> Path:
        files = sorted(self.folder.glob(f"mp_rank_*/{FILE}"))
        if not files:
            raise ConversionError(f"{self.folder} has no mp_rank_00/{FILE}: the checkpoint is not complete")
        return files[0]

    def _check_files(self) -> None:
        wanted = {folder_name(rank, self.layout) for rank in ranks_of(self.layout)}
        found = {path.parent.name for path in self.folder.glob(f"mp_rank_*/{FILE}")}
        if wanted != found:
            parts = [f"{', '.join(sorted(wanted - found))} missing"] if wanted - found else []
            parts += [f"{', '.join(sorted(found - wanted))} not of this layout"] if found - wanted else []
            raise ConversionError(f"{self.folder} was saved with {self.layout}: {'; '.join(parts)}")

    def _has_buckets(self) -> bool:
        return any(self.folder.glob("mp_rank_*/distrib_optim.pt"))

    def _chunks(self, file: RankFile) -> list[dict[str, Any]]:
        """Return the model chunks of a rank, in the order of its virtual stages."""
        numbered = {int(found[1] or 0): key for key in file.state if (found := _MODEL.fullmatch(str(key)))}
        if not numbered:
            raise ConversionError(f"{file.path} has no model (it has {', '.join(map(str, file.state))})")
        return [file.state[numbered[number]] for number in sorted(numbered)]

    def _count_layers(self) -> dict[tuple[int, int], int]:
        """Return the number of the first layer of (pipeline rank, chunk): chunk by chunk, rank by rank."""
        counts = {}
        for rank, file in self.files.items():
            if rank.tensor == rank.expert == 0:
                for chunk, model in enumerate(self._chunks(file)):
                    counts[chunk, rank.pipeline] = len({found[1] for key in model if (found := _LAYER.match(key))})
        first, starts = 0, {}
        for chunk, pipeline in sorted(counts):
            starts[pipeline, chunk] = first
            first += counts[chunk, pipeline]
        return starts

    def _global_name(self, name: str, rank: Rank, chunk: int) -> str:
        split = split_controller_name(name)
        self.combined |= split != name
        place = find_tensor(split)
        numbers = {}
        if place.in_decoder:
            numbers["layer"] = (place.layer or 0) + self._first_layers[rank.pipeline, chunk]
        if place.expert is not None:
            numbers["expert"] = place.expert + rank.expert * self.sizes.get("E", 0) // self.layout.expert
        return place.at(**numbers).name

    def _add_rank(self, rank: Rank, file: RankFile) -> None:
        names: dict[str, Tensor] = {}
        for chunk, model in enumerate(self._chunks(file)):
            for key, value in model.items():
                if key.endswith("._extra_state"):
                    continue
                name = self._global_name(key, rank, chunk)
                if not isinstance(value, Tensor):
                    raise ConversionError(f"{file.path}: {key} is a {type(value).__name__}, a tensor is wanted")
                names[name] = value
                self._add(name, WEIGHT, rank, value)
        if file.state.get("optimizer") is not None and not self._has_buckets():
            self._add_optimizer(rank, file, names)

    def _add(self, name: str, slot: str, rank: Rank, stored: Tensor) -> None:
        if name == OUTPUT and self._tied():
            name = EMBEDDING  # the last stage's copy
        places = self._places.setdefault(Entry(name, slot), {})
        places.setdefault(rank.tensor, []).append((rank, stored))

    def _tied(self) -> bool:
        args = next(iter(self.files.values())).state["args"]
        return not getattr(args, "untie_embeddings_and_output_weights", False)

    def _add_optimizer(self, rank: Rank, file: RankFile, names: dict[str, Tensor]) -> None:
        parts = parts_of(file.state["optimizer"])
        order = optimizer_order(names, lambda name: names[name].dim(), parts)
        for part, groups in zip(parts, order, strict=True):
            if part.distributed:
                return
            masters = part.state.get("fp32_from_fp16_params")
            for number, (group, members) in enumerate(zip(part.groups, groups, strict=True)):
                if len(group["params"]) != len(members):
                    raise ConversionError(
                        f"{file.path}: group {number} of the optimizer has {len(group['params'])} states, the "
                        f"model has {len(members)} such parameters: convert with --weights-only"
                    )
                for at, (index, name) in enumerate(zip(group["params"], members, strict=True)):
                    states = dict(part.inner["state"].get(index, {}))
                    states.pop("step", None)
                    if masters is not None:
                        states["fp32_param"] = masters[number][at]
                    for slot, value in states.items():
                        if value.shape != names[name].shape:
                            raise ConversionError(
                                f"{file.path}: state {index} of the optimizer is {list(value.shape)}, {name} is "
                                f"{list(names[name].shape)}: convert with --weights-only"
                            )
                        self._add(name, slot, rank, value)

    def _info(self, entry: Entry) -> TensorInfo:
        place = find_tensor(entry.name)
        split = place.split(self.sizes["g"] == 2)
        shards = self._places[entry]
        if sorted(shards) != list(range(self.layout.tensor)):
            raise ConversionError(f"{entry} is not on all {self.layout.tensor} tensor-parallel ranks")
        stored = shards[0][0][1]
        for rank, other in (place for places in shards.values() for place in places):
            if other.dtype != stored.dtype:
                raise ConversionError(f"{entry} is {stored.dtype}, on {folder_name(rank, self.layout)} {other.dtype}")
        return TensorInfo(split.whole_shape(tuple(stored.shape), self.layout.tensor), stored.dtype)

    def _read_common(self) -> Common:
        first = next(iter(self.files.values()))
        state = {
            key: first.with_data(value)
            for key, value in first.state.items()
            if not _MODEL.fullmatch(str(key)) and key not in ("optimizer", "rng_state")
        }
        if first.state.get("optimizer") is not None and not self._has_buckets():
            state["optimizer"] = joined(
                [self._without_tensors(part, first) for part in parts_of(first.state["optimizer"])]
            )
        rng = {}
        for rank, file in self.files.items():
            if rank.expert == 0 and "rng_state" in file.state:
                rng[rank.pipeline, rank.tensor] = file.with_data(file.state["rng_state"])
        return Common(state, rng, self.combined)

    def _without_tensors(self, part: OptimizerPart, file: RankFile) -> OptimizerPart:
        """Return an optimizer in torch_dist's form."""
        steps = [states["step"] for states in part.inner["state"].values() if "step" in states]
        groups = [{key: value for key, value in group.items() if key != "params"} for group in part.groups]
        inner: dict[str, Any] = {"state": {}, "param_groups": groups}
        if steps:
            inner["state"]["common_step"] = file.with_data(steps[0])
        if "optimizer" not in part.state:
            return OptimizerPart(inner)
        rest = {k: file.with_data(v) for k, v in part.state.items() if k not in ("optimizer", "fp32_from_fp16_params")}
        return OptimizerPart({"optimizer": inner, **rest})

    def read(self, entry: Entry) -> Tensor:
        """Return a whole tensor: contiguous, on the CPU, in its stored dtype."""
        info = self.entries[entry]
        split = find_tensor(entry.name).split(self.sizes["g"] == 2)
        whole = torch.empty(info.shape, dtype=info.dtype)
        parts = self.layout.tensor
        for tensor_rank, places in sorted(self._places[entry].items()):
            pieces = split.pieces(whole, parts, tensor_rank, self.sizes)
            (rank, stored), *copies = places
            if isinstance(split, Replicated) and tensor_rank:
                copies, shard = places, whole
            elif len(pieces) == 1 and pieces[0].is_contiguous():
                self.files[rank].read_into(stored, pieces[0])
                shard = pieces[0]
            else:
                shard = self.files[rank].read(stored)
                fill(pieces, shard, getattr(split, "axis", 0))
            for other, copy in copies:
                if not torch.equal(self.files[other].read(copy), shard):
                    raise ConversionError(
                        f"{entry} differs between {self.files[rank].path.parent.name} and "
                        f"{self.files[other].path.parent.name}, which should hold the same"
                    )
        return whole
