"""A recipe becomes exactly the flags that it says, in one documented way, and what cannot be used is named."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from harness_corpus import tool

from megatron.run_control.__main__ import LAUNCHER_FLAGS, parse_launch_line, resolve, sweep_line
from megatron.run_control.__main__ import main as run_control
from megatron.run_control.environment import shell_exports
from megatron.run_control.errors import LaunchError
from megatron.run_control.known_flags import FlagTable, check_flags, flag_sources, known_flags
from megatron.run_control.recipes import Recipe, flag_arguments, load_recipe, parse_overrides
from megatron.run_control.run_folder import RunFolder, script_arguments
from megatron.run_control.snapshot import take_snapshot

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


def test_a_resolved_recipe_is_taken_literally_and_what_is_laid_over_it_is_not(tmp_path: Path) -> None:
    (recipe_text, variables) = (
        "script: a.py\nenvironment: {A: '${X}'}\nflags: {x: '${X}', y: ['${X}']}",
        {"X": "${Y}"},
    )
    recipe = load_recipe(_recipe(tmp_path, recipe_text), variables)
    assert recipe == Recipe("a.py", 1, {"A": "${Y}"}, {"x": "${Y}", "y": ["${Y}"]})
    _recipe(tmp_path, recipe.as_yaml(), "resolved.yaml")
    assert load_recipe(tmp_path / "resolved.yaml", {"Y": "twice"}) == recipe
    over = load_recipe(_recipe(tmp_path, "base: resolved.yaml\nflags: {z: '${Y}'}"), {"Y": "once"})
    assert over.flags == {"x": "${Y}", "y": ["${Y}"], "z": "once"}


def test_a_variable_reaches_the_processes_character_by_character(tmp_path: Path) -> None:
    values = {"A": 'it\'s "two"\nlines $HOME `id` \\ !\t*', "B": "", "C": "\n trailing \n\n"}
    recipe = load_recipe(_recipe(tmp_path, json.dumps({"script": "a.py", "environment": values}).replace("${", "$ {")))
    code = 'settings=$(cat); eval "$settings"; exec "$0" -c \'import json, os; print(json.dumps(dict(os.environ)))\''
    done = subprocess.run(
        ["bash", "-euc", code, sys.executable], input=shell_exports(recipe.environment), text=True, capture_output=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {name: found[name] for name in values} == values


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("{'A B': 1}", "'A B' is no name of a variable"),
        ("{'A=$(touch x);B': 1}", "is no name of a variable"),
        ("{PYTHONPATH: /x}", "PYTHONPATH belongs to the launcher: set it in front of launch.sh or sbatch"),
        ("{MEGATRON_RUN_FOLDER: /x}", "belongs to the launcher"),
        ("{MAX_RESTARTS_WITHOUT_PROGRESS: 9}", "belongs to the launcher"),
        ("{RANK: 0}", "RANK is set by torchrun"),
        ("{UID: 5}", "UID is set by bash"),
        ("{A: true}", "A is True: a text or a number"),
        ("{A: }", "A is None: a text"),
        ("{A: [1]}", "A is [1]: a text"),
        ('{A: "x\\0"}', "holds a zero byte"),
        ('{A: "\\ud800"}', "is no UTF-8 text"),
    ],
)
def test_a_variable_that_cannot_be_set_is_refused_by_name(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LaunchError, match=r"recipe\.yaml: environment: ") as error:
        load_recipe(_recipe(tmp_path, f"script: a.py\nenvironment: {text}"))
    assert complaint in str(error.value)


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
        ("base: recipe.yaml", "recipe.yaml -> "),
        ("script: a.py\nflags:\n  lr: 1\n  x: 2\n  lr: 3", "key 'lr' stands in line 3 and in line 5: keep one"),
        ("script: a.py\nflags: {1: 1, '1': 2}", "key '1' stands in line 2 and in line 2"),
        ("script: a.py\nscript: b.py", "key 'script' stands in line 1 and in line 2"),
        ("script: a.py\nresolved: 3", "resolved is 3, true or false"),
        ("script: a.py\nflags: {x: 2001-99-99}", "cannot be read as YAML"),
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


def test_a_cycle_of_bases_is_named_without_what_leads_to_it(tmp_path: Path) -> None:
    for name, base in (("top", "a"), ("a", "b"), ("b", "a")):
        _recipe(tmp_path, f"base: {base}.yaml", f"{name}.yaml")
    with pytest.raises(LaunchError, match="lead back to itself") as error:
        load_recipe(tmp_path / "top.yaml")
    assert str(error.value).endswith(" -> ".join(str(tmp_path / f"{name}.yaml") for name in ("a", "b", "a")))


def test_merged_mappings_may_be_overridden(tmp_path: Path) -> None:
    text = "script: a.py\nflags: &f {x: 1, y: 2}\nenvironment: {<<: *f, x: 3}"
    assert load_recipe(_recipe(tmp_path, text)).environment == {"x": "3", "y": "2"}


def test_an_unknown_flag_is_refused_with_the_nearest_name(flag_table: FlagTable) -> None:
    with pytest.raises(LaunchError, match=r"--num-layer: .* nearest: num-layers"):
        check_flags({"num-layer": 2}, flag_table)
    with pytest.raises(LaunchError, match=r"--wide_residual: .* nearest: wide-residual"):
        check_flags({"wide_residual": 2}, flag_table)
    with pytest.raises(LaunchError, match="--swiglu takes no value"):
        check_flags({"swiglu": 1}, flag_table)
    with pytest.raises(LaunchError, match="--lr needs a value"):
        check_flags({"lr": True}, flag_table)
    with pytest.raises(LaunchError, match="--help: the training scripts have no such flag"):
        check_flags({"help": True}, flag_table)


def test_the_list_of_flags_is_made_again_when_any_source_of_flags_changes() -> None:
    names = {str(file.relative_to(ROOT / "megatron")) for file in flag_sources()}
    parts = ("training/pretrain_entry.py", "training/resume/preflight.py", "core/transformer/wide_residual_config.py")
    assert names >= {*parts, "run_control/known_flags.py"}
    assert not [name for name in names if name.startswith("ablations")]


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ([], "name a recipe first"),
        (["--lr", "1"], "name a recipe first"),
        (["r.yaml", "1"], "'1' belongs to no flag"),
        (["r.yaml", "--run-dir"], "--run-dir needs one value"),
        (["r.yaml", "--run-dir", ""], "--run-dir needs one value; '' was given"),
        (["r.yaml", "--run-dir="], "--run-dir needs one value; '' was given"),
        (["r.yaml", "--run-dir", " "], "--run-dir needs one value"),
        (["r.yaml", "--without"], "--without needs the names"),
        (["r.yaml", "--without", "a", "--without"], "--without needs the names"),
        (["r.yaml", "--without", "--without", "a"], "--without needs the names"),
        ([str(RECIPES[-1]), "--processes", "0"], "--processes is '0'"),
        ([str(RECIPES[-1]), "--without", "nothing"], "the recipe has no such flag"),
    ],
)
def test_a_launch_line_that_cannot_be_used_is_named(line: list[str], complaint: str) -> None:
    with pytest.raises(LaunchError, match=complaint):
        resolve(parse_launch_line(line))


def test_flags_to_leave_out_add_up() -> None:
    words = ["r.yaml", "--without", "a", "b", "--lr", "1", "--without=c", "--without", "d"]
    line = parse_launch_line(words)
    assert (line.without, line.flags) == (("a", "b", "c", "d"), {"lr": "1"})


def test_the_launch_adds_where_to_save_and_how_to_be_asked_but_never_over_a_flag(tmp_path: Path) -> None:
    arguments = script_arguments(Recipe("a.py", flags={"save": "/elsewhere", "wandb-project": "p"}), tmp_path)
    pairs = dict(itertools.pairwise(arguments))
    assert pairs["--save"] == pairs["--load"] == "/elsewhere"
    assert pairs["--exit-signal"] == "SIGUSR2"
    assert pairs["--wandb-exp-name"] == tmp_path.name
    assert pairs["--tensorboard-dir"] == str(tmp_path / "tensorboard")


def test_a_run_folder_refuses_another_run_and_says_both_values(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "run")
    recipe = Recipe("a.py", 2, {"A": "1"}, {"lr": 1, "data-path": ["a", "b"], "bf16": True})
    assert run.create(recipe, ROOT)
    assert not run.create(recipe, ROOT)
    again = replace(recipe, flags=dict(reversed(list(recipe.flags.items()))))
    assert not run.create(again, ROOT), "the order of flags does not count"
    assert not RunFolder(run.path).create(load_recipe(run.recipe), ROOT), "its own resolved recipe"
    for other, complaint in (
        (replace(recipe, flags={**recipe.flags, "lr": 2}), "launched with --lr 1; --lr 2 is wanted now"),
        (replace(recipe, flags={"lr": 1, "bf16": True}), "launched with --data-path a b; no --data-path is wanted now"),
        (replace(recipe, script="b.py"), "launched with script a.py; script b.py is wanted now"),
        (replace(recipe, processes=4), "launched with processes 2; processes 4 is wanted now"),
        (replace(recipe, environment={"A": "2"}), "launched with A=1; A=2 is wanted now"),
        (replace(recipe, environment={"A": "1", "B": "x y"}), "with no variable B; B='x y' is wanted now"),
    ):
        with pytest.raises(LaunchError, match=r"Continue it as it is with .*rerun\.sh, or choose another") as error:
            run.create(other, ROOT)
        assert complaint in str(error.value)


def test_a_moved_or_copied_run_folder_is_refused_by_name(tmp_path: Path) -> None:
    run, recipe = RunFolder(tmp_path / "run"), Recipe("a.py", flags={"lr": 1})
    run.create(recipe, ROOT)
    shutil.copytree(run.path, tmp_path / "copy")
    with pytest.raises(LaunchError, match=r"copy was moved or copied from .*/run, which its flags still name"):
        RunFolder(tmp_path / "copy").create(recipe, ROOT)
    (tmp_path / "link").symlink_to(run.path)
    assert not RunFolder((tmp_path / "link").resolve()).create(recipe, ROOT), "another name of the same folder"


@pytest.mark.parametrize("content", ["recipe.yaml", "log.txt", "checkpoints/latest_checkpointed_iteration.txt"])
def test_a_folder_that_is_no_run_is_neither_written_nor_loaded_from(content: str, tmp_path: Path) -> None:
    run = RunFolder(tmp_path / "foreign")
    file = run.path / content
    file.parent.mkdir(parents=True)
    file.write_text("mine\n")
    with pytest.raises(LaunchError, match=r"foreign is not empty and is no run folder: .* Choose a new or an empty"):
        run.create(Recipe("a.py"), ROOT)
    assert file.read_text() == "mine\n"
    assert not run.launch.exists()


def test_a_creation_that_was_killed_is_done_again(tmp_path: Path) -> None:
    run, recipe = RunFolder(tmp_path / "run"), Recipe("a.py", flags={"lr": 1})
    assert run.create(recipe, ROOT)
    run.launch.unlink()  # written last
    (run.path / ".launch.json.17").write_text("{")
    assert run.create(recipe, ROOT)


def test_rerun_sh_stays_in_its_folder_whatever_its_name_and_refuses_a_copy(tmp_path: Path) -> None:
    run = RunFolder(tmp_path / 'a b\'s "q" $HOME')
    run.create(Recipe("a.py"), ROOT)
    take_snapshot(run, ROOT, "typed", ["printf", "%s\\n"])

    def rerun(script: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(script), *arguments], capture_output=True, text=True, check=False)

    assert rerun(run.rerun).stdout.splitlines() == [str(run.recipe), "--run-dir", str(run.path)]
    assert rerun(run.rerun, "new one").stdout.splitlines() == [str(run.recipe), "--run-dir", "new one"]
    shutil.copytree(run.path, tmp_path / "copy")
    refused = rerun(tmp_path / "copy" / "rerun.sh")
    assert refused.returncode == 2
    assert not refused.stdout
    assert "was moved or copied" in refused.stderr


def test_names_and_values_that_no_file_can_hold_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    odd = "a\rb\u2028c\x0cd"
    run = RunFolder(tmp_path / "run")
    run.create(Recipe("a.py", flags={"x": odd}), ROOT)
    assert run.value_of("x") == odd
    for folder, value, complaint in (
        (os.fsdecode(b"r\xff"), "1", "the run folder's name is .* no UTF-8"),
        ("r", "a\nb", "a flag's value holds a line break"),
        ("r", os.fsdecode(b"\xff"), "a flag's value is .* no UTF-8"),
        ("r", "a\0b", "holds a zero byte"),
    ):
        with pytest.raises(LaunchError, match=complaint):
            RunFolder(tmp_path / folder).create(Recipe("a.py", flags={"x": value}), ROOT)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_bad_limits_and_names_end_a_launch_with_status_2_before_a_folder_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prepare = ["prepare", str(ROOT / "scripts/recipes/tiny-gpt.yaml"), "--run-dir", str(tmp_path / "run")]
    monkeypatch.setenv("MAX_RESTARTS_WITHOUT_PROGRESS", "0")
    assert run_control([*prepare]) == 2
    assert "MAX_RESTARTS_WITHOUT_PROGRESS is '0', a whole number from 1" in capsys.readouterr().err
    run = RunFolder(tmp_path / "made")
    run.create(Recipe("a.py"), ROOT)
    for command in (["begin", str(run.path)], ["end", str(run.path), "1"]):
        assert run_control(command) == 2, "3 would say that the guard has stopped it"
        assert "a whole number from 1" in capsys.readouterr().err
    monkeypatch.delenv("MAX_RESTARTS_WITHOUT_PROGRESS")
    assert run_control([*prepare[:-1], os.fsdecode(os.fsencode(tmp_path) + b"/r\xff")]) == 2
    assert capsys.readouterr().err.startswith("error: the run folder's name is ")
    assert run_control([*prepare, "--help"]) == 0
    assert "prepare RECIPE" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


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
    assert recipe_flags.main([recipe, "--lr", "5e-5", "--help"]) == 0
    assert capsys.readouterr().out.startswith("Shows the flags")
    assert recipe_flags.main([recipe, "--lrr", "5e-5"]) == 2
    assert capsys.readouterr().err == "error: --lrr: the training scripts have no such flag; nearest: lr\n"


@pytest.mark.parametrize("name", ["recipe_flags", "runs"])
def test_help_is_quick(name: str) -> None:
    show = f"sys.argv = ['{name}', '--help']; runpy.run_path('tools/{name}.py', run_name='__main__')"
    check = "import atexit, runpy, sys; atexit.register(lambda: print('torch' in sys.modules)); sys.path[0] = 'tools'; "
    check += show
    done = subprocess.run([sys.executable, "-c", check], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "python tools/" in done.stdout
    assert done.stdout.rstrip().endswith("False"), "--help imports torch"
