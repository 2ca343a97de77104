"""A run folder holds one run and is made whole or not at all; what cannot be one is named before it is written."""

from __future__ import annotations

import itertools
import os
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megatron.run_control.__main__ import main as run_control
from megatron.run_control.errors import LaunchError
from megatron.run_control.recipes import FlagValue, Recipe, load_recipe
from megatron.run_control.run_folder import TRACKER, RunFolder, script_arguments, write_whole
from megatron.run_control.snapshot import take_snapshot

ROOT = Path(__file__).resolve().parents[1]
TINY = str(ROOT / "scripts/recipes/tiny-gpt.yaml")


def test_the_launch_adds_where_to_save_and_how_to_be_asked_but_never_over_a_flag(tmp_path: Path) -> None:
    arguments = script_arguments(Recipe("a.py", flags={"save": "/elsewhere", "wandb-project": "p"}), tmp_path)
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--save"] == pairs["--load"] == "/elsewhere"
    assert pairs["--exit-signal"] == "SIGUSR2"
    assert pairs["--wandb-exp-name"] == tmp_path.name
    assert pairs["--tensorboard-dir"] == str(tmp_path / "tensorboard")


@pytest.mark.parametrize(
    "flags", [{"exit-signal": "SIGTERM"}, {"exit-signal-handler": False}, {"exit-signal": False}], ids=str
)
def test_a_run_that_would_not_save_when_it_is_preempted_is_refused(tmp_path: Path, flags: dict) -> None:
    with pytest.raises(LaunchError, match="the launcher asks runs to save by SIGUSR2"):
        RunFolder(tmp_path / "run").create(Recipe("a.py", flags=flags), ROOT)
    assert not (tmp_path / "run" / "launch.json").exists()


def test_a_run_folder_refuses_another_run_and_says_both_values(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    recipe = Recipe("a.py", 2, {"A": "1"}, {"lr": 1, "data-path": ["a", "b"], "bf16": True})
    assert run.create(recipe, ROOT)
    assert not run.create(recipe, ROOT)
    again = replace(recipe, flags=dict(reversed(list(recipe.flags.items()))))
    assert not run.create(again, ROOT), "the order of flags does not count"
    assert not RunFolder(run.path).create(load_recipe(run.recipe), ROOT), "its own resolved recipe"
    for other, complaint in (
        (replace(recipe, flags={**recipe.flags, "lr": 2}), "launched with --lr 1; --lr 2 is wanted now"),
        (replace(recipe, flags={"lr": 1, "bf16": True}), "launched with --data-path a b; no --data-path is wanted now"),
        (replace(recipe, script="b.py"), "launched with script a.py; script b.py is wanted now"),
        (replace(recipe, processes=4), "launched with processes 2; processes 4 is wanted now"),
        (replace(recipe, environment={"A": "2"}), "launched with A=1; A=2 is wanted now"),
        (replace(recipe, environment={"A": "1", "B": "x y"}), "with no variable B; B='x y' is wanted now"),
    ):
        with pytest.raises(LaunchError, match=r"Continue it as it is with .*rerun\.sh, or choose another") as error:
            run.create(other, ROOT)
        assert complaint in str(error.value)


def test_a_moved_or_copied_run_folder_is_refused_by_name(tmp_path: Path) -> None:
    run, recipe = RunFolder(tmp_path / "run"), Recipe("a.py", flags={"lr": 1})
    run.create(recipe, ROOT)
    shutil.copytree(run.path, tmp_path / "copy")
    with pytest.raises(LaunchError, match=r"copy was moved or copied from .*/run, which its flags still name"):
        RunFolder(tmp_path / "copy").create(recipe, ROOT)
    (tmp_path / "link").symlink_to(run.path)
    assert not RunFolder((tmp_path / "link").resolve()).create(recipe, ROOT), "another name of the same folder"
    shutil.move(run.path, tmp_path / "larger disk")
    run.path.symlink_to(tmp_path / "larger disk")
    assert not RunFolder(tmp_path / "larger disk").create(recipe, ROOT), "moved, and linked back: its flags still hold"


def test_a_run_that_has_a_checkpoint_goes_on_from_that_whatever_it_began_with(tmp_path: Path) -> None:
    begun: dict[str, FlagValue] = {
        "load": "/other/run",
        "finetune": True,
        "ckpt-step": 5,
        "no-load-optim": True,
        "lr": 1,
        "data-path": ["a", "b"],
    }
    run = RunFolder(tmp_path / "run")
    run.create(Recipe("a.py", flags=begun), ROOT)
    own = str(run.path / "checkpoints")
    assert run.arguments_now() == run.arguments(), "nothing is saved yet"
    _saved(run, 20)
    now = run.arguments_now()
    pairs = dict(itertools.pairwise(now))
    assert pairs["--load"] == pairs["--save"] == own
    assert not set(now) & {"--finetune", "--ckpt-step", "--no-load-optim", "/other/run", "5"}
    assert now[now.index("--data-path") :][:3] == ["--data-path", "a", "b"]
    plain = RunFolder(tmp_path / "plain")
    plain.create(Recipe("a.py", flags={"lr": 1}), ROOT)
    _saved(plain, 20)
    assert plain.arguments_now() == plain.arguments()


@pytest.mark.parametrize("flag", ["exit-interval", "exit-duration-in-mins"])
def test_a_run_that_stopped_before_its_last_step_is_known_by_the_flag_that_stopped_it(
    tmp_path: Path, flag: str
) -> None:
    run = RunFolder(tmp_path / "run")
    run.create(Recipe("a.py", flags={"train-iters": 20, flag: 10}), ROOT)
    _saved(run, 10)
    assert run.stops_early() == f"--{flag}"
    _saved(run, 20)
    assert run.stops_early() is None


def _saved(run: RunFolder, step: int) -> None:
    write_whole(run.path / "checkpoints" / TRACKER, str(step))


@pytest.mark.parametrize("content", ["recipe.yaml", "log.txt", "checkpoints/latest_checkpointed_iteration.txt"])
def test_a_folder_that_is_no_run_is_neither_written_nor_loaded_from(content: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "foreign")
    file = run.path / content
    file.parent.mkdir(parents=True)
    file.write_text("mine\n")
    with pytest.raises(LaunchError, match=r"foreign is not empty and is no run folder: .* Choose a new or an empty"):
        run.create(Recipe("a.py"), ROOT)
    assert file.read_text() == "mine\n"
    assert not run.launch.exists()


def test_a_file_that_cannot_be_written_leaves_nothing_beside(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    for text in ("x", "\ud800"):
        with pytest.raises((OSError, UnicodeEncodeError)):
            write_whole(tmp_path / "there", text)
    assert [path.name for path in tmp_path.iterdir()] == ["there"]


def test_a_creation_that_was_killed_is_done_again(tmp_path: Path) -> None:
    run, recipe = RunFolder(tmp_path / "run"), Recipe("a.py", flags={"lr": 1})
    assert run.create(recipe, ROOT)
    run.launch.unlink()  # written last
    (run.path / ".launch.json.17").write_text("{")
    assert run.create(recipe, ROOT)


def test_rerun_sh_stays_in_its_folder_whatever_its_name_and_refuses_a_copy(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / 'a b\'s "q" $HOME')
    run.create(Recipe("a.py"), ROOT)
    take_snapshot(run, ROOT, "typed", ["printf", "%s\\n"])

    def rerun(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(script), *arguments], capture_output=True, text=True, check=False)

    assert rerun(run.rerun).stdout.splitlines() == [str(run.recipe), "--run-dir", str(run.path)]
    assert rerun(run.rerun, "new one").stdout.splitlines() == [str(run.recipe), "--run-dir", "new one"]
    shutil.copytree(run.path, tmp_path / "copy")
    refused = rerun(tmp_path / "copy" / "rerun.sh")
    assert refused.returncode == 2
    assert not refused.stdout
    assert "was moved or copied" in refused.stderr


def test_names_and_values_that_no_file_can_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    odd = "a\rb\u2028c\x0cd"
    run = RunFolder(tmp_path / "run")
    run.create(Recipe("a.py", flags={"x": odd}), ROOT)
    assert run.value_of("x") == odd
    for folder, value, complaint in (
        (os.fsdecode(b"r\xff"), "1", "the run folder's name is .* no UTF-8"),
        ("r", "a\nb", "a flag's value holds a line break"),
        ("r", os.fsdecode(b"\xff"), "a flag's value is .* no UTF-8"),
        ("r", "a\0b", "holds a zero byte"),
    ):
        with pytest.raises(LaunchError, match=complaint):
            RunFolder(tmp_path / folder).create(Recipe("a.py", flags={"x": value}), ROOT)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bad_limits_and_names_end_a_launch_with_status_2_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = ["prepare", TINY, "--run-dir", str(tmp_path / "run")]
    limits = {"WATCHDOG_SECONDS": "a number of seconds", "WATCHDOG_START_SECONDS": "a number of seconds"}
    limits |= {"LOCK_SECONDS": "a whole number of seconds", "MAX_RESTARTS_WITHOUT_PROGRESS": "a whole number from 1"}
    for name, wanted in limits.items():
        for value in ("-1", "soon", "nan", "inf", "9" * 5000, " "):
            monkeypatch.setenv(name, value)
            assert run_control([*prepare]) == 2
            assert f"{name} is {value!r}, {wanted}" in capsys.readouterr().err
        monkeypatch.delenv(name)
    monkeypatch.setenv("MAX_RESTARTS_WITHOUT_PROGRESS", "0")
    assert run_control([*prepare]) == 2
    assert "MAX_RESTARTS_WITHOUT_PROGRESS is '0', a whole number from 1" in capsys.readouterr().err
    run = RunFolder(tmp_path / "made")
    run.create(Recipe("a.py"), ROOT)
    for command in (["begin", str(run.path)], ["end", str(run.path), "1"]):
        assert run_control(command) == 2, "3 would say that the guard has stopped it"
        assert "a whole number from 1" in capsys.readouterr().err
    monkeypatch.delenv("MAX_RESTARTS_WITHOUT_PROGRESS")
    assert run_control([*prepare[:-1], os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")]) == 2
    assert capsys.readouterr().err.startswith("error: the run folder's name is ")
    assert run_control([*prepare, "--help"]) == 0
    assert "prepare RECIPE" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_a_run_folder_that_cannot_be_made_is_named_with_what_stands_in_its_way(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.write_text("mine\n")
    loop = tmp_path / "loop"
    loop.symlink_to(loop)
    for folder, why in (
        (file, f"{file} is no folder"),
        (file / "x" / "y", f"{file} is no folder"),
        (loop, f"{loop} is no folder"),
        (Path("/proc/x"), "/proc"),
        (tmp_path / "new" / ("x" * 300), "File name too long"),
    ):
        assert run_control(["prepare", TINY, "--run-dir", str(folder)]) == 2
        said = capsys.readouterr().err
        assert said.startswith(f"error: the run folder {folder} cannot be made or written: ")
        assert why in said
        assert "Errno" not in said
        assert said.count("\n") == 1
    assert file.read_text() == "mine\n"
    assert {path.name for path in tmp_path.iterdir()} == {"file", "loop"}, "no part of a path is left behind"
