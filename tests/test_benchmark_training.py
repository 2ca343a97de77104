"""tools/benchmark_training.py: its JSON, its files, its refusals and its --help.

    pytest tests/test_benchmark_training.py

No assertion looks at seconds: those belong to the machine. Bytes are PyTorch's own count.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from benchmark_training import extra_units, main, megatron_flags, parse_arguments, variants

TOOL = Path(__file__).resolve().parent.parent / "tools" / "benchmark_training.py"
SHAPE = ("--hidden-size", "32", "--head-dim", "16", "--seq-length", "16", "--vocab-size", "64")
HOW = ("--repeats", "2", "--threads", "1")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool to its end."""
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=300)


def test_wide_models_are_timed_beside_the_ordinary_one_and_train_alike(tmp_path: Path) -> None:
    outputs = [part for kind in ("json", "markdown", "plot") for part in (f"--{kind}", str(tmp_path / f"t.{kind}"))]
    outputs[-1] = str(tmp_path / "t.png")
    arguments = ("--num-layers", "2", "--num-streams", "2", "3", "--replay", "both", *outputs)
    done = run(*SHAPE, *HOW, *arguments, "--", "--init-method-std", "0.1")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "t.json").read_text())
    assert found["machine"]["load_average"]
    results = {result["model"]: result for result in found["results"]}
    wide = ["wide K=2", "wide K=2, replay", "wide K=3", "wide K=3, replay"]
    assert list(results) == ["ordinary", *wide]
    for result in results.values():
        assert result["seconds"] > 0
        assert result["tokens_per_second"] == pytest.approx(16 / result["seconds"])
        assert 0 < result["ratio_low"] <= result["ratio"] <= result["ratio_high"]
        assert result["loss"] == pytest.approx(results["ordinary"]["loss"], rel=1e-4), "the models do not start alike"
        assert result["peak_bytes"] > 0
    for name in wide:
        assert results[name]["bound_seconds"] > 0
        assert results[name]["of_bound_low"] <= results[name]["of_bound"] <= results[name]["of_bound_high"]
        assert len(results[name]["seconds_each"]) == 2
    assert results["ordinary"]["ratio"] == 1
    assert results["wide K=3"]["bound_seconds"] > results["wide K=2"]["bound_seconds"]
    assert {entry.name for entry in tmp_path.iterdir()} == {"t.json", "t.markdown", "t.png"}, "something half-written"
    assert (tmp_path / "t.png").read_bytes().startswith(b"\x89PNG")
    assert "| wide K=3, replay | 32 |" in (tmp_path / "t.markdown").read_text()


def test_hybrids_are_measured_too(tmp_path: Path) -> None:
    path = tmp_path / "hybrid.json"
    arguments = ("--model", "hybrid", "--hybrid-layer-pattern", "M*-", "--replay", "off", "--no-memory")
    done = run(*SHAPE, *HOW, *arguments, "--dtype", "bf16", "--json", str(path))
    assert done.returncode == 0, done.stderr
    results = json.loads(path.read_text())["results"]
    assert [result["model"] for result in results] == ["ordinary", "wide K=4"]
    assert results[1]["loss"] == pytest.approx(results[0]["loss"], rel=1e-2)
    assert results[0]["peak_bytes"] is None


def test_extra_traffic_is_that_of_the_operators_beyond_the_additions_they_replace() -> None:
    """By hand for K=4 in units of D: a branch moves 3K + 2 forward and 3K + 3 backward, an ordinary one 3 and 3."""
    ends = (4 + 1) + (4 + 1) + (4 + 1) + (2 * 4 + 1)  # expand and readout, forward and backward
    assert extra_units(4, [1], replay=False) == (3 * 4 + 2) + (3 * 4 + 3) - 6 + ends
    assert extra_units(4, [2, 2], replay=False) - extra_units(4, [2], replay=False) == 46
    assert extra_units(4, [2], replay=True) - extra_units(4, [2], replay=False) == 2 * (3 * 4 + 2) - (2 * 4 + 1)


def test_flags_of_megatrons_reach_every_model() -> None:
    args = parse_arguments(["--num-streams", "2", "--", "--normalization", "RMSNorm"])
    for variant in variants(args):
        assert megatron_flags(args, 512, variant)[-2:] == ["--normalization", "RMSNorm"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-streams", "1"], "--num-streams: 1 is too few; 2 or more streams are wanted"),
        (["--seq-length", "many"], "--seq-length: a whole number of at least 1 is wanted, got 'many'"),
        (["--head-dim", "7"], "--head-dim: 7 does not divide the hidden size 512"),
        (["--hybrid-layer-pattern", "MX"], "--hybrid-layer-pattern: M, * and - are wanted, got 'MX'"),
        (["--json", "/no/such/folder/x.json"], "--json: the folder /no/such/folder does not exist"),
        (["--plot", "x.pdf"], "--plot: a name that ends in .png is wanted, got 'x.pdf'"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_bad_values_are_refused_with_exit_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main(arguments)
    assert refused.value.code == 2
    assert message in capsys.readouterr().err


def test_help_explains_every_flag_without_importing_torch() -> None:
    program = (
        f"import runpy, sys; sys.path.insert(0, {str(TOOL.parent)!r}); sys.argv = [{str(TOOL)!r}, '--help']\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('IMPORTED', 'torch' in sys.modules or 'megatron' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED False" in done.stdout
    for flag in ("model", "num-streams", "replay", "hidden-size", "dtype", "repeats", "plot", "markdown", "json"):
        assert f"--{flag}" in done.stdout
    assert "example: python tools/benchmark_training.py" in done.stdout
