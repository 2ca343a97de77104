"""Upstream's load_checkpoint, strict: what a checkpoint and a run have must be the same, or nothing is loaded.

Upstream's own strictness gives way in two places, and there is no seam in either: a strict load of the plain format
that fails is done once more without strictness, and a torch_dist checkpoint may hold tensors that the model lacks. Here
the keys, shapes and dtypes of model and optimizer are compared before upstream loads a tensor. The step is the one that
preflight.py found, on every rank: upstream reads the tracker file once more for the distributed optimizer of the plain
format, and so takes another step's with --ckpt-step.

What always holds: a refusal is a CheckpointError on every rank and before any weight is changed; without
--load-non-strict nothing softens it.
"""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch

from megatron.cpu.replacements import Replacements
from megatron.patches import UpstreamPatch
from megatron.training.resume import plain, sharded
from megatron.training.resume.completeness import OPTIMIZER_FILE
from megatron.training.resume.differences import Differences, Entry, differences, is_extra_state, refusal, skipped_line
from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.location import CheckpointLocation, check_step
from megatron.training.resume.preflight import checkpoint_to_load
from megatron.training.resume.stored import damage_reported


def _say(args: Namespace, line: str) -> None:
    if args.rank == 0:
        print(line, flush=True)


def agreed_checkpoint(args: Namespace) -> CheckpointLocation | None:
    """Return the checkpoint to load; raises CheckpointError where ranks see different ones."""
    location = checkpoint_to_load(args)
    found = "none" if location is None else str(location.folder.resolve())
    seen = sharded.of_all_ranks({str(args.rank): found})
    if len(set(seen.values())) > 1:
        ranks = {folder: [rank for rank, one in seen.items() if one == folder] for folder in sorted(set(seen.values()))}
        raise CheckpointError(
            "the processes see different checkpoints: "
            + "; ".join(f"{folder} on rank {', '.join(of[:8])}" for folder, of in ranks.items())
            + ". Is --load on a file system that all nodes share?",
            on_all_ranks=True,
        )
    return location


def loads_optimizer(args: Namespace, location: CheckpointLocation) -> bool:
    """Return whether a run with these arguments takes the optimizer's state from the checkpoint."""
    return not (args.no_load_optim or args.finetune or location.step is None)


def _check_state(args: Namespace, location: CheckpointLocation, state: Mapping[str, Any], optimizer: Any) -> None:
    """Raise CheckpointError for state that is no tensor, is to be loaded and is not there."""
    stored = state.get("args")
    check_step(location, state)
    resumes = not args.finetune and location.step is not None
    for what, wanted, flag in (
        ("optimizer", optimizer is not None, "--no-load-optim"),
        ("opt_param_scheduler", optimizer is not None, "--no-load-optim"),
        ("rng_state", resumes and not args.no_load_rng, "--no-load-rng"),
    ):
        if what == "rng_state":
            there = not getattr(stored, "no_save_rng", False) and (location.format == "torch_dist" or what in state)
        elif what == "optimizer":
            there = not getattr(stored, "no_save_optim", False) and (location.format == "torch_dist" or what in state)
        else:
            there = what in state or "lr_scheduler" in state
        if wanted and not there:
            raise CheckpointError(
                f"{location.folder} has no {what}: give {flag} to load the rest, or --finetune to start a new run from "
                "its weights.",
                on_all_ranks=True,
            )
    sharded_optimizer = getattr(stored, "use_distributed_optimizer", args.use_distributed_optimizer)
    if optimizer is not None and sharded_optimizer != args.use_distributed_optimizer:
        found, remedy = ("with", "add it") if sharded_optimizer else ("without", "leave it out")
        raise CheckpointError(
            f"{location.folder} was saved {found} --use-distributed-optimizer: {remedy}, or give --no-load-optim.",
            on_all_ranks=True,
        )
    if resumes and "iteration" not in state:
        raise CheckpointError(f"{location.folder} does not say its iteration: --finetune starts a new run from it.")


class _Load:
    """One call of load_checkpoint: what it loads into, and the reader that upstream calls meanwhile."""

    def __init__(
        self, args: Namespace, location: CheckpointLocation, models: list[Any], optimizer: Any, read: Callable[..., Any]
    ) -> None:
        self.args, self.location, self.models, self.optimizer = args, location, models, optimizer
        self._upstream_read = read
        self._common: Mapping[str, Any] = {}

    def read(self, load_dir: str, args: Namespace, rank0: bool = False, **options: Any) -> Any:
        """Stand in for upstream's _load_base_checkpoint: the same, compared first."""
        wanted = options.get("sharded_state_dict")
        if not rank0 and self.location.format == "torch_dist":
            options["sharded_state_dict"] = self._checked_sharded(wanted)
        with damage_reported(self.location):
            state, *rest = self._upstream_read(load_dir, args, rank0=rank0, **options)
        if rank0:
            self._common = state or {}
            if self.location.format == "torch_dist":
                _check_state(args, self.location, self._common, self.optimizer)
        elif self.location.format == "torch":
            state = self._checked_plain(state)
        return (state, *rest)

    def _repadded(self, wanted: Entry, stored: Entry) -> bool:
        """Whether two embeddings differ in the padding of one vocabulary alone, which follows the layout."""
        from megatron.core.tokenizers.utils.build_tokenizer import vocab_size_with_padding
        from megatron.training.global_vars import get_tokenizer

        size, stored_args = get_tokenizer().vocab_size, self._common.get("args")
        if wanted.shape is None or stored.shape is None or wanted.shape[1:] != stored.shape[1:] or stored_args is None:
            return False
        padded = vocab_size_with_padding(size, stored_args, False)
        return stored.shape[0] == padded and wanted.shape[0] >= size

    def _decide(self, found: Differences) -> None:
        """Raise on every rank if any rank found a difference, unless the command line asks for what fits."""
        everywhere = Differences()
        for name in ("missing", "unexpected", "other_shape", "other_dtype"):
            getattr(everywhere, name).update(sharded.of_all_ranks(getattr(found, name)))
        if not everywhere:
            return
        if not self.args.load_non_strict:
            raise CheckpointError(refusal(everywhere, self.location.folder), on_all_ranks=True)
        if any(sharded.OPTIMIZER_KEY.match(name) or name.startswith("buffer.") for name in everywhere.names()):
            raise CheckpointError(
                f"--load-non-strict needs --no-load-optim here: the optimizer's state in {self.location.folder} is "
                f"that of another model.\n  {everywhere.describe()}",
                on_all_ranks=True,
            )
        _say(self.args, skipped_line(everywhere, self.location.folder))

    def _checked_sharded(self, wanted: Any) -> Any:
        with damage_reported(self.location):
            stored = sharded.stored_entries(self.location.folder)
        wanted = sharded.with_stored_keys(wanted, stored)
        stored = sharded.entries_to_load(stored, wanted)
        entries = sharded.of_all_ranks(sharded.wanted_entries(wanted))
        found = differences(entries, stored)
        for name in sharded.of_all_ranks(dict.fromkeys(sharded.resizable_names(wanted))):
            if name in found.other_shape and self._repadded(entries[name], stored[name]):
                del found.other_shape[name]
        self._decide(found)
        # TE's extra state may differ both ways: where a shard of one is not stored, none of its shards is asked for.
        absent = {sharded.base_name(name) for name in entries.keys() - stored.keys() if is_extra_state(name)}
        skipped = {name for name in entries if sharded.base_name(name) in absent}
        skipped |= set(found.missing) | set(found.other_shape)
        return sharded.without_names(wanted, skipped) if skipped else wanted

    def _checked_plain(self, state: Mapping[str, Any]) -> Mapping[str, Any]:
        count = len(self.models)
        _check_state(self.args, self.location, state, self.optimizer)
        split = plain.with_split_keys(state, count)
        if self.optimizer is not None and any(
            split[key].keys() != state[key].keys() for key in split.keys() & {*plain.model_keys(count)}
        ):
            raise CheckpointError(
                f"{self.location.folder} has the older residual_connection keys, and the plain format keeps optimizer "
                "state by position alone, which those keys change: add --no-load-optim.",
                on_all_ranks=True,
            )
        found = plain.plain_differences(self.models, self.optimizer, split)
        if self.optimizer is not None and self.args.use_distributed_optimizer:
            found.add(self._buffers(), prefix="")
        self._decide(found)
        return plain.without_misfits(split, count, set(found.other_shape)) if found else split

    def _buffers(self) -> Differences:
        from megatron.training.checkpointing import get_checkpoint_name

        location = self.location
        file = os.path.join(
            os.path.dirname(get_checkpoint_name(str(location.load), location.step, location.step is None)),
            OPTIMIZER_FILE,
        )
        with damage_reported(location):
            return plain.buffer_differences(self.optimizer, torch.load(file, map_location="cpu", mmap=True))


def _strict(upstream_load: Callable[..., Any]) -> Callable[..., Any]:
    def load_checkpoint(
        ddp_model: list[Any], optimizer: Any, opt_param_scheduler: Any, *rest: Any, **options: Any
    ) -> Any:
        from megatron.core.utils import unwrap_model
        from megatron.training.global_vars import get_args

        from megatron.training import checkpointing

        args = get_args()
        location = agreed_checkpoint(args)
        if location is None:
            return upstream_load(ddp_model, optimizer, opt_param_scheduler, *rest, **options)
        release = location.step is None
        with Replacements() as replaced, damage_reported(location):
            loaded_optimizer = optimizer if loads_optimizer(args, location) else None
            load = _Load(args, location, unwrap_model(ddp_model), loaded_optimizer, checkpointing._load_base_checkpoint)
            replaced.set(checkpointing, "_load_base_checkpoint", load.read)
            replaced.set(checkpointing, "read_metadata", lambda tracker: (location.step or 0, release))
            replaced.set(args, "ckpt_step", location.step)  # where a killed first save left no tracker file
            try:
                return upstream_load(ddp_model, optimizer, opt_param_scheduler, *rest, **options)
            except AssertionError as error:  # how upstream refuses arguments that differ from the stored ones
                raise CheckpointError(_argument_refusal(location, error), on_all_ranks=True) from error

    return load_checkpoint


def _argument_refusal(location: CheckpointLocation, error: AssertionError) -> str:
    text = " ".join(str(error).replace("checkpointvalue", "checkpoint value").split())
    if "OptimizerParamScheduler" in text:
        text = text.removeprefix("OptimizerParamScheduler: ").replace("class input value", "this run's")
        return (
            f"the schedule in {location.folder} is another one ({text}): give the flags that it was trained with, "
            "--override-opt-param-scheduler to take this command line's, or --use-checkpoint-opt-param-scheduler to "
            "take the checkpoint's."
        )
    return f"{location.folder} was written with other arguments: {text}"


PATCHES = (
    UpstreamPatch(
        module="megatron.training.training",
        name="load_checkpoint",
        reason="loads without strictness what it could not load with it, and ignores tensors that the model lacks",
        source_sha256="4f03d48a79382b8c4c8f9b745b5dca700b2110a01426dd685219e8f4e958d55d",
        make=_strict,
    ),
    UpstreamPatch(
        module="megatron.training.checkpointing",
        name="_load_base_checkpoint",
        reason="the one place that reads; replaced during a load",
        source_sha256="9a7e9e8de2428c6711170829f8830e1dec323ca23bdbeeb41092a0c84e8c8632",
        make=lambda original: original,
    ),
)
