"""The converter never costs a checkpoint: sources stay, kills are survived, what is not whole is refused in one line.

On checkpoints that were written without training; kills are those of a forked process.
"""

from __future__ import annotations

import os
import shutil
import signal
import sys
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatron.core.transformer.wide_residual_config import WideResidualConfig
from megatron.training.checkpoints import output_folder
from megatron.training.checkpoints.checkpoint_state import Common, Entry, TensorInfo
from megatron.training.checkpoints.companions import flaw_of
from megatron.training.checkpoints.conversion import Plan, Step, execute
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import open_reader
from megatron.training.checkpoints.output_folder import new_checkpoint
from megatron.training.checkpoints.reshard import plan_reshard
from megatron.training.checkpoints.widen import plan_widen

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "checkpoint"))

from benchmark_convert import make_checkpoint
from convert import main

STEP = "iter_0000010"
FC1 = "decoder.layers.0.mlp.linear_fc1.weight"
NORM, EXIT = "decoder.final_layernorm.weight", "decoder.residual_stream_readout.exit_map.logit"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small GPT with optimizer states."""
    folder = tmp_path_factory.mktemp("safety") / "source"
    make_checkpoint(folder, layers=2, width=32)
    return folder


@pytest.fixture(scope="module")
def wide(source: Path) -> Path:
    target = source.parent / "wide"
    with open_reader(source) as reader:
        execute(plan_widen(reader, WideResidualConfig(num_streams=4)), reader, target, progress=False)
    return target


def rewrite(source: Path, target: Path, change: Callable[[Plan], None], format: str = "torch_dist") -> Path:
    """Write a checkpoint again with what `change` does to its plan: steps, arguments."""
    with open_reader(source) as reader:
        plan = plan_reshard(reader, Layout(), format)
        plan.keeps_parts = False
        change(plan)
        plan.dropped = sorted(set(reader.entries) - {step.entry for step in plan.steps})
        execute(plan, reader, target, progress=False)
    return target


def contents(folder: Path) -> dict[str, Any]:
    """Return every file's bytes and every link below a folder, hidden ones included."""
    return {
        str(path.relative_to(folder)): os.readlink(path) if path.is_symlink() else path.is_file() and path.read_bytes()
        for path in folder.rglob("*")
    }


def refused(capsys: pytest.CaptureFixture[str], *words: object) -> str:
    """Run the converter, which must end with status 2 and one line; returns the line."""
    capsys.readouterr()
    status = main([str(word) for word in words])
    lines = [line for line in capsys.readouterr().err.strip().splitlines() if not line.startswith("> ")]  # no notes
    assert status == 2, f"{words} ended with status {status}: {lines}"
    assert len(lines) == 1, lines
    assert lines[0].startswith("error: "), lines
    return lines[0]


COMMANDS: dict[str, list[str]] = {
    "widen": ["--num-streams", "4"],
    "resize": ["--num-streams", "8"],
    "rekey": ["--names", "combined"],
    "reshard": ["--format", "torch"],
    "import-hf": [],
    "export-hf": [],
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_around_or_inside_the_input_is_refused_and_nothing_is_touched(
    command: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(source, tmp_path / "around" / "input")
    shutil.copytree(source / STEP, tmp_path / "elsewhere" / STEP)
    (tmp_path / "linked").mkdir()
    shutil.copy(source / "latest_checkpointed_iteration.txt", tmp_path / "linked")
    (tmp_path / "linked" / STEP).symlink_to(tmp_path / "elsewhere" / STEP)
    (tmp_path / "link").symlink_to(tmp_path / "around")
    read = tmp_path / "around" / "input"
    before = contents(tmp_path)
    cases = [
        *((read, place) for place in (read, read.parent, tmp_path, read / STEP, read / "new" / "deep")),
        *((tmp_path / "link" / "input", place) for place in (read.parent, read / "new")),
        *((read, place) for place in (tmp_path / "link", tmp_path / "link" / "input" / "new")),
        *((tmp_path / "linked", place) for place in (tmp_path / "elsewhere", tmp_path / "elsewhere" / STEP)),
    ]
    for given, place in cases:
        for overwrite in ([],) if command == "export-hf" else ([], ["--overwrite"]):
            said = refused(capsys, command, "--input", given, "--output", place, *COMMANDS[command], *overwrite)
            assert "--output" in said, said
            assert contents(tmp_path) == before, f"{command} {given} to {place} {overwrite} changed something"


def _killed(make: Callable[[], None], moment: int, *, exchange: bool) -> bool:
    """Run `make` in a process that kills itself at its moment-th rename, before or after it; whether it was killed."""
    child = os.fork()
    if child == 0:
        left = [moment]

        def counted(real: Callable[..., Any]) -> Callable[..., Any]:
            def rename(*names: Any) -> Any:
                for act in (None, real):
                    value = act(*names) if act is not None else None
                    left[0] -= 1
                    if left[0] < 0:
                        os.kill(os.getpid(), signal.SIGKILL)
                return value

            return rename

        os.rename = counted(os.rename)
        output_folder._exchange = counted(output_folder._exchange) if exchange else lambda one, other: False
        try:
            make()
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.mark.parametrize("exchange", [True, False])
def test_killed_while_overwriting_the_old_or_the_new_checkpoint_stands_whole_after_the_next_start(
    exchange: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "out"

    def write(text: str) -> None:
        with new_checkpoint(target, 10, overwrite=True) as folder:
            for number in range(3):
                (folder / f"file{number}").write_text(text)

    seen, restored, moment = set(), 0, 0
    while True:
        write("old")
        if not _killed(lambda: write("new"), moment, exchange=exchange):
            break
        # the next conversion fails, at a source that is not there
        said = main(["widen", "--input", str(tmp_path / "none"), "--output", str(target), "--num-streams", "2"])
        assert said == 2
        restored += "is there again" in capsys.readouterr().err
        found = {path.read_text() for path in (target / STEP).iterdir()}
        assert found in ({"old"}, {"new"}), f"after a kill at moment {moment}: {found}"
        assert len(list((target / STEP).iterdir())) == 3
        seen |= found
        write("next")
        assert [path.name for path in tmp_path.iterdir()] == ["out"], "left-overs stay"
        moment += 1
    assert seen == {"old", "new"}, f"{moment} moments were tried"
    assert exchange or restored, "no kill fell between the renames"


@pytest.mark.parametrize("place", ["file/x", "file/x/y", "/proc/no-such/y", "name" + 250 * "e", "circle"])
def test_an_output_that_cannot_be_made_is_one_line(
    place: str, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("mine")
    (tmp_path / "circle").symlink_to(tmp_path / "circle")
    before = contents(tmp_path)
    for overwrite in ([], ["--overwrite"]):
        refused(capsys, "widen", "--input", source, "--output", tmp_path / place, "--num-streams", 2, *overwrite)
        if "file" in place or place == "circle":  # what can be told before anything is read
            refused(capsys, "export-hf", "--input", source, "--output", tmp_path / place)
    assert contents(tmp_path) == before


def test_a_link_as_output_stays_and_leads_to_the_result(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "mine").write_text("precious")
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "link").symlink_to(tmp_path / "real")
    command = ["widen", "--input", str(source), "--output", str(tmp_path / "there" / "link"), "--num-streams", "2"]
    assert "--overwrite" in refused(capsys, *command)
    assert (tmp_path / "real" / "mine").read_text() == "precious"
    assert main([*command, "--overwrite"]) == 0
    assert os.readlink(tmp_path / "there" / "link") == str(tmp_path / "real")
    assert (tmp_path / "real" / STEP).is_dir()
    assert not (tmp_path / "real" / "mine").exists()
    assert sorted(p.name for p in (*tmp_path.iterdir(), *(tmp_path / "there").iterdir())) == ["link", "real", "there"]


def test_a_stream_layout_of_an_unknown_format_is_refused_by_every_command(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def newer(plan: Plan) -> None:
        plan.common.args.wide_residual_format = 2

    for format in ("torch_dist", "torch"):
        other = rewrite(wide, tmp_path / format, newer, format)
        for command in ("resize", "rekey", "reshard", "export-hf"):
            words = ["--input", other, "--output", tmp_path / "out", *COMMANDS[command]]
            assert "format 2" in refused(capsys, command, *words)
        assert "format 2" in refused(capsys, "inspect", "--input", other)
    assert not (tmp_path / "out").exists()


def _without(*lost: Entry) -> Callable[[Plan], None]:
    def change(plan: Plan) -> None:
        plan.steps = [step for step in plan.steps if step.entry not in lost]

    return change


def _stacked_without_moment(plan: Plan) -> None:
    """Leave out what torch_dist keeps in one tensor: that of all layers."""
    lost = [step.entry for step in plan.steps if step.entry.name.endswith("mlp.linear_fc1.weight")]
    _without(*(entry for entry in lost if entry.slot == "exp_avg_sq"))(plan)


def _as(dtype: torch.dtype, *entries: Entry) -> Callable[[Plan], None]:
    def cast(tensor: Tensor | None) -> Tensor:
        assert tensor is not None
        return tensor.to(dtype)

    def change(plan: Plan) -> None:
        plan.common.args.params_dtype = torch.float32
        for number, step in enumerate(plan.steps):
            if step.entry in entries:
                info = TensorInfo(step.info.shape, dtype)
                plan.steps[number] = Step(step.entry, info, step.source, cast)

    return change


def _state_lost(source: Path, target: Path) -> Path:
    """Write a plain checkpoint in which the optimizer has no state of one parameter."""
    plain = rewrite(source, target, lambda plan: None, "torch")
    path = plain / STEP / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(path, weights_only=False)
    state["optimizer"]["state"].pop(3)
    torch.save(state, path)
    return plain


INCOMPLETE: dict[str, tuple[Callable[[Path, Path], Path], str]] = {
    "a moment of a layer": (lambda s, t: rewrite(s, t, _stacked_without_moment), "exp_avg_sq of decoder.layers.0"),
    "a moment of a controller": (lambda s, t: rewrite(s, t, _without(Entry(EXIT, "exp_avg"))), f"exp_avg of {EXIT}"),
    "a weight": (lambda s, t: rewrite(s, t, _without(Entry(NORM))), f"{NORM} is missing"),
    "a half-precision weight": (lambda s, t: rewrite(s, t, _as(torch.float16, Entry(NORM))), f"{NORM} is float16"),
    "a half-precision moment": (
        lambda s, t: rewrite(s, t, _as(torch.float16, Entry(NORM, "exp_avg"))),
        f"exp_avg of {NORM} is float16",
    ),
    "a state of a plain checkpoint": (_state_lost, "is missing"),
}


@pytest.mark.parametrize("case", INCOMPLETE)
def test_a_source_that_lacks_a_state_or_has_one_in_another_dtype_is_refused(
    case: str, wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make, words = INCOMPLETE[case]
    given = make(wide, tmp_path / "given")
    for command in ("resize", "rekey", "reshard"):
        said = refused(capsys, command, "--input", given, "--output", tmp_path / "out", *COMMANDS[command])
        assert words in said, said
    assert main(["inspect", "--input", str(given)]) == 1
    assert words in capsys.readouterr().out
    assert not (tmp_path / "out").exists()


def _model(half: torch.dtype | None, master: str | None, moments: torch.dtype = torch.float32) -> Namespace:
    """A reader's table of a hybrid's tensors: controllers and A_log in fp32, experts' bias a buffer."""
    entries: dict[Entry, TensorInfo] = {}
    for name, kept in (
        *((name, False) for name in (FC1, NORM, "decoder.layers.1.mlp.router.weight")),
        *(("decoder.layers.2.mixer.A_log", True), (EXIT, True), ("decoder.layers.1.mlp.router.expert_bias", True)),
    ):
        dtype = torch.float32 if kept or half is None else half
        entries[Entry(name)] = TensorInfo((1,), dtype)
        if name.endswith("expert_bias"):
            continue
        entries |= {Entry(name, slot): TensorInfo((1,), moments) for slot in ("exp_avg", "exp_avg_sq")}
        # upstream's optimizer for half precision keeps no copy of what the model has in fp32; controllers have one
        if master == "param" or (master and not name.endswith("A_log")):
            entries[Entry(name, master)] = TensorInfo((1,), torch.float32)
    args = Namespace(params_dtype=half or torch.float32)
    return Namespace(entries=entries, common=Common({"args": args}), bucket_keys=())


@pytest.mark.parametrize("half", [None, torch.bfloat16, torch.float16])
def test_what_real_optimizers_write_is_accepted_and_every_missing_or_odd_state_is_found(
    half: torch.dtype | None,
) -> None:
    """fp32, half precision with and without the distributed optimizer, moments in half precision, Muon with Adam."""
    for master in ("fp32_param", "param") if half else (None, "param"):
        for moments in (torch.float32, torch.bfloat16):
            reader = _model(half, master, moments)
            assert flaw_of(reader) is None, f"{half}, {master}, moments {moments}: {flaw_of(reader)}"
            for entry in list(reader.entries):
                if entry.name.endswith("expert_bias"):
                    continue
                info = reader.entries.pop(entry)
                lonely = master == "fp32_param" and entry == Entry(EXIT, "fp32_param")  # no other controller tells
                assert lonely or flaw_of(reader), f"{half}, {master}: {entry} was taken out, and nothing was said"
                reader.entries[entry] = TensorInfo(info.shape, torch.float64)
                assert flaw_of(reader), f"{half}, {master}: {entry} is float64, and nothing was said"
                reader.entries[entry] = info
    muon = _model(half, "fp32_param" if half else None)
    for slot in ("exp_avg", "exp_avg_sq"):
        del muon.entries[Entry(FC1, slot)]
    assert flaw_of(muon), "moments that are missing were accepted"
    muon.entries[Entry(FC1, "momentum_buffer")] = TensorInfo((1,), torch.float32)
    assert flaw_of(muon) is None, flaw_of(muon)


def test_created_moments_have_the_dtype_of_the_sources(source: Path, tmp_path: Path) -> None:
    def half_moments(plan: Plan) -> None:
        _as(torch.bfloat16, *(step.entry for step in plan.steps if step.entry.slot))(plan)

    half = rewrite(source, tmp_path / "half", half_moments)
    assert main(["widen", "--input", str(half), "--output", str(tmp_path / "wide"), "--num-streams", "4"]) == 0
    with open_reader(tmp_path / "wide") as reader:
        assert reader.entries[Entry(EXIT, "exp_avg")].dtype == torch.bfloat16
        assert reader.entries[Entry(EXIT)].dtype == torch.float32


def test_a_source_whose_states_are_incomplete_still_gives_its_weights(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = rewrite(wide, tmp_path / "given", _without(Entry(EXIT, "exp_avg")))
    command = ["resize", "--input", str(given), "--output", str(tmp_path / "out"), "--num-streams", "8"]
    assert main([*command, "--weights-only"]) == 0


def test_widening_with_retention_says_that_it_is_not_exact(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["widen", "--input", str(source), "--output", str(tmp_path / "out"), "--num-streams", "2", "--dry-run"]
    assert main(command) == 0
    assert "not exactly" not in capsys.readouterr().out
    assert main([*command, "--wide-residual-learned-retention", "--wide-residual-retention-init", "0.99"]) == 0
    said = capsys.readouterr().out
    assert "not exactly the same function" in said
    assert "0.99" in said
