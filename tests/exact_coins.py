"""Coins whose numbers are known beforehand, and the cells of [0, 1) on which an outcome cannot change.

With them a law is computed and not sampled: every cell of every coin is tried once, at its middle, and
weighs its length.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch

Key = tuple[int, int, int]  # (position, stream, column)
Cell = tuple[float, float]  # a coin inside, and the length

# Closer ends are one: what lies between them is rounding.
_SAME = 1e-13


def cells(ends: Iterable[float]) -> list[Cell]:
    """The parts into which `ends` cut [0, 1)."""
    cuts = [0.0]
    for end in sorted(end for end in ends if 0.0 < end < 1.0):
        if end - cuts[-1] > _SAME and 1.0 - end > _SAME:
            cuts.append(end)
    return [((low + high) / 2, high - low) for low, high in pairwise([*cuts, 1.0])]


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
