"""Whole files that do not belong together: a tensor without one of its parts, a folder with another step's state."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
from harness_pretrain import TINY_GPT
from harness_resume import copy_of, edit_metadata, refused_here, train_here

from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.open_checkpoint import open_reader
from megatron.training.resume.completeness import damage_of
from megatron.training.resume.location import find_checkpoint

OPTIONS = [*TINY_GPT, "--train-iters", "4", "--save-interval", "2"]
FORMATS = {"torch_dist": [], "torch": ["--ckpt-format", "torch"]}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """--save folders with the steps 2 and 4, by format."""
    folder = tmp_path_factory.mktemp("saved")
    for name, options in FORMATS.items():
        train_here([*OPTIONS, *options, "--save", str(folder / name)])
    return {name: folder / name for name in FORMATS}


def test_a_tensor_without_one_of_its_parts_is_refused_by_name(saved: dict[str, Path], tmp_path: Path) -> None:
    """Upstream keeps what is in memory where a part is missing."""
    keys: list[str] = []

    def parts(entries: dict[str, Any], _: Any) -> None:
        keys.extend(key for key, entry in entries.items() if len(getattr(entry, "chunks", ())) > 1)

    edit_metadata(copy_of(saved["torch_dist"], tmp_path / "look") / "iter_0000004", parts)
    assert any("linear_fc1.weight" in key for key in keys), f"no tensor is stored in parts: {keys}"
    for number, key in enumerate(keys):
        checkpoints = copy_of(saved["torch_dist"], tmp_path / str(number))

        def drop(entries: dict[str, Any], places: dict[Any, Any], key: str = key) -> None:
            lost = entries[key].chunks.pop()
            del places[next(index for index in places if index.fqn == key and index.offset == lost.offsets)]

        edit_metadata(checkpoints / "iter_0000004", drop)
        damage = damage_of(find_checkpoint(checkpoints))
        assert damage is not None, f"{key} without a part counts as whole"
        assert damage.startswith(f"{key} has "), damage
    assert "elements in its" in refused_here([*OPTIONS, "--load", str(checkpoints)])


@pytest.mark.parametrize("name", FORMATS)
def test_the_state_of_another_step_is_refused(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved[name], tmp_path / "mixed")
    shutil.rmtree(checkpoints / "iter_0000004")
    shutil.copytree(checkpoints / "iter_0000002", checkpoints / "iter_0000004")
    load = [*OPTIONS, *FORMATS[name], "--load", str(checkpoints)]
    assert "iter_0000004 holds the state of step 2: files of two steps were mixed" in refused_here(load)


@pytest.mark.parametrize("name", FORMATS)
def test_the_converter_refuses_the_state_of_another_step(name: str, saved: dict[str, Path], tmp_path: Path) -> None:
    checkpoints = copy_of(saved[name], tmp_path / "mixed")
    shutil.rmtree(checkpoints / "iter_0000004")
    shutil.copytree(checkpoints / "iter_0000002", checkpoints / "iter_0000004")
    with pytest.raises(ConversionError, match="iter_0000004 holds the state of step 2"):
        open_reader(checkpoints)
