"""tools/ablate.py run, killed twice and started again, gives the report of an ablation that was left in peace.

Two runs (ordinary, two streams) are trained once undisturbed. Then the same again: the tool alone is killed while its
first launch starts, so that the next `run` finds a launch at work; everything is killed at a random step of the second
run; a third `run` finishes.
"""

from __future__ import annotations

import contextlib
import csv
import io
import json
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest
from harness_corpus import tool
from harness_scripts import needs_own_venv, run_script, script_environment

ROOT = Path(__file__).resolve().parents[1]
STEPS = 120
YAML = f"""base: {ROOT}/scripts/recipes/tiny-gpt.yaml
processes: 1
folder: FOLDER
flags: {{train-iters: {STEPS}, save-interval: 20, eval-interval: 50, eval-iters: 2}}
axes: {{streams: [1, 2]}}
seeds: [1]
"""
FIRST, SECOND = "ordinary-seed-1", "streams-2-seed-1"
_STEP_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|")

pytestmark = needs_own_venv


@dataclass
class Trial:
    """An ablation of two runs in a folder of its own."""

    file: Path
    runs: Path

    def attempts(self, run: str) -> list[dict]:
        file = self.runs / run / "attempts.json"
        return json.loads(file.read_text()) if file.exists() else []

    def step(self, run: str) -> int:
        log = self.runs / run / "log.txt"
        steps = _STEP_LINE.findall(log.read_text()) if log.exists() else []
        return int(steps[-1]) if steps else 0

    def run(self) -> subprocess.CompletedProcess:
        return run_script(sys.executable, "tools/ablate.py", "run", str(self.file))

    def report(self) -> tuple[int, str]:
        """Write the report, in this process (a start costs seconds of imports); returns the status and what it said."""
        said = io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            status = tool("ablate").main(["report", str(self.file)])
        return status, said.getvalue()

    def results(self) -> dict[str, dict[str, str]]:
        """results.csv of a report, by run, without what depends on the machine's load."""
        rows = csv.DictReader((self.runs / "report" / "results.csv").open())
        by_load = ("tokens_per_second", "peak_memory_bytes")
        return {row["run"]: {name: value for name, value in row.items() if name not in by_load} for row in rows}


def _trial(folder: Path) -> Trial:
    (folder / "trial.yaml").write_text(YAML.replace("FOLDER", str(folder / "runs")))
    return Trial(folder / "trial.yaml", folder / "runs")


def _start(trial: Trial, log: Path) -> subprocess.Popen:
    with log.open("w") as out:
        command = [sys.executable, "tools/ablate.py", "run", str(trial.file)]
        return subprocess.Popen(
            command, cwd=ROOT, env=script_environment(), stdin=subprocess.DEVNULL, stdout=out, stderr=out
        )


def _wait_for(condition: Callable[[], bool], process: subprocess.Popen, log: Path, what: str) -> None:
    deadline = time.monotonic() + 400
    while not condition():
        assert process.poll() is None, f"it ended before {what}:\n{log.read_text()[-4000:]}"
        assert time.monotonic() < deadline, f"waited 400 s for {what}:\n{log.read_text()[-4000:]}"
        time.sleep(0.05)


def _kill_all(process: subprocess.Popen) -> None:
    """SIGKILL to the tool and everything below it; parents first, so that none starts anything again."""
    parent = psutil.Process(process.pid)
    for member in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()
    process.wait()


@pytest.fixture(scope="module")
def peaceful(tmp_path_factory: pytest.TempPathFactory) -> Trial:
    """The undisturbed ablation and its report."""
    trial = _trial(tmp_path_factory.mktemp("peace"))
    done = trial.run()
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    status, said = trial.report()
    assert status == 0, said
    return trial


@dataclass
class HardLife:
    """The disturbed ablation, and what its second and third `run` said."""

    trial: Trial
    unfinished: tuple[int, str]
    second: str
    third: subprocess.CompletedProcess


@pytest.fixture(scope="module")
def hard_life(tmp_path_factory: pytest.TempPathFactory) -> HardLife:
    """Kill the tool alone, start it again, kill everything at a random step, start it again."""
    folder = tmp_path_factory.mktemp("hard")
    trial, log = _trial(folder), folder / "out.txt"
    process = _start(trial, log)
    _wait_for(lambda: bool(trial.attempts(FIRST)), process, log, "the first launch")
    process.kill()  # its launch is a session of its own and goes on
    process.wait()
    process, log = _start(trial, folder / "again.txt"), folder / "again.txt"
    step = random.randint(1, 30)
    _wait_for(lambda: trial.step(SECOND) >= step, process, log, f"step {step} of the second run")
    _kill_all(process)
    unfinished = trial.report()
    third = trial.run()
    return HardLife(trial, unfinished, log.read_text(), third)


def test_an_interrupted_ablation_gives_the_report_of_an_undisturbed_one(hard_life: HardLife, peaceful: Trial) -> None:
    assert hard_life.third.returncode == 0, hard_life.third.stdout[-4000:] + hard_life.third.stderr[-4000:]
    assert len(hard_life.trial.attempts(SECOND)) == 2, "the second run was not interrupted"
    status, said = hard_life.trial.report()
    assert status == 0, said
    assert hard_life.trial.results() == peaceful.results()
    assert float(peaceful.results()[SECOND]["validation_loss"]) > 0


def test_a_launch_that_outlived_the_tool_is_waited_for_and_not_doubled(hard_life: HardLife) -> None:
    assert f"{FIRST}: an earlier launch is still at work, waiting for it" in hard_life.second
    assert [attempt["status"] for attempt in hard_life.trial.attempts(FIRST)] == [0]


def test_a_report_of_an_unfinished_ablation_names_the_run_and_fails(hard_life: HardLife) -> None:
    assert hard_life.unfinished[0] == 1
    assert f"not in the report: {SECOND} (interrupted)" in hard_life.unfinished[1]


def test_a_finished_ablation_is_not_run_again(peaceful: Trial) -> None:
    before = {file: file.stat().st_mtime_ns for file in peaceful.runs.rglob("*") if "locks" not in str(file)}
    done = peaceful.run()
    assert done.returncode == 0
    assert "2 of 2 runs are finished, 0 to do" in done.stdout
    after = {file: file.stat().st_mtime_ns for file in peaceful.runs.rglob("*") if "locks" not in str(file)}
    assert after == before


def test_the_plan_says_the_parameters_that_the_runs_logged_and_their_time(peaceful: Trial) -> None:
    done = run_script(sys.executable, "tools/ablate.py", "plan", str(peaceful.file), "--flags")
    assert done.returncode == 0, done.stderr
    for row in peaceful.results().values():
        parameters = f"{int(row['parameters']):,}"
        if row["controller_parameters"] != "0":
            parameters += f" + {row['controller_parameters']}"
        line = next(text for text in done.stdout.splitlines() if text.split()[:1] == [row["variant"]])
        assert re.search(rf" {re.escape(parameters)} .* \d+ s +1/1", line), f"{parameters} is not in {line}"
    assert f"{2 * STEPS * 8 * 32:,} tokens" in done.stdout
    assert "ordinary: pretrain_gpt.py --" in done.stdout


def test_a_changed_yaml_is_refused_by_name(peaceful: Trial, tmp_path: Path) -> None:
    changed = tmp_path / "trial.yaml"
    changed.write_text(peaceful.file.read_text().replace("save-interval: 20", "save-interval: 30"))
    done = run_script(sys.executable, "tools/ablate.py", "run", str(changed))
    assert done.returncode == 2
    assert f"{peaceful.runs / FIRST} was launched with --save-interval 20; it says --save-interval 30" in done.stderr
