import logging

import pytest

from speculative.accept import walk
from speculative.budgets.adaptive import AdaptiveBudget
from speculative.budgets.count import CountBudget
from speculative.policy import DraftPolicy
from speculative.policy import policy_of as read_policy
from speculative.proposer import Proposal
from speculative.simulate import SimulatedAcceptance
from speculative.tree import build
from speculative.verify import DrawAtEveryNode

CHAIN = build(9, Proposal(token_ids=(1, 2, 3, 4), parents=(0, 1, 2, 3)))
REFUSED = (50, 60, 70, 80, 90)


def policy_of(options: dict[str, object], *, max_draft_tokens: int) -> DraftPolicy:
    return read_policy(options, max_draft_tokens=max_draft_tokens, clock=lambda: 0.0)


def test_nothing_is_adaptive_or_simulated_unless_asked(caplog: pytest.LogCaptureFixture) -> None:
    policy = policy_of({"num_steps": 3}, max_draft_tokens=4)
    assert (policy.budget, policy.is_simulated) == (None, False)
    assert isinstance(policy.verify, DrawAtEveryNode)
    assert caplog.records == []


def test_count_starts_at_what_the_algorithm_drafts() -> None:
    budget = policy_of({"budget": "count"}, max_draft_tokens=6).budget
    assert isinstance(budget, CountBudget)
    assert [budget.start(size) for size in (1, 8, 32, 64)] == [6, 3, 1, 0]


def test_adaptive_starts_the_lower_the_larger_the_batch_and_within_what_the_algorithm_drafts() -> None:
    budget = policy_of({"budget": "adaptive"}, max_draft_tokens=6).budget
    assert isinstance(budget, AdaptiveBudget)
    assert [budget.start(size) for size in (1, 8, 32, 64)] == [4, 2, 0, 0]


@pytest.mark.parametrize("kind", ["adaptive", "count"])
def test_slots_can_be_given(kind: str) -> None:
    budget = policy_of({"budget": kind, "budget_slots": "1:0/2;4:0"}, max_draft_tokens=6).budget
    assert budget is not None
    assert [budget.start(size) for size in (1, 3, 4)] == [2, 2, 0]


def test_simulation_is_loud(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        policy = policy_of({"simulate_acceptance": "2.5"}, max_draft_tokens=4)
    assert policy.is_simulated
    assert "EVERY TEXT IS WRONG" in caplog.text


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": "greedy"}, "budget must be fixed, adaptive or count, got 'greedy'"),
        (
            {"budget_slots": "1:1"},
            "budget_slots must be left out unless budget is adaptive or count, got '1:1'",
        ),
        ({"budget": "adaptive", "budget_slots": "1"}, "budget_slots must be like 1:0/1/3;8:0/1, got '1'"),
        ({"acceptance": "lossy"}, "acceptance must be one of exact, rejection, block, got 'lossy'"),
        (
            {"acceptance": "block", "simulate_acceptance": 1},
            "acceptance must be exact while simulate_acceptance is on, got 'block'",
        ),
        ({"simulate_acceptance": "lots"}, "simulate_acceptance must be a number in .*, got 'lots'"),
        ({"simulate_acceptance": -1}, "simulate_acceptance must be a number in .*, got -1"),
        ({"simulate_acceptance": 5}, "simulate_acceptance must be a number in .* 4], got 5"),
        ({"simulate_acceptance": "nan"}, "simulate_acceptance must be a number in .*, got 'nan'"),
    ],
)
def test_what_cannot_work_is_refused_by_name(options: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        policy_of(options, max_draft_tokens=4)


def test_simulation_needs_an_algorithm_that_drafts() -> None:
    with pytest.raises(ValueError, match="what the algorithm may draft, 0"):
        policy_of({"simulate_acceptance": 1}, max_draft_tokens=0)


def test_simulated_drafts_stand_whatever_was_drawn_and_the_last_token_is_the_targets() -> None:
    assert walk(CHAIN, REFUSED).nodes == (0,)
    outcome = SimulatedAcceptance(2)(CHAIN, REFUSED)
    assert (outcome.nodes, outcome.token_ids) == ((0, 1, 2), (1, 2, 70))


def test_simulated_length_comes_out_on_average() -> None:
    accept = SimulatedAcceptance(2.25)
    counts = [accept(CHAIN, REFUSED).num_correct_drafts for _ in range(8000)]
    assert set(counts) == {2, 3}
    assert sum(counts) / len(counts) == pytest.approx(2.25, abs=0.02)  # four standard deviations


def test_no_more_stands_than_the_deepest_path_of_what_was_drafted() -> None:
    tree = build(9, Proposal(token_ids=(1, 2, 3, 4), parents=(0, 0, 2, 3)))
    outcome = SimulatedAcceptance(4)(tree, REFUSED)
    assert (outcome.nodes, outcome.token_ids) == ((0, 2, 3, 4), (2, 3, 4, 90))
    assert SimulatedAcceptance(4)(build(9, Proposal()), (5,)).token_ids == (5,)
