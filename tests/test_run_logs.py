"""A run's numbers reach wandb and TensorBoard, one wandb run for all its starts, and neither can end a run."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from harness_pretrain import ROOT, TINY_GPT, exact_losses
from harness_resume import refused_here, train_here
from harness_wandb import OfflineRun, offline_folders, read_offline_run, wandb_environment

from megatron.training.run_logs.step_mark import StepMark
from megatron.training.run_logs.tensorboard_writer import RunWriter
from megatron.training.run_logs.warnings_once import forget_warnings

WANDB = ["--wandb-project", "tests", "--wandb-timeout", "60"]
STEPS = 4


@pytest.fixture(autouse=True)
def _fresh_warnings() -> None:
    forget_warnings()


@dataclass
class TwoStarts:
    """A run of STEPS steps that lost its last checkpoint and went on from the one before."""

    first: OfflineRun
    second: OfflineRun
    first_losses: list[float]
    second_losses: list[float]
    save: Path


@pytest.fixture(scope="module")
def two_starts(tmp_path_factory: pytest.TempPathFactory) -> TwoStarts:
    save = tmp_path_factory.mktemp("two-starts") / "save"
    options = [*TINY_GPT, *WANDB, "--save", str(save), "--load", str(save), "--load-if-present"]
    options += ["--save-interval", "2", "--wide-residual", "3", "--wandb-group", "g", "--wandb-job-type", "trial"]
    options += ["--train-iters", str(STEPS + 2)]
    with wandb_environment(WANDB_TAGS="overridden"):
        first = train_here([*options, "--wandb-tags", "one,two", "three", "--exit-interval", str(STEPS)])
    shutil.rmtree(save / f"iter_{STEPS:07d}")
    (save / "latest_checkpointed_iteration.txt").write_text("2")
    with wandb_environment():
        second = train_here(options)
    starts = offline_folders(save)
    assert len(starts) == 2, f"two starts are wanted, found {starts}"
    return TwoStarts(read_offline_run(starts[0]), read_offline_run(starts[1]), first, second, save)


def test_all_starts_of_a_save_folder_are_one_wandb_run(two_starts: TwoStarts) -> None:
    assert two_starts.first.id == two_starts.second.id == (two_starts.save / "wandb_run_id.txt").read_text().strip()


def test_steps_never_go_backwards_though_training_did(two_starts: TwoStarts) -> None:
    assert len(two_starts.second_losses) == STEPS, "the second start did not go back to step 2"
    assert two_starts.first.steps == [1, 2, 3, 4]
    assert two_starts.second.steps == [5, 6], "steps that the run had logged were logged again, or new ones were not"


def test_every_number_reaches_wandb_without_tensorboard(two_starts: TwoStarts) -> None:
    for run, losses, offset in (
        (two_starts.first, two_starts.first_losses, 0),
        (two_starts.second, two_starts.second_losses[2:], STEPS),
    ):
        for number, loss in enumerate(losses, start=offset + 1):
            row = run.rows[number]
            assert row["lm loss"] == loss
            wanted = {"learning-rate", "grad-norm", "batch-size", "mem-allocated-bytes", "loss-scale"}
            if number > 1:  # the trainer logs no time of the first step of a start
                wanted |= {"iteration-time", "throughput", "tokens-per-second"}
            assert wanted <= set(row), f"step {number} lacks {wanted - set(row)}"
            assert not [name for name in row if name.endswith("vs samples")]
    last = two_starts.second.rows[STEPS + 2]
    assert last["tokens-per-second"] == pytest.approx(4 * 32 / last["iteration-time"])
    assert "lm loss validation" in last


def test_group_tags_and_job_type_come_from_flags(two_starts: TwoStarts) -> None:
    first = two_starts.first
    assert (first.group, first.tags, first.job_type) == ("g", ["one", "two", "three"], "trial")


def test_the_configuration_has_the_stream_layout(two_starts: TwoStarts) -> None:
    streams = two_starts.first.config["streams"]
    assert (streams["num_streams"], streams["carried_width"], streams["learned_retention"]) == (3, 192, False)
    assert two_starts.first.config["hidden_size"] == 64


def test_checkpoints_are_noted_by_path_and_not_uploaded(two_starts: TwoStarts) -> None:
    assert two_starts.first.summary["checkpoint/step"] == STEPS
    assert two_starts.first.summary["checkpoint/path"].endswith(f"iter_{STEPS:07d}")
    staged = [path for path in two_starts.save.rglob("wandb/**/*") if path.suffix in (".distcp", ".pt")]
    assert not staged, f"checkpoint files lie among wandb's: {staged}"


def test_a_checkpoint_is_uploaded_where_that_is_asked_for(tmp_path: Path) -> None:
    options = [*TINY_GPT, *WANDB, "--wandb-upload-checkpoints", "--train-iters", "1", "--save-interval", "1"]
    with wandb_environment(WANDB_DATA_DIR=str(tmp_path / "data"), WANDB_CACHE_DIR=str(tmp_path / "cache")):
        train_here([*options, "--save", str(tmp_path / "save")])
    (artifact,) = read_offline_run(tmp_path / "save").artifacts
    assert "iter_0000001" in artifact.aliases
    names = [file.name for file in artifact.files]
    assert any(name.endswith(".distcp") for name in names), f"the checkpoint's files are not in the artifact: {names}"
    assert not [file for file in artifact.files if not Path(file.path).exists()]


def test_a_run_needs_neither_save_nor_tensorboard_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with wandb_environment(WANDB_RUN_GROUP="from-environment"):
        losses = train_here([*TINY_GPT, *WANDB, "--wandb-run-id", "chosen", "--train-iters", "2"])
    run = read_offline_run(tmp_path)
    assert (run.id, run.group) == ("chosen", "from-environment")
    assert [run.rows[step]["lm loss"] for step in (1, 2)] == losses


@pytest.mark.parametrize(
    ("flags", "variables", "message"),
    [
        (["--wandb-run-id", "another"], {}, "belongs to the wandb run ID, but --wandb-run-id is another"),
        ([], {"WANDB_RUN_ID": "a/b"}, "WANDB_RUN_ID is 'a/b', which is no run id of wandb"),
        (
            ["--wandb-project", "elsewhere"],
            {},
            "the wandb run ID of project tests, but this start names project elsewh",
        ),
    ],
)
def test_an_id_or_a_project_that_is_not_the_folders_is_refused(
    two_starts: TwoStarts, flags: list[str], variables: dict[str, str], message: str
) -> None:
    options = [*TINY_GPT, *WANDB, "--train-iters", "9", "--wide-residual", "3", "--save-interval", "9"]
    options += ["--save", str(two_starts.save), "--override-opt-param-scheduler"]
    with wandb_environment(**variables):
        said = refused_here([*options, "--load", str(two_starts.save), *flags])
    assert (
        message.replace("ID of", f"{two_starts.first.id} of").replace("run ID,", f"run {two_starts.first.id},") in said
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--wandb-group", "g"], "--wandb-group given without --wandb-project"),
        (["--log-streams-interval", "5"], "--log-streams-interval 5 needs wide residual streams"),
    ],
)
def test_a_flag_with_nothing_to_act_on_is_refused(options: list[str], message: str) -> None:
    assert message in refused_here([*TINY_GPT, "--train-iters", "1", *options])


def test_an_absent_wandb_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    losses = train_here([*TINY_GPT, *WANDB, "--wandb-save-dir", str(tmp_path), "--train-iters", "3"])
    assert len(losses) == 3
    assert capfd.readouterr().out.count("WARNING: wandb: it cannot be used") == 1


def test_a_disabled_wandb_leaves_nothing(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    options = [*TINY_GPT, *WANDB, "--train-iters", "2", "--save", str(tmp_path), "--save-interval", "2"]
    with wandb_environment(WANDB_MODE="disabled"):
        train_here(options)
    assert "WARNING: wandb" not in capfd.readouterr().out
    assert not list(tmp_path.glob("wandb")), "a folder of wandb's"
    assert not (tmp_path / "wandb_last_step.txt").exists(), "steps count as logged that were not"


def test_without_a_login_the_run_is_kept_on_disk(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with wandb_environment(WANDB_MODE="online", HOME=str(tmp_path), NETRC=str(tmp_path / "none"), WANDB_SILENT="false"):
        losses = train_here([*TINY_GPT, *WANDB, "--wandb-save-dir", str(tmp_path / "w"), "--train-iters", "3"])
    printed = capfd.readouterr().out
    assert printed.count("WARNING: wandb: nobody is logged in (wandb login); the run is kept on disk") == 1, printed
    assert [read_offline_run(tmp_path / "w").rows[step]["lm loss"] for step in (1, 2, 3)] == losses


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system with 16 KiB left; skips where this process may mount none."""
    folder = tmp_path / "full"
    folder.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", folder], check=False).returncode:
        pytest.skip("no permission to mount a small file system")
    (folder / "filler").write_bytes(bytes(48 * 1024))
    yield folder
    subprocess.run(["umount", "--lazy", folder], check=True)


def test_tensorboard_on_a_full_disk_is_one_warning(full_disk: Path, capfd: pytest.CaptureFixture[str]) -> None:
    losses = train_here([*TINY_GPT, "--tensorboard-dir", str(full_disk / "tb"), "--train-iters", "6"])
    said = capfd.readouterr()
    assert len(losses) == 6
    assert said.out.count("WARNING: TensorBoard: cannot write to") == 1, said.out[-3000:]
    assert "No space left on device" in said.out
    assert "_AsyncWriterThread" not in said.err, "a traceback beside the warning"


def test_with_everything_broken_training_ends_normally_and_warns_once_each(tmp_path: Path, full_disk: Path) -> None:
    (tmp_path / "file").write_text("in the place of a folder\n")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("WANDB_")}
    environment |= {"WANDB_BASE_URL": "http://127.0.0.1:9", "WANDB_API_KEY": "x" * 40, "OMP_NUM_THREADS": "1"}
    environment["TMPDIR"] = str(tmp_path)
    options = [*TINY_GPT, "--wandb-project", "tests", "--wandb-save-dir", str(tmp_path / "file"), "--train-iters", "6"]
    options += ["--wandb-timeout", "2", "--wide-residual", "2", "--log-streams-interval", "1"]
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), *options, "--tensorboard-dir", str(full_disk / "tb")],
        cwd=tmp_path,
        env=environment,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "iteration        6/       6" in done.stdout
    assert done.stdout.count("WARNING: TensorBoard: cannot write to") == 1
    said = [line for line in done.stdout.splitlines() if line.startswith("WARNING: wandb:")]
    # Of the folder, of the server, of the end that did not wait: which of them come depends on how fast wandb starts.
    assert 1 <= len(said) <= 3, said
    assert len(said) == len(set(said)), said
    assert "Traceback" not in done.stderr, done.stderr[-3000:]


def test_a_tensorboard_folder_that_cannot_be_made_is_one_warning(tmp_path: Path, capfd) -> None:
    (tmp_path / "file").write_text("in the place of a folder\n")
    writer = RunWriter(str(tmp_path / "file" / "tb"), 10, 32)
    for step in range(3):
        writer.add_scalar("lm loss", 1.0, step)
    writer.flush()
    writer.close()
    assert capfd.readouterr().out.count("WARNING: TensorBoard: cannot write to") == 1


def test_tensorboard_files_are_as_upstreams(tmp_path: Path) -> None:
    losses = train_here([*TINY_GPT, "--tensorboard-dir", str(tmp_path), "--train-iters", "3"])
    assert list(exact_losses(tmp_path).values()) == losses
    assert list(exact_losses(tmp_path, "lm loss vs samples").values()) == losses


def test_a_step_is_taken_once_whatever_is_lost(tmp_path: Path) -> None:
    mark = StepMark(tmp_path)
    assert [mark.take(step) for step in (1, 2, 2, 1, 3)] == [True, True, False, False, True]
    assert StepMark(tmp_path).last == 3
    (tmp_path / "wandb_last_step.txt").write_text("damaged")
    assert StepMark(tmp_path).take(1)
