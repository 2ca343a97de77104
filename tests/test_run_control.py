"""What decides about restarts, snapshots, heartbeats and the wandb run, each in this process."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron.run_control.attempts import begin_attempt, end_attempt, read_attempts, write_outcome
from megatron.run_control.errors import LaunchError
from megatron.run_control.exit_status import BAD_OPTIONS, HUNG, LOST_PROCESS, SAVED_ON_REQUEST, STOPPED_EARLY
from megatron.run_control.node_agent import end_earlier, end_leftovers, script_arguments_now
from megatron.run_control.progress import read_progress
from megatron.run_control.recipes import Recipe
from megatron.run_control.resubmission import resubmission
from megatron.run_control.run_folder import TRACKER, RunFolder
from megatron.run_control.snapshot import kept_variables, take_snapshot
from megatron.run_control.wandb_identity import WandbPlace, check_run_id, use_stable_run_id
from megatron.run_control.watchdog import Watchdog

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


def test_three_attempts_in_a_row_without_a_checkpoint_stop_the_run_and_say_why(run: RunFolder) -> None:
    for _ in range(2):
        begin_attempt(run)
        assert end_attempt(run, 1).again
    begin_attempt(run)
    decision = end_attempt(run, LOST_PROCESS)
    assert not decision.again
    assert "3 attempts in a row ended without a new checkpoint (still at step 0)" in decision.reason
    assert "failed with exit status 1" in decision.reason
    with pytest.raises(LaunchError, match="not started: 3 attempts in a row"):
        begin_attempt(run)
    assert begin_attempt(run, reset=True) == 4


def test_a_new_checkpoint_starts_the_count_afresh(run: RunFolder) -> None:
    for step in (0, 10, 20, 30, 40):
        _saved(run, step)
        begin_attempt(run)
        if step != 40:
            _saved(run, step + 10)
        assert end_attempt(run, 1).again, f"stopped although step {step} had been reached"


def test_a_job_that_ended_without_a_word_counts(run: RunFolder) -> None:
    for _ in range(3):
        begin_attempt(run)
    with pytest.raises(LaunchError, match="ended without a word"):
        begin_attempt(run)


def test_where_a_run_begins_holds_until_an_attempt_has_saved(tmp_path: Path) -> None:
    """Here it begins from an older step of the folder that it saves into."""
    run = RunFolder(tmp_path / "run")
    run.create(Recipe("pretrain_gpt.py", flags={"ckpt-step": 5}), ROOT)
    _saved(run, 20)
    for _ in range(2):
        begin_attempt(run)
        assert "--ckpt-step" in script_arguments_now(run), "nothing of its own is saved yet"
        assert end_attempt(run, 1).again
    begin_attempt(run)
    _saved(run, 10)
    assert end_attempt(run, 1).again
    begin_attempt(run)
    assert "--ckpt-step" not in script_arguments_now(run), "it would begin at step 5 again"


@pytest.mark.parametrize(("status", "reason"), [(0, "finished"), (LOST_PROCESS, "rank 0 was killed by SIGKILL")])
def test_an_end_that_only_the_node_has_recorded_is_known(run: RunFolder, status: int, reason: str) -> None:
    """The launcher was killed, its trainers went on to their end."""
    begin_attempt(run)
    write_outcome(run, 1, 0, status, reason)
    view = read_progress(run.path)
    assert view.state == ("finished" if status == 0 else "silent")
    assert status == 0 or (view.problem is not None and reason in view.problem)
    begin_attempt(run)
    assert (read_attempts(run)[0].status, read_attempts(run)[0].reason) == (status, reason)


def test_a_run_that_stopped_itself_is_neither_finished_nor_started_again(run: RunFolder) -> None:
    begin_attempt(run)
    write_outcome(run, 1, 0, STOPPED_EARLY, "stopped by --exit-interval at step 10 of 20")
    decision = end_attempt(run, STOPPED_EARLY)
    assert (decision.again, decision.status) == (False, STOPPED_EARLY)
    assert decision.reason.startswith("stopped by --exit-interval at step 10 of 20; goes on with ")
    assert read_progress(run.path).state == "stopped"


def test_bad_options_and_a_cancelled_job_are_not_started_again(run: RunFolder) -> None:
    begin_attempt(run)
    decision = end_attempt(run, BAD_OPTIONS)
    assert (decision.again, decision.status) == (False, 2)
    begin_attempt(run)
    assert not end_attempt(run, 143, cancelled=True).again
    begin_attempt(run)
    _saved(run, 5)
    assert end_attempt(run, SAVED_ON_REQUEST).again


def test_the_node_that_ended_first_says_why(run: RunFolder) -> None:
    number = begin_attempt(run)
    write_outcome(run, number, 1, HUNG, "hung: rank 3")
    time.sleep(0.01)
    write_outcome(run, number, 0, LOST_PROCESS, "killed by the step's end")
    assert end_attempt(run, 137).reason == "hung: rank 3; goes on from step 0"
    assert read_attempts(run)[-1].status == HUNG


_NO_OUTCOMES = ["[" * 100_000, "[]", "{}", '{"time": 1, "status": "x", "reason": "y"}', "{"]


@pytest.mark.parametrize("content", _NO_OUTCOMES)
def test_a_damaged_outcome_is_said_and_keeps_no_end_from_being_written(
    run: RunFolder, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    begin_attempt(run)
    run.outcomes.mkdir()
    (run.outcomes / "attempt-1-node-0.json").write_text(content)
    assert end_attempt(run, LOST_PROCESS).again
    assert read_attempts(run)[0].status == LOST_PROCESS
    assert "attempt-1-node-0.json is damaged" in capsys.readouterr().err


def test_a_damaged_heartbeat_does_not_end_the_watchdog(run: RunFolder) -> None:
    run.heartbeats.mkdir()
    for number, content in enumerate(("[" * 100_000, "[]", "{", "3")):
        (run.heartbeats / f"rank-{number}.json").write_text(content)
    assert Watchdog(run, 1, 9.0, 9.0, lambda: [1])._ranks() == {}


def test_a_damaged_tracker_is_no_progress(run: RunFolder) -> None:
    (run.path / "checkpoints").mkdir()
    for content in (b"9" * 5000, b"\xff", b"-3", b""):
        (run.path / "checkpoints" / TRACKER).write_bytes(content)
        assert run.step() == 0, content[:9]


def test_a_command_that_a_message_suggests_can_be_typed(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "a b's $HOME")
    recipe = Recipe("pretrain_gpt.py", flags={"seq-length": 32})
    run.create(recipe, ROOT)
    for _ in range(2):
        begin_attempt(run)
        decision = end_attempt(run, LOST_PROCESS, limit=2)
    assert decision.reason.endswith(shlex.join(["RESET_GUARD=1", str(run.rerun)]))
    with pytest.raises(LaunchError) as error:
        run.create(Recipe("pretrain_gpt.py"), ROOT)
    assert f"with {shlex.quote(str(run.rerun))}, or" in str(error.value)


def test_the_snapshot_holds_what_a_rerun_needs_and_no_secret(run: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "s3cret")
    monkeypatch.setenv("NCCL_DEBUG", "WARN")
    take_snapshot(run, ROOT, "scripts/launch.sh 'a b'", ["scripts/launch.sh"])
    kept = "".join(file.read_text() for file in run.snapshot.iterdir() if file.suffix == ".txt")
    assert "s3cret" not in kept
    assert "NCCL_DEBUG=WARN" in kept
    assert "megatron-core==" in (run.snapshot / "packages.txt").read_text()
    assert "scripts/launch.sh 'a b'" in (run.snapshot / "submit.txt").read_text()
    assert os.access(run.rerun, os.X_OK)
    kept_all = {"TOKENIZERS_PARALLELISM": "0", "CONTAINER_IMAGE": "docker://nvcr.io/nvidia/pytorch:25.01", "DATA": "/d"}
    secrets = {"WANDB_BASE_URL": "https://user:pw@host", "SLURM_JWT": "eyJ", "TORCH_PW": "x", "HF_TOKEN": "x"}
    assert kept_variables({**kept_all, **secrets, "HOME": "/root"}) == kept_all


_PLACE = WandbPlace("streams", "team")


def test_a_save_folder_has_one_wandb_run(tmp_path: Path) -> None:
    first: dict[str, str] = {}
    second: dict[str, str] = {"WANDB_RUN_ID": ""}
    save, other = tmp_path / "save", tmp_path / "other"
    assert use_stable_run_id(save, first, _PLACE) == use_stable_run_id(save, second, WandbPlace("streams"))
    assert second == {"WANDB_RUN_ID": first["WANDB_RUN_ID"], "WANDB_RESUME": "allow"}
    assert use_stable_run_id(other, {"WANDB_RUN_ID": "mine"}, WandbPlace("streams")) == "mine"
    with pytest.raises(LaunchError, match="belongs to the wandb run mine, but WANDB_RUN_ID is theirs"):
        use_stable_run_id(other, {"WANDB_RUN_ID": "theirs"}, _PLACE)


def test_a_save_folder_stays_in_its_wandb_project_and_entity(tmp_path: Path) -> None:
    identity = use_stable_run_id(tmp_path, {}, WandbPlace("streams"))
    use_stable_run_id(tmp_path, {}, _PLACE)  # an entity named later is that of the run from then on
    for place, complaint in (
        (WandbPlace("elsewhere", "team"), "of project streams, but this start names project elsewhere"),
        (WandbPlace("streams", "others"), "of entity team, but this start names entity others"),
    ):
        with pytest.raises(LaunchError, match=f"belongs to the wandb run {identity} {complaint}"):
            check_run_id(tmp_path, None, place)
    (tmp_path / "wandb_run_id.txt").unlink()
    assert use_stable_run_id(tmp_path, {}, WandbPlace("elsewhere", "others")) != identity, "another history"
    (tmp_path / "wandb_place.json").unlink()  # as before it was kept
    use_stable_run_id(tmp_path, {}, _PLACE)


@pytest.mark.parametrize("identity", ["a/b", "a b", "x" * 129, "a?", "a:b"])
def test_a_run_id_that_wandb_cannot_have_is_refused(tmp_path: Path, identity: str) -> None:
    with pytest.raises(LaunchError, match=r"WANDB_RUN_ID is .* which is no run id of wandb: 1 to 128 characters"):
        use_stable_run_id(tmp_path, {"WANDB_RUN_ID": identity}, _PLACE)
    assert not list(tmp_path.iterdir())
    (tmp_path / "wandb_run_id.txt").write_text(identity)
    with pytest.raises(LaunchError, match=r"wandb_run_id\.txt is damaged"):
        use_stable_run_id(tmp_path, {}, _PLACE)


# What `scontrol show job` prints: of SLURM 22.05 (gres:), and of a newer one.
_RECORD = """JobId=17 ArrayJobId=15 ArrayTaskId=2 JobName=sweep
   UserId=me(1000) GroupId=me(1000) MCS_label=N/A
   Priority=1 Nice=0 Account=physics QOS=high
   JobState=RUNNING Reason=None Dependency=(null)
   Requeue=0 Restarts=0 BatchFlag=1 Reboot=0 ExitCode=0:0
   RunTime=00:00:01 TimeLimit=1-04:00:00 TimeMin=N/A
   Partition=gpu AllocNode:Sid=login:1
   ReqNodeList=(null) ExcNodeList=node7
   NumNodes=2 NumCPUs=32 NumTasks=2 CPUs/Task=16 ReqB:S:C:T=0:0:*:*
   MinCPUsNode=16 MinMemoryNode=100G MinTmpDiskNode=0
   Features=h200 DelayBoot=00:00:00
   OverSubscribe=NO Contiguous=0 Licenses=(null) Network=(null)
   Command=/repo/scripts/slurm/sweep.sbatch
   Comment=two words
   TresPerNode=gres:gpu:8,gres:craft:1
"""
_OPTIONS = [
    *("--account=physics", "--qos=high", "--partition=gpu", "--nodes=2", "--time=1-04:00:00", "--cpus-per-task=16"),
    *("--mem=100G", "--constraint=h200", "--exclude=node7", "--job-name=sweep", "--comment=two words"),
    *("--gres=gpu:8,craft:1", "--exclusive", "--no-requeue"),
]
_TYPED = "/usr/bin/sbatch -A physics --array=1-3 -d afterok:5 --signal=B:USR2@600 -N2 --wait --mem 100G"


@pytest.mark.parametrize(
    ("record", "line", "expected"),
    [
        (_RECORD, "", _OPTIONS),
        (_RECORD.replace("gres:", "gres/"), "", _OPTIONS),
        (
            _RECORD,
            f"{_TYPED} scripts/slurm/sweep.sbatch lines.txt --time 3",
            ["-A", "physics", "--signal=B:USR2@600", "-N2", "--mem", "100G", "--qos=high", "--partition=gpu"],
        ),
        (_RECORD, "sbatch --comment=two words scripts/slurm/sweep.sbatch lines.txt", _OPTIONS),
        (_RECORD, "srun scripts/slurm/sweep.sbatch", _OPTIONS),
    ],
    ids=["old", "new", "submit-line", "ambiguous-line", "no-sbatch"],
)
def test_a_job_is_submitted_again_with_all_that_it_was_given(record: str, line: str, expected: list[str]) -> None:
    assert resubmission(record, line) == ["sbatch", *expected]


_TRAINER = """
import sys, time
from megatron.run_control.heartbeat import join_run
heartbeat = join_run()
if sys.argv[1] == "beats":
    heartbeat.beat()
def stuck_here():
    print("ready", flush=True)
    time.sleep(600)
stuck_here()
"""


@pytest.mark.parametrize(("mode", "stop"), [("beats", True), ("beats", False), ("silent", False)])
def test_a_hung_process_is_dumped_and_killed(run: RunFolder, mode: str, stop: bool) -> None:
    """After its first step, also when it is stopped; and before its first step."""
    environment = os.environ | {"MEGATRON_RUN_FOLDER": str(run.path), "MEGATRON_RUN_ATTEMPT": "1", "RANK": "3"}
    command = [sys.executable, "-c", _TRAINER, mode]
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        if stop:
            process.send_signal(signal.SIGSTOP)
        watchdog = Watchdog(
            run, 1, 1.0 if mode == "beats" else 600.0, 600.0 if mode == "beats" else 1.0, lambda: [process.pid]
        )
        watchdog.start()
        assert process.wait(timeout=60) == -signal.SIGKILL
    watchdog.join(timeout=10)
    assert watchdog.hung is not None
    assert f"rank 3 (pid {process.pid}, {'T (stopped)' if stop else 'S (sleeping)'}" in watchdog.hung
    stacks = (run.stacks / "attempt-1-rank-3.txt").read_text()
    assert "stuck_here" in stacks, f"the stack does not show where it hung:\n{stacks}"


def test_a_process_that_moves_is_left_alone(run: RunFolder) -> None:
    environment = os.environ | {"MEGATRON_RUN_FOLDER": str(run.path), "RANK": "0"}
    with subprocess.Popen(
        [sys.executable, "-c", _TRAINER, "beats"], cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        watchdog = Watchdog(run, 1, 600.0, 600.0, lambda: [process.pid])
        watchdog.start()
        time.sleep(1)
        watchdog.stop()
        assert process.poll() is None
        process.kill()
    assert watchdog.hung is None


def test_what_a_killed_trainer_left_behind_is_ended_and_nothing_else(run: RunFolder) -> None:
    """Its helpers would hold the output of the step open, and the allocation would idle for a minute."""
    environment = {name: value for name, value in os.environ.items() if name != "SLURM_NODEID"}
    environment |= {"MEGATRON_RUN_FOLDER": str(run.path), "TORCHELASTIC_RUN_ID": "1"}
    with (
        subprocess.Popen(["sleep", "600"], env=environment | {"MEGATRON_RUN_ATTEMPT": "2"}) as left,
        subprocess.Popen(["sleep", "600"], env=environment | {"MEGATRON_RUN_ATTEMPT": "1"}) as other,
    ):
        end_leftovers(run, 1)
        assert other.wait(timeout=10) == -signal.SIGKILL
        assert left.poll() is None, "a process of another attempt was ended"
        assert end_earlier(run, 2) == 0
        assert end_earlier(run, 3) == 1, "a trainer that outlived its launch would write the same checkpoints"
        assert left.poll() is not None
