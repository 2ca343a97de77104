"""tools/benchmarking.py: interleaving, spreads, tables and files of the benchmark tools.

pytest tests/test_benchmarking.py
"""

from __future__ import annotations

import argparse
import contextlib
import math
import random
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from benchmarking import (
    BenchmarkError,
    Column,
    Report,
    interleave,
    machine,
    machine_line,
    median_interval,
    over,
    peak_rise,
    run_measurement,
    spread,
    write_outputs,
)


def test_every_repetition_runs_each_case_once_and_all_cases_come_behind_all_others() -> None:
    orders = []
    for _ in range(2):
        ran: list[str] = []
        cases = {name: partial(ran.append, name) for name in "abcd"}
        timings = interleave(cases, repeats=39, warm_up=1)
        assert all(len(timing.wall) == len(timing.cpu) == 39 for timing in timings.values()), "warm-up was counted"
        assert all(sorted(ran[start : start + 4]) == list("abcd") for start in range(0, 160, 4))
        orders.append("".join(ran))
    assert orders[0] == orders[1], "another order in the second run"
    followed = {orders[0][index : index + 2] for index in range(159)}
    assert followed >= {one + other for one in "abcd" for other in "abcd" if one != other}


def test_the_context_of_a_case_holds_it_and_the_freeing_of_its_result_and_nothing_else() -> None:
    events: list[str] = []

    @contextlib.contextmanager
    def state() -> Iterator[None]:
        events.append("enter")
        yield
        events.append("leave")

    class Result:
        def __del__(self) -> None:
            events.append("freed")

    def inside() -> Result:
        events.append("run")
        return Result()

    cases = {"inside": inside, "outside": partial(events.append, "outside")}
    timings = interleave(cases, repeats=3, warm_up=1, around={"inside": state})
    assert len(timings["inside"].wall) == 3
    one = "enter run freed leave"
    assert sorted(" ".join(events).replace(one, "once").split()) == ["once"] * 4 + ["outside"] * 4


def test_what_a_context_costs_is_not_measured() -> None:
    @contextlib.contextmanager
    def slow() -> Iterator[None]:
        time.sleep(0.2)
        yield
        time.sleep(0.2)

    timings = interleave({"case": lambda: None}, repeats=3, warm_up=0, around={"case": slow})
    assert min(timings["case"].wall) < 0.1


def test_a_spread_is_the_median_and_the_middle_half() -> None:
    found = spread([5.0, 1.0, 2.0, 3.0, 4.0])
    assert (found.low, found.median, found.high) == (2, 3, 4)
    assert spread([7.0]).text() == ("7.00", "7.00-7.00")
    assert over([2.0, 9.0], [1.0, 3.0]) == [2, 3]


@pytest.mark.parametrize("count", [6, 7, 9, 15, 21, 40])
def test_an_interval_of_the_median_holds_the_true_one_at_least_as_often_as_it_says(count: int) -> None:
    """Of a skewed distribution, as step times have it: -ln(u) has its median at ln 2."""
    draw, held, trials = random.Random(count), 0, 4000
    for _ in range(trials):
        low, high = median_interval([-math.log(1 - draw.random()) for _ in range(count)])
        held += low <= math.log(2) <= high
    assert held / trials >= 0.945, f"{held} of {trials} intervals of {count} values hold the median"
    assert held / trials < 0.99, "the interval is wider than it need be"


def test_an_interval_of_the_median_of_few_values_is_all_of_them() -> None:
    assert median_interval([3.0]) == (3.0, 3.0)
    assert median_interval([5.0, 1.0, 4.0, 2.0, 3.0]) == (1.0, 5.0)
    assert median_interval([6.0, 5.0, 1.0, 4.0, 2.0, 3.0, 9.0, 7.0, 8.0]) == (2.0, 8.0)


def test_peak_is_the_highest_moment_and_not_the_sum() -> None:
    import torch

    def run() -> None:
        for _ in range(3):
            torch.ones(1 << 18)  # 1 MiB, freed each time

    assert 1 << 20 <= peak_rise(run) < 2 << 20


def test_markdown_names_machine_and_command_and_has_every_row(tmp_path: Path) -> None:
    report = Report("title", [Column("what"), Column("ms", right=True)], [["a", "1"], ["b", "2"]], "note")
    args = argparse.Namespace(json=tmp_path / "x.json", markdown=tmp_path / "x.md")
    write_outputs(args, [{"a": 1}], [report])
    text = (tmp_path / "x.md").read_text()
    for part in ("`python ", "load average", "| what | ms |\n|---|---:|\n| a | 1 |\n| b | 2 |", "note"):
        assert part in text
    assert {entry.name for entry in tmp_path.iterdir()} == {"x.json", "x.md"}, "something half-written was left"
    assert machine_line(machine()).count("load average") == 1


@pytest.mark.parametrize("error", [BenchmarkError("not here"), OSError("disk full")], ids=lambda e: type(e).__name__)
def test_what_cannot_be_measured_is_one_line_and_status_2(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    def run() -> None:
        raise error

    assert run_measurement(run) == 2
    assert capsys.readouterr().err.strip() == f"error: {error}"
