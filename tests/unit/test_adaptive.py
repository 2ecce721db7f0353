"""The cost-aware budget against synthetic engines on a virtual clock: what is lost to the best fixed limit."""

import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from speculative.budgets.adaptive import AdaptiveBudget, AdaptiveConfig
from speculative.budgets.budget import Verified

MOST = 8
PLAIN_S = 0.028


def rows_cost(free_rows: float, draft_share: float = 0.0) -> Callable[[int, int], float]:
    """Seconds of a round that costs as much again from so many rows on, with drafting besides."""

    def seconds(num_requests: int, limit: int) -> float:
        rows = num_requests * (1 + limit)
        return PLAIN_S * (1 + rows / free_rows + draft_share * bool(limit))

    return seconds


CHEAP = rows_cost(60.0)
STEEP = rows_cost(4.0)
DEAR_DRAFT = rows_cost(60.0, draft_share=1.0)


class World:
    """Draws what stands in chains with a chance per draft, and moves the clock by what the round costs."""

    def __init__(self, seconds: Callable[[int, int], float], *, seed: int, max_tokens: int = MOST) -> None:
        print(f"seed {seed}")
        self.random = random.Random(seed)
        self.seconds = seconds
        self.chance = 0.0
        self.noise: Callable[[], float] = lambda: 1.0
        self.now = 0.0
        self.fair_s = 0.0  # the same without noise
        self.num_tokens = 0
        self.limits: list[int] = []
        self.budget = AdaptiveBudget(AdaptiveConfig(max_tokens=max_tokens), clock=lambda: self.now)

    def run(self, num_rounds: int, *, chance: float, num_requests: int = 1, is_alone: bool = True) -> None:
        for _ in range(num_rounds):
            limit = self.budget.start(num_requests)
            self.limits.append(limit)
            cost = self.seconds(num_requests, limit)
            self.fair_s += cost
            self.now += cost * self.noise()
            verified = [Verified(limit, self._ranks(limit, chance)) for _ in range(num_requests)]
            self.num_tokens += sum(1 + len(one.ranks) for one in verified)
            self.budget.finish(verified, is_alone=is_alone)

    def over_plain(self, num_requests: int = 1) -> float:
        """Tokens per second over those of plain decoding."""
        return self.num_tokens / self.fair_s / (num_requests / self.seconds(num_requests, 0))

    def _ranks(self, limit: int, chance: float) -> Sequence[int]:
        stood = 0
        while stood < limit and self.random.random() < chance:
            stood += 1
        return range(1, stood + 1)


def best_over_plain(seconds: Callable[[int, int], float], chance: float, num_requests: int = 1) -> float:
    return max(
        sum(chance**rank for rank in range(limit + 1))
        * seconds(num_requests, 0)
        / seconds(num_requests, limit)
        for limit in range(MOST + 1)
    )


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("chance", [0.0, 0.2, 0.4, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("seconds", [CHEAP, STEEP, DEAR_DRAFT], ids=["cheap", "steep", "dear draft"])
def test_one(seconds: Callable[[int, int], float], chance: float, seed: int) -> None:
    world = World(seconds, seed=seed)
    world.run(500, chance=chance)
    best = best_over_plain(seconds, chance)
    print(f"RES {chance} got {world.over_plain():.3f} best {best:.3f} ratio {world.over_plain()/best:.3f} sw {world.budget.state} {sorted(Counter(world.limits).items())}")


@pytest.mark.parametrize("free_rows", [4.0, 20.0, 100.0])
@pytest.mark.parametrize("chance", [0.0, 0.3, 0.6, 0.8])
def test_two(free_rows, chance) -> None:
    out = []
    for n in range(1, 65):
        world = World(rows_cost(free_rows, 0.1), seed=n)
        world.run(300, chance=chance, num_requests=n)
        out.append((round(world.over_plain(n), 3), round(best_over_plain(world.seconds, chance, n),3)))
    print("TWO", free_rows, chance, "min", min(out), "maxloss", min(a/b for a, b in out), out)
