"""The overlay: `megatron` of this tree and of megatron-core are one package, however this project is installed."""

from __future__ import annotations

import json
import shutil
import tarfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from harness_overlay import (
    REPOSITORY,
    Place,
    Shelf,
    module_name,
    repository_files,
    run,
    upstream_files,
)

KINDS = ("checkout", "editable", "wheel")
WANTED = "megatron-core>=0.19.2,<0.20 is wanted"

# Imports each module named on the command line and prints {module: file} as its last line.
IMPORT_ALL = """
import importlib, json, sys
print("\\n" + json.dumps({name: importlib.import_module(name).__file__ for name in sys.argv[1:]}))
"""
# Prints {module: file} of where the modules named would come from.
FIND_ALL = """
import importlib.util, json, sys
print("\\n" + json.dumps({name: importlib.util.find_spec(name).origin for name in sys.argv[1:]}))
"""


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    folder = tmp_path_factory.mktemp("overlay")
    yield Shelf(folder)
    shutil.rmtree(folder)


def our_modules() -> list[str]:
    return sorted(module_name(name) for name in repository_files("megatron") if name.endswith(".py"))


def upstream_modules() -> list[str]:
    return sorted(module_name(name) for name in upstream_files() if name.endswith(".py"))


def located(place: Place, program: str, modules: list[str]) -> dict[str, Path]:
    done = place.run("-c", program, *modules)
    assert done.returncode == 0, done.stdout + done.stderr
    return {name: Path(file).resolve() for name, file in json.loads(done.stdout.splitlines()[-1]).items()}


def assert_one_clear_error(place: Place, arguments: tuple[str, ...], *parts: str, **run_arguments: object) -> None:
    done = place.run(*arguments, **run_arguments)
    assert done.returncode != 0, f"{arguments} succeeded:\n{done.stdout}"
    entry_point = any(argument.endswith(".py") for argument in arguments)
    # A launch ends in one line; an import in a program of someone else's raises, so that they can catch it.
    tracebacks, kind = (0, "error: ") if entry_point else (1, "ImportError: ")
    assert done.stderr.count("Traceback") == tracebacks, f"not one error is shown:\n{done.stderr}"
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(kind), done.stderr
    for part in parts:
        assert part in last, f"the error does not say {part!r}:\n{last}"


def test_no_path_and_no_module_of_ours_exists_in_megatron_core() -> None:
    ours, theirs = set(repository_files("megatron")), set(upstream_files())
    assert len(theirs) > 500, "megatron-core's RECORD was not read"
    assert not ours & theirs, "an install would overwrite these files and an uninstall would delete them"
    # x.py and x/__init__.py are different paths but one module: the pip package's would hide ours.
    assert not set(our_modules()) & set(upstream_modules()) - {"megatron"}


def test_wheel_holds_every_file_of_ours_and_nothing_else(shelf: Shelf) -> None:
    expected = set(repository_files("megatron"))
    with zipfile.ZipFile(shelf.our_wheel) as wheel:
        names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == expected
    (source,) = shelf.distributions.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert expected <= packed


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_imports_and_comes_from_its_own_side(shelf: Shelf, kind: str) -> None:
    place = shelf.complete(kind)
    modules = our_modules()
    overlay = place.overlay.resolve()
    for name, file in located(place, IMPORT_ALL, modules).items():
        assert file.is_relative_to(overlay), f"{name} was taken from {file}, not from {overlay}"
        assert module_name(f"megatron/{file.relative_to(overlay)}") == name

    shared_folders = {name.rpartition(".")[0] for name in modules}
    theirs = [name for name in upstream_modules() if name.rpartition(".")[0] in shared_folders]
    assert "megatron.core" in theirs
    upstream = (place.site_packages / "megatron").resolve()
    for name, file in located(place, FIND_ALL, theirs).items():
        assert module_name(f"megatron/{file.relative_to(upstream)}") == name, f"{name} was taken from {file}"


def test_the_entry_point_runs_in_a_bare_checkout(shelf: Shelf) -> None:
    place = shelf.complete("checkout")
    done = place.run("pretrain_gpt.py", "--help")
    assert done.returncode == 0, done.stderr
    assert "--num-layers" in done.stdout


@pytest.mark.parametrize("kind", KINDS)
def test_pieces_of_megatron_from_another_distribution_stay_importable(shelf: Shelf, kind: str) -> None:
    place = shelf.install(kind, core=shelf.core_wheel)
    place.install(shelf.stub_wheel("megatron-elsewhere", "1.0", {"megatron/elsewhere/__init__.py": "FOUND = 1\n"}))
    done = place.run("-c", "import megatron.elsewhere as m; print(m.FOUND)")
    assert done.stdout.split() == ["1"], done.stderr


@pytest.mark.parametrize("kind", ["editable", "wheel"])
def test_uninstalling_this_project_leaves_megatron_core_whole(shelf: Shelf, kind: str) -> None:
    place = shelf.install(kind, core=shelf.core_wheel)
    assert place.damaged_core_files() == []
    place.pip("uninstall", "-q", "-y", "megatron-wide-residual")
    assert place.damaged_core_files() == []
    done = place.run(
        "-c", "import megatron; from importlib.util import find_spec; print(find_spec('megatron.core').origin)"
    )
    assert done.stdout.split() == [str(place.site_packages / "megatron/core/__init__.py")], done.stdout + done.stderr


@pytest.mark.parametrize("kind", KINDS)
def test_missing_megatron_core_is_one_clear_error(shelf: Shelf, kind: str) -> None:
    place = shelf.install(kind, core=shelf.core_wheel)
    place.pip("uninstall", "-q", "-y", "megatron-core")
    # After the overlay was imported once, its compiled caches must not change the answer.
    ours = next(name for name in our_modules() if name.startswith("megatron.core."))
    for statement in ("import megatron.core", f"import {ours}", "from megatron.training import pretrain"):
        assert_one_clear_error(place, ("-c", statement), "megatron-core is not installed", WANTED, "pip install")


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_megatron_core_is_one_clear_error(shelf: Shelf, kind: str) -> None:
    place = shelf.install(kind, core=shelf.stub_wheel("megatron-core", "0.18.1", release_files(0, 18, 1)))
    assert_one_clear_error(place, ("-c", "import megatron.core"), "megatron-core 0.18.1 is found", WANTED)


@pytest.mark.parametrize("installed", [None, "0.18.1"])
def test_the_entry_point_says_that_megatron_core_is_missing_or_wrong(shelf: Shelf, installed: str | None) -> None:
    core = installed and shelf.stub_wheel("megatron-core", installed, release_files(0, 18, 1))
    place = shelf.install("checkout", core=core or None)
    found = f"megatron-core {installed} is found" if installed else "megatron-core is not installed"
    assert_one_clear_error(place, ("pretrain_gpt.py", "--num-layers", "2"), found, WANTED)


def release_files(major: int, minor: int, patch: int, pre: str = "") -> dict[str, str]:
    """The files by which a megatron-core release is recognised."""
    version = f"VERSION = ({major}, {minor}, {patch}, {pre!r})\n"
    return {"megatron/core/__init__.py": "", "megatron/core/package_info.py": version}


@pytest.mark.parametrize(("pre_release", "minor"), [("rc1", 20), ("rc1", 19)])
def test_a_pre_release_outside_the_range_is_refused(shelf: Shelf, pre_release: str, minor: int) -> None:
    version = f"0.{minor}.{2 if minor == 19 else 0}{pre_release}"
    patch = 2 if minor == 19 else 0
    core = shelf.stub_wheel("megatron-core", version, release_files(0, minor, patch, pre_release))
    place = shelf.install("checkout", core=core)
    assert_one_clear_error(place, ("-c", "import megatron"), f"megatron-core {version} is found", WANTED)


def test_a_clone_on_pythonpath_is_judged_by_its_own_version(shelf: Shelf, tmp_path: Path) -> None:
    for name, text in release_files(0, 16, 0).items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    place = shelf.complete("editable")
    clone = str(tmp_path / "megatron/core")
    env = {"PYTHONPATH": str(tmp_path)}
    assert_one_clear_error(place, ("-c", "import megatron.core"), "megatron-core 0.16.0", clone, WANTED, env=env)


def test_an_installed_copy_beside_a_checkout_is_refused(shelf: Shelf) -> None:
    installed = shelf.complete("wheel")
    checkout = Place(installed.python, shelf.copy_of_tree(), installed.overlay)
    assert_one_clear_error(
        checkout, ("-c", "import megatron.core"), str(installed.overlay), "pip uninstall megatron-wide-residual"
    )


def test_an_old_python_is_told_what_is_wanted(shelf: Shelf) -> None:
    candidates = [shutil.which(f"python3.{minor}") for minor in range(8, 12)]
    candidates += [str(path) for path in Path.home().glob(".pyenv/versions/3.*/bin/python")] + ["/usr/bin/python3"]
    probe = "import sys; sys.exit(not (3, 8) <= sys.version_info < (3, 12))"
    old = next((p for p in candidates if p and Path(p).exists() and run(p, "-c", probe).returncode == 0), None)
    if old is None:
        pytest.skip("no Python 3.8 to 3.11 on this machine")
    checkout = Place(Path(old), REPOSITORY, REPOSITORY / "megatron")
    for arguments in (("-B", "-c", "import megatron"), ("-B", "pretrain_gpt.py")):
        assert_one_clear_error(checkout, arguments, "3.12 or newer is wanted", "scripts/setup.sh")
