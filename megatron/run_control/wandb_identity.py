"""One Weights & Biases run for one save folder, however often training is started.

    check_run_id(Path(args.save), run_id, WandbPlace("streams", "my-team"))      # on every rank
    use_stable_run_id(Path(args.save), os.environ, WandbPlace("streams", "my-team"))

The id lies in wandb_run_id.txt in the save folder, written at the first start, and reaches wandb as WANDB_RUN_ID with
WANDB_RESUME=allow (https://docs.wandb.ai/guides/track/environment-variables). An id that the user sets as WANDB_RUN_ID
is the one that is written. Project and entity lie beside it in wandb_place.json.

What always holds: a resumed, requeued or re-ranked run has the id of the first start; another id, project or entity for
the same save folder is an error, because one history would be mixed with another or torn in two. An entity that is not
named is wandb's default and agrees with any.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron.run_control.errors import LaunchError
from megatron.run_control.run_folder import read_json, write_whole

RUN_ID_FILE = "wandb_run_id.txt"
PLACE_FILE = "wandb_place.json"
RUN_ID = re.compile(r"[^/\\#?%:\s]{1,128}")
RUN_ID_WANTED = "1 to 128 characters without / \\ # ? % : and spaces"


@dataclass(frozen=True)
class WandbPlace:
    """Where wandb keeps the run; `entity` is None where nobody says."""

    project: str
    entity: str | None = None


def stored_run_id(save: Path) -> str | None:
    """The id of a save folder, None where it has none. Raises LaunchError for a file that holds no id."""
    file = save / RUN_ID_FILE
    try:
        text = file.read_bytes().decode("utf-8", errors="replace").strip()
    except FileNotFoundError:
        return None
    if not RUN_ID.fullmatch(text):
        raise LaunchError(f"{file} is damaged: {text[:200]!r} is no run id of wandb ({RUN_ID_WANTED})")
    return text


def check_id(wanted: str | None, named_by: str = "WANDB_RUN_ID") -> None:
    """Raise LaunchError for an id that wandb cannot have, which `named_by` says."""
    if wanted and not RUN_ID.fullmatch(wanted):
        raise LaunchError(f"{named_by} is {wanted!r}, which is no run id of wandb: {RUN_ID_WANTED}")


def check_run_id(save: Path, wanted: str | None, place: WandbPlace, named_by: str = "WANDB_RUN_ID") -> None:
    """Raise LaunchError for a save folder that belongs to another run, which `named_by` says, project or entity."""
    found = stored_run_id(save)
    if found is None:
        return
    afresh = f"remove {save / RUN_ID_FILE} to begin another history"
    if wanted and found != wanted:
        raise LaunchError(
            f"{save} belongs to the wandb run {found}, but {named_by} is {wanted}: leave it out to continue that run, "
            f"or {afresh}"
        )
    there = _stored_place(save)
    for name, now in asdict(place).items():
        if now and there.get(name) and there[name] != now:
            raise LaunchError(
                f"{save} belongs to the wandb run {found} of {name} {there[name]}, but this start names {name} {now}: "
                f"name {there[name]} to continue that run, or {afresh}"
            )


def _stored_place(save: Path) -> dict[str, str | None]:
    """Project and entity of a save folder; empty where none are kept, as before they were."""
    place = read_json(save / PLACE_FILE, {})
    if not isinstance(place, dict):
        raise LaunchError(f"{save / PLACE_FILE} is damaged: a mapping is wanted")
    return place


def use_stable_run_id(save: Path, environment: MutableMapping[str, str], place: WandbPlace) -> str:
    """Make wandb continue the run of this save folder, whose id is chosen now if it has none; returns the id."""
    wanted = environment.get("WANDB_RUN_ID")
    check_id(wanted)
    check_run_id(save, wanted, place)
    found = stored_run_id(save)
    there = {} if found is None else _stored_place(save)
    if found is None:
        found = wanted or secrets.token_hex(4)
    now = {name: there.get(name) or value for name, value in asdict(place).items()}
    if now != there:  # before the id: a place without an id means nothing
        write_whole(save / PLACE_FILE, json.dumps(now) + "\n")
    if stored_run_id(save) is None:
        write_whole(save / RUN_ID_FILE, f"{found}\n")
    environment["WANDB_RUN_ID"] = found
    environment.setdefault("WANDB_RESUME", "allow")
    return found
