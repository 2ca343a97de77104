"""tools/preprocess_data.py as a process: --help, signals, dying workers; and the flags that docs/data.md names exist.

pytest tests/test_preprocess_process.py
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import harness_corpus as harness
import pytest

BYTES = ["--tokenizer-type", "ByteLevelTokenizer"]


def test_help_needs_neither_torch_nor_megatron() -> None:
    code = (
        "import sys, runpy\n"
        "sys.argv = [sys.argv[1], '--help']\n"
        "sys.path[0] = sys.argv[0].rpartition('/')[0]\n"
        "try: runpy.run_path(sys.argv[0], run_name='__main__')\n"
        "except SystemExit as end: assert end.code == 0\n"
        "assert not {'torch', 'megatron', 'datasets', 'transformers'} & set(sys.modules)\n"
    )
    for name in ("preprocess_data.py", "train_tokenizer.py"):
        path = str(harness.ROOT / "tools" / name)
        done = subprocess.run([sys.executable, "-c", code, path], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        assert "--json-keys" in done.stdout


def test_interrupt_terminate_and_kill_leave_no_output_and_no_process(tmp_path: Path) -> None:
    """Real processes, forked from this one to save them the imports, each hit in the middle of its work."""
    path = tmp_path / "in.jsonl"
    with path.open("wb") as stream:
        for _ in range(20):
            stream.write((json.dumps({"text": "word " * 2000}) + "\n").encode() * 200)
    harness.tokenizer_for("ByteLevelTokenizer")  # imports what the tool imports
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGKILL):
        folder, log = tmp_path / number.name, tmp_path / f"{number.name}.log"
        folder.mkdir()
        process = multiprocessing.get_context("fork").Process(target=_run_in_session, args=(path, folder, log))
        process.start()
        assert process.pid is not None
        _wait_until(partial(_is_writing, log), "documents are being written")
        assert [name.startswith(".out.unfinished-") for name in os.listdir(folder)] == [True]
        if number == signal.SIGINT:
            os.killpg(process.pid, number)  # as a terminal does: to the workers too
        else:
            os.kill(process.pid, number)
        process.join(60)
        left = os.listdir(folder)
        if number == signal.SIGKILL:
            assert process.exitcode == -signal.SIGKILL
            assert all(name.startswith(".out.unfinished-") for name in left), left
        else:
            assert (process.exitcode, left) == (130, []), (log.read_text(), left)
            assert log.read_text().endswith("interrupted; nothing was written\n")
            assert "Traceback" not in log.read_text()
        _wait_until(partial(_session_ended, process.pid), "no worker outlives the tool")


def _run_in_session(path: Path, folder: Path, log: Path) -> None:
    os.setsid()
    with log.open("w", buffering=1) as sys.stderr:
        argv = ["--input", str(path), "--output-prefix", str(folder / "out"), "--workers", "2", "--log-interval", "200"]
        os._exit(harness.tool("preprocess_data").main([*argv, *BYTES]))


def _is_writing(log: Path) -> bool:
    return log.exists() and "documents/s" in log.read_text()


def _session_ended(session: int) -> bool:
    try:
        os.killpg(session, 0)
    except ProcessLookupError:
        return True
    return False


def _wait_until(holds: Callable[[], bool], what: str) -> None:
    for _ in range(600):
        if holds():
            return
        time.sleep(0.1)
    pytest.fail(f"waited in vain: {what}")


_slow_forks = False


def _sleep_in_every_second_child() -> None:
    if _slow_forks and os.getpid() % 2:
        time.sleep(1)


def test_a_killed_worker_is_an_error_not_a_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also when other workers are not up yet, as on a busy host: the pool terminates them while they start."""
    from megatron.training.data import preprocess

    os.register_at_fork(after_in_child=_sleep_in_every_second_child)
    monkeypatch.setattr(sys.modules[__name__], "_slow_forks", True)
    monkeypatch.setattr(preprocess._ChunkEncoder, "encode", lambda self, chunk: os._exit(9))
    path = harness.write_jsonl(tmp_path / "in.jsonl", ["a"])
    argv = ["--input", str(path), "--output-prefix", f"{tmp_path}/out", "--workers", "4", *BYTES]
    status = harness.tool("preprocess_data").main(argv)
    assert (status, "worker process was killed" in capsys.readouterr().err) == (2, True)
    assert os.listdir(tmp_path) == ["in.jsonl"]


def test_every_flag_in_the_guide_exists(capsys: pytest.CaptureFixture[str]) -> None:
    import argparse

    from megatron.training.arguments import add_megatron_arguments

    known = set(add_megatron_arguments(argparse.ArgumentParser())._option_string_actions)
    for name in ("preprocess_data", "train_tokenizer"):
        with pytest.raises(SystemExit):
            harness.tool(name).main(["--help"])
        known |= set(re.findall(r"--[a-z][a-z-]+", capsys.readouterr().out))
    named = set(re.findall(r"--[a-z][a-z-]+", (harness.ROOT / "docs/data.md").read_text(encoding="utf-8")))
    assert len(named) > 20
    assert named <= known, sorted(named - known)
