"""What a round costs at each limit, learned from how long rounds took.

Owns, for each range of batch sizes, the pace of its rounds and the cost of each limit in terms of that pace.
Must never know what drafts bring, nor read a clock.

The pace follows the limit in force, round by round: contexts grow, and others use the machine. Costs are
ratios to it, so what changes for all limits alike changes no choice; a probe compares its limit with the
rounds around it. Limits and sizes that were never measured are inferred from those next to them.
"""

import math
from collections.abc import Iterable

# Guess before any measurement: so many rows cost as much again as what a round costs without rows.
_FREE_ROWS = 20.0
# Shares by which pace and cost move to each new measurement.
_PACE_STEP = 0.1
_COST_STEP = 0.2
# From so many measurements on a cost is trusted, and rounds at it move the pace instead.
_SETTLED = 8
# Times beyond this factor of what was expected: longer ones are believed when they come twice in a row, and
# shorter ones at once, since nothing makes a round faster than it is.
_ODD_FACTOR = 2.0


class RoundCosts:
    """Costs compare limits at one batch size only; their unit differs between sizes."""

    def __init__(self) -> None:
        self._ranges: dict[int, _Range] = {}

    def cost(self, num_requests: int, limit: int) -> float:
        return self._range(num_requests).cost(limit, self._like(num_requests))

    def has_measured(self, num_requests: int, limits: Iterable[int]) -> bool:
        return self._range(num_requests).has_measured(limits)

    def observe(self, num_requests: int, limit: int, *, seconds: float, is_probe: bool) -> None:
        """A round took so long; `is_probe`: at another limit than those around it."""
        if seconds > 0:
            self._range(num_requests).observe(limit, seconds, is_probe, self._like(num_requests))

    def _range(self, num_requests: int) -> "_Range":
        return self._ranges.setdefault(range_of(num_requests), _Range(num_requests))

    def _like(self, num_requests: int) -> "_Range | None":
        """The range of the nearest size at which limits have been compared."""
        known = [found for found in self._ranges.values() if found.is_compared]
        return min(known, key=lambda found: abs(math.log(found.size / num_requests)), default=None)


class _Range:
    """Invariant: there is a pace once there is a cost."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._pace = 0.0
        self._costs: dict[int, float] = {}
        self._counts: dict[int, int] = {}
        self._odd: int | None = None  # limit of the last round, if it took unbelievably long

    @property
    def is_compared(self) -> bool:
        return len(self._costs) > 1

    def has_measured(self, limits: Iterable[int]) -> bool:
        return all(limit in self._costs for limit in limits)

    def cost(self, limit: int, like: "_Range | None") -> float:
        if limit in self._costs:
            return self._costs[limit]
        if self.is_compared:
            return self._between(limit)
        base = self._guess if like is None or like is self else like.known_cost
        if not self._costs:
            return base(limit)
        (measured, cost), *_ = self._costs.items()
        return cost * base(limit) / base(measured)

    def known_cost(self, limit: int) -> float:
        return self.cost(limit, None)

    def observe(self, limit: int, seconds: float, is_probe: bool, like: "_Range | None") -> None:
        cost = self.cost(limit, like)
        if not self._pace:
            self._pace = seconds / cost
        factor = seconds / (self._pace * cost)
        if factor > _ODD_FACTOR and self._odd != limit:
            self._odd = limit
            return
        self._odd = None
        is_new = factor > _ODD_FACTOR or factor < 1 / _ODD_FACTOR
        count = self._counts.get(limit, 0)
        if not is_probe and count >= _SETTLED:
            self._pace *= factor if is_new else 1.0 + _PACE_STEP * (factor - 1.0)
            return
        step = 1.0 if is_new else max(_COST_STEP, 1.0 / (count + 1))
        self._costs[limit] = cost * (1.0 + step * (factor - 1.0))
        self._counts[limit] = count + 1

    def _guess(self, limit: int) -> float:
        return (_FREE_ROWS + self.size * (1 + limit)) / (_FREE_ROWS + self.size)

    def _between(self, limit: int) -> float:
        """On a line through the measured neighbours; outside them, on one through the outermost two."""
        limits = sorted(self._costs)
        below = [known for known in limits if known < limit]
        above = [known for known in limits if known > limit]
        low, high = (below[-1], above[0]) if below and above else (limits[0], limits[-1])
        slope = max(0.0, (self._costs[high] - self._costs[low]) / (high - low))
        nearest = below[-1] if below else above[0]
        cost = self._costs[nearest] + slope * (limit - nearest)
        return max(cost, self._costs[nearest] * self._guess(limit) / self._guess(nearest) / _ODD_FACTOR)


def range_of(num_requests: int) -> int:
    """The least size of the range it is in: each size alone up to 8, then four ranges to every doubling."""
    width: int = max(1, 2 ** (num_requests.bit_length() - 3))
    return num_requests - num_requests % width
