"""Checkpoint files: streamed, whole or not there, damage named. On checkpoints that were written without training."""

from __future__ import annotations

import json
import os
import pickle
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatron.core.transformer.wide_residual_config import WideResidualConfig
from megatron.training.checkpoints.conversion import execute
from megatron.training.checkpoints.errors import ConversionError
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import open_reader
from megatron.training.checkpoints.reshard import plan_reshard
from megatron.training.checkpoints.sharded_reader import ShardedReader
from megatron.training.checkpoints.widen import plan_widen

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "checkpoint"))

from benchmark_convert import make_checkpoint
from convert import COMMANDS, main

TWO_BY_TWO = Layout(tensor=2, pipeline=2, expert_tensor=2)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT with optimizer states."""
    folder = tmp_path_factory.mktemp("convert") / "source"
    make_checkpoint(folder, layers=2, width=64)
    return folder


def _widen(source: Path, target: Path) -> None:
    with open_reader(source) as reader:
        execute(plan_widen(reader, WideResidualConfig(num_streams=4)), reader, target, progress=False)


def _metadata(folder: Path) -> Path:
    return next(folder.glob("iter_*")) / ".metadata"


def _copy(source: Path, target: Path) -> Path:
    shutil.copytree(source, target)
    return target


@pytest.mark.parametrize("format", ["torch_dist", "torch"])
def test_memory_stays_below_two_layers(format: str, tmp_path: Path) -> None:
    make_checkpoint(tmp_path / "source", layers=3, width=640)
    with open_reader(tmp_path / "source") as reader:
        outcome = execute(
            plan_reshard(reader, Layout(2, expert_tensor=2), format), reader, tmp_path / "out", progress=False
        )
    assert outcome.largest_layer > 19e6
    assert outcome.peak_bytes < 2 * outcome.largest_layer, (
        f"{outcome.peak_bytes:,} bytes were taken for layers of {outcome.largest_layer:,}"
    )


def test_a_name_that_the_table_does_not_know_is_refused(source: Path, tmp_path: Path, capsys) -> None:
    copy = _copy(source, tmp_path / "copy")
    metadata = pickle.loads(_metadata(copy).read_bytes())
    key = "decoder.layers.mlp.linear_fc1.weight"
    renamed = "decoder.layers.mlp.linear_fc3.weight"
    metadata.state_dict_metadata[renamed] = metadata.state_dict_metadata.pop(key)
    metadata.storage_data = {
        replace(index, fqn=renamed) if index.fqn == key else index: stored
        for index, stored in metadata.storage_data.items()
    }
    _metadata(copy).write_bytes(pickle.dumps(metadata))
    assert main(["widen", "--input", str(copy), "--output", str(tmp_path / "out"), "--num-streams", "4"]) == 2
    error = capsys.readouterr().err.strip().splitlines()
    assert len(error) == 1
    assert renamed in error[0]
    assert key in error[0].replace("layers.N.", "layers."), f"the nearest known name is not named: {error[0]}"
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("damage", ["truncated", "removed", "garbage", "wrong shape"])
def test_damage_is_one_line_and_leaves_nothing(damage: str, source: Path, tmp_path: Path, capsys) -> None:
    copy = _copy(source, tmp_path / "copy")
    data = next(copy.glob("iter_*/*.distcp"))
    if damage == "truncated":
        os.truncate(data, data.stat().st_size // 2)
    elif damage == "removed":
        data.unlink()
    elif damage == "garbage":
        data.write_bytes(os.urandom(data.stat().st_size))
    else:
        metadata = pickle.loads(_metadata(copy).read_bytes())
        described = metadata.state_dict_metadata["decoder.final_layernorm.weight"]
        described.size = torch.Size([65])
        _metadata(copy).write_bytes(pickle.dumps(metadata))
    # reshard reads every tensor; widen copies most as bytes
    command = ["reshard", "--input", str(copy), "--output", str(tmp_path / "out"), "--tensor-model-parallel-size", "2"]
    assert main(command) == 2
    error = capsys.readouterr().err.strip()
    assert error.startswith("error: "), error
    assert len(error.splitlines()) == 1
    assert [entry.name for entry in tmp_path.iterdir()] == ["copy"], "something half-written was left"


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_killed_at_any_moment_nothing_half_written_has_the_name(number: int, source: Path, tmp_path: Path) -> None:
    begin = time.perf_counter()
    _widen(source, tmp_path / "timed")
    duration = time.perf_counter() - begin
    for attempt in range(6):
        target = tmp_path / f"out{attempt}"
        child = os.fork()
        if child == 0:
            try:
                _widen(source, target)
            finally:
                os._exit(1)
        time.sleep(duration * attempt / 5)
        os.kill(child, number)
        os.waitpid(child, 0)
        if target.exists():  # it was faster
            with open_reader(target) as reader:
                assert reader.common.args.wide_residual == 4
        else:
            left = [entry.name for entry in tmp_path.iterdir() if f"out{attempt}" in entry.name]
            assert not [name for name in left if not name.startswith(".")]
            assert number == signal.SIGKILL or not left, f"SIGTERM left {left}"
            _widen(source, target)
            assert [e.name for e in tmp_path.iterdir() if f"out{attempt}" in e.name] == [target.name], "left-overs stay"


def test_an_existing_output_is_refused_and_replaced_on_demand(source: Path, tmp_path: Path, capsys) -> None:
    target = tmp_path / "out"
    target.mkdir()
    (target / "mine").write_text("precious")
    command = ["widen", "--input", str(source), "--output", str(target), "--num-streams", "2"]
    assert main(command) == 2
    assert "--overwrite" in capsys.readouterr().err
    assert (target / "mine").read_text() == "precious"
    assert main([*command, "--overwrite"]) == 0
    assert sorted(entry.name for entry in target.iterdir()) == ["iter_0000010", "latest_checkpointed_iteration.txt"]
    assert (target / "latest_checkpointed_iteration.txt").read_text() == "10"
    assert main(["widen", "--input", str(source), "--output", str(source), "--num-streams", "2", "--overwrite"]) == 2


def test_a_dry_run_names_every_tensor_and_writes_nothing(source: Path, tmp_path: Path, capsys) -> None:
    out = tmp_path / "out"
    assert main(["widen", "--input", str(source), "--output", str(out), "--num-streams", "4", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    with open_reader(source) as reader:
        names = {entry.name for entry in reader.entries}
    assert all(any(name in line for line in lines) for name in names)
    assert any(line.startswith("create") and "exit_map.logit" in line for line in lines)
    assert not list(tmp_path.iterdir())


def test_weights_only_leaves_the_optimizer_out(source: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    command = ["reshard", "--input", str(source), "--output", str(out), "--format", "torch", "--weights-only"]
    assert main(command) == 0
    with open_reader(out) as reader:
        assert {entry.slot for entry in reader.entries} == {""}
        assert reader.common.args.no_save_optim
        assert "optimizer" not in reader.common.state


def test_a_missing_rank_of_a_plain_checkpoint_is_named(source: Path, tmp_path: Path, capsys) -> None:
    with open_reader(source) as reader:
        execute(plan_reshard(reader, TWO_BY_TWO, "torch"), reader, tmp_path / "plain", progress=False)
    shutil.rmtree(next((tmp_path / "plain").glob("iter_*")) / "mp_rank_01_001")
    command = [
        "reshard",
        "--input",
        str(tmp_path / "plain"),
        "--output",
        str(tmp_path / "out"),
        "--format",
        "torch_dist",
    ]
    assert main(command) == 2
    assert "mp_rank_01_001" in capsys.readouterr().err


def test_inspect_tells_what_is_there_and_what_is_missing(source: Path, tmp_path: Path, capsys) -> None:
    wide = tmp_path / "wide"
    _widen(source, wide)
    assert main(["inspect", "--input", str(wide), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["iteration"], report["streams"]["num_streams"], report["complete"]) == (10, 4, True)
    factors = report["controllers"]["decoder.residual_stream_readout.exit_map.logit"]["factors"]
    assert factors == pytest.approx([0.25] * 4, abs=1e-7)
    assert len(report["controllers"]) == 2 * 4 + 1
    data = next(wide.glob("iter_*/*.distcp"))
    os.truncate(data, data.stat().st_size - 1)
    assert main(["inspect", "--input", str(wide)]) == 1
    assert "not complete" in capsys.readouterr().out


def test_numbers_of_streams_that_cannot_be_reached_are_refused_with_the_reason(
    source: Path, tmp_path: Path, capsys
) -> None:
    _widen(source, tmp_path / "wide")
    for wanted, reason in ((6, "no multiple of 4"), (2, "--average"), (4, "already"), (3, "no multiple of")):
        command = ["resize", "--input", str(tmp_path / "wide"), "--output", str(tmp_path / "out")]
        assert main([*command, "--num-streams", str(wanted)]) == 2
        assert reason in capsys.readouterr().err
    assert (
        main(["widen", "--input", str(tmp_path / "wide"), "--output", str(tmp_path / "out"), "--num-streams", "8"]) == 2
    )
    assert "resize" in capsys.readouterr().err


def test_a_layout_that_cannot_hold_the_model_is_refused_before_anything_is_written(
    source: Path, tmp_path: Path
) -> None:
    with open_reader(source) as reader:
        for layout in (Layout(tensor=3, expert_tensor=3), Layout(pipeline=4), Layout(expert=2)):
            with pytest.raises(ConversionError, match="cannot be divided"):
                plan_reshard(reader, layout, "torch")


def test_files_are_read_by_torch_itself(source: Path, tmp_path: Path) -> None:
    from torch.distributed.checkpoint import FileSystemReader, load

    with ShardedReader(next(source.glob("iter_*"))) as reader:
        key = "decoder.layers.mlp.linear_fc2.weight"
        state = {key: torch.empty(2, 64, 256)}
        load(state, storage_reader=FileSystemReader(reader.folder), no_dist=True)
        names = [entry for entry in reader.entries if entry.name.endswith("mlp.linear_fc2.weight") and not entry.slot]
        assert all(torch.equal(state[key][layer], reader.read(entry)) for layer, entry in enumerate(names))


def test_help_needs_no_torch_and_shows_an_example() -> None:
    tool = Path(__file__).resolve().parents[1] / "tools" / "checkpoint" / "convert.py"
    for command in ([], *([name] for name in COMMANDS)):
        script = f"import sys, runpy; sys.modules['torch'] = None; sys.argv = ['convert.py', *{command!r}, '--help']; "
        done = subprocess.run(
            [sys.executable, "-c", script + f"runpy.run_path({str(tool)!r}, run_name='__main__')"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        assert "example: convert.py" in done.stdout
    with pytest.raises(SystemExit) as left:
        main(["widen", "--input", "a"])
    assert left.value.code == 2
