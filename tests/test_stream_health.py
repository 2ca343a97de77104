"""What training reports of its streams is right, the same in every layout, and changes nothing."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness_corpus import tool
from harness_layouts import BASE, MODELS, START, TRAIN, launch_entries
from harness_pretrain import TINY_GPT, TINY_HYBRID
from harness_resume import train_here

from megatron.training.stream_health.monitor import StreamMonitor
from megatron.training.stream_health.pictures import heat_map
from megatron.training.stream_health.report import QUIET_STEPS, BranchHealth, StreamReport
from megatron.training.stream_health.samples import MAX_TOKENS, mean_of, stream_sums, token_grams

_REPLAY = ["--recompute-granularity", "selective", "--recompute-modules", "residual_stream"]
_SPREAD = ["--wide-residual-streamwise-sigmoid-init-scale", "0.7"]


def all_scalars(folder: Path) -> dict[str, dict[int, float]]:
    """Every scalar of a TensorBoard folder whose name begins with "streams", by name and step."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "images": 0})
    reader.Reload()
    names = [name for name in reader.Tags()["scalars"] if name.startswith("streams")]
    return {name: {event.step: event.value for event in reader.Scalars(name)} for name in names}


# Dropout is 0.1 in both, so a single random number drawn too many would show.
UNCHANGED = {
    "gpt-replay-retention": [*TINY_GPT, "--wide-residual", "3", "--wide-residual-learned-retention", *_REPLAY],
    "hybrid-shortcut-bf16": [*TINY_HYBRID, "--wide-residual", "2", "--moe-shortcut-connection", "--bf16"],
}


@pytest.mark.parametrize("name", UNCHANGED)
def test_losses_are_bit_equal_with_and_without_it(name: str, tmp_path: Path) -> None:
    options = [*UNCHANGED[name], *_SPREAD, "--train-iters", "4"]
    plain = train_here([*options, "--log-streams-interval", "0"])
    watched = train_here([*options, "--log-streams-interval", "1", "--tensorboard-dir", str(tmp_path)])
    assert watched == plain
    numbers = all_scalars(tmp_path)
    branches = {"gpt-replay-retention": ["001.self_attn", "001.mlp", "002.self_attn", "002.mlp", "readout"]}.get(
        name, ["001.mamba", "002.self_attn", "003.mlp", "004.shortcut", "004.mlp", "readout"]
    )
    for kind in ("cosine", "distinct", "effective", "read-entropy"):
        found = sorted(key.split("/")[1] for key in numbers if key.startswith(f"streams-{kind}/"))
        assert found == sorted(branches), f"streams-{kind} has other branches"
    for branch in branches:
        shares = [value for key, value in numbers.items() if key.startswith(f"streams-share/{branch}.")]
        assert sum(share[4] for share in shares) == pytest.approx(1, abs=1e-6), f"the shares of {branch}"
    assert ("streams-retention/002.mlp.2" in numbers) == (name == "gpt-replay-retention")
    assert all(sorted(steps) == [1, 2, 3, 4] for steps in numbers.values())


def test_it_reports_at_its_interval_with_pictures_and_a_line_once_though_a_step_is_repeated(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import megatron.training.initialize as initialize
    from megatron.core.rerun_state_machine import RerunMode
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    # The machine's mode that computes every step twice. Upstream's flag for it has a value that its enum does not know.
    monkeypatch.setattr(initialize, "RerunMode", lambda mode: RerunMode.REPORT_DETERMINISM_STATS)
    finalized: list[int] = []
    report = StreamMonitor.report

    def counted(monitor: StreamMonitor, chunks: Sequence[Any]) -> None:
        finalized.append(1)
        report(monitor, chunks)

    monkeypatch.setattr(StreamMonitor, "report", counted)
    options = [*TINY_GPT, "--wide-residual", "4", "--train-iters", "5", "--log-streams-interval", "2"]
    train_here([*options, "--tensorboard-dir", str(tmp_path)])
    assert len(finalized) == 2 * 5, "the steps were not computed twice"
    lines = re.findall(r"streams at iteration (\d+) \| effective streams: 4\.000 of 4 .*", capfd.readouterr().out)
    assert lines == ["2", "4"]
    numbers = all_scalars(tmp_path)
    assert all(sorted(steps) == [2, 4] for steps in numbers.values())
    for stream in range(4):
        assert numbers[f"streams-read/001.self_attn.{stream}"][2] == pytest.approx(0.25, abs=1e-3)
        # The first branch reads the embedding, the same in every stream.
        assert numbers[f"streams-share/001.self_attn.{stream}"][2] == pytest.approx(0.25, abs=1e-3)
        assert numbers["streams-cosine/001.self_attn"][2] == pytest.approx(1, abs=1e-5)
    assert numbers["streams-write-spread/001.mlp"][2] == pytest.approx(0.01, rel=0.2)
    assert numbers["streams/gradient"][2] > 0
    reader = EventAccumulator(str(tmp_path), size_guidance={"images": 0})
    reader.Reload()
    assert sorted(reader.Tags()["images"]) == [f"streams/{kind}" for kind in ("norm", "read", "share", "write")]


def _trained(folder: Path, layouts: dict[str, tuple[int, Sequence[str]]]) -> dict[str, dict[str, dict[int, float]]]:
    """Train one model in each layout, from the same weights; what each one reported."""
    base = [*BASE, *MODELS["wide4"]]
    weights = folder / "weights"
    train_here([*base, *START, "--save", str(weights)])
    load = ["--load", str(weights), "--finetune", "--no-load-optim", "--no-load-rng", "--log-streams-interval", "1"]
    entries = []
    for name, (processes, flags) in layouts.items():
        argv = [*base, *TRAIN, "2", *load, *flags, "--tensorboard-dir", str(folder / name)]
        if processes == 1:
            train_here(argv)
        else:
            entries.append({"name": name, "argv": argv})
    launch_entries(2, entries, folder)
    return {name: all_scalars(folder / name) for name in layouts}


LAYOUTS: dict[str, tuple[int, Sequence[str]]] = {
    "one": (1, ()),
    "one-all-samples": (1, ("--micro-batch-size", "2")),
    "tp2-sp": (2, ("--tensor-model-parallel-size", "2", "--sequence-parallel")),
    "pp2-vpp2": (2, ("--pipeline-model-parallel-size", "2", "--num-virtual-stages-per-pipeline-rank", "2")),
    "dp2-distopt": (2, ("--use-distributed-optimizer",)),
}


@pytest.fixture(scope="module")
def layouts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, dict[int, float]]]:
    return _trained(tmp_path_factory.mktemp("layouts"), LAYOUTS)


@pytest.mark.parametrize("name", ["tp2-sp", "pp2-vpp2"])
def test_sharded_streams_are_reported_as_one_process_does(
    name: str, layouts: dict[str, dict[str, dict[int, float]]]
) -> None:
    assert sorted(layouts[name]) == sorted(layouts["one"]), "other numbers, or other names"
    for key, steps in layouts["one"].items():
        assert layouts[name][key] == pytest.approx(steps, rel=2e-3, abs=2e-6), f"{key} in {name}"


def test_data_parallel_ranks_report_their_mean_and_whole_gradients(
    layouts: dict[str, dict[str, dict[int, float]]],
) -> None:
    """Both ranks' first sample is looked at, as a micro-batch of two is in one process."""
    found = layouts["dp2-distopt"]
    for key, steps in layouts["one-all-samples"].items():
        assert found[key] == pytest.approx(steps, rel=2e-3, abs=2e-6), key


def test_sums_give_norms_and_cosines_of_the_tokens() -> None:
    generator = torch.Generator().manual_seed(1)
    streams, width = 3, 16
    x_sbw = torch.randn(40, 2, streams * width, generator=generator)
    means = mean_of(stream_sums([token_grams(x_sbw, streams)])[0].numpy(), streams)
    assert means is not None
    gram_kj, cosine_kj = map(torch.from_numpy, means)
    x_nkd = x_sbw.double().reshape(-1, streams, width)
    expected = torch.einsum("nkd,njd->kj", x_nkd, x_nkd) / 80
    torch.testing.assert_close(gram_kj, expected, rtol=1e-5, atol=1e-5)
    unit_nkd = x_nkd / x_nkd.norm(dim=-1, keepdim=True)
    torch.testing.assert_close(cosine_kj, torch.einsum("nkd,njd->kj", unit_nkd, unit_nkd) / 80, rtol=1e-5, atol=1e-5)


def test_many_tokens_are_sampled_and_parts_add_up() -> None:
    x_sbw = torch.randn(1000, 3, 8)
    whole, few = stream_sums([token_grams(x_sbw, 2), token_grams(x_sbw[:5], 2)]).numpy()
    assert 0 < whole[-1] <= MAX_TOKENS
    assert few[-1] == 15
    copies = mean_of(whole + whole, 2)
    once = mean_of(whole, 2)
    assert copies is not None
    assert once is not None
    assert copies[0] == pytest.approx(once[0])
    assert mean_of(0 * whole, 2) is None


def _health(cosine: float, read: Sequence[float], step: int = QUIET_STEPS) -> StreamReport:
    streams = len(read)
    cosines = [[1.0 if k == j else cosine for j in range(streams)] for k in range(streams)]
    row = BranchHealth("001.mlp", read, write=[1.0] * streams, cosines=cosines, gradients={"read": 3.0, "write": 4.0})
    return StreamReport(step, [row])


def test_streams_that_are_copies_count_as_one_and_orthogonal_ones_as_all() -> None:
    alike, apart = _health(1.0, [0.25] * 4), _health(0.0, [0.25] * 4)
    assert (alike.rows[0].distinct, apart.rows[0].distinct) == (pytest.approx(1), pytest.approx(4))
    assert (alike.deeper_cosine, apart.deeper_cosine) == (pytest.approx(1), pytest.approx(0))
    assert _health(0.0, [0.5, 0.5, 1e-12, 1e-12]).effective == pytest.approx(2, abs=1e-6)
    assert alike.gradient == pytest.approx(5)


def test_a_collapse_is_warned_of_with_its_two_numbers_and_not_while_streams_part() -> None:
    warning = _health(0.9995, [0.25] * 4).collapse()
    assert warning is not None
    assert "cosine between streams is 0.9995" in warning
    assert "4.00 of 4 streams are read" in warning
    assert _health(0.2, [0.9, 1e-9, 1e-9, 1e-9]).collapse() is not None
    assert _health(0.2, [0.25] * 4).collapse() is None
    assert _health(1.0, [0.25] * 4, step=QUIET_STEPS - 1).collapse() is None, "streams start as copies"


def test_a_heat_map_has_a_line_for_every_branch() -> None:
    pixels = heat_map("read factors", ["001.mlp", "readout"], [[0.1, 0.9], [0.5, 0.5]])
    assert pixels.dtype.name == "uint8"
    assert pixels.shape[2] == 3
    low, high = pixels[35, -66], pixels[35, -22]
    assert list(low) == [68, 1, 84]
    assert list(high) == [253, 231, 37]


@pytest.mark.parametrize("layout", [[], ["--ckpt-format", "torch"]], ids=["torch_dist", "plain"])
def test_the_plot_tool_shows_what_training_reported(
    layout: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save, events = tmp_path / "save", tmp_path / "events"
    options = [*TINY_HYBRID, *layout, *_SPREAD, "--wide-residual", "3"]
    options += ["--train-iters", "2", "--lr", "0", "--min-lr", "0", "--save", str(save), "--save-interval", "2"]
    train_here([*options, "--log-streams-interval", "2", "--tensorboard-dir", str(events)])
    plot = tool("plot_streams")
    files = ["--output", str(tmp_path / "p.png"), "--json", str(tmp_path / "p.json")]
    assert plot.main([str(save), *files]) == 0
    assert "5 branches of step 2" in capsys.readouterr().out
    table = json.loads((tmp_path / "p.json").read_text())["branches"]
    assert list(table) == ["001.mamba", "002.self_attn", "003.mlp", "004.mlp", "readout"]
    logged = all_scalars(events)
    for branch, kinds in table.items():
        for kind, factors in kinds.items():
            found = [logged[f"streams-{kind}/{branch}.{stream}"][2] for stream in range(3)]
            assert factors == pytest.approx(found, abs=1e-6), f"{kind} of {branch}"
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG")


def test_the_plot_tool_refuses_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plot = tool("plot_streams")
    assert plot.main([str(tmp_path), "--output", str(tmp_path / "p.png")]) == 2
    assert capsys.readouterr().err.startswith("error: ")
    assert not (tmp_path / "p.png").exists()
