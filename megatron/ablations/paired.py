"""Means and spreads over seeds, and paired differences with Student's t interval.

    spread([5.1, 5.2, 5.3])                                     # Spread(3, 5.2, 0.1)
    paired_difference({1: 5.1, 2: 5.3}, {1: 5.0, 2: 5.1})       # Difference(n=2, mean=0.15, low=-0.49, high=0.79)

Two runs of one seed begin with the same base weights and see the same data in the same order, so that the difference of
a seed holds less noise than either loss. The interval is that of the paired t test (Student 1908): mean +- t s/sqrt(n),
with t of n-1 degrees of freedom and s the sample standard deviation of the differences.

What always holds: nothing is said of what one seed cannot say: the spread and the interval of a single value are None;
a difference counts as seen only where the interval leaves 0 out. A value that is NaN or infinite makes the mean NaN,
the spread and the interval None and the verdict NOT_FINITE: no mean is ever that of the finite values alone.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95
NOT_FINITE = "not finite"


@dataclass(frozen=True)
class Spread:
    """Number, mean and sample standard deviation (None for one value, and where one is not finite)."""

    n: int
    mean: float
    deviation: float | None


@dataclass(frozen=True)
class Difference:
    """The mean of paired differences and its interval (None for one pair)."""

    n: int
    mean: float
    low: float | None
    high: float | None
    by_seed: Mapping[int, float]

    @property
    def verdict(self) -> str:
        """What the interval allows to say, as words for a table."""
        if not math.isfinite(self.mean):
            return NOT_FINITE
        if self.low is None or self.high is None:
            return "one seed: nothing can be said"
        if self.low <= 0 <= self.high:
            return "no difference seen"
        return "lower" if self.mean < 0 else "higher"


def spread(values: Sequence[float]) -> Spread | None:
    """Mean and spread; None for no value."""
    if not values:
        return None
    if not all(map(math.isfinite, values)):
        return Spread(len(values), math.nan, None)
    return Spread(len(values), statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else None)


def paired_difference(values: Mapping[int, float], reference: Mapping[int, float]) -> Difference | None:
    """values minus reference over the seeds that both have; None when they share none."""
    differences = {seed: values[seed] - reference[seed] for seed in sorted(values.keys() & reference.keys())}
    found = spread(list(differences.values()))
    if found is None:
        return None
    if found.deviation is None:
        return Difference(found.n, found.mean, None, None, differences)
    from scipy.stats import t

    half = float(t.ppf((1 + CONFIDENCE) / 2, found.n - 1)) * found.deviation / math.sqrt(found.n)
    return Difference(found.n, found.mean, found.mean - half, found.mean + half, differences)
