from collections.abc import Iterable

import pytest

from speculative.budgets.budget import Verified
from speculative.budgets.count import CountBudget, CountConfig


def finish(budget: CountBudget, counts: Iterable[int]) -> None:
    budget.finish([Verified(7, range(1, count + 1)) for count in counts], is_alone=True)


def switches(budget: CountBudget, counts: Iterable[int], *, num_requests: int = 1) -> list[tuple]:
    """(batch, new limit, average) of each batch after which the limit moved; counts are cut to the limit."""
    found, limit = [], budget.start(num_requests)
    for batch, count in enumerate(counts, start=1):
        old = budget.state.num_switches
        finish(budget, [min(count, limit)] * num_requests)
        if (limit := budget.start(num_requests)) and budget.state.num_switches == old:
            continue
        if budget.state.num_switches > old:
            found.append((batch, limit, round(budget.ema, 4)))
    return found


def budget_of(candidates: tuple[int, ...], **options: float) -> CountBudget:
    return CountBudget(CountConfig(**{"max_tokens": 7, "slots": {1: candidates}, **options}))  # type: ignore[arg-type]


def test_eagle_g11_climbs_to_seven_and_falls_back() -> None:
    assert switches(budget_of((1, 3, 5, 7), start=3), [3] * 15 + [5] * 15 + [0] * 15) == [
        (15, 5, 2.9648),
        (25, 7, 4.7815),
        (35, 3, 1.6149),
        (45, 1, 0.1734),
    ]


def test_eagle_g11_accepting_nothing_stops_drafting_and_probes_again() -> None:
    found = switches(budget_of((0, 1, 3), start=1, down_hysteresis=0.0), [0] * 30)
    assert [(batch, limit) for batch, limit, _ in found] == [(15, 0), (20, 1), (25, 0), (30, 1)]


def test_the_average_rests_while_nothing_is_drafted() -> None:
    budget = budget_of((0, 1), start=1)
    switches(budget, [1] * 4 + [0] * 11)
    assert budget.start(1) == 0
    before = budget.ema
    finish(budget, [0])
    assert budget.ema == before > 0


def test_a_probe_that_is_accepted_stays_and_climbs() -> None:
    found = switches(budget_of((0, 1, 3), start=1), [0] * 20 + [3] * 20)
    assert [(batch, limit) for batch, limit, _ in found] == [(15, 0), (20, 1), (25, 3)]


def test_hysteresis_delays_both_directions() -> None:
    assert switches(budget_of((1, 3), start=1, up_hysteresis=0.6), [1] * 100) == []
    every_other = [1, 0] * 50
    assert switches(budget_of((1, 3), start=3), every_other) == []
    eager = switches(budget_of((1, 3), start=3, down_hysteresis=0.4), every_other)
    assert eager[0][:2] == (15, 1)


def test_each_range_of_batch_sizes_has_a_limit_of_its_own() -> None:
    budget = CountBudget(CountConfig(start=5, max_tokens=7))
    assert {size: budget.start(size) for size in (1, 7, 8, 31, 32, 63, 64, 500)} == {
        1: 5,
        7: 5,
        8: 3,
        31: 3,
        32: 1,
        63: 1,
        64: 0,
        500: 0,
    }
    switches(budget, [0] * 15, num_requests=10)
    assert (budget.start(10), budget.start(1), budget.start(40)) == (0, 5, 1)


def test_no_candidate_exceeds_what_the_algorithm_drafts() -> None:
    budget = CountBudget(CountConfig(start=4, max_tokens=4))
    switches(budget, [4] * 100)
    assert (budget.start(1), budget.start(8), budget.state.num_switches) == (4, 3, 0)


def test_the_mean_over_the_batch_counts() -> None:
    budget = budget_of((1, 3), start=3)
    budget.start(2)
    finish(budget, [3, 0])
    assert budget.ema == pytest.approx(2 + 0.2 * (1.5 - 2))


@pytest.mark.parametrize("slots", [{}, {2: (1,)}, {1: ()}, {1: (3, 1)}, {1: (1, 1)}, {1: (-1, 2)}])
def test_slots_that_cannot_be_are_refused_by_name(slots: dict[int, tuple[int, ...]]) -> None:
    with pytest.raises(ValueError, match="budget_slots must"):
        CountConfig(start=1, max_tokens=3, slots=slots)
