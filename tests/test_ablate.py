"""An ablation's YAML means exactly the runs that it says, and what contradicts itself is named before anything runs."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness_corpus import tool
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.ablations.axes import flags_of
from megatron.ablations.cost import Cost, _with_time
from megatron.ablations.description import Ablation, load_ablation
from megatron.ablations.plan_table import own_flags, remarks, totals
from megatron.ablations.runner import write_recipe
from megatron.ablations.slurm_array import submit
from megatron.ablations.state import check_folders, end_orphans, launch_lock, other_folders, state_of
from megatron.run_control.errors import LaunchError
from megatron.run_control.known_flags import known_flags
from megatron.run_control.recipes import FlagValue, load_recipe
from megatron.run_control.run_folder import RunFolder

ROOT = Path(__file__).resolve().parents[1]
COMMITTED = sorted((ROOT / "scripts" / "ablations").glob("*.yaml"))
BASE = """script: pretrain_gpt.py
flags: {num-layers: 2, hidden-size: 64, ffn-hidden-size: 192, num-attention-heads: 4, seq-length: 32, lr: 1e-3,
        min-lr: 1e-4, global-batch-size: 8, train-iters: 10, swiglu: true}
"""
WIDE = "base: base.yaml\naxes: [{streams: 1}, {streams: [2, 4], retention: [false, true]}]\nseeds: [1, 2]\n"


def _ablation(folder: Path, text: str, root: Path = ROOT, name: str = "trial.yaml") -> Ablation:
    (folder / "base.yaml").write_text(BASE)
    (folder / name).write_text(text)
    return load_ablation(folder / name, root)


def _variant_flags(folder: Path, axes: str, base: str = "") -> dict:
    """The flags of the last variant."""
    return dict(_ablation(folder, f"base: base.yaml\n{base}axes: {axes}\nseeds: [1]\n").variants[-1].recipe.flags)


def test_the_runs_are_every_combination_with_every_seed(tmp_path: Path) -> None:
    ablation = _ablation(tmp_path, WIDE)
    names = ["ordinary", "streams-2", "streams-2-retention", "streams-4", "streams-4-retention"]
    assert [run.name for run in ablation.runs] == [f"{name}-seed-{seed}" for seed in (1, 2) for name in names]
    assert [variant.reference for variant in ablation.variants] == [None, *["ordinary"] * 4]
    assert {run.recipe.flags["seed"] for run in ablation.runs} == {1, 2}
    last = ablation.runs[-1].recipe.flags
    assert last["wide-residual"] == 4
    assert last["wide-residual-learned-retention"] is True
    assert "wide-residual" not in ablation.runs[0].recipe.flags
    assert {ablation.tokens(variant) for variant in ablation.variants} == {8 * 10 * 32}


def test_every_axis_becomes_its_flags(tmp_path: Path) -> None:
    flags = _variant_flags(tmp_path, "[{streams: 1}, {streams: 3, init-scale: 0.1}]")
    assert (flags["wide-residual"], flags["wide-residual-streamwise-sigmoid-init-scale"]) == (3, 0.1)
    flags = _variant_flags(tmp_path, "[{streams: 1}, {streams: 3, replay: 2}]")
    assert flags["recompute-granularity"] == "selective"
    assert flags["recompute-modules"] == ["residual_stream"]
    assert flags["residual-stream-recompute-num-layers"] == 2
    flags = _variant_flags(tmp_path, "{streams: [1], width: [128]}")
    assert [flags[name] for name in ("hidden-size", "ffn-hidden-size", "num-attention-heads")] == [128, 384, 8]
    flags = _variant_flags(tmp_path, "{streams: 1, learning-rate: [5e-3], depth: [3]}")
    assert (float(flags["lr"]), float(flags["min-lr"]), flags["num-layers"]) == (5e-3, 5e-4, 3)
    assert _variant_flags(tmp_path, "{streams: 1, weight-decay: [0.3]}")["weight-decay"] == 0.3
    assert "swiglu" not in _variant_flags(tmp_path, "{streams: 1, swiglu: [false]}"), "false takes a flag away"


def test_replay_off_leaves_the_other_recomputed_modules() -> None:
    base: Mapping[str, FlagValue] = {
        "recompute-granularity": "selective",
        "recompute-modules": ["core_attn", "residual_stream"],
    }
    assert flags_of("replay", False, base)["recompute-modules"] == ["core_attn"]
    assert flags_of("replay", True, base)["recompute-modules"] == ["core_attn", "residual_stream"]
    with pytest.raises(LaunchError, match="replay needs recompute-granularity selective"):
        flags_of("replay", True, {"recompute-granularity": "full"})


def test_a_variant_is_compared_with_the_reference_that_has_its_other_settings(tmp_path: Path) -> None:
    ablation = _ablation(tmp_path, "base: base.yaml\naxes: {streams: [1, 4], depth: [1, 2]}\nseeds: [1]\n")
    assert {v.name: v.reference for v in ablation.variants} == {
        "ordinary-depth-1": None,
        "ordinary-depth-2": None,
        "streams-4-depth-1": "ordinary-depth-1",
        "streams-4-depth-2": "ordinary-depth-2",
    }
    text = "base: base.yaml\naxes: {learning-rate: [1e-3, 2e-3]}\nseeds: [1]\nreference: {learning-rate: 1e-3}\n"
    assert [v.reference for v in _ablation(tmp_path, text).variants] == [None, "lr-1e-3"]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("axes: {streams: 1}\nseeds: [1]", "no base"),
        ("base: base.yaml\nseeds: [1]", "no axes"),
        ("base: base.yaml\naxes: {streams: 1}", "no seeds"),
        ("base: base.yaml\naxis: {streams: 1}\nseeds: [1]", "'axis' is none of base, folder"),
        ("base: nowhere.yaml\naxes: {streams: 1}\nseeds: [1]", "no such recipe"),
        ("base: base.yaml\naxes: {streams: [0]}\nseeds: [1]", "axes: streams is 0, a whole number from 1"),
        ("base: base.yaml\naxes: {streams: [true]}\nseeds: [1]", "axes: streams is True"),
        ("base: base.yaml\naxes: {streams: []}\nseeds: [1]", "axes: streams has no value"),
        ("base: base.yaml\naxes: {streams: 1, retention: 3}\nseeds: [1]", "axes: retention is 3, true or false"),
        ("base: base.yaml\naxes: {streams: 2, init-scale: -1}\nseeds: [1]", "axes: init-scale is -1, a number from 0"),
        ("base: base.yaml\naxes: {streams: 1, learning-rate: 0}\nseeds: [1]", "axes: learning-rate is 0"),
        ("base: base.yaml\naxes: {streams: 1, width: 65}\nseeds: [1]", "width 65: num-attention-heads is 4 at"),
        ("base: base.yaml\naxes: {streams: 2, replay: 0}\nseeds: [1]", "axes: replay is 0"),
        (
            "base: base.yaml\naxes: {streams: [1, 2], retention: [false, true]}\nseeds: [1]",
            "axes: retention contradicts streams: 1, for the ordinary model has no streams. Write axes as a list",
        ),
        ("base: base.yaml\naxes: {streams: [1, 2], replay: [true]}\nseeds: [1]", "axes: replay contradicts streams: 1"),
        ("base: base.yaml\naxes: {streams: 1, lr: 1, learning-rate: 1}\nseeds: [1]", "lr and learning-rate both set"),
        ("base: base.yaml\naxes: [{streams: 1}, {streams: [1, 2]}]\nseeds: [1]", "are the same run"),
        ("base: base.yaml\naxes: {streams: [1, 2], retention: false}\nseeds: [1, 1]", "seeds: 1 stands there 2 times"),
        ("base: base.yaml\naxes: {streams: 1}\nseeds: 3", "seeds is 3, a list"),
        ("base: base.yaml\naxes: {streams: 1}\nseeds: [0]", "seeds: 0 is no whole number from 1"),
        ("base: base.yaml\naxes: {streams: 1, seed: 3}\nseeds: [1]", "the seeds stand in seeds"),
        ("base: base.yaml\naxes: {streams: 1}\nflags: {seed: 3}\nseeds: [1]", "the seeds stand in seeds"),
        ("base: base.yaml\naxes: {streams: 2}\nseeds: [1]", "reference: no variant has streams 1"),
        ("base: base.yaml\naxes: {depth: [1, 2]}\nseeds: [1]", "reference: no variant has streams 1"),
        (
            "base: base.yaml\naxes: {streams: 2, retention: [false, true]}\nreference: {streams: 2}\nseeds: [1]",
            "there is streams-2, streams-2-retention",
        ),
        ("base: base.yaml\naxes: {streams: 1}\nprocesses: 0\nseeds: [1]", "processes is 0"),
        ("base: base.yaml\naxes: 3\nseeds: [1]", "axes: 3: a mapping from axes"),
        ("base: base.yaml\naxes: {streams: {a: 1}}\nseeds: [1]", "axes: streams is {'a': 1}"),
        ("base: [", "cannot be read as YAML"),
        ("- 1", "a mapping with"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LaunchError, match=r"trial\.yaml|nowhere\.yaml") as error:
        _ablation(tmp_path, text)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_depth_of_a_hybrid_and_an_unknown_flag_are_refused(tmp_path: Path) -> None:
    text = f"base: {ROOT}/scripts/recipes/tiny-hybrid.yaml\naxes: {{streams: 1, depth: [1]}}\nseeds: [1]\n"
    with pytest.raises(LaunchError, match="the recipe is a hybrid, its pattern says the depth"):
        _ablation(tmp_path, text)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "trial.yaml").write_text("base: base.yaml\naxes: {streams: 1, num-layer: 3}\nseeds: [1]\n")
    with pytest.raises(LaunchError, match=r"trial\.yaml: --num-layer: .* nearest: num-layers"):
        load_ablation(tmp_path / "trial.yaml", ROOT, dict.fromkeys(_NAMES, "value") | dict.fromkeys(_BARE, "bare"))


_NAMES = (
    *("num-layers", "hidden-size", "ffn-hidden-size", "num-attention-heads", "seq-length", "lr", "min-lr"),
    *("global-batch-size", "train-iters"),
)
_BARE = ("swiglu", "log-timers-to-tensorboard", "log-memory-to-tensorboard")


@settings(max_examples=50, deadline=None)
@given(
    streams=st.lists(st.integers(2, 16), min_size=1, max_size=4, unique=True),
    retention=st.lists(st.booleans(), min_size=1, max_size=2, unique=True),
    depths=st.lists(st.integers(1, 9), min_size=1, max_size=3, unique=True),
    seeds=st.lists(st.integers(1, 99), min_size=1, max_size=3, unique=True),
)
def test_any_grid_gives_its_product_with_unique_runs_and_one_reference_each(
    tmp_path_factory: pytest.TempPathFactory, streams: list, retention: list, depths: list, seeds: list
) -> None:
    folder = tmp_path_factory.mktemp("grid")
    axes = [{"streams": 1, "depth": depths}, {"streams": streams, "depth": depths, "retention": retention}]
    text = json.dumps({"base": "base.yaml", "axes": axes, "seeds": seeds})
    ablation = _ablation(folder, text)
    assert len(ablation.variants) == len(depths) * (1 + len(streams) * len(retention))
    assert len({run.name for run in ablation.runs}) == len(ablation.runs) == len(ablation.variants) * len(seeds)
    recipes = [run.recipe for run in ablation.runs]
    assert all(a != b for a, b in itertools.combinations(recipes, 2)), "two runs compute the same"
    by_name = {variant.name: variant for variant in ablation.variants}
    for variant in ablation.variants:
        if variant.settings["streams"] == 1:
            assert variant.reference is None
        else:
            assert variant.reference is not None
            other = by_name[variant.reference].settings
            assert other == {"streams": 1, "depth": variant.settings["depth"]}
            changed = {n for n in variant.recipe.flags if n not in by_name[variant.reference].recipe.flags}
            assert changed <= {"wide-residual", "wide-residual-learned-retention"}
    assert load_ablation(ablation.file, ROOT) == ablation, "two readings of one YAML differ"


@pytest.mark.parametrize("file", COMMITTED, ids=lambda file: file.stem)
def test_every_committed_ablation_loads_with_known_flags(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATA", "/data/corpus")
    monkeypatch.setenv("TOKENIZER", "/data/tokenizer")
    ablation = load_ablation(file, ROOT, known_flags())
    assert len(ablation.seeds) >= 3
    assert any(variant.settings.get("streams") == 1 for variant in ablation.variants)
    assert file.read_text().startswith("# "), f"{file} does not begin with what it is for"


def test_a_changed_yaml_is_refused_by_the_name_of_the_run_and_an_extended_one_is_not(tmp_path: Path) -> None:
    ablation = _ablation(tmp_path, WIDE, tmp_path)
    run = ablation.runs[0]
    RunFolder(run.folder.resolve()).create(run.recipe, ROOT)
    check_folders(ablation)
    check_folders(_ablation(tmp_path, WIDE.replace("[1, 2]", "[1, 2, 3]"), tmp_path))
    for changed, complaint in (
        ("flags: {train-iters: 20}\n", "ordinary-seed-1 was launched with --train-iters 10; it says --train-iters 20"),
        ("flags: {bf16: true}\n", "was launched with no --bf16; it says --bf16 now"),
        ("processes: 2\n", "was launched with processes 1; it says 2 now"),
        ("environment: {A: b}\n", "was launched with environment {}; it says {'A': 'b'} now"),
    ):
        with pytest.raises(LaunchError, match=r"trial\.yaml has changed: ") as error:
            check_folders(_ablation(tmp_path, WIDE + changed, tmp_path))
        assert complaint in str(error.value)
    assert other_folders(_ablation(tmp_path, WIDE.replace("[1, 2]", "[5]"), tmp_path)) == ["ordinary-seed-1"]


def test_a_launch_reads_back_the_recipe_of_its_run(tmp_path: Path) -> None:
    run = _ablation(tmp_path, WIDE, tmp_path).runs[-1]
    assert load_recipe(write_recipe(run), {}) == run.recipe


def test_a_run_is_one_launchs_at_a_time(tmp_path: Path) -> None:
    run = _ablation(tmp_path, WIDE, tmp_path).runs[0]
    lock = launch_lock(run)
    assert lock is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, pass_fds=(lock,))
    os.close(lock)
    assert launch_lock(run) is None, "the child that inherited the lock still lives"
    child.communicate(b"\n")
    again = launch_lock(run)
    assert again is not None, "the lock outlived its process"
    os.close(again)


def test_trainers_that_outlived_a_killed_launch_are_ended_and_no_others(tmp_path: Path) -> None:
    ours, other = _ablation(tmp_path, WIDE, tmp_path).runs[:2]
    sleep = [sys.executable, "-c", "import time; time.sleep(600)"]
    left = subprocess.Popen(sleep, env={**os.environ, "MEGATRON_RUN_FOLDER": str(ours.folder.resolve())})
    stays = subprocess.Popen(sleep, env={**os.environ, "MEGATRON_RUN_FOLDER": str(other.folder.resolve())})
    try:
        assert end_orphans(ours) == 1
        assert left.poll() is not None, "it still lives"
        assert stays.poll() is None
    finally:
        stays.kill()
        stays.wait()


def test_runs_that_log_to_wandb_have_group_job_type_and_tags(tmp_path: Path) -> None:
    flags = _ablation(tmp_path, WIDE + "flags: {wandb-project: p}\n").runs[-1].recipe.flags
    assert (flags["wandb-group"], flags["wandb-job-type"]) == ("trial", "streams-4-retention")
    assert flags["wandb-tags"] == ["streams=4", "retention=True", "seed=2"]
    given_group = _ablation(tmp_path, WIDE + "flags: {wandb-project: p, wandb-group: mine}\n").runs[-1].recipe.flags
    assert given_group["wandb-group"] == "mine"
    assert not any("wandb" in name for name in _ablation(tmp_path, WIDE).runs[-1].recipe.flags)


def test_times_come_from_measured_speeds_and_a_scaled_one_says_so() -> None:
    costs = {"a": Cost(1000, flops=1e6), "b": Cost(1000, flops=2e6), "c": Cost(None)}
    assert _with_time("a", costs, {"a": 100.0}).seconds == pytest.approx(10)
    scaled = _with_time("b", costs, {"a": 100.0})
    assert (scaled.seconds, scaled.guessed) == (pytest.approx(20), True)
    assert _with_time("b", costs, {}).seconds is None
    assert _with_time("c", costs, {"a": 100.0}).seconds is None


def test_the_plan_names_what_deserves_a_word(tmp_path: Path) -> None:
    text = "base: base.yaml\naxes: {streams: [1, 2], train-iters: [10]}\nseeds: [1]\n"
    ablation = _ablation(tmp_path, text, tmp_path)
    costs = {"ordinary-train-iters-10": Cost(10), "streams-2-train-iters-10": Cost(20, error="no tokenizer")}
    said = "\n".join(remarks(ablation, costs))
    for words in ("no interval", "not train on equal tokens", "no speed was measured", "unknown: no tokenizer"):
        assert words in said
    assert own_flags(ablation, ablation.variants[1]) == "--wide-residual 2"
    assert totals(ablation, costs).startswith("all: 2 runs, 30 tokens; to do: 2 runs")
    assert {state_of(run) for run in ablation.runs} == {"absent"}


def test_slurm_without_sbatch_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch on PATH"):
        submit(_ablation(tmp_path, WIDE, tmp_path), ROOT, None, [])


def test_help_needs_no_torch_and_shows_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    code = (
        "import sys; sys.path[:0] = ['tools', '.']; import ablate\n"
        "try: ablate.main(['--help'])\nexcept SystemExit: pass\n"
        "assert not {'torch', 'scipy', 'matplotlib', 'tensorboard'} & set(sys.modules), 'help imports too much'\n"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "tools/ablate.py run scripts/ablations/quickstart_gpt.yaml" in done.stdout
    ablate = tool("ablate")
    for wrong in (["run", "x", "--parallel", "0"], ["run", "x", "--", "-N1"], ["report", "x", "--tail", "0"]):
        with pytest.raises(SystemExit) as ended:
            ablate.main(wrong)
        assert ended.value.code == 2
    assert ablate.main(["plan", "nowhere.yaml"]) == 2
    assert "error: nowhere.yaml: no such ablation" in capsys.readouterr().err
