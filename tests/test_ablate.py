"""An ablation's YAML means exactly the runs that it says, and what contradicts itself is named before anything runs."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from harness_ablations import BASE, ROOT, WIDE, ablation_of
from harness_corpus import tool
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron.ablations.axes import flags_of
from megatron.ablations.cost import Cost, _with_time
from megatron.ablations.description import load_ablation
from megatron.ablations.plan_table import own_flags, remarks, totals
from megatron.ablations.slurm_array import queued, submit
from megatron.ablations.state import state_of
from megatron.run_control.errors import LaunchError
from megatron.run_control.known_flags import FlagTable, known_flags
from megatron.run_control.recipes import FlagValue
from megatron.run_control.run_folder import OWNED_FLAGS

COMMITTED = sorted((ROOT / "scripts" / "ablations").glob("*.yaml"))


@pytest.fixture(scope="module")
def flag_table() -> FlagTable:
    """The flags of the training scripts."""
    return known_flags()


def _variant_flags(folder: Path, axes: str, base: str = "") -> dict:
    """The flags of the last variant."""
    return dict(ablation_of(folder, f"base: base.yaml\n{base}axes: {axes}\nseeds: [1]\n").variants[-1].recipe.flags)


def test_the_runs_are_every_combination_with_every_seed(tmp_path: Path) -> None:
    ablation = ablation_of(tmp_path, WIDE)
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
    ablation = ablation_of(tmp_path, "base: base.yaml\naxes: {streams: [1, 4], depth: [1, 2]}\nseeds: [1]\n")
    assert {v.name: v.reference for v in ablation.variants} == {
        "ordinary-depth-1": None,
        "ordinary-depth-2": None,
        "streams-4-depth-1": "ordinary-depth-1",
        "streams-4-depth-2": "ordinary-depth-2",
    }
    text = "base: base.yaml\naxes: {learning-rate: [1e-3, 2e-3]}\nseeds: [1]\nreference: {learning-rate: 1e-3}\n"
    assert [v.reference for v in ablation_of(tmp_path, text).variants] == [None, "lr-1e-3"]


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
        (
            "base: base.yaml\naxes: {streams: 1, lr: 1, learning-rate: 1}\nseeds: [1]",
            "axes: lr and axes: learning-rate both set",
        ),
        (
            "base: base.yaml\nflags: {lr: 1e-3}\naxes: {learning-rate: [1e-3, 2e-3]}\nseeds: [1]",
            "flags: lr and axes: learning-rate both set --lr",
        ),
        ("base: base.yaml\naxes: [{streams: 1}, {streams: [1, 2]}]\nseeds: [1]", "are the same run"),
        (
            "base: base.yaml\naxes: {streams: 1, learning-rate: [1e-3, 0.001]}\nseeds: [1]",
            "learning-rate 0.001 and streams 1, learning-rate 1e-3 are the same run",
        ),
        (
            "base: base.yaml\naxes: {streams: 1, data-path: [a/b, a_b]}\nseeds: [1]",
            "would share the run folder's name ordinary-data-path-a_b",
        ),
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
        (
            "base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nflags:\n  lr: 1\n  lr: 2",
            "key 'lr' stands in line 5 and in",
        ),
        ("base: base.yaml\naxes: {streams: 1, streams: 2}\nseeds: [1]", "key 'streams' stands in line 2 and in line 2"),
        ("base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nfolder: ''", "folder is '', the name of a folder"),
        ("base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nflags: {lr: [1, true]}", "flags: lr is [1, True]"),
        ("base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nflags: {lr: '${NOT_SET}'}", "NOT_SET, which is not set"),
        ("base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nenvironment: {A B: 1}", "environment: 'A B' is no name"),
        ("base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nenvironment: {RANK: 1}", "RANK is set by torchrun"),
        (
            "base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nenvironment: {WANDB_RUN_ID: a}",
            "environment: WANDB_RUN_ID: every run is a wandb run of its own",
        ),
        ("base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nflags: 0", "flags is a int, a mapping is wanted"),
        (
            f"base: base.yaml\naxes: {{streams: 1, data-path: {'a' * 300}}}\nseeds: [1]",
            "a name of 319 bytes, at most 200",
        ),
        *(
            (f"base: base.yaml\naxes: {{streams: 1, {axis}: 1{'0' * 400}}}\nseeds: [1]", f"axes: {axis} is 1000")
            for axis in ("width", "depth", "learning-rate")
        ),
        (f"base: base.yaml\naxes: {{streams: 1}}\nseeds: [1{'0' * 400}]", "is no whole number from 1"),
        ("base: [", "cannot be read as YAML"),
        ("base: [a]\naxes: {streams: 1}\nseeds: [1]", "base is ['a'], the name of one recipe's file"),
        ('base: base.yaml\naxes: {streams: 1}\nseeds: [1]\nfolder: "a\\0"', "which holds a zero byte"),
        ("- 1", "a mapping with"),
    ],
)
def test_what_cannot_be_used_is_named_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LaunchError, match=r"trial\.yaml|nowhere\.yaml") as error:
        ablation_of(tmp_path, text)
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("flag", OWNED_FLAGS)
def test_a_flag_that_a_run_folder_owns_is_refused_wherever_it_comes_from(
    tmp_path: Path, flag: str, flag_table: FlagTable
) -> None:
    assert flag in flag_table, "no flag of the training scripts any more"
    (tmp_path / "own.yaml").write_text(f"base: base.yaml\nflags: {{{flag}: /shared}}\n")
    rest = "axes: {streams: 1}\nseeds: [1, 2]\n"
    for text, where in (
        (f"base: base.yaml\nflags: {{{flag}: /shared}}\n{rest}", f"flags: {flag}: "),
        (f"base: base.yaml\naxes: {{streams: 1, {flag}: [/a, /b]}}\nseeds: [1]", f"axes: {flag}: "),
        (f"base: own.yaml\n{rest}", f"base: own.yaml has {flag}: "),
    ):
        with pytest.raises(LaunchError, match=r"trial\.yaml: ") as error:
            ablation_of(tmp_path, text)
        assert where + OWNED_FLAGS[flag] in str(error.value)
    taken_away = ablation_of(tmp_path, f"base: own.yaml\nflags: {{{flag}: false}}\n{rest}")
    assert flag not in taken_away.runs[0].recipe.flags


def test_values_may_hold_variables_and_reach_the_launch_as_they_became(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CORPUS", "/data/${X}")
    text = "flags: {data-path: '${CORPUS}/a'}\nenvironment: {A: '${CORPUS}'}\nfolder: '${CORPUS:-x}'\n"
    ablation = ablation_of(tmp_path, f"{WIDE}{text}", tmp_path)
    recipe = ablation.runs[0].recipe
    assert (recipe.flags["data-path"], recipe.environment["A"]) == ("/data/${X}/a", "/data/${X}")
    assert ablation.folder == Path("/data/${X}")


def test_depth_of_a_hybrid_and_an_unknown_flag_are_refused(tmp_path: Path) -> None:
    text = f"base: {ROOT}/scripts/recipes/tiny-hybrid.yaml\naxes: {{streams: 1, depth: [1]}}\nseeds: [1]\n"
    with pytest.raises(LaunchError, match="the recipe is a hybrid, its pattern says the depth"):
        ablation_of(tmp_path, text)
    (tmp_path / "base.yaml").write_text(BASE)
    (tmp_path / "trial.yaml").write_text("base: base.yaml\naxes: {streams: 1, num-layer: 3}\nseeds: [1]\n")
    with pytest.raises(LaunchError, match=r"trial\.yaml: --num-layer: .* nearest: num-layers"):
        load_ablation(tmp_path / "trial.yaml", ROOT, dict.fromkeys(_NAMES, "value") | dict.fromkeys(_BARE, "bare"))


def test_a_list_is_refused_for_a_flag_of_one_value_and_taken_for_one_of_several(
    tmp_path: Path, flag_table: FlagTable
) -> None:
    (tmp_path / "base.yaml").write_text(BASE)
    file = tmp_path / "trial.yaml"
    for axes, extra in (("{streams: 1, lr: [[1, 2]]}", ""), ("{streams: 1}", "flags: {lr: [1, 2]}\n")):
        file.write_text(f"base: base.yaml\n{extra}axes: {axes}\nseeds: [1]\n")
        with pytest.raises(LaunchError, match=r"trial\.yaml: --lr takes one value, the list \[1, 2\] was given"):
            load_ablation(file, ROOT, flag_table)
    file.write_text("base: base.yaml\naxes: {streams: 1, data-path: [[0.3, a, 0.7, b], [c]]}\nseeds: [1]\n")
    variants = load_ablation(file, ROOT, flag_table).variants
    assert [variant.recipe.flags["data-path"] for variant in variants] == [[0.3, "a", 0.7, "b"], ["c"]]


def test_a_base_that_cannot_train_is_refused_by_its_name(tmp_path: Path, flag_table: FlagTable) -> None:
    (tmp_path / "base.yaml").write_text(BASE.replace("pretrain_gpt.py", "tools/runs.py"))
    (tmp_path / "trial.yaml").write_text(WIDE)
    with pytest.raises(LaunchError, match=r"base\.yaml: script is 'tools/runs\.py', but no file in"):
        load_ablation(tmp_path / "trial.yaml", ROOT, flag_table)


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
    ablation = ablation_of(folder, text)
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


def test_a_run_id_of_the_environment_is_not_shared_by_all_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ablation_of(tmp_path, WIDE + f"flags: {{wandb-project: p}}\nfolder: {tmp_path}/runs\n")
    monkeypatch.setenv("WANDB_RUN_ID", "one")
    assert tool("ablate").main(["run", str(tmp_path / "trial.yaml")]) == 2
    assert "WANDB_RUN_ID is set: all runs would be one wandb run" in capsys.readouterr().err


def test_runs_that_log_to_wandb_have_group_job_type_and_tags(tmp_path: Path) -> None:
    flags = ablation_of(tmp_path, WIDE + "flags: {wandb-project: p}\n").runs[-1].recipe.flags
    assert (flags["wandb-group"], flags["wandb-job-type"]) == ("trial", "streams-4-retention")
    assert flags["wandb-tags"] == ["streams=4", "retention=True", "seed=2"]
    given_group = ablation_of(tmp_path, WIDE + "flags: {wandb-project: p, wandb-group: mine}\n").runs[-1].recipe.flags
    assert given_group["wandb-group"] == "mine"
    assert not any("wandb" in name for name in ablation_of(tmp_path, WIDE).runs[-1].recipe.flags)


def test_times_come_from_measured_speeds_and_a_scaled_one_says_so() -> None:
    costs = {"a": Cost(1000, flops=1e6), "b": Cost(1000, flops=2e6), "c": Cost(None)}
    assert _with_time("a", costs, {"a": 100.0}).seconds == pytest.approx(10)
    scaled = _with_time("b", costs, {"a": 100.0})
    assert (scaled.seconds, scaled.guessed) == (pytest.approx(20), True)
    assert _with_time("b", costs, {}).seconds is None
    assert _with_time("c", costs, {"a": 100.0}).seconds is None


def test_the_plan_names_what_deserves_a_word(tmp_path: Path) -> None:
    text = "base: base.yaml\naxes: {streams: [1, 2], train-iters: [10]}\nseeds: [1]\n"
    ablation = ablation_of(tmp_path, text, tmp_path)
    costs = {"ordinary-train-iters-10": Cost(10), "streams-2-train-iters-10": Cost(20, error="no tokenizer")}
    said = "\n".join(remarks(ablation, costs))
    for words in ("no interval", "not train on equal tokens", "no speed was measured", "unknown: no tokenizer"):
        assert words in said
    assert own_flags(ablation, ablation.variants[1]) == "--wide-residual 2"
    assert totals(ablation, costs).startswith("all: 2 runs, 30 tokens; to do: 2 runs")
    assert {state_of(run) for run in ablation.runs} == {"absent"}


def test_a_model_whose_cost_is_unknown_says_why(tmp_path: Path) -> None:
    models = [["/a/mine.py", []], ["pretrain_gpt.py", ["--seq-length", "abc"]]]
    command = [sys.executable, "-W", "ignore", "-m", "megatron.ablations.model_cost", str(tmp_path / "out.json")]
    subprocess.run(command, cwd=ROOT, input=json.dumps(models), text=True, capture_output=True, check=True)
    mine, bad = json.loads((tmp_path / "out.json").read_text())
    assert mine["error"] == "/a/mine.py is none of pretrain_gpt.py, pretrain_mamba.py, whose models are known"
    assert "argument --seq-length: invalid int value: 'abc'" in bad["error"]


@pytest.mark.parametrize("content", ["[" * 100_000, "{}", "[3]", '[{"job": 1, "lines": "", "runs": []}]', "{"])
def test_a_damaged_list_of_submissions_is_named(tmp_path: Path, content: str) -> None:
    ablation = ablation_of(tmp_path, f"{WIDE}folder: {tmp_path}\n")
    (tmp_path / "submissions.json").write_text(content)
    with pytest.raises(LaunchError, match=r"submissions\.json is damaged"):
        queued(ablation)


def test_tokens_that_are_no_number_are_not_said(tmp_path: Path) -> None:
    flags = "flags: {train-iters: 1e200, seq-length: 1e200}\n"
    ablation = ablation_of(tmp_path, f"base: base.yaml\n{flags}axes: {{streams: 1}}\nseeds: [1]\n")
    assert ablation.tokens(ablation.variants[0]) is None


def test_slurm_without_sbatch_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match="there is no sbatch on PATH"):
        submit(ablation_of(tmp_path, WIDE, tmp_path), ROOT, None, [])


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
    with pytest.raises(SystemExit):
        ablate.main(["report", "x", "--output", ""])
    assert "argument --output: a name is wanted, it is empty" in capsys.readouterr().err
