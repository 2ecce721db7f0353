"""Coins whose numbers are known beforehand, and the cells of [0, 1) on which an outcome cannot change.

With them a law is computed and not sampled. Outcomes are monotone in a coin, so a cell is tried just inside
both of its ends: a rule that changes its mind within a cell is caught, by half the cell's mass.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

Key = tuple[int, int, int]  # (position, stream, column)
Point = tuple[float, float]  # a coin, and how much of [0, 1) it stands for

# How far inside a cell its ends are tried; cells that are not much longer are rounding.
_INSIDE = 1e-12


def points(ends: Iterable[float]) -> list[Point]:
    """Both ends of every part into which `ends` cut [0, 1)."""
    cuts = [0.0]
    for end in sorted(end for end in ends if 0.0 < end < 1.0):
        if end - cuts[-1] > 4 * _INSIDE and 1.0 - end > 4 * _INSIDE:
            cuts.append(end)
    return [
        (coin, (high - low) / 2)
        for low, high in pairwise([*cuts, 1.0])
        for coin in (low + _INSIDE, high - _INSIDE)
    ]


def sides(bound: float) -> list[Point]:
    """For an outcome that is one thing below `bound` and another above: just below, just above."""
    below, above = (bound - _INSIDE, bound), (bound + _INSIDE, 1.0 - bound)
    return [(coin, length) for coin, length in (below, above) if 0.0 <= coin < 1.0]


def cdf(weights: Sequence[float]) -> list[float]:
    """Where an inverse CDF passes from one token to the next."""
    total, mass, ends = sum(weights), 0.0, []
    for weight in weights:
        mass += weight
        ends.append(mass / total)
    return ends


@dataclass
class KnownCoins:
    """Seed i takes its numbers from `tables[i]`; a coin that is not there is an error of the test."""

    tables: list[Mapping[Key, float]] = field(default_factory=list)

    def add(self, table: Mapping[Key, float]) -> int:
        """Returns the seed."""
        self.tables.append(table)
        return len(self.tables) - 1

    def __call__(
        self,
        seeds: Sequence[int],
        positions: Sequence[int],
        stream: int,
        columns: Sequence[int] | None = None,
    ) -> torch.Tensor:
        columns = [0] * len(seeds) if columns is None else columns
        keys = zip(seeds, positions, columns, strict=True)
        found = [self.tables[seed][position, stream, column] for seed, position, column in keys]
        return torch.tensor(found, dtype=torch.float64)
