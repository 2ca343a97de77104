"""A checkpoint that is not what the run needs loads nothing: every key and every file damaged in turn, both formats.

Real checkpoints of the trainer are damaged one piece at a time and given to the real load of a run, whose model has to
be untouched afterwards. tests/test_checkpoint_refusals.py has what is refused before a model is built.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from operator import methodcaller
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_pretrain import TINY_GPT
from harness_resume import (
    copy_of,
    edit_metadata,
    rename_stored,
    train_here,
    with_load,
)

from megatron.training.resume.completeness import require_whole, whole_steps
from megatron.training.resume.errors import CheckpointError
from megatron.training.resume.location import find_checkpoint

RUN = [*TINY_GPT, "--wide-residual", "4", "--train-iters", "4", "--save-interval", "2"]
RUNS = {
    "torch_dist": [*RUN, "--wide-residual-learned-retention"],
    "torch_dist-distributed-bf16": [*RUN, "--bf16", "--use-distributed-optimizer"],
    "torch_dist-fully-reshardable": [*RUN, "--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"],
    "plain": [*RUN, "--ckpt-format", "torch"],
    "plain-bf16": [*RUN, "--bf16", "--ckpt-format", "torch"],
    "plain-distributed-bf16": [*RUN, "--bf16", "--use-distributed-optimizer", "--ckpt-format", "torch"],
}
SHARDED = [name for name in RUNS if name.startswith("torch_dist")]
PLAIN = [name for name in RUNS if name.startswith("plain")]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The --save folder of a run, steps 2 and 4."""
    folder = tmp_path_factory.mktemp("saved")

    def of(name: str) -> Path:
        checkpoints = folder / name
        if not checkpoints.is_dir():
            train_here([*RUNS[name], "--save", str(checkpoints)])
        return checkpoints

    return of


def fingerprint(parts: Any) -> list[torch.Tensor]:
    """Copies of all that a load could change."""
    models, optimizer, _ = parts
    kept = [parameter.detach().clone() for model in models for parameter in model.parameters()]
    for one in getattr(optimizer, "chained_optimizers", [optimizer]):
        kept += [
            value.clone() for state in one.optimizer.state.values() for value in state.values() if value.numel() > 1
        ]
    return kept


def assert_refused(load: Callable[[Path], Any], folder: Path, named: str, what: str) -> None:
    refusal = None
    try:
        load(folder)
    except CheckpointError as error:
        refusal = str(error)
    assert refusal is not None, f"loaded although {named} was {what}"
    assert named in refusal, f"{what}: the refusal does not name {named}:\n{refusal}"


# ---- torch_dist: every key


def _drop(key: str) -> Callable[[dict[str, Any], dict[Any, Any]], None]:
    def edit(entries: dict[str, Any], places: dict[Any, Any]) -> None:
        del entries[key]
        for index in [index for index in places if index.fqn == key]:
            del places[index]

    return edit


def _reshape(key: str) -> Callable[[dict[str, Any], dict[Any, Any]], None]:
    def edit(entries: dict[str, Any], places: dict[Any, Any]) -> None:
        entries[key].size = torch.Size([*entries[key].size[:-1], entries[key].size[-1] + 1])

    return edit


def _recast(key: str) -> Callable[[dict[str, Any], dict[Any, Any]], None]:
    def edit(entries: dict[str, Any], places: dict[Any, Any]) -> None:
        entries[key].properties.dtype = torch.float16

    return edit


@pytest.mark.parametrize("name", SHARDED)
def test_each_key_of_a_sharded_checkpoint_dropped_renamed_reshaped_or_recast_is_refused(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    whole = saved(name)
    checkpoints = copy_of(whole, tmp_path / "damaged")
    folder, metadata = checkpoints / "iter_0000004", (whole / "iter_0000004/.metadata").read_bytes()
    tensors: dict[str, bool] = {}
    edit_metadata(folder, lambda entries, _: tensors.update({k: hasattr(v, "size") for k, v in entries.items()}))
    # Not compared: TE's extra state, and the rerun machine's, which a run takes up only while it looks for faults.
    left_out = ("_extra_state", "common_state/", "rerun_state_machine_state/")
    keys = [key for key in tensors if not any(name in key for name in left_out)]
    if name != "torch_dist":  # the model's keys are those of the first run
        keys = [key for key in keys if key.startswith("optimizer.")]
        keys = keys[:: max(len(keys) // 12, 1)]  # by parameter: three tensors of each, which all go the same way
    assert len(keys) >= 9

    def body(load: Callable[[Path], Any], parts: Any) -> None:
        before = fingerprint(parts)
        for key in keys:
            for what, edit in {"dropped": _drop, "reshaped": _reshape, "recast": _recast}.items():
                if tensors[key] or what == "dropped":
                    (folder / ".metadata").write_bytes(metadata)
                    edit_metadata(folder, edit(key))
                    assert_refused(load, checkpoints, key, what)
            (folder / ".metadata").write_bytes(metadata)
            rename_stored(folder, key, f"{key}2" if tensors[key] else f"other_{key}")
            assert_refused(load, checkpoints, key, "renamed")
        assert all(map(torch.equal, before, fingerprint(parts))), "a refused checkpoint has changed the model"
        (folder / ".metadata").write_bytes(metadata)
        assert load(checkpoints)[0] == 4
        assert not all(map(torch.equal, before, fingerprint(parts))), "the whole checkpoint changed nothing"

    with_load([*RUNS[name], "--load", str(whole)], body)


def test_extra_state_of_transformer_engine_may_differ_both_ways(saved: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved("torch_dist"), tmp_path / "other")

    def edit(entries: dict[str, Any], places: dict[Any, Any]) -> None:
        keys = [key for key in entries if "_extra_state" in key]
        assert len(keys) == 8
        for key in keys[1:]:
            _drop(key)(entries, places)
        entries["decoder.other._extra_state/shard_0_1"] = entries[keys[0]]
        for index in [index for index in places if index.fqn == keys[0]]:
            places[type(index)("decoder.other._extra_state/shard_0_1")] = places[index]

    edit_metadata(checkpoints / "iter_0000004", edit)
    with_load([*RUNS["torch_dist"], "--load", str(checkpoints)], lambda load, _: _loads_step_4(load, checkpoints))


def _loads_step_4(load: Callable[[Path], Any], checkpoints: Path) -> None:
    assert load(checkpoints)[0] == 4


def test_a_renamed_key_is_reported_beside_the_nearest_known_name(saved: Callable[[str], Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved("torch_dist"), tmp_path / "renamed")
    rename_stored(checkpoints / "iter_0000004", "decoder.final_layernorm.weight", "decoder.final_norm.weight")

    def body(load: Callable[[Path], Any], parts: Any) -> None:
        for nearest in (
            "not in the checkpoint: decoder.final_layernorm.weight (nearest: decoder.final_norm.weight)",
            "not in the model: decoder.final_norm.weight (nearest: decoder.final_layernorm.weight)",
            "--load-non-strict loads what fits",
        ):
            assert_refused(load, checkpoints, nearest, "renamed")

    with_load([*RUNS["torch_dist"], "--load", str(checkpoints)], body)


# ---- plain: every key


def _plain_file(checkpoints: Path, name: str = "model_optim_rng.pt") -> Path:
    return checkpoints / "iter_0000004/mp_rank_00" / name


def _leaves(state: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths of all tensors below dicts and lists."""
    if isinstance(state, torch.Tensor):
        return [path]
    items = state.items() if isinstance(state, dict) else enumerate(state) if isinstance(state, list) else ()
    return [leaf for key, value in items for leaf in _leaves(value, (*path, key))]


def _with(state: Any, path: tuple[Any, ...], change: Callable[[Any], None]) -> Any:
    """A copy of the dicts and lists along path, the last of which `change` gets."""
    copy = dict(state) if isinstance(state, dict) else list(state)
    if len(path) == 1:
        change(copy)
    else:
        copy[path[0]] = _with(state[path[0]], path[1:], change)
    return copy


@pytest.mark.parametrize("name", PLAIN)
def test_each_tensor_of_a_plain_checkpoint_dropped_renamed_reshaped_or_recast_is_refused(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoints = copy_of(saved(name), tmp_path / "damaged")
    files = {
        file: torch.load(file, weights_only=False) for file in sorted(_plain_file(checkpoints).parent.glob("*.pt"))
    }

    def damages(leaf: Any) -> dict[str, Callable[[Any], None]]:
        def recast(holder: Any) -> None:
            holder[leaf] = holder[leaf].half()

        def reshape(holder: Any) -> None:
            holder[leaf] = torch.cat([holder[leaf], holder[leaf][:1]])

        def rename(holder: Any) -> None:
            holder[f"{leaf}2"] = holder.pop(leaf)

        return {"dropped": lambda holder: holder.pop(leaf), "recast": recast, "reshaped": reshape, "renamed": rename}

    def body(load: Callable[[Path], Any], parts: Any) -> None:
        before = fingerprint(parts)
        for file, state in files.items():
            paths = [path for path in _leaves(state) if path[0] != "rng_state"]
            for path in paths:
                for what, damage in damages(path[-1]).items():
                    if what == "renamed" and isinstance(path[-1], int):
                        continue  # a position in a list
                    if path[-1] == "step" and what in ("recast", "reshaped"):
                        continue  # a count, without shape and dtype to speak of
                    torch.save(_with(state, path, damage), file)
                    with pytest.raises(CheckpointError, match="is not this model's") as refusal:
                        load(checkpoints)
                    named = str(path[-1] if isinstance(path[-1], str) else path[-2])
                    assert named in str(refusal.value), f"{path} {what}: not named in\n{refusal.value}"
            torch.save(state, file)
        assert all(map(torch.equal, before, fingerprint(parts))), "a refused checkpoint has changed the model"
        assert load(checkpoints)[0] == 4

    with_load([*RUNS[name], "--load", str(checkpoints)], body)


def test_what_is_no_tensor_of_a_plain_checkpoint_dropped_is_refused(
    saved: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoints = copy_of(saved("plain"), tmp_path / "damaged")
    state = torch.load(_plain_file(checkpoints), weights_only=False)

    def body(load: Callable[[Path], Any], parts: Any) -> None:
        for path in (
            *(("model",), ("optimizer",), ("opt_param_scheduler",), ("iteration",), ("rng_state",)),
            *(("optimizer", "param_groups"), ("optimizer", "state"), ("optimizer", "param_groups", 1)),
            ("rng_state", 0, "rng_tracker_states"),
        ):
            torch.save(_with(state, path, methodcaller("pop", path[-1])), _plain_file(checkpoints))
            with pytest.raises(CheckpointError):
                load(checkpoints)

    with_load([*RUNS["plain"], "--load", str(checkpoints)], body)


# ---- every file


@pytest.mark.parametrize("name", ["torch_dist", "plain-distributed-bf16"])
def test_each_file_missing_or_cut_short_is_found_before_anything_is_built(
    name: str, saved: Callable[[str], Path], tmp_path: Path
) -> None:
    checkpoints = copy_of(saved(name), tmp_path / "damaged")
    step = checkpoints / "iter_0000004"
    files = sorted(file for file in step.rglob("*") if file.is_file())
    assert len(files) == (3 if name == "torch_dist" else 2)
    for file in files:
        content = file.read_bytes()
        for length in (None, 0, 1, len(content) // 2, len(content) - 1):
            file.unlink(missing_ok=True)
            if length is not None:
                file.write_bytes(content[:length])
            with pytest.raises(CheckpointError) as refusal:
                require_whole(find_checkpoint(checkpoints))
            assert file.name in str(refusal.value), f"{file.name} of {length} bytes: {refusal.value}"
            assert whole_steps(checkpoints) == [2]
        file.write_bytes(content)
    assert whole_steps(checkpoints) == [2, 4]
    shutil.rmtree(step)
    with pytest.raises(CheckpointError, match=r"iter_0000004 is not there.*whole: 2 \(--ckpt-step 2 takes that one\)"):
        find_checkpoint(checkpoints)
