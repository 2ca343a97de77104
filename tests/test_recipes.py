"""A recipe becomes exactly the flags that it says, in one documented way, and what cannot be used is named."""

from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest
from harness_corpus import tool

from megatron.run_control.__main__ import LAUNCHER_FLAGS, parse_launch_line, resolve, sweep_line
from megatron.run_control.errors import LaunchError
from megatron.run_control.known_flags import FlagTable, check_flags, known_flags
from megatron.run_control.recipes import Recipe, flag_arguments, load_recipe, parse_overrides
from megatron.run_control.run_folder import RunFolder, script_arguments

ROOT = Path(__file__).resolve().parents[1]
RECIPES = sorted((ROOT / "scripts" / "recipes").glob("*.yaml"))
VARIABLES = {"DATA": "/data/corpus", "TOKENIZER": "/data/tokenizer"}


@pytest.fixture(scope="module")
def flag_table() -> FlagTable:
    """The flags of the training scripts."""
    return known_flags()


def _recipe(folder: Path, text: str, name: str = "recipe.yaml") -> Path:
    file = folder / name
    file.write_text(text)
    return file


def test_values_become_arguments_as_documented(tmp_path: Path) -> None:
    file = _recipe(
        tmp_path,
        "script: a.py\nflags: {num-layers: 2, swiglu: true, bf16: false, data-path: [0.3, a, 0.7, b], lr: 1e-3}",
    )
    expected = ["--num-layers", "2", "--swiglu", "--data-path", "0.3", "a", "0.7", "b", "--lr", "1e-3"]
    assert flag_arguments(load_recipe(file).flags) == expected


def test_a_recipe_wins_over_its_base_and_false_takes_a_flag_away(tmp_path: Path) -> None:
    _recipe(tmp_path, "script: a.py\nenvironment: {A: 1, B: 2}\nflags: {x: 1, y: true, z: 3}", "base.yaml")
    recipe = load_recipe(_recipe(tmp_path, "base: base.yaml\nenvironment: {B: 3}\nflags: {x: 5, y: false}"))
    assert recipe == Recipe("a.py", 1, {"A": "1", "B": "3"}, {"x": 5, "z": 3})


def test_flags_of_the_command_line_take_the_place_of_the_recipes_and_come_last() -> None:
    recipe = Recipe("a.py", flags={"lr": 1, "data-path": ["a", "b"], "swiglu": True})
    changed = recipe.overridden(parse_overrides(["--data-path", "c", "--lr=2", "--bf16"]), ["swiglu"])
    assert flag_arguments(changed.flags) == ["--data-path", "c", "--lr", "2", "--bf16"]


def test_a_resolved_recipe_reads_back_as_itself(tmp_path: Path) -> None:
    for file in RECIPES:
        recipe = load_recipe(file, VARIABLES)
        assert load_recipe(_recipe(tmp_path, recipe.as_yaml()), {}) == recipe, file


@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_every_flag_of_every_recipe_exists_and_says_why(file: Path, flag_table: FlagTable) -> None:
    recipe = load_recipe(file, VARIABLES)
    check_flags(recipe.flags, flag_table)
    assert (ROOT / recipe.script).is_file()
    assert file.read_text().startswith("# "), f"{file} does not begin with its source or reasoning"


def test_no_flag_of_the_launcher_hides_one_of_the_training_scripts(flag_table: FlagTable) -> None:
    assert not set(LAUNCHER_FLAGS) & set(flag_table)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("flags: {num-layers: 2}", "no script"),
        ("script: a.py\nflag: {}", "'flag' is none of base, script"),
        ("script: a.py\nflags: [1]", "flags is a list, a mapping is wanted"),
        ("script: a.py\nflags: {lr: }", "lr is None"),
        ("script: a.py\nflags: {lr: [1, true]}", "mean nothing in a list"),
        ("script: a.py\nflags: {data-path: '${NOT_SET_ANYWHERE}/x'}", "NOT_SET_ANYWHERE, which is not set"),
        ("script: a.py\nprocesses: 0", "processes is 0"),
        ("base: recipe.yaml", "lead back to itself"),
        ("base: other.yaml", "no such recipe"),
        ("a: [", "cannot be read as YAML"),
        ("- 1", "a mapping with"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LaunchError, match=r"recipe\.yaml|other\.yaml") as error:
        load_recipe(_recipe(tmp_path, text), {})
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


def test_an_unknown_flag_is_refused_with_the_nearest_name(flag_table: FlagTable) -> None:
    with pytest.raises(LaunchError, match=r"--num-layer: .* nearest: num-layers"):
        check_flags({"num-layer": 2}, flag_table)
    with pytest.raises(LaunchError, match=r"--wide_residual: .* nearest: wide-residual"):
        check_flags({"wide_residual": 2}, flag_table)
    with pytest.raises(LaunchError, match="--swiglu takes no value"):
        check_flags({"swiglu": 1}, flag_table)
    with pytest.raises(LaunchError, match="--lr needs a value"):
        check_flags({"lr": True}, flag_table)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ([], "name a recipe first"),
        (["--lr", "1"], "name a recipe first"),
        (["r.yaml", "1"], "'1' belongs to no flag"),
        (["r.yaml", "--run-dir"], "--run-dir needs one value"),
        (["r.yaml", "--without"], "--without needs the names"),
        ([str(RECIPES[-1]), "--processes", "0"], "--processes is '0'"),
        ([str(RECIPES[-1]), "--without", "nothing"], "the recipe has no such flag"),
    ],
)
def test_a_launch_line_that_cannot_be_used_is_named(line: list[str], complaint: str) -> None:
    with pytest.raises(LaunchError, match=complaint):
        resolve(parse_launch_line(line))


def test_the_launch_adds_where_to_save_and_how_to_be_asked_but_never_over_a_flag(tmp_path: Path) -> None:
    arguments = script_arguments(Recipe("a.py", flags={"save": "/elsewhere", "wandb-project": "p"}), tmp_path)
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--save"] == pairs["--load"] == "/elsewhere"
    assert pairs["--exit-signal"] == "SIGUSR2"
    assert pairs["--wandb-exp-name"] == tmp_path.name
    assert pairs["--tensorboard-dir"] == str(tmp_path / "tensorboard")


def test_a_run_folder_refuses_other_flags_and_says_which(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    assert run.create(Recipe("a.py", flags={"lr": 1}), ROOT)
    assert not run.create(Recipe("a.py", flags={"lr": 1}), ROOT)
    with pytest.raises(LaunchError, match=r"holds a run with other flags .*1 there, 2 wanted"):
        run.create(Recipe("a.py", flags={"lr": 2}), ROOT)


def test_an_element_of_a_sweep_takes_its_line(tmp_path: Path) -> None:
    file = _recipe(tmp_path, "# comment\n\na.yaml --lr 1\nb.yaml --data-path 'c d'\n", "lines.txt")
    assert sweep_line(file, 2) == ["b.yaml", "--data-path", "c d"]
    with pytest.raises(LaunchError, match="has 2 launches, number 3 is wanted"):
        sweep_line(file, 3)


def test_the_tool_prints_the_command_that_a_launch_runs(capsys: pytest.CaptureFixture[str]) -> None:
    recipe_flags = tool("recipe_flags")
    recipe = str(ROOT / "scripts/recipes/tiny-gpt.yaml")
    assert recipe_flags.main([recipe, "--lr", "5e-5"]) == 0
    assert capsys.readouterr().out.startswith("pretrain_gpt.py --num-layers 2")
    assert recipe_flags.main([recipe, "--lines", "--lr", "5e-5"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "--lr 5e-5"
    assert recipe_flags.main([recipe, "--lrr", "5e-5"]) == 2
    assert capsys.readouterr().err == "error: --lrr: the training scripts have no such flag; nearest: lr\n"


@pytest.mark.parametrize("name", ["recipe_flags", "runs"])
def test_help_is_quick(name: str) -> None:
    show = f"sys.argv = ['{name}', '--help']; runpy.run_path('tools/{name}.py', run_name='__main__')"
    check = f"import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); {show}"
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python tools/" in done.stdout
    assert done.stdout.rstrip().endswith("False"), "--help imports torch"
