"""Every algorithm across the handoff: a pair's rounds are one engine's from the first on, whatever either
side has in its cache, and nothing leaks when a request ends early."""

from functools import cache

import pytest

from tests.conformance.test_loop import LENGTHS as FITTED_LENGTHS
from tests.conformance.test_loop import prompt_of, reference
from tests.engines import make_engine, make_request, run
from tests.every_proposer import NAMES, drafter, every_drafter
from tests.node_pair import NodePair
from wire.work import Finished, PromptInfo

LENGTHS = (3, 16, 33, 64, 129)
PAGE_SIZE = 4
ENGINE = {"num_pages": 600, "chunk_tokens": 32, "page_size": PAGE_SIZE}

Rounds = list[tuple[int, tuple[int, ...], int, int]]


@cache
def colocated(name: str, prompts: tuple[tuple[int, ...], ...], max_tokens: int) -> dict[int, Rounds]:
    """(first index, ids, drafted, accepted) of every report of each prompt, as `NodePair.rounds` has them."""
    engine = make_engine(drafter(name).make(), **ENGINE)  # type: ignore[arg-type]
    requests = [make_request(f"{i}", list(prompt), max_tokens=max_tokens) for i, prompt in enumerate(prompts)]
    found: dict[int, Rounds] = {}
    for key, history in run(engine, requests).items():
        rounds: Rounds = []
        for progress in history:
            if progress.tokens:
                first = sum(len(ids) for _, ids, _, _ in rounds)
                rounds.append((first, progress.tokens, progress.num_drafted, progress.num_accepted))
        found[int(key)] = rounds
    return found


def warm(pair: NodePair, node: str, prompts: tuple[tuple[int, ...], ...]) -> None:
    """Let one node compute the prompts for itself, so that its cache alone has them."""
    engine = pair.prefill._engine if node == "P" else pair.decode._engine
    run(engine, [make_request(f"warm {i}", list(p), max_tokens=1) for i, p in enumerate(prompts)])


def pages_hit(name: str, node: str, length: int) -> int:
    """A prompt's last tokens are computed again: as many as its drafts look ahead, one at least."""
    needs = drafter(name).make().needs
    is_plain = node == "P" and not needs.prefill_identity
    return max(0, length - max(1, 0 if is_plain else needs.num_lookahead_tokens)) // PAGE_SIZE


@pytest.mark.parametrize("warmed", ["", "P", "D", "PD"])
@every_drafter
def test_acceptance_through_a_pair_equals_colocated_with_hits_on(name: str, warmed: str) -> None:
    prompts = tuple(tuple(prompt_of(n)) for n in LENGTHS)
    expected = colocated(name, prompts, 14)
    pair = drafter(name).pair(**ENGINE)
    for node in warmed:
        warm(pair, node, prompts)
    tids = [
        pair.submit(f"{n}", list(prompt), max_tokens=14) for n, prompt in zip(LENGTHS, prompts, strict=True)
    ]
    pair.run()
    for index, tid in enumerate(tids):
        assert pair.rounds(tid) == expected[index], LENGTHS[index]
        assert pair.ends(tid) == ("handed_over", "length")
    cached = {e.tid: e.cached_tokens for e in pair.events["P"] if isinstance(e, PromptInfo)}
    received = {e.tid: e.kv_bytes for e in pair.events["D"] if isinstance(e, Finished)}
    page_bytes = pair.decode._engine.pool.layout.page_bytes
    for n, tid in zip(LENGTHS, tids, strict=True):
        on_p, on_d = (pages_hit(name, node, n) if node in warmed else 0 for node in "PD")
        assert cached[tid] == on_p * PAGE_SIZE, n
        assert received[tid] == (-(-n // PAGE_SIZE) - on_d) * page_bytes, n
    assert pair.decode.status().counters["seedless_joins"] == 0
    assert pair.is_at_rest()


@pytest.mark.parametrize("steps", [2, 4, 6, 9])
@every_drafter
def test_a_cancelled_request_frees_both_sides_and_spares_its_neighbour(name: str, steps: int) -> None:
    pair = drafter(name).pair(**{**ENGINE, "chunk_tokens": 16})
    doomed = pair.submit("doomed", prompt_of(50), max_tokens=60)
    spared = pair.submit("spared", prompt_of(33), max_tokens=14)
    for _ in range(steps):
        pair.step()
    pair.cancel(doomed)
    pair.run()
    assert tuple(pair.tokens(spared)) == reference(tuple(prompt_of(33)), 14)
    text = pair.tokens(doomed)
    assert len(text) < 60
    assert tuple(text) == reference(tuple(prompt_of(50)), 60)[: len(text)]
    assert pair.is_at_rest()


@pytest.mark.parametrize("chunk_tokens", [15, 16, 30, 31, 32])
@every_drafter
def test_a_page_is_sent_only_once_nothing_will_write_it_again(name: str, chunk_tokens: int) -> None:
    """Also where a chunk ends so near the prompt's end that drafts of its last slots want later tokens. A
    page written again after it was sent shows as a checksum that differs."""
    pair = drafter(name).pair(**{**ENGINE, "chunk_tokens": chunk_tokens})
    tid = pair.submit("r", prompt_of(33), max_tokens=14)
    pair.run()
    assert pair.ends(tid) == ("handed_over", "length")
    assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(33)), 14)


@every_drafter
def test_a_decode_node_short_of_pages_preempts_between_drafts_and_comes_to_rest(name: str) -> None:
    pair = drafter(name).pair(page_size=4, num_pages=14, max_running=4, reserve_tokens=1)
    tids = [pair.submit(f"{i}", prompt_of(9, seed=i), max_tokens=30) for i in range(3)]
    pair.run()
    ends = [pair.ends(tid)[1] for tid in tids]
    assert "length" in ends
    assert "preempted" in ends
    for i, tid in enumerate(tids):
        text = tuple(pair.tokens(tid))
        assert text == reference(tuple(prompt_of(9, seed=i)), 30)[: len(text)]
    assert pair.is_at_rest()


# ---- P01 of the reports from the field


@pytest.mark.parametrize("name", NAMES[4:])
def test_p01_acceptance_length_under_pd_is_the_colocated_one(name: str) -> None:
    """20 greedy prompts, every draft with weights: (tokens - 1) / decode steps, and the first step alone."""
    fitted = [tuple(prompt_of(n)) for n in FITTED_LENGTHS if n < 300]
    prompts = (*fitted, *(tuple(prompt_of(10 + 9 * i, seed=i)) for i in range(20 - len(fitted))))
    alone = colocated(name, prompts, 20)
    pair = drafter(name).pair(**ENGINE)
    tids = [pair.submit(f"{i}", list(prompt), max_tokens=20) for i, prompt in enumerate(prompts)]
    pair.run()
    through = {i: pair.rounds(tid) for i, tid in enumerate(tids)}

    def length(found: dict[int, Rounds]) -> float:
        return sum(19 for _ in found) / sum(len(rounds) - 1 for rounds in found.values())

    def first_accepted(found: dict[int, Rounds]) -> int:
        return sum(rounds[1][3] for rounds in found.values())

    assert length(through) == length(alone) > 1.0
    assert first_accepted(through) == first_accepted(alone) > 0
    assert {len(tokens) for tokens in map(pair.tokens, tids)} == {20}
