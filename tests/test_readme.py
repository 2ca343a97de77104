"""README.md and docs/: the commands run, the links resolve, the map is true."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from harness_overlay import repository_files
from harness_scripts import REPOSITORY, readme_commands, script_environment

README = REPOSITORY / "README.md"
PAGES = [name for name in repository_files() if name.endswith(".md")]
# These are run by tests of their own, each of which checks that the README shows the command.
RUN_ELSEWHERE = {
    "./scripts/quickstart.sh": "test_quickstart.py",
    "./scripts/test.sh": "test_setup_script.py",
    "./scripts/launch.sh scripts/recipes/tiny-gpt.yaml --run-dir runs/tiny --train-iters 20": "test_launch.py",
    ".venv/bin/python tools/runs.py runs --once": "test_launch.py",
}


@pytest.fixture
def newcomer(tmp_path: Path) -> Path:
    """A folder that looks like the repository, with a small corpus.jsonl; what commands write stays in it."""
    for name in {path.split("/")[0] for path in repository_files()}:
        (tmp_path / name).symlink_to(REPOSITORY / name)
    (tmp_path / ".venv/bin").mkdir(parents=True)
    for program in Path(sys.executable).parent.iterdir():
        (tmp_path / ".venv/bin" / program.name).symlink_to(program)
    words = ["a", "brown", "fox", "jumps", "over", "the", "lazy", "dog", "while", "wizards", "make", "toxic", "brew"]
    texts = (" ".join(words[(i * j) % len(words)] for j in range(1, 40)) for i in range(400))
    (tmp_path / "corpus.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tmp_path


def test_every_command_of_the_readme_runs_in_the_order_shown(newcomer: Path) -> None:
    commands = [command for command in readme_commands() if command not in RUN_ELSEWHERE]
    assert len(commands) >= 4, "the README's commands were not found"
    for command in commands:
        program, *arguments = shlex.split(command)
        if program == ".venv/bin/python":  # the link of a venv's python is no venv: start the interpreter itself
            program = sys.executable
        done = subprocess.run(
            [program, *arguments],
            cwd=newcomer,
            env=script_environment(OMP_NUM_THREADS="1"),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
    assert (newcomer / "runs/mine/loss.png").is_file()
    assert (newcomer / "runs/mine/checkpoints/latest_checkpointed_iteration.txt").read_text() == "50"


@pytest.mark.parametrize(("command", "file"), RUN_ELSEWHERE.items())
def test_commands_that_other_tests_run_are_shown_and_run_there(command: str, file: str) -> None:
    assert command in readme_commands()
    text = (REPOSITORY / "tests" / file).read_text()
    assert f'"{command}"' in text
    assert "readme_commands()" in text


@pytest.mark.parametrize("page", PAGES)
def test_links_resolve(page: str) -> None:
    folder = (REPOSITORY / page).parent
    targets = re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", (REPOSITORY / page).read_text())
    local = [target for target in targets if not target.startswith(("http://", "https://", "mailto:"))]
    missing = [target for target in local if not (folder / target).exists()]
    assert not missing, f"{page} links to what is not there: {missing}"
    ignored = [t for t in local if os.path.relpath(folder / t, REPOSITORY) not in {*repository_files(), *folders()}]
    assert not ignored, f"{page} links to what git does not carry: {ignored}"


def folders() -> set[str]:
    return {str(parent) for name in repository_files() for parent in Path(name).parents if str(parent) != "."}


def test_every_page_is_in_the_index() -> None:
    index = (REPOSITORY / "docs/index.md").read_text()
    missing = [page for page in PAGES if page.startswith("docs/") and f"({page.removeprefix('docs/')})" not in index]
    assert missing == ["docs/index.md"], f"docs/index.md does not link to {missing}"


def test_the_map_of_the_house_is_true() -> None:
    (block,) = re.findall(r"^```text\n(.*?)^```$", README.read_text(), re.DOTALL | re.MULTILINE)
    shown, parent = set(), ""
    for line in block.splitlines():
        path = line.split()[0]
        if not line.startswith(" "):
            parent = path if path.endswith("/") else ""
        shown.add((parent if line.startswith(" ") else "") + path)
    carried = repository_files()
    present = {*carried, *(f"{folder}/" for folder in folders())}
    assert shown <= present, f"the map shows what is not there: {shown - present}"

    top = {name if "/" not in name else name.split("/")[0] + "/" for name in carried}
    below_megatron = {"/".join(name.split("/")[:2]) + "/" for name in carried if re.match(r"megatron/\w+/", name)}
    expected = {entry for entry in top | below_megatron if not entry.startswith(".")} - {"README.md"}
    assert expected <= shown, f"the map lacks {expected - shown}"
