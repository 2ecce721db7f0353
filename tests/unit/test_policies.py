"""Exact picks of every policy."""

import itertools
import random

import pytest

from router.loads import SentBook
from router.policies import (
    POLICIES,
    NodeLoad,
    Pair,
    Policy,
    PolicyState,
    RequestFacts,
    least_load,
    policy_named,
    power_of_two,
    round_robin,
)
from tests.fakes_nodes import FakeRegistry, a_request, cluster, reading, settle, virtual
from wire.records import Load
from wire.work import Incarnation, TransferId

FACTS = RequestFacts(num_prompt_tokens=20, max_tokens=12)  # two pages of 16


def _node(name: str, *, sent: tuple[int, int, int] = (0, 0, 0), **load: int) -> NodeLoad:
    """`sent`: requests, tokens, pages."""
    return NodeLoad(
        incarnation=Incarnation(name),
        load=Load(**({"free_pages": 100, "total_pages": 100} | load)),
        page_size=16,
        sent_requests=sent[0],
        sent_tokens=sent[1],
        sent_pages=sent[2],
    )


def _pairs(prefills: list[NodeLoad], decodes: list[NodeLoad]) -> list[Pair]:
    return [Pair(prefill=p, decode=d) for p, d in itertools.product(prefills, decodes)]


def _name(pair: Pair) -> str:
    return f"{pair.prefill.incarnation if pair.prefill else '-'}/{pair.decode.incarnation}"


def _turns(policy: Policy, pairs: list[Pair], count: int) -> list[str]:
    return [_name(policy(FACTS, pairs, PolicyState(turn=turn))) for turn in range(count)]


def test_round_robin_uses_both_sides_evenly_and_every_pair_once_a_cycle() -> None:
    pairs = _pairs([_node("p1"), _node("p2")], [_node("d1"), _node("d2")])
    assert _turns(round_robin, pairs, 5) == ["p1/d1", "p2/d2", "p1/d2", "p2/d1", "p1/d1"]


def test_round_robin_goes_through_uneven_and_incomplete_sets() -> None:
    pairs = [
        *_pairs([_node("p1")], [_node("d1"), _node("d2"), _node("d3")]),
        *_pairs([_node("p2")], [_node("d1")]),
    ]
    assert _turns(round_robin, pairs, 6) == ["p1/d1", "p2/d1", "p1/d2", "p2/d1", "p1/d3", "p2/d1"]


def test_round_robin_over_decode_nodes_alone() -> None:
    pairs = [Pair(prefill=None, decode=_node(name)) for name in ("d1", "d2")]
    assert _turns(round_robin, pairs, 3) == ["-/d1", "-/d2", "-/d1"]


def test_least_load_takes_the_prefill_node_with_the_fewest_tokens_before_us() -> None:
    pairs = _pairs(
        [
            _node("p1", queued_tokens=300),
            _node("p2", queued_tokens=100, sent=(1, 150, 0)),
            _node("p3", queued_tokens=260),
        ],
        [_node("d1")],
    )
    assert _turns(least_load, pairs, 1) == ["p2/d1"]


def test_least_load_takes_the_decode_node_with_the_fewest_requests_that_has_room() -> None:
    busy = _node("d1", running=5)
    full = _node("d2", running=0, free_pages=1)
    sent = _node("d3", running=1, waiting=1, sent=(1, 0, 0))
    assert _turns(least_load, _pairs([_node("p1")], [busy, full]), 1) == ["p1/d1"]
    assert _turns(least_load, _pairs([_node("p1")], [busy, full, sent]), 1) == ["p1/d3"]


def test_least_load_counts_the_pages_that_were_sent_since_the_heartbeat() -> None:
    promised = _node("d1", free_pages=10, sent=(1, 0, 9))
    assert promised.free_pages_after(FACTS) == -1
    assert _turns(least_load, _pairs([_node("p1")], [promised, _node("d2", running=9)]), 1) == ["p1/d2"]


def test_least_load_prefers_more_free_pages_among_equally_busy_nodes() -> None:
    decodes = [_node("d1", free_pages=40), _node("d2", free_pages=60)]
    assert _turns(least_load, _pairs([_node("p1")], decodes), 1) == ["p1/d2"]


def test_least_load_picks_a_busier_prefill_node_over_a_decode_node_without_room() -> None:
    pairs = [
        Pair(prefill=_node("p1"), decode=_node("d1", free_pages=0)),
        Pair(prefill=_node("p2", queued_tokens=500), decode=_node("d2")),
    ]
    assert _turns(least_load, pairs, 1) == ["p2/d2"]


def test_power_of_two_draws_two_of_each_side_and_takes_the_better() -> None:
    prefills = [_node(f"p{i}", queued_tokens=100 * i) for i in range(1, 5)]
    decodes = [_node(f"d{i}", running=i) for i in range(1, 5)]
    picks = _turns(power_of_two, _pairs(prefills, decodes), 400)
    used = {side: {pick.split("/")[side] for pick in picks} for side in (0, 1)}
    # The worst of each side loses against whatever was drawn with it.
    assert used == {0: {"p1", "p2", "p3"}, 1: {"d1", "d2", "d3"}}
    assert 160 <= sum(pick.startswith("p1/") for pick in picks) <= 240  # half of the draws hold p1


def test_power_of_two_repeats_itself_for_the_same_seed_and_turn() -> None:
    pairs = _pairs([_node("p1"), _node("p2")], [_node("d1"), _node("d2")])
    assert _turns(power_of_two, pairs, 20) == _turns(power_of_two, pairs, 20)
    other = [_name(power_of_two(FACTS, pairs, PolicyState(turn=turn, seed=1))) for turn in range(20)]
    assert other != _turns(power_of_two, pairs, 20)


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_every_policy_takes_the_only_pair(name: str) -> None:
    for pair in (Pair(prefill=_node("p1"), decode=_node("d1")), Pair(prefill=None, decode=_node("d1"))):
        assert policy_named(name)(FACTS, (pair,), PolicyState(turn=7)) is pair


def test_an_unknown_policy_is_refused_by_name() -> None:
    with pytest.raises(
        ValueError, match="policy must be one of least_load, power_of_two, prefix, round_robin, got 'x'"
    ):
        policy_named("x")


def test_what_was_sent_counts_until_the_leg_closes_or_the_node_tells_its_load() -> None:
    book, record = SentBook(), FakeRegistry().add("d1").record
    for attempt, tokens in ((1, 100), (2, 50)):
        book.add(record.incarnation, TransferId("r1", attempt), tokens=tokens, pages=4)
    load = book.load_of(record)
    assert (load.sent_requests, load.sent_tokens, load.sent_pages) == (2, 150, 8)
    book.remove(record.incarnation, TransferId("r1", 1))
    assert book.load_of(record).sent_tokens == 50
    book.clear(record.incarnation)
    assert book.load_of(record).sent_requests == 0


@pytest.mark.parametrize("seed", range(3))
def test_sums_of_what_was_sent_are_those_of_the_legs_that_are_left(seed: int) -> None:
    rng, book, record = random.Random(seed), SentBook(), FakeRegistry().add("d1").record
    left: dict[TransferId, tuple[int, int]] = {}
    for _ in range(500):
        tid = TransferId("r", rng.randrange(8))
        match rng.choice(("add", "add", "remove", "end", "clear")):
            case "add":  # also of one that is there already
                left[tid] = rng.randrange(1000), rng.randrange(50)
                book.add(record.incarnation, tid, tokens=left[tid][0], pages=left[tid][1])
            case "remove":
                left.pop(tid, None)
                book.remove(record.incarnation, tid)
            case "end":
                left.pop(tid, None)
                book.end(record.incarnation, tid, pages=1)
            case "clear" if rng.random() < 0.2:
                left.clear()
                book.clear(record.incarnation)
        load = book.load_of(record)
        sums = sum(tokens for tokens, _ in left.values()), sum(pages for _, pages in left.values())
        assert (load.sent_requests, load.sent_tokens, load.sent_pages) == (len(left), *sums), f"seed {seed}"


def test_what_a_node_gave_back_counts_until_it_tells_and_never_as_more_than_it_has() -> None:
    book, record = SentBook(), FakeRegistry().add("d1", load=Load(free_pages=90, total_pages=100)).record
    for number, pages in ((1, 6), (2, 50)):
        tid = TransferId("r", number)
        book.add(record.incarnation, tid, tokens=0, pages=pages)
        book.clear(record.incarnation)
        book.end(record.incarnation, tid, pages=pages)
        assert book.load_of(record).free_pages_after(FACTS) == min(90 + pages, 100) - 2
        book.clear(record.incarnation)
    assert book.load_of(record).free_pages_after(FACTS) == 88


def test_a_leg_that_ends_after_its_node_is_gone_leaves_nothing_behind() -> None:
    book, record = SentBook(), FakeRegistry().add("d1").record
    book.retain(())
    book.end(record.incarnation, TransferId("r1", 1), pages=4)
    assert book.load_of(record).freed_pages == 4
    book.retain((record.incarnation,))
    assert book.load_of(record).freed_pages == 4
    book.retain(())
    assert book.load_of(record).freed_pages == 0


@virtual
async def test_requests_sent_between_heartbeats_spread_over_the_nodes() -> None:
    async with cluster("p1 p2 d1 d2") as made, reading(made, a_request()), reading(made, a_request()):
        assert [len(made[name].submits) for name in ("p1", "p2", "d1", "d2")] == [1, 1, 1, 1]


@virtual
async def test_a_prefill_node_that_reported_its_first_token_is_free_again_for_the_policy() -> None:
    async with cluster("p1 p2 d1") as made, reading(made, a_request()):
        made["p1"].tokens(0, 10)
        await settle()
        async with reading(made, a_request()):
            assert len(made["p1"].submits) == 2
