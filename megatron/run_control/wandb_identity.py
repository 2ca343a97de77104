"""One Weights & Biases run for one save folder, however often training is started.

    use_stable_run_id(Path(args.save), os.environ)

The id lies in wandb_run_id.txt in the save folder, written at the first start, and reaches wandb as WANDB_RUN_ID with
WANDB_RESUME=allow (https://docs.wandb.ai/guides/track/environment-variables). An id that the user sets as WANDB_RUN_ID
is the one that is written.

What always holds: a resumed, requeued or re-ranked run has the id of the first start; another id for the same save
folder is an error, because two histories would be mixed.
"""

from __future__ import annotations

import secrets
from collections.abc import MutableMapping
from pathlib import Path

from megatron.run_control.errors import LaunchError
from megatron.run_control.run_folder import write_whole

RUN_ID_FILE = "wandb_run_id.txt"


def check_run_id(save: Path, wanted: str | None, named_by: str = "WANDB_RUN_ID") -> None:
    """Raise LaunchError when the save folder has a run id and it is not `wanted`, which `named_by` says."""
    file = save / RUN_ID_FILE
    if wanted and file.exists() and (found := file.read_text().strip()) != wanted:
        raise LaunchError(
            f"{save} belongs to the wandb run {found}, but {named_by} is {wanted}: leave it out to continue that run, "
            f"or remove {file} to begin another history"
        )


def use_stable_run_id(save: Path, environment: MutableMapping[str, str]) -> str:
    """Make wandb continue the run of this save folder, whose id is chosen now if it has none; returns the id."""
    wanted = environment.get("WANDB_RUN_ID")
    check_run_id(save, wanted)
    file = save / RUN_ID_FILE
    if not file.exists():
        write_whole(file, f"{wanted or secrets.token_hex(4)}\n")
    environment["WANDB_RUN_ID"] = file.read_text().strip()
    environment.setdefault("WANDB_RESUME", "allow")
    return environment["WANDB_RUN_ID"]
