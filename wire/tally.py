"""Histograms of the cores: how often a duration fell into which range. Plain counting.

Owns the ranges. Must never know who reads them, nor a clock: whoever observes brings the seconds.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

SECONDS = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    480.0,
)
"""From a token on a fast GPU to a very long prompt."""

TOKEN_SECONDS = (
    0.001,
    0.002,
    0.004,
    0.006,
    0.008,
    0.01,
    0.025,
    0.05,
    0.075,
    0.1,
    0.15,
    0.2,
    0.3,
    0.5,
    1.0,
    2.5,
)
"""Between two tokens: fine where drafting makes the difference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A histogram at one moment. counts[i]: values in (bounds[i-1], bounds[i]]; last: above all."""

    bounds: tuple[float, ...]
    counts: tuple[int, ...]
    total: float

    @property
    def count(self) -> int:
        return sum(self.counts)


class Tally:
    """One histogram. Only grows."""

    def __init__(self, bounds: Sequence[float] = SECONDS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._total = 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._total += value

    def merge(self, other: "Tally") -> None:
        """Take over what another one of the same ranges counted."""
        assert self._bounds == other._bounds
        self._counts = [ours + theirs for ours, theirs in zip(self._counts, other._counts, strict=True)]
        self._total += other._total

    def read(self) -> Distribution:
        return Distribution(bounds=self._bounds, counts=tuple(self._counts), total=self._total)


class Tallies:
    """Histograms by key; one that was not announced begins with its first value and the usual ranges."""

    def __init__(self, *keys: str, bounds: Mapping[str, Sequence[float]] = MappingProxyType({})) -> None:
        self._tallies = {key: Tally(bounds.get(key, SECONDS)) for key in (*keys, *bounds)}

    def observe(self, key: str, value: float) -> None:
        if key not in self._tallies:
            self._tallies[key] = Tally()
        self._tallies[key].observe(value)

    def merge(self, key: str, other: Tally) -> None:
        self._tallies[key].merge(other)

    def read(self) -> Mapping[str, Distribution]:
        return {key: tally.read() for key, tally in self._tallies.items()}
