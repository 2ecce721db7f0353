"""Limits that move in mid-text, and acceptance that is simulated: what the loop makes of either."""

from collections.abc import Callable, Mapping, Sequence
from itertools import cycle
from random import Random
from time import perf_counter

import pytest
import torch

from engine.request import Request
from speculative.budgets.adaptive import AdaptiveBudget, AdaptiveConfig
from speculative.budgets.budget import BudgetState, DraftBudget, FixedBudget, Verified
from speculative.budgets.count import CountBudget, CountConfig
from speculative.build import BuiltEngine
from speculative.build import build_engine as build
from speculative.drafts.layer import POOL
from speculative.loop import EngineLoop
from speculative.policy import DraftPolicy, policy_of
from speculative.progress import Progress
from speculative.proposer import Proposal, Proposer
from speculative.registry import create_proposer
from speculative.settings import EngineSettings
from tests.conformance.test_eagle import CHAIN, TREE
from tests.conformance.test_eagle import proposer as head
from tests.conformance.test_loop import greedy_truth, prompt_of, reference
from tests.draft_claims import kv_of_slots
from tests.engines import UNWRITTEN, VOCAB_SIZE, make_engine, make_request, run, tiny_settings, tokens_of
from tests.fakes_proposers import BushyProposer
from tests.tiny_block_drafts import dflash, standalone

SLOTS = {1: (0, 1, 3, 6), 3: (0, 2)}


def proposer(name: str) -> Proposer:
    if name == "bushy":
        return BushyProposer(greedy_truth, vocab_size=VOCAB_SIZE, num_draft_tokens=6, seed=0)
    return create_proposer(name, {"num_draft_tokens": 6})


def counting_engine(name: str, start: int) -> EngineLoop:
    budget = CountBudget(CountConfig(start=start, max_tokens=6, slots=SLOTS))
    return make_engine(proposer(name), num_pages=600, policy=DraftPolicy(budget=budget))


def requests_of(lengths: Mapping[int, int]) -> list[Request]:
    """One per prompt length, with its max_tokens."""
    return [make_request(f"r{n}", prompt_of(n), max_tokens=most) for n, most in lengths.items()]


@pytest.mark.parametrize("name", ["ngram", "bushy"])
@pytest.mark.parametrize("start", [0, 6])
def test_greedy_equals_transformers_while_the_limit_switches(name: str, start: int) -> None:
    engine = counting_engine(name, start)
    requests = requests_of({5: 120, 33: 60, 64: 60, 129: 20})
    history = run(engine, requests)
    for request in requests:
        expected = reference(request.prompt_ids, request.sampling.max_tokens)
        assert tuple(tokens_of(history[str(request.key)])) == expected, request.key
    assert engine.counters.budget.num_switches >= 2


def settings(draft_options: Mapping[str, object], *, is_prefill_only: bool = False) -> EngineSettings:
    options = {"num_draft_tokens": 6, **draft_options}
    return tiny_settings("ngram", "", options, is_prefill_only=is_prefill_only)


def build_engine(settings: EngineSettings) -> BuiltEngine:
    return build(settings, clock=perf_counter)


def test_an_engine_takes_its_policy_from_the_draft_options() -> None:
    engine = build_engine(settings({"budget": "adaptive", "budget_slots": "1:2"})).loop
    run(engine, requests_of({20: 10}))
    assert engine.counters.draft_limit == 2
    assert build_engine(settings({"simulate_acceptance": 1})).loop.counters.is_simulated


def test_a_prefill_engine_ignores_the_policy() -> None:
    built = build_engine(settings({"budget": "adaptive", "simulate_acceptance": 1}, is_prefill_only=True))
    assert not built.loop.counters.is_simulated


class ScriptedBudget:
    """Limits that jump every round, none included."""

    state = BudgetState()

    def __init__(self) -> None:
        self._limits = cycle([4, 0, 1, 0, 0, 6, 2, 0, 6])

    def start(self, num_requests: int) -> int:
        assert num_requests > 0
        return next(self._limits)

    def finish(self, verified: Sequence[Verified], *, is_alone: bool) -> None:
        assert len(verified) > 0


def jumpy() -> AdaptiveBudget:
    """On a clock that tells nonsense, so that limits keep moving."""
    rng, now = Random(5), [0.0]

    def clock() -> float:
        now[0] += rng.uniform(0.1, 1.0) ** 2
        return now[0]

    return AdaptiveBudget(AdaptiveConfig(max_tokens=6), clock)


DRAFTERS: Mapping[str, Callable[[], Proposer]] = {
    "eagle chain": lambda: head("eagle", CHAIN),
    "eagle3 tree": lambda: head("eagle3", TREE),
    "mtp chain": lambda: head("mtp", CHAIN),
    "mtp modules": lambda: head("mtp_chain", CHAIN),
    "dflash": lambda: dflash("speculators"),
    "standalone": lambda: standalone("noisy"),
    "ngram": lambda: proposer("ngram"),
}


@pytest.mark.parametrize(("page_size", "budget"), [(1, ScriptedBudget), (16, ScriptedBudget), (16, jumpy)])
@pytest.mark.parametrize("make", DRAFTERS.values(), ids=DRAFTERS)
def test_greedy_equals_transformers_for_every_algorithm_under_jumping_limits(
    make: Callable[[], Proposer], page_size: int, budget: Callable[[], DraftBudget]
) -> None:
    engine = make_engine(
        make(), page_size=page_size, num_pages=2400 // page_size, policy=DraftPolicy(budget=budget())
    )
    requests = requests_of({2: 25, 16: 30, 33: 40, 64: 20, 129: 20})
    history = run(engine, requests)
    for request in requests:
        expected = reference(request.prompt_ids, request.sampling.max_tokens)
        assert tuple(tokens_of(history[str(request.key)])) == expected, request.key
    assert engine.counters.drafted > 0


def test_draft_kv_keeps_step_through_rounds_that_draft_nothing() -> None:
    engine = make_engine(standalone("same"), policy=DraftPolicy(budget=ScriptedBudget()))
    run(engine, requests_of({20: 60, 33: 60}))
    assert engine.counters.accepted == engine.counters.drafted > 20


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", ["eagle chain", "eagle3 tree", "mtp chain", "dflash"])
def test_a_head_that_slept_reads_up_and_drafts_as_after_a_fresh_prefill(name: str, page_size: int) -> None:
    def begun(limit: int, prompt: Sequence[int], num_outputs: int) -> tuple[EngineLoop, Request]:
        policy = DraftPolicy(budget=FixedBudget(limit))
        engine = make_engine(DRAFTERS[name](), page_size=page_size, num_pages=800 // page_size, policy=policy)
        request = make_request("r", list(prompt), max_tokens=60)
        engine.add(request)
        while request.num_outputs < num_outputs:
            engine.step()
        return engine, request

    def draft_kv(engine: EngineLoop, request: Request, count: int) -> torch.Tensor:
        found = kv_of_slots(engine.pool, request, count)
        return torch.stack([kv for (pool, _), kv in found.items() if pool == POOL])

    asleep, request = begun(0, prompt_of(33), 22)
    count = request.num_committed
    fresh, again = begun(0, request.tokens[:count], 1)
    whole = count // page_size * page_size
    torch.testing.assert_close(
        draft_kv(asleep, request, whole), draft_kv(fresh, again, whole), rtol=1e-4, atol=1e-5
    )
    if page_size > 1:
        assert (draft_kv(asleep, request, count)[:, whole:] == UNWRITTEN).all()
    proposals = []
    for engine, one in ((asleep, request), (fresh, again)):
        engine.cache.grow(one, count + engine.proposer.needs.num_scratch_slots)
        proposals += engine.proposer.propose([one], [6])
    assert proposals[0] == proposals[1]
    torch.testing.assert_close(
        draft_kv(asleep, request, count), draft_kv(fresh, again, count), rtol=1e-4, atol=1e-5
    )


def test_every_request_keeps_to_the_limit_of_its_round() -> None:
    engine = counting_engine("bushy", 6)
    for request in requests_of({5: 120, 33: 60, 64: 60}):
        engine.add(request)
    limits = set()
    while engine.requests():
        rounds = [progress for progress in engine.step().progress if progress.tokens]
        limit = engine.counters.draft_limit
        limits.add(limit)
        assert all(progress.num_drafted <= limit for progress in rounds)
    assert limits >= {0, 2}


def test_the_limit_and_its_switches_are_counted_for_status() -> None:
    engine = counting_engine("bushy", 6)
    assert engine.counters.as_dict()["draft_limit"] == 0.0
    run(engine, requests_of({5: 120}))
    counts = engine.counters.as_dict()
    assert counts["draft_limit"] in {0.0, 1.0, 3.0, 6.0}
    assert counts["draft_limit_switches"] >= 1.0
    assert counts["simulated_acceptance"] == 0.0


def test_without_a_budget_the_limit_is_what_the_algorithm_drafts() -> None:
    engine = make_engine(proposer("bushy"))
    run(engine, requests_of({20: 60}))
    assert (engine.counters.draft_limit, engine.counters.budget.num_switches) == (6, 0)


class WrongProposer(BushyProposer):
    """Chains of one token that greedy decoding of the prompt does not choose."""

    def __init__(self) -> None:
        super().__init__(greedy_truth, vocab_size=VOCAB_SIZE, num_draft_tokens=4, seed=0)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return [Proposal(token_ids=(3,) * limit, parents=tuple(range(limit))) for limit in limits]


def simulated(mean: float) -> tuple[EngineLoop, list[Progress]]:
    engine = make_engine(
        WrongProposer(),
        num_pages=600,
        policy=policy_of({"simulate_acceptance": mean}, max_draft_tokens=4, clock=perf_counter),
    )
    history = run(engine, [make_request("r", prompt_of(20), max_tokens=301)])
    return engine, history["r"]


def test_simulated_acceptance_sets_how_many_drafts_stand_and_shows() -> None:
    engine, history = simulated(2)
    assert {progress.num_accepted for progress in history[1:]} == {2}
    assert len(history) == 1 + 100
    assert engine.counters.as_dict()["simulated_acceptance"] == 1.0
    assert tokens_of(history)[1:3] == [3, 3]
    assert tuple(tokens_of(history)) != reference(tuple(prompt_of(20)), 301)


def test_simulated_acceptance_comes_out_on_average_through_the_loop() -> None:
    engine, history = simulated(2.5)
    assert {progress.num_accepted for progress in history[1:-1]} == {2, 3}
    assert engine.counters.accepted / engine.counters.rounds == pytest.approx(2.5, abs=0.2)
