"""The table of runs tells state, speed and problems from the folders alone, whatever stands in them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from harness_corpus import tool

from megatron.run_control.attempts import begin_attempt, end_attempt
from megatron.run_control.exit_status import BAD_OPTIONS, LOST_PROCESS
from megatron.run_control.progress import find_runs, read_progress
from megatron.run_control.recipes import Recipe
from megatron.run_control.run_folder import TRACKER, RunFolder

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def run(tmp_path: Path) -> RunFolder:
    """A prepared run."""
    folder = RunFolder(tmp_path / "run")
    folder.create(Recipe("pretrain_gpt.py", flags={"seq-length": 32}), ROOT)
    return folder


def _saved(run: RunFolder, step: int) -> None:
    (run.path / "checkpoints").mkdir(exist_ok=True)
    (run.path / "checkpoints" / TRACKER).write_text(str(step))


_STEP = (
    " [2026-01-01] iteration {step:8d}/     100 | consumed samples: 8 | elapsed time per iteration (ms): 500.0 | "
    "global batch size:     8 | lm loss: 4.25E+00 | loss scale: 1.0 |\n"
)


def test_the_table_tells_state_speed_and_problems_from_the_folder_alone(
    run: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    assert read_progress(run.path).state == "prepared"
    begin_attempt(run)
    run.log.write_text(_STEP.format(step=39) + _STEP.format(step=40))
    _saved(run, 25)
    view = read_progress(run.path)
    assert (view.state, view.step, view.steps, view.loss, view.saved_step) == ("running", 40, 100, 4.25, 25)
    assert (view.tokens_per_second, view.seconds_left) == (8 * 32 / 0.5, 30.0)
    attempts = json.loads(run.attempts.read_text())
    attempts[0]["started"] -= 600
    run.attempts.write_text(json.dumps(attempts))
    assert read_progress(run.path).state == "silent"
    end_attempt(run, LOST_PROCESS)
    assert read_progress(run.path).state == "waiting"
    begin_attempt(run)
    end_attempt(run, BAD_OPTIONS)
    assert find_runs([run.path.parent]) == [run.path]
    assert tool("runs").main([str(run.path.parent), "--once"]) == 0
    out = capsys.readouterr().out
    assert "stopped" in out
    assert "another start cannot mend" in " ".join(out.split())


@pytest.mark.parametrize("shown", ["NAN", "INF", "-INF", "nan"])
def test_a_loss_that_is_not_finite_is_a_problem_in_every_state(run: RunFolder, shown: str) -> None:
    begin_attempt(run)
    run.log.write_text(_STEP.format(step=39) + _STEP.format(step=40).replace("4.25E+00", shown))
    for state in ("running", "finished"):
        view = read_progress(run.path)
        assert view.state == state
        assert f"the loss is not finite ({float(shown)}) at step 40" in (view.problem or "")
        end_attempt(run, 0)


def test_steps_and_validations_that_are_not_finite_are_problems(run: RunFolder) -> None:
    begin_attempt(run)
    counted = "loss scale: 1.0 | number of nan iterations:   {} |"
    # Upstream leaves a mean that is NaN out of the line.
    line = _STEP.format(step=40)
    run.log.write_text(line.replace("lm loss: 4.25E+00 | ", "").replace("loss scale: 1.0 |", counted.format(3)))
    view = read_progress(run.path)
    assert view.loss != view.loss
    assert view.problem == "the loss is not finite (nan) at step 40"
    run.log.write_text(line.replace("loss scale: 1.0 |", counted.format(3)))
    assert read_progress(run.path).problem == "3 of the steps up to 40 had a loss that is NaN"
    run.log.write_text(
        line.replace("loss scale: 1.0 |", counted.format(0))
        + " validation loss at iteration 40 on validation set | lm loss value: NAN | lm loss PPL: NAN |\n"
    )
    assert read_progress(run.path).problem == "the validation loss is not finite (nan) at step 40"
    run.log.write_text(line)
    assert read_progress(run.path).problem is None


_DEEP = b"[" * 100_000
_ATTEMPT = '{"number": 1, "started": %s, "step_at_start": %s, "host": "a", "job": %s}'
_ATTEMPTS = [
    f"[{_ATTEMPT % values}]".encode()
    for values in (("NaN", 0, "null"), ("1e999", 0, "null"), ("1" * 400, 0, "null"), (1, "9" * 5000, "null"), (1, 0, 3))
]
_SETTINGS = [
    b'{"script": "a.py", "processes": "1", "environment": {}}',
    b'{"script": "a.py", "processes": 1, "environment": []}',
    b'{"script": "a.py", "processes": 1, "environment": {"A": 1}}',
    b'{"script": "a.py", "processes": 1, "environment": {}, "folder": 3}',
]
_DAMAGES: dict[str, list[bytes | None]] = {
    "attempts.json": [b"[{", b"{}", b'[{"number": 1}]', b"\xff", _DEEP, *_ATTEMPTS],
    "launch.json": [b"", b"{}", _DEEP, b'{"script": 3, "processes": 1, "environment": {}}', *_SETTINGS],
    "flags.txt": [None, b"\xff\n"],
}


@pytest.mark.parametrize(("name", "content"), [(n, content) for n, found in _DAMAGES.items() for content in found])
def test_a_damaged_run_is_a_row_that_says_what_is_damaged_and_the_others_are_shown(
    run: RunFolder, name: str, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    other = RunFolder(run.path.parent / "other")
    other.create(Recipe("pretrain_gpt.py"), ROOT)
    begin_attempt(run)
    file = run.path / name
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content)
    assert tool("runs").main([str(run.path.parent), "--once"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert "run damaged" in out
    assert "is damaged" in (problem := read_progress(run.path).problem or "")
    assert name in problem
    assert "other prepared" in out


_LONG = "9" * 5000
_LOGS = [
    _STEP.format(step=40).replace("500.0", "1.2.3"),
    _STEP.format(step=40).replace("500.0", _LONG),
    _STEP.format(step=40).replace("      40", _LONG),
    _STEP.format(step=40).replace("     100", _LONG),
    _STEP.format(step=40).replace("size:     8", f"size: {_LONG}"),
]


@pytest.mark.parametrize("line", _LOGS)
def test_a_bad_line_of_the_log_is_a_problem_that_names_the_file_and_no_other_state(
    run: RunFolder, line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_attempt(run)
    run.log.write_text(_STEP.format(step=39) + line)
    for state in ("running", "finished"):
        view = read_progress(run.path)
        assert (view.state, view.step) == (state, None), "nothing of a line that cannot be read is shown"
        assert f"{run.log} is damaged: " in (view.problem or "")
        assert len(view.problem or "") < 400, "not the whole of it"
        assert tool("runs").main([str(run.path), "--once"]) == 0
        assert state in capsys.readouterr().out
        end_attempt(run, 0)


def test_what_does_not_decide_about_the_run_is_a_problem_beside_its_state(run: RunFolder) -> None:
    begin_attempt(run)
    end_attempt(run, 0)
    tracker = run.path / "checkpoints" / TRACKER
    tracker.parent.mkdir()
    for content in ("x", _LONG, ""):
        tracker.write_text(content)
        view = read_progress(run.path)
        assert (view.state, view.saved_step) == ("finished", None)
        assert f"{tracker} is damaged: " in (view.problem or "")
    tracker.write_text("release")
    assert read_progress(run.path).problem is None
    tracker.unlink()
    for folder in (tracker, run.log):
        folder.mkdir()
        view = read_progress(run.path)
        assert view.state == "finished"
        assert f"{folder} cannot be read: Is a directory" in (view.problem or "")


def test_a_reason_reaches_the_terminal_as_text(run: RunFolder) -> None:
    begin_attempt(run)
    end_attempt(run, BAD_OPTIONS)
    attempts = json.loads(run.attempts.read_text())
    attempts[0]["reason"] = "\x1b[2J\ud800 é"
    run.attempts.write_text(json.dumps(attempts))
    assert read_progress(run.path).problem == "\\x1b[2J\\ud800 é"


_OTHERS = (
    *("compare_runs", "checkpoint/convert", "generate", "plot_streams", "preprocess_data"),
    *("report_stream_memory", "train_tokenizer"),
    *("benchmark_convert", "benchmark_streams"),
)


def _tools(run: RunFolder) -> list[list[str]]:
    """A command of every tool that prints through run_tool."""
    ablation = run.path.parent / "trial.yaml"
    base = f"base: {ROOT}/scripts/recipes/tiny-gpt.yaml\nfolder: {run.path.parent}/runs\n"
    ablation.write_text(f"{base}axes: {{streams: 1}}\nseeds: [1]\n")
    return [
        ["runs.py", str(run.path.parent), "--once"],
        ["recipe_flags.py", "scripts/recipes/tiny-gpt.yaml"],
        ["ablate.py", "report", str(ablation)],
        *([f"{name}.py", "--help"] for name in _OTHERS),
    ]


@pytest.mark.parametrize(
    ("redirection", "reason"), [(">/dev/full", "No space left on device"), (">&-", "it is closed"), (">&- 2>&-", "")]
)
@pytest.mark.parametrize("python", ["", "-u"])
def test_an_output_that_cannot_be_written_is_one_line_and_status_2(
    run: RunFolder, redirection: str, reason: str, python: str
) -> None:
    for command in _tools(run):
        line = f'exec "$0" {python} "tools/$1" "${{@:2}}" {redirection}'
        done = subprocess.run(
            ["bash", "-c", line, sys.executable, *command], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert done.returncode == 2, command
        said = done.stderr.splitlines()
        wanted = [f"error: standard output cannot be written: {reason}. Send it to a file or to /dev/null"]
        assert said[-1:] == (wanted if reason else []), command
        assert "Traceback" not in done.stderr
        assert "Exception ignored" not in done.stderr


def test_a_reader_that_goes_away_ends_a_tool_quietly(run: RunFolder) -> None:
    folder = run.path.parent / os.fsdecode(b"not-\xff-utf8")
    run.path.rename(folder)
    for command in _tools(run):
        with subprocess.Popen(
            [sys.executable, f"tools/{command[0]}", *command[1:]],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            said = process.stderr.read()
        assert process.returncode == 1, command
        for noise in ("Traceback", "Broken pipe", "Exception ignored"):
            assert noise not in said, f"{command}: {said}"
    assert (run.path.parent / "runs" / "report" / "report.md").exists(), "what was written before stays"
    shown = read_progress(folder)
    assert shown.name == "not-\\xff-utf8"


def test_a_place_without_runs_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert tool("runs").main([str(tmp_path)]) == 2
    assert "a run has a launch.json" in capsys.readouterr().err
    assert tool("runs").main(["no\nwhere"]) == 2
    assert capsys.readouterr().err == "error: no run in no\\nwhere: a run has a launch.json\n"
    for wrong in ([""], *(["--every", seconds] for seconds in ("nan", "inf", "0", "-1", "86401", "soon"))):
        with pytest.raises(SystemExit) as ended:
            tool("runs").main(wrong)
        assert ended.value.code == 2
        assert wrong[-1][:3] in capsys.readouterr().err, "the error names what was found"


def test_one_absent_place_among_others_is_an_error(run: RunFolder, capsys: pytest.CaptureFixture[str]) -> None:
    absent = run.path / "absent"
    assert tool("runs").main([str(run.path), str(absent), "--once"]) == 2
    assert capsys.readouterr().err == f"error: {absent}: there is no such folder\n"
