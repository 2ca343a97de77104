"""tools/benchmark_convert.py measures every conversion beside cp, and leaves nothing behind."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools"))

from benchmark_convert import main


def test_the_report_has_throughput_ratio_and_memory_of_every_conversion(tmp_path: Path, capsys) -> None:
    command = ["--gigabytes", "0.005", "--width", "64", "--rounds", "2", "--folder", str(tmp_path)]
    assert main([*command, "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    rows = {row["what"]: row for row in report["rows"]}
    assert rows["cp -r"]["ratio"] == 1
    assert len(rows) == 4
    for name, row in rows.items():
        assert row["megabytes_per_second"] > 0
        assert name == "cp -r" or row["peak_bytes"] >= 0
    assert not list(tmp_path.iterdir()), "the temporary checkpoints are still there"


def test_a_folder_that_is_not_there_is_one_line_and_status_2(tmp_path: Path, capsys) -> None:
    assert main(["--folder", str(tmp_path / "absent")]) == 2
    assert len(capsys.readouterr().err.strip().splitlines()) == 1
