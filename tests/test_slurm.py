"""On a real Slurm: a run that is preempted, loses ranks and hangs ends like one that was left in peace.

One job of two nodes, one process each, is preempted at a random step, loses a random rank five times in a row, and has
a rank stopped; each time it requeues itself and goes on. What it computed is compared with the same recipe run by
scripts/launch.sh. Skipped, with the reason, only where Slurm cannot be installed.
"""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness_pretrain import exact_losses
from harness_scripts import needs_own_venv, run_script
from harness_slurm import Cluster, slurm_cluster, why_no_slurm

from megatron.run_control.exit_status import BAD_OPTIONS, HUNG, LOST_PROCESS, SAVED_ON_REQUEST

STEPS = 260
SAVE_INTERVAL = 8
KILLS = 5
RECIPE = "scripts/recipes/tiny-gpt.yaml"
FLAGS = ["--train-iters", str(STEPS), "--save-interval", str(SAVE_INTERVAL), "--wandb-project", "tests"]
_STEP_LINE = re.compile(r"iteration +(\d+)/ *\d+ \|")

pytestmark = needs_own_venv


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    """The two nodes."""
    if (reason := why_no_slurm()) is not None:
        pytest.skip(f"no Slurm here: {reason}")
    # Short, because the path of a socket may have 107 characters.
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))
    try:
        with slurm_cluster(folder) as running:
            yield running
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@dataclass
class HardLife:
    """The job that was disturbed."""

    job: str
    cluster: Cluster
    folder: Path

    def attempts(self) -> list[dict]:
        file = self.folder / "attempts.json"
        return json.loads(file.read_text()) if file.exists() else []

    def steps(self) -> list[list[int]]:
        """The steps that were logged, for every attempt."""
        file = self.folder / "log.txt"
        parts = re.split(r"launch: attempt \d+ of .*\n", file.read_text() if file.exists() else "")
        return [[int(step) for step in _STEP_LINE.findall(part)] for part in parts[1:]]

    def pid(self, rank: int) -> int:
        return json.loads((self.folder / "heartbeats" / f"rank-{rank}.json").read_text())["pid"]

    def wait_for_steps(self, attempt: int, count: int) -> None:
        def enough() -> bool:
            steps = self.steps()
            return len(steps) >= attempt and len(steps[attempt - 1]) >= count

        self.cluster.wait_for(self.job, enough, f"{count} steps of attempt {attempt}")


@pytest.fixture(scope="module")
def hard_life(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> HardLife:
    """Submit, preempt, kill a rank five times, stop a rank, let it finish."""
    folder = tmp_path_factory.mktemp("hard") / "run"
    arguments = ["--nodes=2", "scripts/slurm/pretrain_gpt.sbatch", RECIPE, "--run-dir", str(folder), "--processes", "1"]
    job = cluster.sbatch([*arguments, *FLAGS], OMP_NUM_THREADS="1", WATCHDOG_SECONDS="45")
    life = HardLife(job, cluster, folder)
    life.wait_for_steps(1, random.randint(1, 30))
    cluster.run("scancel", "--batch", "--signal=USR2", job)
    for attempt in range(2, 2 + KILLS):
        # Past a checkpoint of this attempt: without progress the guard would stop the job at the third kill.
        life.wait_for_steps(attempt, random.randint(2 * SAVE_INTERVAL, 3 * SAVE_INTERVAL))
        os.kill(life.pid(random.randint(0, 1)), signal.SIGKILL)
    life.wait_for_steps(2 + KILLS, random.randint(1, 30))
    os.kill(life.pid(0), signal.SIGSTOP)
    cluster.wait_for(job, lambda: cluster.job(job)["JobState"] == "COMPLETED", "its end")
    return life


def _all_losses(run: Path) -> dict[int, float]:
    return exact_losses(run / "tensorboard")


def test_the_job_requeued_itself_each_time_and_says_why(hard_life: HardLife) -> None:
    attempts = hard_life.attempts()
    expected = [SAVED_ON_REQUEST, *[LOST_PROCESS] * KILLS, HUNG, 0]
    assert [attempt["status"] for attempt in attempts] == expected
    for attempt in attempts[1 : 1 + KILLS]:
        assert "was killed by SIGKILL" in attempt["reason"]
    assert "hung: rank" in attempts[1 + KILLS]["reason"]
    assert hard_life.cluster.job(hard_life.job)["Restarts"] == str(2 + KILLS)
    for attempt in attempts[:-1]:
        assert attempt["reason"] in hard_life.cluster.output(hard_life.job)


def test_its_losses_are_bit_equal_to_those_of_an_undisturbed_run(hard_life: HardLife, tmp_path: Path) -> None:
    done = run_script("scripts/launch.sh", RECIPE, "--run-dir", str(tmp_path / "peace"), *FLAGS, OMP_NUM_THREADS="1")
    assert done.returncode == 0, done.stderr[-4000:]
    expected = _all_losses(tmp_path / "peace")
    assert sorted(expected) == list(range(1, STEPS + 1)), "the undisturbed run did not log every step"
    assert _all_losses(hard_life.folder) == expected


def test_a_preempted_run_does_no_step_twice_and_leaves_none_out(hard_life: HardLife) -> None:
    steps, attempts = hard_life.steps(), hard_life.attempts()
    assert attempts[0]["step_at_end"] == steps[0][-1], "it did not save the step at which it left"
    assert steps[0] + steps[1] == list(range(1, steps[1][-1] + 1))
    for number in range(2, len(attempts)):
        assert steps[number][0] == attempts[number]["step_at_start"] + 1, "a lost run goes on after its last checkpoint"
        lost = steps[number - 1][-1] - attempts[number]["step_at_start"]
        assert 0 <= lost <= SAVE_INTERVAL + 1, f"start {number + 1} repeats {lost} steps"
    assert steps[-1][-1] == STEPS


def test_all_starts_belong_to_one_wandb_run(hard_life: HardLife) -> None:
    identity = (hard_life.folder / "checkpoints" / "wandb_run_id.txt").read_text().strip()
    runs = [path.name for path in (hard_life.folder / "wandb").glob("offline-run-*")]
    assert len(runs) == 3 + KILLS, f"{3 + KILLS} starts, one folder each: {runs}"
    assert all(name.endswith(f"-{identity}") for name in runs), f"{runs} are not all of run {identity}"


def test_a_hung_run_leaves_the_stacks_of_all_ranks(hard_life: HardLife) -> None:
    for rank in (0, 1):
        stacks = (hard_life.folder / "stacks" / f"attempt-{2 + KILLS}-rank-{rank}.txt").read_text()
        assert "train_step" in stacks or "training.py" in stacks, f"rank {rank} does not say where it stood:\n{stacks}"


def test_the_run_folder_keeps_what_a_rerun_needs(hard_life: HardLife) -> None:
    assert " --nodes=2 " in (hard_life.folder / "rerun.sh").read_text()
    assert f"JobId={hard_life.job} " in (hard_life.folder / "snapshot" / "job.txt").read_text()
    assert "--train-iters" in (hard_life.folder / "flags.txt").read_text()
    assert "SLURM_JOB_ID=" in (hard_life.folder / "snapshot" / "environment.txt").read_text()


def test_a_job_converts_and_inspects_the_checkpoint(hard_life: HardLife, tmp_path: Path) -> None:
    checkpoints, wide = str(hard_life.folder / "checkpoints"), str(tmp_path / "wide")
    assert _inspected(hard_life.cluster, checkpoints)["iteration"] == STEPS
    command = ["widen", "--input", checkpoints, "--output", wide, "--num-streams", "4", "--verify"]
    assert "the same function" in _converted(hard_life.cluster, *command)
    assert _inspected(hard_life.cluster, wide)["streams"]["num_streams"] == 4


def _inspected(cluster: Cluster, folder: str) -> dict:
    output = _converted(cluster, "inspect", "--input", folder, "--json")
    return json.loads(next(line for line in output.splitlines() if line.startswith("{")))


def _converted(cluster: Cluster, *arguments: str) -> str:
    """Run convert.sbatch to its end; returns what the tool printed."""
    job = cluster.sbatch(["scripts/slurm/convert.sbatch", *arguments])
    cluster.wait_for(job, lambda: cluster.job(job)["JobState"] == "COMPLETED", "its end")
    return cluster.output(job)


def test_the_hybrid_recipe_trains_as_a_job_of_two_tasks(cluster: Cluster, tmp_path: Path) -> None:
    run = tmp_path / "hybrid"
    options = ["--account=physics", "--gres=craft:1", "--comment=two words", "--cpus-per-task=2", "--mem=1M"]
    job = cluster.sbatch(
        [
            *options,
            *("--nodes=2", "scripts/slurm/pretrain_mamba.sbatch", "scripts/recipes/tiny-hybrid.yaml"),
            *("--run-dir", str(run), "--processes", "1", "--train-iters", "3"),
        ],
        OMP_NUM_THREADS="1",
    )
    cluster.wait_for(job, lambda: cluster.job(job)["JobState"] == "COMPLETED", "its end")
    assert [attempt["status"] for attempt in json.loads((run / "attempts.json").read_text())] == [0]
    assert sorted(_all_losses(run)) == [1, 2, 3]
    _check_rerun(cluster, run, [*options, "--nodes=2", "--time=00:20:00", "--partition=all"])


def _check_rerun(cluster: Cluster, run: Path, options: list[str]) -> None:
    """rerun.sh submits the job with these options, and this Slurm takes them: versions show gres in different forms."""
    script = (run / "rerun.sh").read_text()
    command = shlex.split(script.splitlines()[-1])
    assert command[:2] == ["exec", "sbatch"]
    assert set(options) <= set(command), f"lost: {set(options) - set(command)}"
    assert "scripts/slurm/pretrain_mamba.sbatch" in command
    only_tested = run / "rerun-tested.sh"  # beside it: a rerun.sh refuses to run from another folder
    only_tested.write_text(script.replace("exec sbatch", "exec sbatch --test-only"))
    cluster.run("bash", str(only_tested))


# A trainer that fails with a given status; one that waits to be asked to save, and is done at its second start.
_FAILS = "import sys\nsys.exit(int(sys.argv[sys.argv.index('--seed') + 1]))\n"
_WAITS = """
import signal, sys
from pathlib import Path
tracker = Path(sys.argv[sys.argv.index("--save") + 1]) / "latest_checkpointed_iteration.txt"
if not tracker.exists():
    print("waiting", flush=True)
    signal.sigwait({signal.SIGUSR2})
    tracker.parent.mkdir()
    tracker.write_text("1")
    sys.exit(75)
"""


@dataclass
class SmallJobs:
    """Elements of job arrays (sweep.sbatch) that train nothing, and their run folders, by name."""

    cluster: Cluster
    folder: Path
    jobs: dict[str, str]

    def log(self, name: str) -> str:
        file = self.folder / name / "log.txt"
        return file.read_text() if file.exists() else ""

    def statuses(self, name: str) -> list[int]:
        return [attempt["status"] for attempt in json.loads((self.folder / name / "attempts.json").read_text())]


@pytest.fixture(scope="module")
def small_jobs(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> SmallJobs:
    """Side by side: one that always fails, one with wrong options, one whose time ends, one that is cancelled."""
    folder = tmp_path_factory.mktemp("small")
    for name, text in (("fails", _FAILS), ("waits", _WAITS)):
        (folder / f"{name}.py").write_text(text)
        (folder / f"{name}.yaml").write_text(f"script: {folder}/{name}.py\nflags: {{seed: 7}}\n")
    lines = {
        "guarded": f"{folder}/fails.yaml",
        "wrong": f"{folder}/fails.yaml --seed {BAD_OPTIONS}",
        "timed": f"{folder}/waits.yaml",
        "cancelled": f"{folder}/waits.yaml",
    }
    small = SmallJobs(cluster, folder, {})
    for name, line in lines.items():
        file = folder / f"{name}.txt"
        file.write_text(f"# one launch\n{line} --run-dir '{folder / name}'\n")
        # The shortest time limit there is, with 50 s of notice: it comes about 25 s after the start.
        time_limit = ["--time=1", "--signal=B:USR2@50"] if name == "timed" else []
        small.jobs[name] = cluster.sbatch(["--array=1", *time_limit, "scripts/slurm/sweep.sbatch", str(file)]) + "_1"
    cluster.wait_for(small.jobs["cancelled"], lambda: "waiting" in small.log("cancelled"), "its trainer")
    cluster.run("scancel", small.jobs["cancelled"])
    ends = {"guarded": "FAILED", "wrong": "FAILED", "timed": "COMPLETED", "cancelled": "CANCELLED"}
    for name, state in ends.items():
        job = small.jobs[name]
        cluster.wait_for(job, lambda job=job, state=state: cluster.job(job)["JobState"] == state, f"{name} is {state}")
    return small


def test_a_run_that_dies_at_its_start_three_times_is_stopped_and_says_why(small_jobs: SmallJobs) -> None:
    assert small_jobs.statuses("guarded") == [7, 7, 7]
    log = small_jobs.log("guarded")
    assert "3 attempts in a row ended without a new checkpoint (still at step 0)" in log
    assert log.count("requeueing job") == 2


def test_a_run_whose_options_are_wrong_is_not_started_again(small_jobs: SmallJobs) -> None:
    assert small_jobs.statuses("wrong") == [BAD_OPTIONS]
    assert "another start cannot mend that" in small_jobs.log("wrong")


def test_a_job_whose_time_ends_saves_and_goes_on(small_jobs: SmallJobs) -> None:
    assert small_jobs.statuses("timed") == [SAVED_ON_REQUEST, 0]
    assert small_jobs.cluster.job(small_jobs.jobs["timed"])["Restarts"] == "1"


def test_a_cancelled_job_stays_cancelled(small_jobs: SmallJobs) -> None:
    assert len(small_jobs.statuses("cancelled")) == 1
    assert "not started again, because it was cancelled" in small_jobs.log("cancelled")


def test_a_misspelt_flag_ends_the_job_before_anything_starts(cluster: Cluster, tmp_path: Path) -> None:
    job = cluster.sbatch(
        ["scripts/slurm/pretrain_gpt.sbatch", RECIPE, "--run-dir", str(tmp_path / "run"), "--lrr", "1"]
    )
    cluster.wait_for(job, lambda: cluster.job(job)["JobState"] == "FAILED", "its end")
    assert "error: --lrr: the training scripts have no such flag; nearest: lr" in cluster.output(job)
    assert not (tmp_path / "run").exists()
    wrong = cluster.sbatch(["scripts/slurm/pretrain_mamba.sbatch", RECIPE])
    cluster.wait_for(wrong, lambda: cluster.job(wrong)["JobState"] == "FAILED", "its end")
    assert "is a recipe for pretrain_gpt.py" in cluster.output(wrong)
