"""A recipe becomes exactly the flags that it says, in one documented way, and what cannot be used is named."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from harness_corpus import tool

from megatron.run_control.__main__ import LAUNCHER_FLAGS, parse_launch_line, resolve, sweep_line
from megatron.run_control.__main__ import main as run_control
from megatron.run_control.environment import shell_exports
from megatron.run_control.errors import LaunchError
from megatron.run_control.known_flags import FlagTable, check_flags, flag_sources, known_flags
from megatron.run_control.recipes import Recipe, flag_arguments, load_recipe, parse_overrides

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


# Empty values of these make PyYAML raise what is no YAMLError.
_EMPTY_KINDS = ("int", "float", "bool", "timestamp")


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
        *(
            (f"script: a.py\nflags:\n  seed: {word}", f"{word} in line 3 is {meaning} for YAML: write that, or quote")
            for word, meaning in (
                ("010", 8),
                ("1:30", 90),
                ("1_000", 1000),
                ("no", False),
                ("On", True),
                ("1:30.5", 90.5),
            )
        ),
        ("script: a.py\nflags: {1: 1, '1': 2}", "key '1' stands in line 2 and in line 2"),
        ("script: a.py\nscript: b.py", "key 'script' stands in line 1 and in line 2"),
        ("script: a.py\nresolved: 3", "resolved is 3, true or false"),
        ("script: a.py\nflags: {x: 2001-99-99}", "cannot be read as YAML"),
        ("base: other.yaml", "no such recipe"),
        ("base: [a]", "base is ['a'], the name of one recipe's file is wanted, relative to this one"),
        ("base: ''", "base is '', the name of one"),
        ('base: "a\\0b"', "base is 'a\\x00b', which holds a zero byte"),
        ("base: .", "cannot be read: Is a directory"),
        ("script: [a.py, b.py]", "script is ['a.py', 'b.py'], the name of one training script"),
        ("script: false", "script is False, the name of one"),
        ("a: [", "cannot be read as YAML"),
        ("[" * 10_000, "nested too deep"),
        *((f"script: a.py\nflags: {{x: !!{kind} ''}}", "cannot be read as YAML") for kind in _EMPTY_KINDS),
        ("- 1", "a mapping with"),
    ],
)
def test_a_recipe_that_cannot_be_used_is_named_in_one_line(tmp_path: Path, text: str, complaint: str) -> None:
    with pytest.raises(LaunchError, match=r"recipe\.yaml|other\.yaml|Is a directory") as error:
        load_recipe(_recipe(tmp_path, text), {})
    assert complaint in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("script", "complaint"),
    [
        (
            "rm.py",
            f"'rm.py', which is not in {ROOT}: pretrain_gpt.py, pretrain_mamba.py or a .py file of yours",
        ),
        ("pretrain_gpt", "which is no Python file"),
        ("/etc/passwd", "'/etc/passwd', which is no Python file"),
        ("/nowhere/x.py", "there is no such file"),
        ("scripts/../pretrain_gpt.py", "which leads out of"),
        ("../x.py", "write pretrain_gpt.py, pretrain_mamba.py or a .py file of yours, by its absolute path"),
        ("tools/runs.py", "no file in megatron/, scripts/, tests/, tools/ trains"),
        (f"{ROOT}/tests/conftest.py", "no file in megatron/"),
        ("megatron", "which is no Python file"),
        ("x.py", f"is not in {ROOT}"),
    ],
)
def test_what_cannot_be_a_training_script_is_refused_by_tool_and_launch_and_makes_no_folder(
    tmp_path: Path, script: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "x.py").touch()
    file = _recipe(tmp_path, f"script: {script}\nflags: {{lr: 1}}")
    assert tool("recipe_flags").main([str(file)]) == 2
    assert run_control(["prepare", str(file), "--run-dir", str(tmp_path / "run")]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == second
    assert first.startswith(f"error: {file}: script is ")
    assert complaint in first
    assert not (tmp_path / "run").exists()
    mine = _recipe(tmp_path, f"script: {tmp_path}/x.py\nflags: {{lr: 1}}")
    assert tool("recipe_flags").main([str(mine)]) == 0, "a training script of the user's, anywhere"


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
    with pytest.raises(LaunchError, match=r"--lr takes one value, the list \[1, 2\] was given"):
        check_flags({"lr": [1, 2]}, flag_table)
    with pytest.raises(LaunchError, match=r"--rampup-batch-size takes 3 values, \[1, 2\] was given"):
        check_flags({"rampup-batch-size": [1, 2]}, flag_table)
    several = next(name for name, kind in flag_table.items() if kind == "values")
    with pytest.raises(LaunchError, match=f"--{several} needs values"):
        check_flags({several: True}, flag_table)
    check_flags({"data-path": ["0.3", "a"], "wandb-tags": ["a", "b"], "rampup-batch-size": [1, 2, 3]}, flag_table)
    check_flags({"data-path": True, "wandb-tags": "a"}, flag_table)
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
        ([], "name a recipe first, for example .*; nothing was found"),
        ([""], "name a recipe first, for example .*; '' was found"),
        (["--lr", "1"], "name a recipe first"),
        (["r.yaml", "1"], "'1' belongs to no flag"),
        (["r.yaml", "--run-dir"], "--run-dir needs one value; none was given"),
        (["r.yaml", "--run-dir", "a", "b"], "--run-dir needs one value; .* was given"),
        (["r.yaml", "--run-dir", ""], "--run-dir needs one value; '' was given"),
        (["r.yaml", "--run-dir="], "--run-dir needs one value; '' was given"),
        (["r.yaml", "--run-dir", " "], "--run-dir needs one value"),
        (["r.yaml", "--without"], "--without needs the names"),
        (["r.yaml", "--without", "a", "--without"], "--without needs the names"),
        (["r.yaml", "--without", "--without", "a"], "--without needs the names"),
        ([str(RECIPES[-1]), "--processes", "0"], "--processes is '0'"),
        ([str(RECIPES[-1]), "--processes", "9" * 5000], "--processes is '9"),
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


def test_an_element_of_a_sweep_takes_its_line(tmp_path: Path) -> None:
    file = _recipe(tmp_path, "# comment\n\na.yaml --lr 1\nb.yaml --data-path 'c d'\n", "lines.txt")
    assert sweep_line(file, 2) == ["b.yaml", "--data-path", "c d"]
    with pytest.raises(LaunchError, match="has 2 launches, number 3 is wanted"):
        sweep_line(file, 3)
    assert sweep_line(_recipe(tmp_path, "a.yaml --x 'b\u2028c'\r\n", "odd.txt"), 1) == ["a.yaml", "--x", "b\u2028c"]


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (b"\xff", "is no UTF-8 text"),
        (b"a.yaml 'b", "launch 1: No closing quotation"),
        (b"a.yaml b\0c", "launch 1: a word is .* which holds a zero byte"),
        (b"# nothing", "has 0 launches, number 1 is wanted"),
    ],
)
def test_a_sweep_that_cannot_be_read_is_named(
    tmp_path: Path, content: bytes, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lines.txt"
    file.write_bytes(content)
    assert run_control(["line", str(file), "1"]) == 2
    assert re.match(rf"error: {re.escape(str(file))}.*{complaint}", said := capsys.readouterr().err)
    assert said.count("\n") == 1


def test_values_that_no_launch_takes_are_refused_by_the_tool_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for flags, complaint in (
        ('{lr: "a\\nb"}', "--lr: its value holds a line break: 'a\\nb'"),
        ('{lr: "a\\0b"}', "which holds a zero byte"),
        ('{data-path: [a, "\\ud800"]}', "which is no UTF-8 text"),
        ('{"lr\\n": 1}', "--lr\\n: the training scripts have no such flag"),
        ("0", "flags is a int, a mapping is wanted"),
    ):
        file = _recipe(tmp_path, f"script: pretrain_gpt.py\nflags: {flags}")
        assert tool("recipe_flags").main([str(file)]) == 2
        said = capsys.readouterr().err
        assert complaint in said
        assert said.count("\n") == 1


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
