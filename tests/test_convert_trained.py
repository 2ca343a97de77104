"""Conversions of checkpoints that the real trainer wrote, and runs of the real trainer on converted ones."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_convert import assert_same_tensors, options, train_all
from megatron.core.transformer.moe.moe_logging import MoEMetricsTracker
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler

from megatron.core.transformer.moe import moe_logging
from megatron.core.transformer.wide_residual_config import WideResidualConfig
from megatron.training.checkpoints.conversion import execute
from megatron.training.checkpoints.layout import Layout
from megatron.training.checkpoints.open_checkpoint import open_reader
from megatron.training.checkpoints.rekey import plan_rekey
from megatron.training.checkpoints.reshard import plan_reshard
from megatron.training.checkpoints.resize import plan_resize
from megatron.training.checkpoints.sharded_reader import ShardedReader
from megatron.training.checkpoints.verification import compare
from megatron.training.checkpoints.widen import plan_widen

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))
sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "checkpoint"))

from convert import main

PLAIN = ("--ckpt-format", "torch")
TP2_PP2 = Layout(tensor=2, pipeline=2, expert_tensor=2)
# (name, model, more flags): trained for two steps and saved, in both formats where the second oracle is wanted.
TRAINED = (
    ("gpt", "dense", ()),
    ("hybrid", "hybrid", ()),
    ("moe", "moe", ()),
    ("wide-bf16", "wide3-retention", ("--bf16",)),
    ("wide-hybrid", "wide4-shortcut", ()),
)
BOTH = ("gpt", "moe", "wide-bf16", "wide-hybrid")
WIDE = ("--wide-residual", "4")


def convert(source: Path, target: Path, make: Any) -> Path:
    """Carry out a plan, in this process."""
    with open_reader(source) as reader:
        execute(make(reader), reader, target, progress=False)
    return target


def reshard(source: Path, target: Path, layout: Layout, format: str) -> Path:
    return convert(source, target, lambda reader: plan_reshard(reader, layout, format))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of checkpoints named as in TRAINED (plain ones with -plain); gpt and hybrid also went on to step 3."""
    folder = tmp_path_factory.mktemp("convert-trained")
    runs = {}
    for name, model, more in TRAINED:
        runs[name] = options(model, 2, *more, "--save", str(folder / name), "--save-interval", "2")
        if name in BOTH:
            plain = str(folder / f"{name}-plain")
            runs[f"{name}-plain"] = options(model, 2, *more, *PLAIN, "--save", plain, "--save-interval", "2")
    for name, model in (("gpt", "dense"), ("hybrid", "hybrid"), ("moe", "moe"), ("wide-hybrid", "wide4-shortcut")):
        runs[f"{name}-on"] = options(model, 3, "--load", str(folder / name))
    losses = train_all(1, runs, folder)
    torch.save(losses, folder / "losses.pt")
    return folder


def loss_of_step_3(trained: Path, name: str) -> float:
    (loss,) = torch.load(trained / "losses.pt")[f"{name}-on"]
    return loss


def _same(one: Any, other: Any, path: str = "") -> Iterator[str]:
    """Yield where two loaded rank files differ."""
    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or not torch.equal(one, other):
            yield path
    elif isinstance(one, dict):
        if list(one) != list(other):
            yield f"{path}: keys or their order ({one.keys() ^ other.keys()})"
        for key in one.keys() & other.keys():
            yield from _same(one[key], other[key], f"{path}/{key}")
    elif isinstance(one, (list, tuple)):
        if len(one) != len(other):
            yield f"{path}: {len(one)} and {len(other)}"
        for number, (left, right) in enumerate(zip(one, other, strict=False)):
            yield from _same(left, right, f"{path}/{number}")
    elif isinstance(one, (int, float, str)) and one != other:
        yield f"{path}: {one} and {other}"


@pytest.mark.parametrize("name", BOTH)
def test_a_plain_checkpoint_is_written_as_the_trainer_writes_it(name: str, trained: Path, tmp_path: Path) -> None:
    """The same training run was saved in both formats: converting one gives the other, optimizer numbering included."""
    reshard(trained / name, tmp_path / "plain", Layout(), "torch")
    (ours,) = (tmp_path / "plain").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    (theirs,) = (trained / f"{name}-plain").glob("iter_*/mp_rank_00/model_optim_rng.pt")
    one, other = (torch.load(path, weights_only=False) for path in (theirs, ours))
    for key in ("model", "optimizer", "rng_state", "opt_param_scheduler", "iteration"):
        differences = list(_same(one[key], other[key], key))
        assert not differences, f"{key} is not the trainer's: {differences[:5]}"
    back = reshard(trained / f"{name}-plain", tmp_path / "back", Layout(), "torch_dist")
    assert_same_tensors(trained / name, back)
    with open_reader(trained / name) as theirs_reader, open_reader(back) as ours_reader:
        assert isinstance(theirs_reader, ShardedReader)
        assert isinstance(ours_reader, ShardedReader)
        assert set(theirs_reader.keys) == set(ours_reader.keys), "torch_dist keys are not the trainer's"
        assert set(theirs_reader.extra_state_keys) == set(ours_reader.extra_state_keys)


@pytest.mark.parametrize("name", [name for name, _, _ in TRAINED])
def test_reshard_there_and_back_is_bit_equal(name: str, trained: Path, tmp_path: Path) -> None:
    for format in ("torch", "torch_dist"):
        there = reshard(trained / name, tmp_path / f"there-{format}", TP2_PP2, format)
        assert_same_tensors(trained / name, there)
        back = reshard(there, tmp_path / f"back-{format}", Layout(), "torch_dist")
        assert_same_tensors(trained / name, back)
        with open_reader(back) as reader, open_reader(trained / name) as before:
            assert Layout.of(reader.common.args) == Layout.of(before.common.args)
            assert reader.common.args.padded_vocab_size == before.common.args.padded_vocab_size
            assert reader.common.iteration == 2


def test_experts_are_divided_and_joined(trained: Path, tmp_path: Path) -> None:
    there = reshard(trained / "moe", tmp_path / "there", Layout(tensor=2, expert=2, expert_tensor=2), "torch")
    assert len(list(there.glob("iter_*/mp_rank_*"))) == 4
    back = reshard(there, tmp_path / "back", Layout(), "torch")
    assert_same_tensors(trained / "moe-plain", back)


def test_rekey_there_and_back_is_bit_equal(trained: Path, tmp_path: Path) -> None:
    for source in ("wide-hybrid", "wide-bf16-plain"):
        combined = convert(trained / source, tmp_path / f"{source}-c", lambda reader: plan_rekey(reader, "combined"))
        with open_reader(combined) as reader:
            assert reader.combined
        split = convert(combined, tmp_path / f"{source}-s", lambda reader: plan_rekey(reader, "split"))
        assert_same_tensors(trained / source, split)
        with open_reader(split) as reader:
            assert not reader.combined


@pytest.mark.parametrize("name", ["gpt", "hybrid"])
def test_widen_computes_the_same_logits(
    name: str, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What an MoE model leaves behind that ran a backward pass in this process before.
    monkeypatch.setattr(MoEAuxLossAutoScaler, "main_loss_backward_scale", torch.tensor(1.0))
    tracker = MoEMetricsTracker()
    tracker.record("load_balancing_loss", torch.tensor(1.0), layer_number=1, num_layers=1)
    monkeypatch.setattr(moe_logging, "_MOE_METRICS_TRACKER", tracker)
    out = tmp_path / "wide"
    command = ["widen", "--input", str(trained / name), "--output", str(out), "--num-streams", "4", "--verify"]
    assert main([*command, "--tolerance", "1e-6"]) == 0
    assert "the same function" in capsys.readouterr().out
    assert main([*command, "--overwrite", "--tolerance", "0"]) == 1, "4 streams add up to the very same bits?"


def test_resize_computes_the_same_logits(trained: Path, tmp_path: Path) -> None:
    for streams, spread in ((8, 0.0), (12, 0.02)):
        out = convert(
            trained / "wide-hybrid",
            tmp_path / str(streams),
            lambda reader, k=streams, x=spread: plan_resize(reader, k, spread=x),
        )
        difference = compare(trained / "wide-hybrid", out)
        assert difference.largest_relative <= 1e-6, f"{streams} streams, spread {spread}: {difference}"


def test_resizing_down_again_gives_the_streams_back(trained: Path, tmp_path: Path) -> None:
    """Merging what was duplicated loses nothing but rounding."""
    wide = convert(trained / "wide-hybrid", tmp_path / "8", lambda reader: plan_resize(reader, 8))
    back = convert(wide, tmp_path / "4", lambda reader: plan_resize(reader, 4, merge=True))
    with open_reader(trained / "wide-hybrid") as before, open_reader(back) as after:
        for entry in before.entries:
            if "residual_" in entry.name and not entry.slot:
                assert torch.allclose(before.read(entry), after.read(entry), atol=1e-6), entry


@pytest.fixture(scope="module")
def continued(trained: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, float]:
    """The loss of step 3 of runs that go on from converted checkpoints: on one process, then on two."""
    folder = tmp_path_factory.mktemp("convert-continued")
    four = WideResidualConfig(num_streams=4)
    convert(trained / "gpt", folder / "gpt-wide", lambda reader: plan_widen(reader, four))
    convert(trained / "gpt-plain", folder / "gpt-wide-plain", lambda reader: plan_widen(reader, four))
    convert(trained / "hybrid", folder / "hybrid-wide", lambda reader: plan_widen(reader, four))
    convert(trained / "wide-hybrid", folder / "wide-8", lambda reader: plan_resize(reader, 8, spread=0.01))
    convert(trained / "wide-hybrid", folder / "combined", lambda reader: plan_rekey(reader, "combined"))
    reshard(trained / "gpt", folder / "gpt-torch", Layout(), "torch")
    restored = ("--use-checkpoint-args",)
    one = {
        "gpt-wide": options("dense", 3, *WIDE, "--load", str(folder / "gpt-wide")),
        "gpt-wide-plain": options("dense", 3, *WIDE, *PLAIN, "--load", str(folder / "gpt-wide-plain")),
        "hybrid-wide": options("hybrid", 3, *restored, "--load", str(folder / "hybrid-wide")),
        "wide-8": options("hybrid", 3, *restored, "--load", str(folder / "wide-8")),
        "combined": options("wide4-shortcut", 3, "--load", str(folder / "combined")),
        "gpt-torch": options("dense", 3, *PLAIN, "--load", str(folder / "gpt-torch")),
    }
    tensor = ("--tensor-model-parallel-size", "2")
    pipeline = ("--pipeline-model-parallel-size", "2")
    expert = ("--expert-model-parallel-size", "2")
    reshard(trained / "gpt", folder / "tp2", Layout(2, expert_tensor=2), "torch_dist")
    reshard(trained / "gpt", folder / "tp2-torch", Layout(2, expert_tensor=2), "torch")
    reshard(trained / "gpt", folder / "pp2-torch", Layout(1, 2), "torch")
    reshard(trained / "moe", folder / "ep2", Layout(expert=2), "torch_dist")
    reshard(trained / "moe", folder / "ep2-torch", Layout(expert=2), "torch")
    two = {
        "tp2": options("dense", 3, *tensor, "--no-load-rng", "--load", str(folder / "tp2")),
        "tp2-torch": options("dense", 3, *tensor, *PLAIN, "--no-load-rng", "--load", str(folder / "tp2-torch")),
        "pp2-torch": options("dense", 3, *pipeline, *PLAIN, "--no-load-rng", "--load", str(folder / "pp2-torch")),
        "ep2": options("moe", 3, *expert, "--load", str(folder / "ep2")),
        "ep2-torch": options("moe", 3, *expert, *PLAIN, "--load", str(folder / "ep2-torch")),
    }
    losses = {**train_all(1, one, folder), **train_all(2, two, folder)}
    assert all(len(steps) == 1 for steps in losses.values()), f"iteration 2 was not continued: {losses}"
    return {name: steps[0] for name, steps in losses.items()}


@pytest.mark.parametrize(
    ("name", "ordinary"),
    [
        *(("gpt-wide", "gpt"), ("gpt-wide-plain", "gpt"), ("hybrid-wide", "hybrid"), ("wide-8", "wide-hybrid")),
        *(
            ("combined", "wide-hybrid"),
            ("gpt-torch", "gpt"),
            ("tp2", "gpt"),
            ("tp2-torch", "gpt"),
            ("pp2-torch", "gpt"),
        ),
        *(("ep2", "moe"), ("ep2-torch", "moe")),
    ],
)
def test_the_first_loss_after_a_conversion_is_the_unconverted_runs_next_one(
    name: str, ordinary: str, continued: dict[str, float], trained: Path
) -> None:
    wanted = loss_of_step_3(trained, ordinary)
    assert abs(continued[name] - wanted) <= 1e-5, f"{name}: loss {continued[name]}, without conversion {wanted}"
