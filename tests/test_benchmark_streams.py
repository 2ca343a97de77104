"""tools/benchmark_streams.py: its JSON, its refusals and its --help.

    pytest tests/test_benchmark_streams.py

No assertion looks at seconds or at a fraction's size: those belong to the machine.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

TOOL = Path(__file__).resolve().parent.parent / "tools" / "benchmark_streams.py"
KEYS = {
    "op": str,
    "direction": str,
    "backend": str,
    "malloc": str,
    "dtype": str,
    "num_streams": int,
    "hidden_size": int,
    "tokens": int,
    "retention": bool,
    "fraction_of_copy": float,
    "fraction_low": float,
    "fraction_high": float,
    "seconds": float,
    "speedup_over": dict,
}
TINY = ("--num-streams", "3", "--hidden-size", "16", "--tokens", "20", "--repeats", "2", "--dtype", "fp32")


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run the tool to its end."""
    return subprocess.run([sys.executable, str(TOOL), *arguments], capture_output=True, text=True, timeout=300)


def test_json_lists_every_operator_direction_backend_and_dtype(tmp_path: Path) -> None:
    path = tmp_path / "streams.json"
    shape = ("--num-streams", "3", "--hidden-size", "16", "--tokens", "20", "--repeats", "2", "--threads", "1")
    backends = ("naive", "eager", "compiled")
    outputs = ("--json", str(path), "--markdown", str(tmp_path / "streams.md"))
    done = run(*shape, "--retention", "--backend", *backends, "--no-package", *outputs)
    assert done.returncode == 0, done.stderr
    records = json.loads(path.read_text())
    for record in records:
        assert {key: type(value) for key, value in record.items()} == KEYS
        assert (record["num_streams"], record["hidden_size"], record["tokens"]) == (3, 16, 20)
        assert record["seconds"] > 0
        assert record["fraction_of_copy"] > 0
    measured = {(r["op"], r["direction"], r["backend"], r["dtype"], r["retention"], r["malloc"]) for r in records}
    assert len(measured) == len(records), "a case was measured twice"
    ways = [*((backend, "kept") for backend in backends), ("naive", "stock")]
    assert measured == {
        (op, direction, backend, dtype, retention, malloc)
        for op, retention in (
            ("read", False),
            ("write", False),
            ("write", True),
            ("write_read", False),
            ("step", False),
        )
        for direction in (("both",) if op == "step" else ("forward", "backward"))
        for backend, malloc in ways
        for dtype in ("fp32", "bf16")
    }
    for record in records:
        others = {backend if malloc == "kept" else f"{backend} stock" for backend, malloc in ways}
        way = record["backend"] if record["malloc"] == "kept" else f"{record['backend']} stock"
        assert set(record["speedup_over"]) == others - {way}
        assert all(speedup > 0 for speedup in record["speedup_over"].values())
    assert {entry.name for entry in tmp_path.iterdir()} == {"streams.json", "streams.md"}, "something half-written"
    assert len((tmp_path / "streams.md").read_text().splitlines()) > len(records)
    for word in ("copy:", "retention", "compiled", "naive"):
        assert word in done.stdout


def test_fraction_is_the_bytes_of_the_table_over_the_time(tmp_path: Path) -> None:
    """With one repetition, fraction * seconds / bytes is the copy's time per byte: the same for every case of a run."""
    path = tmp_path / "streams.json"
    k, arguments = (
        4,
        ("--num-streams", "4", "--hidden-size", "8", "--tokens", "16", "--repeats", "1", "--dtype", "fp64"),
    )
    done = run(*arguments, "--backend", "auto", "--retention", "--norm", "RMSNorm", "--no-package", "--json", str(path))
    assert done.returncode == 0, done.stderr
    moved = {
        ("read", "forward", False): k + 1,
        ("read", "backward", False): 2 * k + 1,
        ("write", "forward", False): 2 * k + 1,
        ("write", "backward", False): k + 2,
        ("write", "forward", True): 2 * k + 1,
        ("write", "backward", True): 3 * k + 2,
        ("write_read", "forward", False): 2 * k + 2,
        ("write_read", "backward", False): 3 * k + 3,
        ("step", "both", False): 9 * k + 5,
    }
    for op in ("read", "write_read"):  # in one operation a norm moves nothing; apart it reads z, writes n, ...
        for direction, apart in (("forward", 2), ("backward", 3)):
            moved[f"{op} RMSNorm", direction, False] = moved[op, direction, False]
            moved[f"{op} then RMSNorm", direction, False] = moved[op, direction, False] + apart
    records = json.loads(path.read_text())
    assert {r["op"] for r in records if "apart" in r["speedup_over"]} == {"read RMSNorm", "write_read RMSNorm"}
    assert len(records) == len(moved)
    rates = [r["fraction_of_copy"] * r["seconds"] / moved[r["op"], r["direction"], r["retention"]] for r in records]
    assert rates == pytest.approx([rates[0]] * len(rates))


def test_others_are_timed_with_stock_malloc_too_in_a_second_table_and_the_json(tmp_path: Path) -> None:
    path, page = tmp_path / "streams.json", tmp_path / "streams.md"
    done = run(*TINY, "--backend", "naive", "auto", "--no-package", "--json", str(path), "--markdown", str(page))
    assert done.returncode == 0, done.stderr
    assert "left out stock malloc" not in done.stderr
    records = json.loads(path.read_text())
    stock = {(r["op"], r["direction"]): r for r in records if r["malloc"] == "stock"}
    kept = {(r["op"], r["direction"]): r for r in records if r["malloc"] == "kept" and r["backend"] == "naive"}
    ours = {(r["op"], r["direction"]): r for r in records if r["backend"] != "naive"}
    assert {r["backend"] for r in stock.values()} == {"naive"}
    assert stock.keys() == kept.keys() == ours.keys()
    head = "| ms | other | its ms | x | its ms stock | x stock |"
    table = page.read_text().split(head, 1)[1].splitlines()[2:]
    rows = {
        tuple(cells[4:6]): cells[7:] for cells in ([c.strip() for c in row.split("|")[1:-1]] for row in table if row)
    }
    for case, record in ours.items():
        own, other, other_kept, x, other_stock, x_stock = rows[case]
        assert other == "naive"
        times = [f"{r['seconds'] * 1e3:.3f}" for r in (record, kept[case], stock[case])]
        assert [own, other_kept, other_stock] == times
        assert [x, x_stock] == [f"{record['speedup_over'][name]:.1f}" for name in ("naive", "naive stock")]
    for column in ("its ms stock", "x stock"):
        assert column in done.stdout


def test_a_case_is_timed_on_its_own_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TOOL.parent))
    benchmark_streams = importlib.import_module("benchmark_streams")
    stream_cases = importlib.import_module("stream_cases")
    monkeypatch.setenv("MEGATRON_STREAMWISE_BACKEND", "compiled")
    seen: list[str] = []
    case = stream_cases.Case(
        "read", "forward", "eager", False, 1, lambda: seen.append(os.environ["MEGATRON_STREAMWISE_BACKEND"])
    )
    with benchmark_streams._setting(case, lambda: None):
        case.run()
    assert set(seen) == {"eager"}
    assert os.environ["MEGATRON_STREAMWISE_BACKEND"] == "compiled"


def test_freed_memory_is_kept_again_behind_the_cases_with_stock_malloc() -> None:
    program = (
        f"import ctypes, resource, sys; sys.path.insert(0, {str(TOOL.parent)!r})\n"
        "import benchmark_streams\n"
        "ctypes.CDLL(None).prctl(41, 1, 0, 0, 0)  # PR_SET_THP_DISABLE: a fault is a page\n"
        f"assert benchmark_streams.main([*{TINY!r}, '--backend', 'naive', 'eager', '--no-package']) == 0\n"
        "import torch\n"
        "for _ in range(4):\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    torch.ones(64 << 18)\n"
        "    print('FAULTS', resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert "x stock" in done.stdout
    first, *later = (int(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("FAULTS"))
    assert min(later) < 100 < first  # the second may not fit into what the first has left


def test_stock_malloc_is_left_out_with_one_line_where_malloc_is_the_users_or_not_set(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "streams.json"
    arguments = (*TINY, "--backend", "naive", "eager", "--no-package", "--json", str(path))
    for allocator, reason in (
        ("auto", "MALLOC_TRIM_THRESHOLD_ is set, so malloc is left as it is for every case"),
        ("default", "--allocator default leaves malloc as it is for every case"),
    ):
        monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "134217728")
        done = run(*arguments, "--allocator", allocator)
        assert done.returncode == 0, done.stderr
        assert f"left out stock malloc: {reason}\n" in done.stderr
        assert {record["malloc"] for record in json.loads(path.read_text())} == {"as it is"}
        assert "freed memory not kept" in " ".join(done.stdout.split())
        assert "x stock" not in done.stdout
    done = run(*arguments, "--allocator", "keep")
    assert done.returncode == 2
    assert "error: --allocator keep: MALLOC_TRIM_THRESHOLD_ is set; use default" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--num-streams", "0"], "--num-streams: a whole number of at least 1 is wanted, got '0'"),
        (["--tokens", "many"], "--tokens: a whole number of at least 1 is wanted, got 'many'"),
        (["--dtype", "int8"], "--dtype: invalid choice: 'int8'"),
        (["--backend", "magic"], "--backend: invalid choice: 'magic'"),
        (["--json", "/no/such/folder/x.json"], "--json: the folder /no/such/folder does not exist"),
        (["--device", "cuda"], "--device cuda: PyTorch finds no CUDA device here"),
        (["--package", "--no-steps"], "--no-steps: not allowed with argument --package"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_bad_values_are_refused_with_exit_2(
    arguments: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    done = run("--tokens", "2", *arguments)
    assert done.returncode == 2
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_backend_that_was_asked_for_and_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    done = run("--tokens", "2", "--backend", "compiled")
    assert done.returncode == 2
    assert "error: --backend compiled: no C++ compiler 'no-such-compiler' on PATH" in done.stderr


def test_help_explains_every_flag_without_importing_torch() -> None:
    program = (
        "import runpy, sys\n"
        f"sys.argv = [{str(TOOL)!r}, '--help']\n"
        "try:\n"
        "    runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "finally:\n"
        "    print('IMPORTED', 'torch' in sys.modules or 'megatron' in sys.modules)\n"
    )
    program = f"import sys; sys.path.insert(0, {str(TOOL.parent)!r})\n" + program
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert "IMPORTED False" in done.stdout
    for flag in (
        "num-streams",
        "hidden-size",
        "tokens",
        "dtype",
        "retention",
        "backend",
        "repeats",
        "threads",
        "device",
        "package",
        "markdown",
    ):
        assert f"--{flag}" in done.stdout


def test_the_package_that_was_asked_for_and_is_not_installed_is_refused_with_the_command_that_installs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import importlib.util as util\n"
        "find = util.find_spec\n"
        "util.find_spec = lambda name, *rest: None if name == 'hyper_connections' else find(name, *rest)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    done = run("--tokens", "2", "--backend", "naive", "--package")
    assert done.returncode == 2
    assert "error: --package: hyper-connections is not installed" in done.stderr
    assert "pip install -c constraints.txt -e '.[benchmarks]'" in done.stderr
