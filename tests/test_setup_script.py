"""scripts/setup.sh and scripts/test.sh: quick when nothing changed, clear when something is missing, honest."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from harness_scripts import REPOSITORY, needs_own_venv, readme_commands, run_script

SETUP = "./scripts/setup.sh"
TOOLS = ("bash", "env", "dirname", "cat", "cmp", "head", "find", "flock", "df", "awk", "mkdir", "touch", "rm", "grep")


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A checkout that holds just what setup.sh reads, in a folder with a space in its name."""
    copy = tmp_path / "a checkout"
    (copy / "scripts").mkdir(parents=True)
    for name in ("scripts/setup.sh", "pyproject.toml", "constraints.txt", "README.md", "LICENSE"):
        shutil.copy2(REPOSITORY / name, copy / name)
    shutil.copytree(REPOSITORY / "megatron", copy / "megatron", ignore=shutil.ignore_patterns("__pycache__"))
    return copy


@pytest.fixture
def bare_path(tmp_path: Path) -> Path:
    """A folder for PATH with the basic commands and no Python."""
    folder = tmp_path / "bin"
    folder.mkdir()
    for name in TOOLS:
        if found := shutil.which(name):
            (folder / name).symlink_to(found)
    return folder


@needs_own_venv
def test_a_complete_set_up_is_left_as_it_is() -> None:
    stamp = REPOSITORY / ".venv/setup-complete"
    before = stamp.stat().st_mtime_ns
    done = run_script(SETUP)
    assert (done.returncode, done.stdout) == (0, "setup: .venv is up to date\n"), done.stdout + done.stderr
    assert stamp.stat().st_mtime_ns == before


@needs_own_venv
@pytest.mark.parametrize("script", ["setup", "quickstart", "test"])
def test_help_explains_and_does_nothing_else(script: str) -> None:
    for flag in ("-h", "--help"):
        done = run_script(f"./scripts/{script}.sh", flag, timeout=20)
        assert (done.returncode, done.stderr) == (0, "")
        assert f"./scripts/{script}.sh" in done.stdout
    if script != "test":
        done = run_script(f"./scripts/{script}.sh", "--unknown", timeout=20)
        assert (done.returncode, done.stdout) == (2, "")
        assert "--unknown" in done.stderr


def test_the_set_up_installs_the_checkout_in_editable_form(tmp_path: Path) -> None:
    done = run_script(sys.executable, "-c", "import megatron; print(megatron.__file__)", cwd=tmp_path)
    assert done.stdout.strip() == str(REPOSITORY / "megatron/__init__.py"), done.stderr


def test_no_suitable_python_is_said(checkout: Path, bare_path: Path, tmp_path: Path) -> None:
    old = bare_path / "python3"
    old.write_text("#!/bin/sh\n[ \"$1\" != --version ] || { echo 'Python 3.9.1'; exit 0; }\nexit 1\n")
    old.chmod(0o755)
    done = run_script(SETUP, cwd=checkout, PATH=str(bare_path), HOME=str(tmp_path), PYENV_ROOT=str(tmp_path))
    assert done.returncode == 1
    assert "no Python 3.12 or newer" in done.stderr
    assert "python3 (Python 3.9.1)" in done.stderr
    assert "PYTHON=" in done.stderr
    assert not (checkout / ".venv").exists()


def test_a_named_python_that_will_not_do_is_said(checkout: Path) -> None:
    done = run_script(SETUP, cwd=checkout, PYTHON="/bin/false")
    assert done.returncode == 1
    assert "PYTHON=/bin/false is not a Python 3.12 or newer" in done.stderr


def test_too_little_disk_is_said(checkout: Path, bare_path: Path) -> None:
    (bare_path / "df").unlink()
    (bare_path / "df").write_text("#!/bin/sh\necho header; echo /dev/disk 9999999 9999999 2097152 80% /\n")
    (bare_path / "df").chmod(0o755)
    done = run_script(SETUP, cwd=checkout, PATH=str(bare_path), PYTHON=sys.executable)
    assert done.returncode == 1
    assert "too little disk: 2 GB free" in done.stderr
    assert not (checkout / ".venv").exists()


def test_no_network_is_said_and_the_next_start_begins_afresh(checkout: Path) -> None:
    offline = {
        "PYTHON": sys.executable,
        "PIP_CONFIG_FILE": "/dev/null",
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple",
        "PIP_FIND_LINKS": "",
        "PIP_RETRIES": "0",
    }
    done = run_script(SETUP, cwd=checkout, **offline)
    assert done.returncode == 1
    assert "no network" in done.stderr, done.stderr
    left_over = checkout / ".venv/left-over"
    left_over.touch()
    done = run_script(SETUP, cwd=checkout, PYTHON="/bin/false")  # goes no further than what is tested here
    assert "making .venv afresh: an earlier set-up did not finish" in done.stdout, done.stdout
    assert not left_over.exists()


def test_a_venv_that_does_not_run_is_made_afresh(checkout: Path) -> None:
    (checkout / ".venv/bin").mkdir(parents=True)
    (checkout / ".venv/bin/python").symlink_to("/nowhere/python3.12")
    done = run_script(SETUP, cwd=checkout, PYTHON="/bin/false")
    assert "making .venv afresh: its Python or its pip does not run" in done.stdout, done.stdout
    assert not (checkout / ".venv/bin").exists()


@needs_own_venv
def test_the_test_command_passes_arguments_and_the_status_of_pytest_through(tmp_path: Path) -> None:
    assert "./scripts/test.sh" in readme_commands()
    tests = tmp_path / "test_two.py"
    tests.write_text("def test_right():\n    pass\n\n\ndef test_wrong():\n    assert 1 == 2\n")
    done = run_script("./scripts/test.sh", str(tests), "-p", "no:cacheprovider")
    assert done.returncode == 1
    assert "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    for check in ("ruff check", "ruff format", "mypy", "shellcheck", "pytest"):
        assert f"== {check}\n" in done.stdout
    # Exit status 5 (no test was found) is pytest's alone: a 0 or 1 of the other checks must not stand in its place.
    assert run_script("./scripts/test.sh", str(tests), "-k", "absent").returncode == 5
