"""Kill a training run -9 in the middle of saves, again and again, and let it fill its disk; one start for all of it.

    python harness_kills.py FOLDER KILLS          # writes FOLDER/result.json (KillResult)

Everything is imported once; every run is a fork of this process that trains with --save and --load of one folder, one
checkpoint a step, --keep-last 2. A run is killed at a random moment of a save: as soon as the place that saves are
written to appears, plus a random part of the time that a save takes.

What always holds: a run is killed by this process alone and by its own id.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

STEPS = 60
SAVE_SECONDS = 0.25
FULL_DISK_BYTES = 200_000


@dataclass
class KillResult:
    """What the runs left behind.

    moments: for every kill what the folder looked like: tracker's content, steps there, steps whole, and the error that
    reading it again gave, if any. losses and whole: by step, of the killed runs together and of an uninterrupted one.
    """

    moments: list[dict[str, Any]] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)
    whole: dict[str, float] = field(default_factory=dict)
    full_disk: str = ""
    full_disk_tracker: str = ""
    full_disk_steps: list[int] = field(default_factory=list)
    full_disk_left: list[str] = field(default_factory=list)


def _options(folder: Path | None, save_interval: int = 1) -> list[str]:
    from harness_pretrain import TINY_GPT

    saving = []
    if folder is not None:
        saving = ["--save", str(folder), "--load", str(folder), "--save-interval", str(save_interval)]
        saving += ["--keep-last", "2"]
    return [*TINY_GPT, "--num-layers", "1", "--wide-residual", "2", "--train-iters", str(STEPS), *saving]


def _forked(body: Callable[[], None], log: Path) -> int:
    """Run body in a fork whose output goes to log; returns its process id."""
    child = os.fork()
    if child:
        return child
    status = 1
    try:
        with log.open("ab") as output:
            os.dup2(output.fileno(), 1)
            os.dup2(output.fileno(), 2)
        body()
        status = 0
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _train(folder: Path | None, losses: Path, save_interval: int = 1) -> None:
    """Train, one line (step, loss) a step."""
    import harness_resume

    with losses.open("a", buffering=1) as stream:
        harness_resume.train_here(
            _options(folder, save_interval), on_step=lambda step, loss: stream.write(f"{step} {loss!r}\n")
        )


def _read(losses: Path) -> dict[str, float]:
    """The loss of every step; a step that was done again after a kill must have the same."""
    found: dict[str, float] = {}
    for line in losses.read_text().splitlines():
        step, loss = line.split()
        assert found.setdefault(step, float(loss)) == float(loss), f"step {step} computed two losses"
    return found


def _kill_in_a_save(folder: Path, child: int, rng: random.Random) -> bool:
    """Kill child in one of its next saves; False when it ended before."""
    stage = folder / "unfinished_save"
    for last in (False,) * rng.randint(1, 2) + (True,):
        while not stage.exists():
            if os.waitpid(child, os.WNOHANG)[0]:
                return False
            time.sleep(0.001)
        if last:
            time.sleep(rng.uniform(0, SAVE_SECONDS))
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return True
        while stage.exists():
            time.sleep(0.001)
    raise AssertionError


def _moment(folder: Path) -> dict[str, Any]:
    from megatron.training.resume.completeness import require_whole, whole_steps
    from megatron.training.resume.errors import CheckpointError
    from megatron.training.resume.location import find_checkpoint, holds_nothing, saved_steps

    tracker = folder / "latest_checkpointed_iteration.txt"
    error = ""
    try:
        if not holds_nothing(folder):
            require_whole(find_checkpoint(folder))
    except CheckpointError as found:
        error = str(found)
    return {
        "tracker": tracker.read_text() if tracker.exists() else None,
        "steps": saved_steps(folder),
        "whole": whole_steps(folder),
        "in_stage": sorted(entry.name for entry in (folder / "unfinished_save").rglob("*")),
        "error": error,
    }


def _fill_the_disk(folder: Path, log: Path) -> str:
    """Train on with a limit on file sizes, which fails a save as a full disk does; returns the message."""
    message = folder.with_name("full_disk.txt")

    def body() -> None:
        from harness_resume import CheckpointError

        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))
        try:
            _train(folder, folder.with_name("full_disk_losses"))
        except CheckpointError as error:
            message.write_text(str(error))

    os.waitpid(_forked(body, log), 0)
    return message.read_text() if message.exists() else f"no message; the log ends:\n{log.read_text()[-3000:]}"


def run(root: Path, kills: int) -> KillResult:
    """Do all of it below root."""
    import harness_resume  # noqa: F401  imported before the forks
    from megatron.core.dist_checkpointing.strategies.filesystem_async import get_write_results_queue

    from megatron.training.resume.location import saved_steps

    get_write_results_queue()  # its server process would otherwise be started, with all imports, by every fork
    rng, result, log = random.Random(0), KillResult(), root / "log.txt"
    folder = root / "checkpoints"
    while len(result.moments) < kills:
        child = _forked(lambda: _train(folder, root / "losses"), log)
        if not _kill_in_a_save(folder, child, rng):
            break
        result.moments.append(_moment(folder))
    result.full_disk = _fill_the_disk(folder, root / "full.txt")
    result.full_disk_tracker = (folder / "latest_checkpointed_iteration.txt").read_text()
    result.full_disk_steps = saved_steps(folder)
    result.full_disk_left = sorted(entry.name for entry in folder.iterdir())
    os.waitpid(_forked(lambda: _train(folder, root / "losses", STEPS), log), 0)
    os.waitpid(_forked(lambda: _train(None, root / "whole"), log), 0)
    result.losses, result.whole = _read(root / "losses"), _read(root / "whole")
    return result


if __name__ == "__main__":
    root = Path(sys.argv[1])
    root.joinpath("result.json").write_text(json.dumps(asdict(run(root, int(sys.argv[2])))))
