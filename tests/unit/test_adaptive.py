"""The cost-aware budget against synthetic engines on a virtual clock: what is lost to the best limit."""

import math
import random
from collections.abc import Callable, Sequence
from functools import partial

import pytest

from speculative.budgets.adaptive import AdaptiveBudget, AdaptiveConfig
from speculative.budgets.budget import BudgetState, Verified

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
        if not chance:
            return ()
        stood = int(math.log(1.0 - self.random.random()) / math.log(chance))
        return range(1, 1 + min(limit, stood))


def best_over_plain(seconds: Callable[[int, int], float], chance: float, num_requests: int = 1) -> float:
    return max(
        sum(chance**rank for rank in range(limit + 1))
        * seconds(num_requests, 0)
        / seconds(num_requests, limit)
        for limit in range(MOST + 1)
    )


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("chance", "lost"), [(0.4, 0.05), (0.8, 0.15), (0.95, 0.1)])
@pytest.mark.parametrize("seconds", [CHEAP, STEEP], ids=["cheap", "steep"])
def test_it_comes_close_to_the_best_limit_within_a_long_answer(
    seconds: Callable[[int, int], float], chance: float, lost: float, seed: int
) -> None:
    world = World(seconds, seed=seed)
    world.run(600, chance=chance)
    assert world.over_plain() > (1 - lost) * best_over_plain(seconds, chance)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("seconds", [CHEAP, STEEP, DEAR_DRAFT], ids=["cheap", "steep", "dear draft"])
def test_when_nothing_stands_500_rounds_take_hardly_longer_than_plain_decoding(
    seconds: Callable[[int, int], float], seed: int
) -> None:
    world = World(seconds, seed=seed)
    world.run(500, chance=0.0)
    assert world.over_plain() >= 0.97
    assert world.budget.state.gain == pytest.approx(1.0, abs=0.01)


@pytest.mark.parametrize("seconds", [CHEAP, STEEP, DEAR_DRAFT], ids=["cheap", "steep", "dear draft"])
def test_once_drafting_is_off_probes_lose_less_than_two_hundredths(
    seconds: Callable[[int, int], float],
) -> None:
    world = World(seconds, seed=0)
    world.run(500, chance=0.0)
    tokens, fair_s = world.num_tokens, world.fair_s
    world.run(2000, chance=0.0)
    assert (world.num_tokens - tokens) / (world.fair_s - fair_s) * seconds(1, 0) > 0.985
    assert any(world.limits[500:])


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("seconds", [CHEAP, STEEP], ids=["cheap", "steep"])
def test_it_follows_acceptance_that_goes_and_returns(seconds: Callable[[int, int], float], seed: int) -> None:
    world = World(seconds, seed=seed)
    world.run(300, chance=0.8)
    world.run(120, chance=0.0)
    before = world.fair_s
    world.run(880, chance=0.0)
    assert 880 * seconds(1, 0) / (world.fair_s - before) > 0.98
    world.run(600, chance=0.8)
    back = world.limits[-300:]
    assert sum(back) / len(back) > 2
    assert world.over_plain() > 1.0


@pytest.mark.parametrize(("free_rows", "chance"), [(4.0, 0.0), (4.0, 0.9), (20.0, 0.9)])
def test_p03_no_batch_size_loses_and_none_is_a_cliff(free_rows: float, chance: float) -> None:
    """An engine for each size; the best limit itself brings less and less, without a cliff."""
    gains = []
    for size in range(1, 65):
        world = World(rows_cost(free_rows, draft_share=0.1), seed=size)
        world.run(150, chance=chance, num_requests=size)
        gains.append(world.over_plain(size))
    best = [best_over_plain(world.seconds, chance, size) for size in range(1, 65)]
    shares = [gain / most for gain, most in zip(gains, best, strict=True)]
    assert min(gains) >= 0.95
    assert min(shares) > 0.87


@pytest.mark.parametrize("chance", [0.0, 0.9])
def test_what_is_learned_at_one_size_serves_the_next(chance: float) -> None:
    """One engine, whose batch grows and shrinks: no size gets more than 20 rounds in a row."""
    seconds = rows_cost(20.0, draft_share=0.1)
    world = World(seconds, seed=1)
    plain_s = 0.0
    for size in [*range(1, 65), *range(64, 0, -1)]:
        before = world.num_tokens
        world.run(20, chance=chance, num_requests=size)
        plain_s += (world.num_tokens - before) / size * seconds(size, 0)
    assert plain_s / world.fair_s > (0.97 if chance == 0 else 1.05)


def spiky(rng: random.Random) -> float:
    """Rounds differ by a few hundredths, and one in thirty is ten times as long."""
    return max(0.5, rng.gauss(1.0, 0.05)) * (10.0 if rng.random() < 1 / 30 else 1.0)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(("chance", "least"), [(0.0, 0.97), (0.8, 3.0)])
def test_noise_and_outliers_on_the_clock_do_not_flip_it(chance: float, least: float, seed: int) -> None:
    world = World(CHEAP, seed=seed)
    world.noise = lambda: spiky(world.random)
    world.run(1000, chance=chance)
    assert world.over_plain() > least
    late = world.limits[500:]
    is_right = [limit == 0 if chance == 0 else limit >= 4 for limit in late]
    assert sum(is_right) > 0.96 * len(late)


def test_a_machine_that_slows_down_for_all_moves_nothing() -> None:
    world = World(CHEAP, seed=3)
    world.run(600, chance=0.9)
    switches = world.budget.state.num_switches
    for slower in (1.5, 2.5, 4.0, 1.0):
        world.noise = partial(float, slower)
        world.run(100, chance=0.9)
    assert world.budget.state.num_switches - switches <= 1
    assert set(world.limits[-350:]) <= {0, 6, 8}


def test_rounds_with_prompt_chunks_are_not_timed() -> None:
    world = World(CHEAP, seed=4)
    world.run(300, chance=0.9)
    before = world.budget.state.gain
    world.noise = lambda: 7.0
    world.run(50, chance=0.9, is_alone=False)
    world.noise = lambda: 1.0
    assert world.budget.state.gain == pytest.approx(before, rel=0.25)
    world.run(50, chance=0.9)
    assert world.limits[-20:].count(8) >= 18


def test_requests_about_to_end_do_not_make_a_limit_look_cheap() -> None:
    budgets = [World(STEEP, seed=5), World(STEEP, seed=5)]
    for world in budgets:
        world.run(100, chance=0.0)
    _, ending = budgets
    for _ in range(50):
        limit = ending.budget.start(1)
        ending.now += STEEP(1, 0)
        ending.budget.finish([Verified(0, ())], is_alone=True)
        assert limit in range(MOST + 1)
    for world in budgets:
        world.run(200, chance=0.0)
    assert ending.limits[-100:].count(0) >= 98


def test_a_tree_is_judged_by_what_stands_not_by_its_nodes() -> None:
    """Three alternatives for the next token, each as likely: a limit of 3 brings what no chain would."""
    now, rng = [0.0], random.Random(6)
    budget = AdaptiveBudget(AdaptiveConfig(max_tokens=3), clock=lambda: now[0])
    limits = []
    for _ in range(300):
        limit = budget.start(1)
        limits.append(limit)
        now[0] += CHEAP(1, limit)
        right = rng.randint(1, 4)
        budget.finish([Verified(limit, (right,) if right <= limit else ())], is_alone=True)
    assert limits[-100:].count(3) > 90
    assert budget.state.gain == pytest.approx(1.75 * CHEAP(1, 0) / CHEAP(1, 3), rel=0.15)


def test_only_the_given_limits_are_used_at_each_size() -> None:
    world = World(CHEAP, seed=7)
    config = AdaptiveConfig(max_tokens=6, slots={1: (1, 4, 9), 4: (0, 2)})
    world.budget = AdaptiveBudget(config, clock=lambda: world.now)
    world.run(100, chance=0.6)
    small = set(world.limits)
    world.limits.clear()
    world.run(100, chance=0.6, num_requests=5)
    assert (small, set(world.limits)) == ({1, 4, 6}, {0, 2})


def test_slots_may_begin_at_any_size() -> None:
    budget = AdaptiveBudget(AdaptiveConfig(max_tokens=6, slots={1: (2,), 9: (3,)}), clock=lambda: 0.0)
    assert [budget.start(size) for size in (8, 9, 8)] == [2, 3, 2]


def test_the_gain_is_told_once_both_sides_of_it_were_measured() -> None:
    world = World(CHEAP, seed=8)
    world.run(2, chance=0.9)
    assert 0 not in world.limits
    assert world.budget.state.gain == 1.0
    world.run(200, chance=0.9)
    assert 0 in world.limits
    assert world.budget.state.gain > 3


def test_limits_are_close_where_one_more_matters_and_end_at_the_most() -> None:
    assert [AdaptiveConfig(max_tokens=most).candidates(1) for most in (0, 1, 3, 15)] == [
        (0,),
        (0, 1),
        (0, 1, 2, 3),
        (0, 1, 2, 3, 4, 6, 8, 12, 15),
    ]


def test_an_algorithm_that_never_drafts_needs_no_clock_to_be_right() -> None:
    budget = AdaptiveBudget(AdaptiveConfig(max_tokens=0), clock=lambda: 0.0)
    for _ in range(20):
        assert budget.start(3) == 0
        budget.finish([Verified(0, ())] * 3, is_alone=True)
    assert budget.state == BudgetState()


@pytest.mark.parametrize("slots", [{2: (1,)}, {1: ()}, {1: (3, 1)}, {1: (1, 1)}, {1: (-1, 2)}])
def test_slots_that_cannot_be_are_refused_by_name(slots: dict[int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="budget_slots must"):
        AdaptiveConfig(max_tokens=3, slots=slots)
