"""The run folders of an ablation: whether they are still the YAML's, who is at work on them, and what is damaged."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness_ablations import ROOT, WIDE, ablation_of

from megatron.ablations.cost import Cost
from megatron.ablations.plan_table import remarks, totals
from megatron.ablations.runner import write_recipe
from megatron.ablations.state import (
    ablation_lock,
    check_folders,
    damage_of,
    end_orphans,
    launch_lock,
    other_folders,
    state_of,
    take_lock,
)
from megatron.run_control.errors import LaunchError
from megatron.run_control.recipes import load_recipe
from megatron.run_control.run_folder import RunFolder


def test_a_changed_yaml_is_refused_by_the_name_of_the_run_and_an_extended_one_is_not(tmp_path: Path) -> None:
    ablation = ablation_of(tmp_path, WIDE, tmp_path)
    run = ablation.runs[0]
    RunFolder(run.folder.resolve()).create(run.recipe, ROOT)
    check_folders(ablation)
    check_folders(ablation_of(tmp_path, WIDE.replace("[1, 2]", "[1, 2, 3]"), tmp_path))
    for changed, complaint in (
        ("flags: {train-iters: 20}\n", "ordinary-seed-1 was launched with --train-iters 10; it says --train-iters 20"),
        ("flags: {bf16: true}\n", "was launched with no --bf16; it says --bf16 now"),
        ("processes: 2\n", "was launched with processes 1; it says processes 2 now"),
        ("environment: {A: b}\n", "was launched with no variable A; it says A=b now"),
    ):
        with pytest.raises(LaunchError, match=r"trial\.yaml has changed: ") as error:
            check_folders(ablation_of(tmp_path, WIDE + changed, tmp_path))
        assert complaint in str(error.value)
    assert other_folders(ablation_of(tmp_path, WIDE.replace("[1, 2]", "[5]"), tmp_path)) == ["ordinary-seed-1"]


def test_a_launch_reads_back_the_recipe_of_its_run(tmp_path: Path) -> None:
    run = ablation_of(tmp_path, WIDE + "environment: {A: '${B:-$}{X}'}\n", tmp_path).runs[-1]
    assert run.recipe.environment["A"] == "${X}"
    assert load_recipe(write_recipe(run), {}) == run.recipe


def test_a_run_is_one_launchs_at_a_time(tmp_path: Path) -> None:
    run = ablation_of(tmp_path, WIDE, tmp_path).runs[0]
    lock = launch_lock(run)
    assert lock is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert launch_lock(run) is None, "the child that inherited the lock still lives"
    child.communicate(b"\n")
    again = launch_lock(run)
    assert again is not None, "the lock outlived its process"
    os.close(again)
    run.folder.mkdir(parents=True)
    by_hand = take_lock(run.folder / "launch.lock")
    assert by_hand is not None
    assert launch_lock(run) is None, "rerun.sh of the folder is at work"
    os.close(by_hand)
    again = launch_lock(run)
    assert again is not None
    os.close(again)


def test_a_folder_that_cannot_be_made_is_an_error_of_the_yaml(tmp_path: Path) -> None:
    for folder, why in ((tmp_path / "trial.yaml", "trial.yaml is no folder"), (Path("/proc/x"), "/proc")):
        ablation = ablation_of(tmp_path, f"{WIDE}folder: {folder}\n")
        with (
            pytest.raises(LaunchError, match=rf"trial\.yaml: folder: .*{why}.* Name another one"),
            ablation_lock(ablation),
        ):
            pass


def test_a_damaged_run_is_named_and_only_stops_what_would_touch_it(tmp_path: Path) -> None:
    ablation = ablation_of(tmp_path, WIDE, tmp_path)
    run = ablation.runs[0]
    RunFolder(run.folder.resolve()).create(run.recipe, ROOT)
    assert damage_of(run) is None
    (run.folder / "attempts.json").write_text("[{")
    assert state_of(run) == "damaged"
    assert "attempts.json is damaged" in (damage_of(run) or "")
    with pytest.raises(LaunchError, match=rf"attempts\.json is damaged.* remove {run.folder}"):
        check_folders(ablation)
    check_folders(ablation, but_damaged=True)
    costs = {variant.name: Cost(1) for variant in ablation.variants}
    assert any("run will refuse" in remark for remark in remarks(ablation, costs))
    assert totals(ablation, costs).startswith("all: 10 runs")


def test_trainers_that_outlived_a_killed_launch_are_ended_and_no_others(tmp_path: Path) -> None:
    ours, other = ablation_of(tmp_path, WIDE, tmp_path).runs[:2]
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(sleep, env={**os.environ, "MEGATRON_RUN_FOLDER": str(ours.folder.resolve())})
    stays = subprocess.Popen(sleep, env={**os.environ, "MEGATRON_RUN_FOLDER": str(other.folder.resolve())})
    try:
        assert end_orphans(ours) == 1
        assert left.poll() is not None, "it still lives"
        assert stays.poll() is None
    finally:
        stays.kill()
        stays.wait()
