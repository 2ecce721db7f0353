"""Medians, percentiles and rates of repeated measurements. Pure: must never know what was measured."""

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is told of repeated measurements of one thing, in the unit of the samples."""

    median: float
    p99: float
    least: float
    most: float
    count: int


def summary(samples: Sequence[float]) -> Summary:
    """Raises ValueError when there is nothing to summarise."""
    if not samples:
        raise ValueError("samples must hold at least one value, got none")
    return Summary(
        median=statistics.median(samples),
        p99=percentile(samples, 99),
        least=min(samples),
        most=max(samples),
        count=len(samples),
    )


def percentile(samples: Sequence[float], percent: float) -> float:
    """The smallest sample that at least `percent` % of the samples do not exceed (nearest rank)."""
    if not samples:
        raise ValueError("samples must hold at least one value, got none")
    if not 0 < percent <= 100:
        raise ValueError(f"percent must be in (0, 100], got {percent!r}")
    return sorted(samples)[math.ceil(len(samples) * percent / 100) - 1]


def median_ratio(upper: Sequence[float], lower: Sequence[float]) -> float:
    """Median of round-by-round ratios: both sides of a round ran next to each other, so drift cancels."""
    return statistics.median(a / b for a, b in zip(upper, lower, strict=True))


def rounded(value: float, digits: int = 4) -> float:
    """To so many significant digits, as reports show numbers."""
    return float(f"{value:.{digits}g}")
