"""The health of a model's streams as numbers with stable names, and the warning of a collapse.

    report = StreamReport(step, rows)
    report.scalars()        # {"streams/cosine": 0.93, "streams-read/003.mlp.0": 0.25, ...}
    report.line()           # one line for the log
    report.collapse()       # a warning, or None

What a row has, for its branch (docs/monitor.md):
    read, write, retention   factors per stream
    effective                exp(entropy of the read factors): how many streams the branch reads, 1 to K
    spread                   largest minus smallest write factor
    norm                     root mean square of each stream's elements, where the branch reads
    cosine                   mean cosine between two streams of one token, over pairs and tokens
    distinct                 K^2 / sum of squared cosines: 1 for streams that are multiples of one another, K for
                             orthogonal ones (the participation ratio of the cosine matrix's eigenvalues)
    share                    f_k <X_k, z> / <z, z> of the branch input z = sum_k f_k X_k: adds up to 1

What always holds: pure arithmetic on plain numbers; names never depend on the parallel layout.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

COLLAPSED_COSINE = 0.999
"""Streams that point the same way to this cosine, on average over the deeper half of the model, have collapsed."""

COLLAPSED_EFFECTIVE = 0.5
"""Branches that read less than this share of the K streams, on average, leave the others unused."""

QUIET_STEPS = 1000
"""Streams start as copies of one another and part slowly: no warning before this step."""


@dataclass(frozen=True)
class BranchHealth:
    """One branch. Activations are None where none were seen; write and retention where the branch has none."""

    key: str
    read: Sequence[float]
    write: Sequence[float] | None = None
    retention: Sequence[float] | None = None
    norm: Sequence[float] | None = None
    cosines: Sequence[Sequence[float]] | None = None
    share: Sequence[float] | None = None
    gradients: dict[str, float] = field(default_factory=dict)

    @property
    def entropy(self) -> float:
        """Entropy of the read factors, in nats: log K when all streams are read alike."""
        total = sum(self.read)
        return -sum(value / total * math.log(value / total) for value in self.read if value > 0)

    @property
    def effective(self) -> float:
        """Streams that the branch reads."""
        return math.exp(self.entropy)

    @property
    def spread(self) -> float | None:
        """Difference of the largest and the smallest write factor."""
        return None if self.write is None else max(self.write) - min(self.write)

    @property
    def cosine(self) -> float | None:
        """Mean over the pairs of different streams."""
        if self.cosines is None:
            return None
        streams = len(self.cosines)
        off = sum(map(sum, self.cosines)) - sum(self.cosines[k][k] for k in range(streams))
        return off / (streams * (streams - 1))

    @property
    def distinct(self) -> float | None:
        """Streams that differ, by the participation ratio."""
        if self.cosines is None:
            return None
        return len(self.cosines) ** 2 / sum(value * value for row in self.cosines for value in row)

    def scalars(self) -> Iterator[tuple[str, float]]:
        """Yield every number of the branch with its name."""
        for kind in ("read", "write", "retention", "norm", "share"):
            for stream, value in enumerate(getattr(self, kind) or ()):
                yield f"streams-{kind}/{self.key}.{stream}", value
        yield f"streams-read-entropy/{self.key}", self.entropy
        yield f"streams-effective/{self.key}", self.effective
        for name, single in (("write-spread", self.spread), ("cosine", self.cosine), ("distinct", self.distinct)):
            if single is not None:
                yield f"streams-{name}/{self.key}", single
        for kind, norm in self.gradients.items():
            yield f"streams-gradient/{self.key}.{kind}", norm


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


@dataclass(frozen=True)
class StreamReport:
    """The whole model at one step; rows in the order of the forward."""

    step: int
    rows: Sequence[BranchHealth]

    @property
    def num_streams(self) -> int:
        """K."""
        return len(self.rows[0].read)

    @property
    def effective(self) -> float:
        """Mean of the branches'."""
        return statistics.fmean(row.effective for row in self.rows)

    @property
    def deeper_cosine(self) -> float | None:
        """Mean cosine over the deeper half of the branches: at the first one all streams are the embedding."""
        seen = [row.cosine for row in self.rows if row.cosine is not None]
        return _mean(seen[len(seen) // 2 :])

    @property
    def gradient(self) -> float:
        """Norm of all controllers' gradients together."""
        return math.sqrt(sum(norm * norm for row in self.rows for norm in row.gradients.values()))

    def scalars(self) -> dict[str, float]:
        """Return the numbers of the whole model, then those of every branch, by their stable names."""
        spreads = [row.spread for row in self.rows if row.spread is not None]
        distinct = [row.distinct for row in self.rows if row.distinct is not None]
        whole = {
            "streams/effective": self.effective,
            "streams/effective-least": min(row.effective for row in self.rows),
            "streams/cosine": self.deeper_cosine,
            "streams/distinct": _mean(distinct[len(distinct) // 2 :]),
            "streams/write-spread": _mean(spreads),
            "streams/gradient": self.gradient,
        }
        named = {name: value for name, value in whole.items() if value is not None}
        for row in self.rows:
            named.update(row.scalars())
        return named

    def line(self) -> str:
        """Return the line of the log."""
        least = min(self.rows, key=lambda row: row.effective)
        largest = max((row for row in self.rows if row.spread is not None), key=lambda row: row.spread or 0.0)
        parts = [
            f" streams at iteration {self.step}",
            f"effective streams: {self.effective:.3f} of {self.num_streams} (least {least.effective:.3f}, {least.key})",
        ]
        if self.deeper_cosine is not None:
            parts.append(f"cosine: {self.deeper_cosine:.4f}")
        parts.append(f"largest write spread: {largest.spread:.4f} ({largest.key})")
        parts.append(f"controller grad norm: {self.gradient:.3E}")
        return " | ".join(parts) + " |"

    def collapse(self) -> str | None:
        """Return the warning of streams that carry, or are read as, less than they could; None while they do not."""
        cosine = self.deeper_cosine
        alike = cosine is not None and cosine >= COLLAPSED_COSINE
        unread = self.effective <= COLLAPSED_EFFECTIVE * self.num_streams
        if self.step < QUIET_STEPS or not (alike or unread):
            return None
        shown = "unknown" if cosine is None else f"{cosine:.4f}"
        return (
            f"streams collapse: at iteration {self.step} the mean cosine between streams is {shown} (warned of from "
            f"{COLLAPSED_COSINE}) and {self.effective:.2f} of {self.num_streams} streams are read (warned of up to "
            f"{COLLAPSED_EFFECTIVE * self.num_streams:g}); see docs/monitor.md"
        )
