"""What a run says instead of training from the wrong weights: no checkpoint, bad trackers, other layouts, other flags.

The trainer runs in this process; that a refusal ends the script with status 2 and without a traceback is tested on real
launches at the end.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_pretrain import TINY_GPT, pretrain
from harness_resume import (
    TRACKER,
    copy_of,
    refused_here,
    rename_stored,
    stored_tensors,
    train_here,
    with_load,
)

from megatron.training.resume.completeness import whole_steps
from megatron.training.resume.location import find_checkpoint
from megatron.training.resume.sharded import combined_name

FOUR = ["--train-iters", "4", "--save-interval", "2"]
ORDINARY = [*TINY_GPT, *FOUR]
WIDE = [*ORDINARY, "--wide-residual", "4", "--wide-residual-learned-retention"]
PLAIN = [*ORDINARY, "--wide-residual", "4", "--ckpt-format", "torch"]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """--save folders with the steps 2 and 4, and `losses` of these runs under the same names."""
    folder = tmp_path_factory.mktemp("saved")
    for name, options in {"ordinary": ORDINARY, "wide": WIDE, "plain": PLAIN}.items():
        LOSSES[name] = train_here([*options, "--save", str(folder / name)])
    return {name: folder / name for name in ("ordinary", "wide", "plain")}


LOSSES: dict[str, list[float]] = {}


# ---- where to load from


@pytest.mark.parametrize(
    "text", ["", "\n", "abc", "iter_10", "4\r\n", "\r\n", "-4", " 4", "4.0", "4 2", "٤", "\x00" * 4]
)
def test_a_tracker_that_holds_no_step_number_is_refused_with_the_whole_steps(
    text: str, saved: dict[str, Path], tmp_path: Path
) -> None:
    checkpoints = copy_of(saved["wide"], tmp_path / "checkpoints")
    (checkpoints / TRACKER).write_bytes(text.encode())
    (checkpoints / "iter_0000004/metadata.json").unlink()
    for flags in ([], ["--use-checkpoint-args"], ["--save", str(checkpoints)]):
        message = refused_here([*WIDE, "--load", str(checkpoints), *flags])
        assert f"{TRACKER} holds {text!r}, a step number is wanted" in message
        assert "whole: 2 (--ckpt-step 2 takes that one)" in message


def test_a_step_that_is_absent_or_not_whole_is_refused_with_the_whole_steps(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    checkpoints = copy_of(saved["wide"], tmp_path / "checkpoints")
    load = [*WIDE, "--load", str(checkpoints)]
    message = refused_here([*load, "--ckpt-step", "3"])
    assert "iter_0000003 is not there, but --ckpt-step names it; whole: 2, 4 (--ckpt-step 4 takes that one)" in message
    assert "--ckpt-step is 0; the number of a saved step" in refused_here([*load, "--ckpt-step", "0"])
    (checkpoints / TRACKER).write_text("10")
    assert f"iter_0000010 is not there, but {TRACKER} names it; whole: 2, 4" in refused_here(load)
    (checkpoints / TRACKER).write_text("4")
    (part,) = (checkpoints / "iter_0000004").glob("*.distcp")
    part.write_bytes(part.read_bytes()[:-1])
    message = refused_here(load)
    assert re.search(r"iter_0000004 is not whole: __0_0.distcp has [\d,]+ bytes, [\d,]+ are wanted; whole: 2", message)


def test_load_where_nothing_is_starts_at_step_0_only_if_the_command_line_says_so(
    saved: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    absent, empty = tmp_path / "absent", tmp_path / "empty"
    empty.mkdir()
    assert f"--load {absent}: no such folder" in refused_here([*WIDE, "--load", str(absent)])
    assert f"--load {empty}: it is empty" in refused_here([*WIDE, "--load", str(empty)])
    (empty / "notes.txt").write_text("")
    message = refused_here([*WIDE, "--load", str(empty), "--save", str(tmp_path / "elsewhere")])
    assert "it has no checkpoint in it" in message
    assert "leave --load out, or add --load-if-present" in message
    both = ["--load", str(absent), "--save", str(absent)]
    for flag in (["--exit-on-missing-checkpoint"], ["--ckpt-step", "2"]):
        assert "no such folder" in refused_here([*WIDE, *both, *flag])
    capfd.readouterr()
    first = ["--exit-interval", "1"]
    assert train_here([*WIDE, "--load", str(absent), "--load-if-present", *first]) == LOSSES["wide"][:1]
    assert "starting at step 0 (--load-if-present)" in capfd.readouterr().out
    assert train_here([*WIDE, *both, *first]) == LOSSES["wide"][:1]
    assert "starting at step 0 (it is --save too)" in capfd.readouterr().out


def test_steps_without_a_tracker_are_refused_and_ckpt_step_takes_one(saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved["wide"], tmp_path / "checkpoints")
    (checkpoints / TRACKER).unlink()
    options = [*WIDE, "--load", str(checkpoints), "--save", str(checkpoints)]
    assert f"{TRACKER} is not there; whole: 2, 4 (--ckpt-step 4 takes that one)" in refused_here(options)
    assert train_here([*options, "--ckpt-step", "2"]) == LOSSES["wide"][2:]


def test_a_first_save_killed_before_it_wrote_the_tracker_is_taken_up(saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved["wide"], tmp_path / "checkpoints")
    shutil.rmtree(checkpoints / "iter_0000004")
    (checkpoints / "unfinished_save/iter_0000002").mkdir(parents=True)
    (checkpoints / TRACKER).rename(checkpoints / "unfinished_save/iter_0000002" / TRACKER)
    (checkpoints / "unfinished_save/iter_0000002" / TRACKER).write_text("2")
    options = [*WIDE, "--load", str(checkpoints), "--save", str(checkpoints)]
    assert train_here(options) == LOSSES["wide"][2:]
    assert whole_steps(checkpoints) == [2, 4]
    assert (checkpoints / TRACKER).read_text() == "4"
    assert not (checkpoints / "unfinished_save").exists()


def test_pretrained_checkpoint_is_taken_while_load_has_nothing(saved: dict[str, Path], tmp_path: Path) -> None:
    fresh = ["--load", str(tmp_path / "new"), "--save", str(tmp_path / "new")]
    losses = train_here([*WIDE, *fresh, "--pretrained-checkpoint", str(saved["wide"]), "--exit-interval", "1"])
    assert losses[0] < LOSSES["wide"][0] - 0.02, "the weights are not those of the pretrained checkpoint"
    fresh = ["--load", str(tmp_path / "newer"), "--pretrained-checkpoint", str(tmp_path / "nowhere")]
    message = refused_here([*WIDE, *fresh])
    assert "--pretrained-checkpoint: " in message
    assert "no such folder" in message


# ---- stream layouts


def test_other_streams_are_refused_with_the_command_that_converts_them(saved: dict[str, Path]) -> None:
    ordinary, wide = str(saved["ordinary"]), str(saved["wide"])
    convert = "python tools/checkpoint/convert.py"
    message = refused_here([*WIDE, "--load", ordinary])
    assert f"{convert} widen --load {ordinary} --save {ordinary}-4-streams --num-streams 4" in message
    for streams, remedy in {
        8: f"{convert} resize --load {wide} --save {wide}-8-streams --num-streams 8",
        2: f"{convert} resize --load {wide} --save {wide}-2-streams --num-streams 2 --average",
        3: "4 streams cannot be made 3: one number has to divide the other",
    }.items():
        other = ["--wide-residual", str(streams), "--wide-residual-learned-retention"]
        assert remedy in refused_here([*ORDINARY, *other, "--load", wide])
    message = refused_here([*ORDINARY, "--load", wide])
    assert "has 4 streams" in message
    assert f"{convert} resize --load {wide}" in message
    message = refused_here([*WIDE, "--wide-residual-retention-max-forget", "0.2", "--load", wide])
    assert "max forget 0.1); this run asks for 4 streams" in message
    assert "convert" not in message, "no converter changes the bound"


def test_values_of_the_start_and_replay_may_change_and_are_said(
    saved: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    replay = ["--recompute-granularity", "selective", "--recompute-modules", "residual_stream"]
    other = ["--wide-residual-streamwise-sigmoid-init-scale", "0.5", "--wide-residual-retention-init", "0.95"]
    target = tmp_path / "resumed"
    load = ["--load", str(saved["wide"]), "--ckpt-step", "2", "--save", str(target)]
    for flags in ([], ["--use-checkpoint-args"]):
        assert train_here([*WIDE, *replay, *other, *load, *flags]) == LOSSES["wide"][2:]
        said = capfd.readouterr().out
        assert "--wide-residual-streamwise-sigmoid-init-scale 0.5 has no effect: the model of" in said
        assert "--wide-residual-retention-init 0.95 has no effect" in said
        assert "> replay of residual streams: blocks of all layers; off when" in said
    stored = _stored_arguments(target)
    assert stored.wide_residual_streamwise_sigmoid_init_scale == 0.01
    assert stored.wide_residual_retention_init == 0.999


def _stored_arguments(checkpoints: Path) -> Any:
    from megatron.training.resume.stored import stored_arguments

    return stored_arguments(find_checkpoint(checkpoints))


def test_the_whole_stream_layout_and_its_format_are_stored(saved: dict[str, Path]) -> None:
    stored = vars(_stored_arguments(saved["wide"]))
    assert {name: stored[name] for name in stored if name.startswith("wide_residual")} == {
        "wide_residual": 4,
        "wide_residual_streamwise_sigmoid_init_scale": 0.01,
        "wide_residual_learned_retention": True,
        "wide_residual_retention_init": 0.999,
        "wide_residual_retention_max_forget": 0.1,
        "wide_residual_format": 1,
    }


def test_a_newer_format_and_absent_arguments_are_refused_for_a_wide_run(saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved["plain"], tmp_path / "checkpoints")
    file = checkpoints / "iter_0000004/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["args"].wide_residual_format = 2
    torch.save(state, file)
    load = [*PLAIN, "--load", str(checkpoints)]
    assert "has format 2; this version reads 1" in refused_here(load)
    del state["args"]
    torch.save(state, file)
    assert "stores no training arguments" in refused_here(load)
    message = refused_here([*ORDINARY, "--ckpt-format", "torch", "--load", str(checkpoints)])
    assert "not in the model: decoder.layers.0.residual_read_mlp.read_map.logit" in message, (
        "its keys were not looked at"
    )


# ---- older keys


def test_older_combined_keys_of_a_sharded_checkpoint_resume_bit_equal(saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved["wide"], tmp_path / "checkpoints")
    folder = checkpoints / "iter_0000002"
    names = [name for name in stored_tensors(folder) if combined_name(name) is not None]
    assert len(names) == 3 * 2 * 3, "maps of 2 branches in the model and in 2 moments"
    for name in names:
        rename_stored(folder, name, str(combined_name(name)))
    older = [*WIDE, "--load", str(checkpoints), "--ckpt-step", "2"]
    assert train_here(older) == LOSSES["wide"][2:]
    rename_stored(folder, names[0].replace("residual_read", "residual_connection"), names[0] + "s")
    assert names[0] in refused_here(older)


def test_older_combined_keys_of_a_plain_checkpoint_load_without_the_optimizer(
    saved: dict[str, Path], tmp_path: Path
) -> None:
    checkpoints = copy_of(saved["plain"], tmp_path / "checkpoints")
    file = checkpoints / "iter_0000004/mp_rank_00/model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    state["model"] = {combined_name(name) or name: value for name, value in state["model"].items()}
    torch.save(state, file)
    load = [*PLAIN, "--load", str(checkpoints)]
    assert "add --no-load-optim" in refused_here(load)

    def body(load: Any, parts: Any) -> None:
        load(checkpoints)
        (model,), *_ = parts
        split = {name: value for name, value in model.module.state_dict().items() if "residual_" in name}
        assert len(split) == 2 * 2 * 2 + 1
        for name, value in split.items():
            assert torch.equal(value, state["model"][combined_name(name) or name])

    with_load([*load, "--no-load-optim"], body)


# ---- --load-non-strict


@pytest.mark.parametrize("name", ["wide", "plain"])
def test_load_non_strict_loads_what_fits_and_prints_what_it_skips(
    name: str, saved: dict[str, Path], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    options = WIDE if name == "wide" else PLAIN
    flags = [*options, "--load", str(saved[name]), "--ffn-hidden-size", "128"]
    assert "another shape: decoder.layers" in refused_here(flags)
    if name == "wide":
        assert "needs --no-load-optim here" in refused_here([*flags, "--load-non-strict"])
    capfd.readouterr()

    def body(load: Any, parts: Any) -> None:
        load(saved[name])

    with_load([*flags, "--load-non-strict", "--no-load-optim"], body)
    said = capfd.readouterr().out
    assert "> --load-non-strict: of " in said
    assert "linear_fc1.weight (float32 [" in said


# ---- what upstream ends with a traceback


@pytest.mark.parametrize(
    ("flags", "reasons"),
    [
        (["--lr-decay-iters", "30"], ["schedule", "--override-opt-param-scheduler"]),
        (["--min-lr", "0.0002"], ["other parameter groups", "--min-lr", "--no-load-optim"]),
        (["--num-layers", "3"], ["is not this model's"]),
        (["--hidden-size", "32"], ["another shape", "embedding.word_embeddings.weight"]),
        (["--bf16"], ["another dtype: decoder.final_layernorm.weight (float32 [64] in the checkpoint, bfloat16 [64]"]),
        (["--use-distributed-optimizer"], ["was saved without --use-distributed-optimizer: leave it out"]),
        (["--ckpt-format", "torch"], ["--auto-detect-ckpt-format"]),
        (["--ckpt-format", "torch_dcp"], ["--ckpt-format torch_dcp cannot be checked"]),
        (["--non-persistent-ckpt-type", "global"], ["is not served"]),
    ],
    ids=lambda value: value[0] if value[0].startswith("--") else "",
)
def test_other_flags_than_those_of_the_checkpoint_are_refused(
    flags: list[str], reasons: list[str], saved: dict[str, Path]
) -> None:
    message = refused_here([*WIDE, "--load", str(saved["wide"]), *flags])
    for reason in reasons:
        assert reason in message


def test_a_checkpoint_without_optimizer_or_rng_says_which_flag_loads_the_rest(tmp_path: Path) -> None:
    options = [*ORDINARY, "--exit-interval", "2", "--load", str(tmp_path / "a"), "--save", str(tmp_path / "a")]
    train_here([*options, "--no-save-optim", "--no-save-rng"])
    assert "has no optimizer: give --no-load-optim" in refused_here(options)
    assert "has no rng_state: give --no-load-rng" in refused_here([*options, "--no-load-optim"])


def test_a_longer_run_needs_a_word_on_the_schedule(saved: dict[str, Path]) -> None:
    without_decay = [flag for flag in WIDE if flag not in ("--lr-decay-iters", "20")]
    message = refused_here([*without_decay, "--train-iters", "8", "--load", str(saved["wide"])])
    assert "for total number of weight decay iterations" in message or "do not match" in message
    assert "--use-checkpoint-opt-param-scheduler" in message
    longer = [*WIDE, "--train-iters", "6", "--load", str(saved["wide"]), "--override-opt-param-scheduler"]
    assert len(train_here(longer)) == 2


def test_ckpt_step_takes_the_distributed_optimizer_of_the_same_step(tmp_path: Path) -> None:
    options = [*PLAIN, "--bf16", "--use-distributed-optimizer", "--save", str(tmp_path / "c")]
    losses = train_here(options)
    assert train_here([*options, "--load", str(tmp_path / "c"), "--ckpt-step", "2"]) == losses[2:]


# ---- --keep-last


def test_keep_last_removes_older_steps_and_counts_whole_ones_alone(tmp_path: Path) -> None:
    folder = tmp_path / "c"
    options = [*ORDINARY, "--save-interval", "1", "--keep-last", "2", "--save", str(folder), "--load", str(folder)]
    train_here([*options, "--exit-interval", "3"])
    assert whole_steps(folder) == [2, 3]
    (folder / "iter_0000002/metadata.json").unlink()
    (folder / TRACKER).write_text("3")
    train_here(options)
    assert whole_steps(folder) == [3, 4]
    assert sorted(entry.name for entry in folder.iterdir()) == ["iter_0000003", "iter_0000004", TRACKER]


def test_a_step_saved_again_takes_the_place_of_the_old_one(saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved["ordinary"], tmp_path / "c")
    before = (checkpoints / "iter_0000004/__0_0.distcp").stat().st_ino
    options = [*ORDINARY, "--save", str(checkpoints), "--load", str(checkpoints), "--ckpt-step", "2"]
    assert train_here(options) == LOSSES["ordinary"][2:]
    assert (checkpoints / "iter_0000004/__0_0.distcp").stat().st_ino != before
    assert whole_steps(checkpoints) == [2, 4]
    assert not (checkpoints / "unfinished_save").exists()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 3 MB; skips where this process may mount none."""
    folder = tmp_path / "small"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", folder], check=False).returncode:
        pytest.skip("no permission to mount a small file system")
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)  # a plain checkpoint may still be mapped


@pytest.mark.parametrize("layout", [[], ["--ckpt-format", "torch"]], ids=["torch_dist", "plain"])
def test_a_full_disk_is_named_and_the_last_checkpoint_stays_loadable(layout: list[str], small_disk: Path) -> None:
    folder = small_disk / "c"
    options = [*ORDINARY, "--save-interval", "1", *layout, "--save", str(folder), "--load", str(folder)]
    message = refused_here(options)
    assert re.search(r"failed: No space left on device \(\d+ bytes are free\); step \d is still the latest", message)
    step = int((folder / TRACKER).read_text())
    assert whole_steps(folder)[-1] == step
    assert not (folder / "unfinished_save").exists()
    assert len(train_here([*ORDINARY, *layout, "--load", str(folder)])) == 4 - step


# ---- as a user sees it


def test_refusals_end_the_script_with_status_2_and_without_a_traceback(saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved["wide"], tmp_path / "checkpoints")
    rename_stored(checkpoints / "iter_0000004", "decoder.final_layernorm.bias", "decoder.final_layernorm.bios")
    run = pretrain([*WIDE, "--load", str(checkpoints)], tmp_path, processes=2, expect_status=1)
    # torchrun's own status; its report has that of the script.
    assert "exitcode  : 2" in run.log, run.log[-3000:]
    assert run.log.count("is not this model's; nothing was loaded.") == 1, "every rank said it"
    assert "not in the checkpoint: decoder.final_layernorm.bias (nearest: decoder.final_layernorm.bios)" in run.log
    (checkpoints / TRACKER).write_text("soon")
    run = pretrain([*WIDE, "--load", str(checkpoints)], tmp_path, expect_status=2)
    assert "Traceback" not in run.log
    assert "error: " in run.log.splitlines()[-1]
