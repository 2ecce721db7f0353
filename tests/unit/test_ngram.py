import random
import time

import pytest

from engine.params import SamplingParams
from engine.request import Request
from speculative.ngram import HitRates, Match, NgramConfig, NgramIndex, NgramProposer
from speculative.proposer import Proposal
from speculative.tree import build


def request_with(tokens: list[int]) -> Request:
    return Request(
        key=object(),
        prompt_ids=tuple(tokens),
        num_prompt_tokens=len(tokens),
        sampling=SamplingParams(seed=0, max_tokens=1000),
    )


def drafted(tokens: list[int], *, limit: int = 8, **options: int) -> Proposal:
    proposer, request = NgramProposer(NgramConfig(**options)), request_with(tokens)
    proposer.admit(request, None)
    return proposer.propose([request], [limit])[0]


def paths(proposal: Proposal) -> set[tuple[int, ...]]:
    return set(build(0, proposal).paths) - {()}


# ---- the index


def index_of(tokens: list[int], min_ngram: int = 1, max_ngram: int = 3) -> NgramIndex:
    index = NgramIndex(min_ngram, max_ngram)
    index.extend(tokens)
    return index


def test_the_longest_match_comes_first_then_the_most_recent() -> None:
    tokens = [1, 2, 3, 4, 9, 2, 3, 5, 8, 3, 6, 7, 2, 3, 8, 1, 2, 3]
    assert index_of(tokens).matches() == [Match(3, 3), Match(2, 14), Match(2, 7), Match(1, 10)]
    assert index_of(tokens, 2).matches() == [Match(3, 3), Match(2, 14), Match(2, 7)]


def test_a_match_is_measured_beyond_the_longest_ngram_looked_up() -> None:
    assert index_of([1, 2, 3, 4, 5, 6, 0, 1, 2, 3, 4, 5], 1, 2).matches()[0] == Match(5, 5)


def test_text_that_has_not_occurred_before_has_no_match() -> None:
    assert index_of([1, 2, 3, 4]).matches() == []
    assert index_of([1]).matches() == []
    assert index_of([], 1, 1).matches() == []


def test_the_end_of_the_text_does_not_match_itself() -> None:
    assert index_of([7, 7], 1, 2).matches() == [Match(1, 1)]
    assert index_of([7, 7, 7], 1, 2).matches() == [Match(2, 2), Match(1, 1)]


def test_an_index_grown_token_by_token_finds_what_one_built_at_once_does() -> None:
    seed = 12
    print(f"seed {seed}")
    rng = random.Random(seed)
    tokens: list[int] = []
    grown = index_of([], 2, 4)
    for _ in range(200):
        step = [rng.randrange(4) for _ in range(rng.randrange(1, 4))]
        tokens += step
        grown.extend(step)
        assert grown.matches() == index_of(tokens, 2, 4).matches()


def test_matches_equal_a_search_of_the_whole_text() -> None:
    seed = 13
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(200):
        tokens = [rng.randrange(5) for _ in range(rng.randrange(1, 40))]
        expected = []
        for start in range(1, len(tokens)):
            length = 0
            while length < start and tokens[start - 1 - length] == tokens[-1 - length]:
                length += 1
            if length >= 2:
                expected.append(Match(length, start))
        expected.sort(key=lambda match: (-match.length, -match.start))
        assert index_of(tokens, 2, 4).matches()[:1] == expected[:1]
        if len(expected) <= 16:
            assert index_of(tokens, 2, 4).matches() == expected


# ---- proposals


def test_a_text_that_repeats_is_drafted_as_a_chain() -> None:
    text = [1, 2, 3, 4, 5, 6, 7, 8, 9, 10]
    proposal = drafted([*text, *text[:3]], limit=3)
    assert proposal == Proposal(token_ids=(4, 5, 6), parents=(0, 1, 2))


def test_the_prompt_is_indexed_from_its_first_token() -> None:
    filler = list(range(100, 600))
    assert drafted([1, 2, 3, *filler, 1, 2]).token_ids[0] == 3


def test_continuations_are_merged_into_one_tree() -> None:
    tokens = [1, 2, 3, 4, 5, 0, 1, 2, 3, 44, 55, 0, 9, 2, 3, 4, 66, 7, 1, 2, 3]
    proposal = drafted(tokens, branches=3)
    assert paths(proposal) == {(44,), (44, 55), (44, 55, 0), (4,), (4, 5), (4, 66)}
    assert len(proposal.token_ids) == len(paths(proposal))


def test_a_continuation_that_adds_nothing_is_no_branch() -> None:
    tokens = [8, 1, 2, 3, 8, 1, 2, 3, 7, 1, 2, 5, 9, 1, 2]
    assert {path[0] for path in paths(drafted(tokens, branches=2))} == {5, 3}


def test_a_budget_is_never_exceeded_and_none_drafts_nothing() -> None:
    tokens = [1, 2, 3, 4, 5, 1, 2, 3, 44, 55, 1, 2]
    for limit in range(10):
        assert len(drafted(tokens, limit=limit, branches=4).token_ids) <= limit
    assert drafted(tokens, limit=0) == Proposal()
    assert len(drafted(tokens, limit=99, num_draft_tokens=2).token_ids) == 2


def test_no_match_proposes_nothing() -> None:
    assert drafted([1, 2, 3, 4, 3]) == Proposal()
    assert drafted([1, 2, 3, 4, 3], min_ngram=1).token_ids[:2] == (4, 3)


def test_a_drafter_reads_what_the_request_has_emitted() -> None:
    proposer, request = NgramProposer(NgramConfig()), request_with([5, 6, 7, 8])
    proposer.admit(request, None)
    assert proposer.propose([request], [8]) == [Proposal()]
    request.tokens += [1, 5, 6]
    assert proposer.propose([request], [1])[0].token_ids == (7,)


# ---- adapting to how often the index is right


def test_hit_rates_move_towards_what_came() -> None:
    rates = HitRates()
    assert rates.worthwhile(4, 8) == 3  # 0.5, 0.25, 0.125
    for _ in range(30):
        rates.observe(4, [1, 2, 3], [1, 2, 3])
    assert rates.worthwhile(4, 8) == 8
    assert rates.worthwhile(2, 8) == 3
    for _ in range(40):
        rates.observe(4, [1, 2, 3], [9])
    assert rates.worthwhile(4, 8) == 0


def test_nothing_is_learnt_after_the_first_miss() -> None:
    missed, short = HitRates(), HitRates()
    for _ in range(10):
        missed.observe(3, [1, 2, 3, 4], [1, 9, 3, 4])
        short.observe(3, [1, 2], [1, 9])
    assert [missed.worthwhile(3, 8)] == [short.worthwhile(3, 8)]


def rounds(proposer: NgramProposer, request: Request, upcoming: list[int]) -> tuple[int, int]:
    """Emit `upcoming` as a target that always draws it; rounds taken and tokens drafted."""
    num_rounds, num_drafted, place = 0, 0, 0
    while place < len(upcoming):
        (proposal,) = proposer.propose([request], [8])
        correct = 0
        for token_id, parent in zip(proposal.token_ids, proposal.parents, strict=True):
            if parent == correct and upcoming[place + correct : place + correct + 1] == [token_id]:
                correct += 1
        request.tokens += upcoming[place : place + correct + 1]
        place += correct + 1
        num_rounds, num_drafted = num_rounds + 1, num_drafted + len(proposal.token_ids)
    return num_rounds, num_drafted


def test_unpredictable_text_is_hardly_drafted_and_a_copy_starts_again() -> None:
    seed = 5
    print(f"seed {seed}")
    rng = random.Random(seed)
    prompt = [rng.randrange(15) for _ in range(1000)]
    proposer, request = NgramProposer(NgramConfig()), request_with(prompt)
    proposer.admit(request, None)
    rounds(proposer, request, [rng.randrange(15) for _ in range(150)])
    num_rounds, num_drafted = rounds(proposer, request, [rng.randrange(15) for _ in range(150)])
    assert num_drafted < 0.4 * num_rounds  # always drafting would be 8 for each
    num_rounds, _ = rounds(proposer, request, prompt)
    assert num_rounds < 200


def test_a_round_costs_the_host_little_even_on_text_that_only_repeats() -> None:
    for tokens in ([7] * 20_000, [1, 2] * 10_000):
        proposer, request = NgramProposer(NgramConfig(branches=4)), request_with(tokens)
        proposer.admit(request, None)
        start = time.thread_time()
        for _ in range(50):
            proposer.propose([request], [8])
            request.tokens += [tokens[0]]
        assert time.thread_time() - start < 50 * 0.002


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"num_draft_tokens": 0}, r"num_draft_tokens must be a whole number in \[1, 256\], got 0"),
        ({"branches": 1.5}, "branches must be a whole number"),
        ({"min_ngram": True}, "min_ngram must be a whole number"),
        ({"min_ngram": 5}, "min_ngram must be at most max_ngram 4, got 5"),
    ],
)
def test_bad_options_are_refused_by_name(options: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        NgramConfig(**options)
