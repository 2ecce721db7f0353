"""What happens to a request when the attempt that serves it breaks."""

import asyncio
from typing import Any

import pytest

from router.dispatch import DispatchConfig
from router.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    NodeFailed,
    NodesBusy,
    NoReadyPair,
    RequestRefused,
    RouterError,
)
from router.requests import Constraint
from tests.fakes_nodes import Cluster, FakeNode, Reader, a_request, cluster, reading, settle, virtual
from wire.work import (
    BAD_GRAMMAR,
    Event,
    Failed,
    GrammarSpec,
    NodeRef,
    Preempted,
    PromptInfo,
    Rejected,
    Tokens,
    TransferId,
)


def _tid(attempt: int) -> TransferId:
    return TransferId("r1", attempt)


def _failed(attempt: int, code: str = "checksum", *, retryable: bool = True) -> Failed:
    return Failed(tid=_tid(attempt), code=code, retryable=retryable, reason="page 3 differs")


def _rejected(attempt: int, code: str = "overloaded", *, retryable: bool = True) -> Rejected:
    return Rejected(tid=_tid(attempt), code=code, retryable=retryable, reason="no room")


def _busy(made: Cluster, attempt: int) -> tuple[FakeNode, FakeNode]:
    """The prefill and decode node that serve this attempt."""
    [p] = [node for name, node in made.nodes.items() if name[0] == "p" and _has(node, attempt)]
    [d] = [node for name, node in made.nodes.items() if name[0] == "d" and _has(node, attempt)]
    return p, d


def _has(node: FakeNode, attempt: int) -> bool:
    return any(submit.tid == _tid(attempt) for submit in node.submits)


async def _decode_three(made: Cluster, reader: Reader) -> tuple[FakeNode, FakeNode]:
    """Bring attempt 1 to three delivered tokens, with P still flushing."""
    p, d = _busy(made, 1)
    p.emit(PromptInfo(tid=_tid(1), cached_tokens=2))
    p.tokens(0, 10)
    d.tokens(1, 11, 12, drafted=2, accepted=1)
    await settle()
    assert reader.tokens == [(0, (10,)), (1, (11, 12))]
    return p, d


@virtual
async def test_losing_decode_mid_stream_goes_on_at_the_next_index_on_another_node() -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request(max_tokens=5)) as reader:
        p, d = await _decode_three(made, reader)
        assert d is made["d1"]
        d.die()
        await settle()
        assert p.cancels == [_tid(1)]
        p2, d2 = _busy(made, 2)
        assert (p2, d2) == (made["p1"], made["d2"])
        for node, peer in ((p2, d2), (d2, p2)):
            again = node.submits[-1]
            assert again.tid == _tid(2)
            assert again.prompt_ids == (1, 2, 3, 10, 11, 12)
            assert again.num_prompt_tokens == 3
            assert again.sampling == a_request(max_tokens=5).sampling
            assert again.peer == NodeRef(address=peer.record.address, incarnation=peer.record.incarnation)
        p2.emit(PromptInfo(tid=_tid(2), cached_tokens=6))
        p2.tokens(3, 13, attempt=2)
        p2.finish("handed_over", attempt=2)
        d2.tokens(4, 14, attempt=2, drafted=1, accepted=0)
        d2.finish("length", attempt=2, num_steps=1)
        await settle()
        assert reader.tokens == [(0, (10,)), (1, (11, 12)), (3, (13,)), (4, (14,))]
        outcome = reader.outcome
        assert (outcome.attempts, outcome.decode_node, outcome.num_output_tokens) == (2, "d2", 5)
        assert (outcome.cached_tokens, outcome.num_steps, outcome.drafted, outcome.accepted) == (2, 2, 3, 1)
        assert made.counted("redispatches_total{cause=link_lost}") == 1.0


@virtual
async def test_what_an_old_attempt_still_says_is_ignored_and_counted() -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request(max_tokens=5)) as reader:
        p, d = await _decode_three(made, reader)
        d.emit(_failed(1))
        await settle()
        p.tokens(0, 77)
        d.tokens(3, 66)
        p.emit(_failed(1))
        await settle()
        assert reader.tokens == [(0, (10,)), (1, (11, 12))]
        assert reader.error is None
        assert made.counted("late_events_total") == 3.0
        made["p1"].tokens(3, 13, attempt=2)
        await settle()
        assert reader.tokens[-1] == (3, (13,))


@virtual
async def test_tokens_that_came_out_of_order_in_a_broken_attempt_are_forgotten() -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request(max_tokens=3)) as reader:
        made["d1"].tokens(1, 99)
        await settle()
        made["d1"].die()
        await settle()
        made["p1"].tokens(0, 10, attempt=2)
        made["d2"].tokens(1, 11, attempt=2)
        await settle()
        assert reader.tokens == [(0, (10,)), (1, (11,))]


BREAKS: list[tuple[str, Event, str]] = [
    ("d1", Preempted(tid=_tid(1), next_index=3), "preempted"),
    ("d1", _failed(1), "failed"),
    ("d1", _rejected(1), "rejected"),
]


@pytest.mark.parametrize(("name", "event", "cause"), BREAKS)
@virtual
async def test_every_retryable_end_on_decode_moves_to_the_other_decode_node(
    name: str, event: Event, cause: str
) -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request(max_tokens=5)) as reader:
        p, _ = await _decode_three(made, reader)
        made[name].emit(event)
        await settle()
        assert (p.cancels, made["d1"].cancels) == ([_tid(1)], [])
        assert made["d2"].submits[0].prompt_ids == (1, 2, 3, 10, 11, 12)
        assert made.counted(f"redispatches_total{{cause={cause}}}") == 1.0
        assert asyncio.get_running_loop().time() == 0.0


@virtual
async def test_a_prefill_node_that_rejects_is_left_for_another() -> None:
    async with cluster("p1 p2 d1") as made, reading(made, a_request()):
        made["p1"].emit(_rejected(1))
        await settle()
        assert made["d1"].cancels == [_tid(1)]
        assert [submit.tid for submit in made["p2"].submits] == [_tid(2)]
        assert [submit.tid for submit in made["d1"].submits] == [_tid(1), _tid(2)]


@virtual
async def test_decode_that_lost_its_peer_speaks_against_the_peer() -> None:
    async with cluster("p1 p2 d1 d2") as made, reading(made, a_request()):
        made["d1"].emit(_failed(1, "peer_lost"))
        await settle()
        assert [submit.tid for submit in made["p2"].submits] == [_tid(2)]


@virtual
async def test_losing_prefill_after_decode_took_over_changes_nothing() -> None:
    async with cluster("p1 p2 d1") as made, reading(made, a_request(max_tokens=4)) as reader:
        await _decode_three(made, reader)
        made["p1"].die()
        await settle()
        made["d1"].tokens(3, 13)
        made["d1"].finish("length")
        await settle()
        assert (reader.outcome.attempts, reader.outcome.num_output_tokens) == (1, 4)
        assert made["p2"].submits == []


@virtual
async def test_losing_prefill_with_its_first_token_unreported_starts_again() -> None:
    async with cluster("p1 p2 d1") as made, reading(made, a_request(max_tokens=3)) as reader:
        made["d1"].tokens(1, 11)
        await settle()
        made["p1"].die()
        await settle()
        assert made["d1"].cancels == [_tid(1)]
        assert [submit.prompt_ids for submit in made["p2"].submits] == [(1, 2, 3)]
        assert reader.items == []


@virtual
async def test_two_last_words_that_leave_a_gap_start_again() -> None:
    async with cluster() as made, reading(made, a_request(max_tokens=3)):
        made["p1"].finish("handed_over")
        made["d1"].tokens(1, 11, 12)
        made["d1"].finish("length")
        await asyncio.sleep(1.0)
        assert [submit.tid for submit in made["d1"].submits] == [_tid(1), _tid(2)]
        assert made.counted("redispatches_total{cause=protocol}") == 1.0


@virtual
async def test_a_lone_pair_is_tried_again_after_a_pause_that_doubles() -> None:
    async with (
        cluster(dispatch=DispatchConfig(retry_delay_s=0.5)) as made,
        reading(made, a_request()) as reader,
    ):
        made["d1"].emit(_rejected(1))
        await asyncio.sleep(0.4)
        assert len(made["d1"].submits) == 1
        await asyncio.sleep(0.2)
        assert len(made["d1"].submits) == 2
        made["d1"].emit(_rejected(2))
        await asyncio.sleep(0.9)
        assert len(made["d1"].submits) == 2
        await asyncio.sleep(0.2)
        assert len(made["d1"].submits) == 3
        assert made["d1"].submits[2].deadline_s == pytest.approx(598.4)  # 0.6 and a pause of 1 s
        made["d1"].emit(_rejected(3))
        await settle()
        assert isinstance(reader.error, NodesBusy)
        assert (reader.error.http_status, reader.error.retry_after_s) == (429, 1.0)
        assert str(reader.error) == ("given up after 3 attempts; last, decode node d1: no room (overloaded)")


@virtual
async def test_the_pause_between_attempts_stays_short_however_many_there_were() -> None:
    async with (
        cluster(dispatch=DispatchConfig(max_preemptions=30)) as made,
        reading(made, a_request()),
    ):
        for attempt in range(1, 21):
            assert made["d1"].submits[-1].tid == _tid(attempt)
            made["d1"].emit(Preempted(tid=_tid(attempt), next_index=0))
            await asyncio.sleep(2.1)


@virtual
async def test_when_every_attempt_fails_the_last_reason_is_told() -> None:
    async with cluster("p1 d1 d2 d3") as made, reading(made, a_request()) as reader:
        for attempt in (1, 2, 3):
            made[f"d{attempt}"].emit(_failed(attempt))
            await settle()
        assert isinstance(reader.error, AttemptsExhausted)
        assert "after 3 attempts; last, decode node d3: page 3 differs (checksum)" in str(reader.error)
        assert made["p1"].cancels == [_tid(1), _tid(2), _tid(3)]
        assert made.counted("redispatches_total{cause=failed}") == 2.0
        assert made.counted("requests_total{outcome=attempts_exhausted}") == 1.0
        assert made.dispatcher.num_in_flight == 0


@virtual
async def test_a_refused_grammar_is_told_under_the_name_its_field_has_for_the_user() -> None:
    constraint = Constraint(spec=GrammarSpec(kind="regex", value="[a"), field="guided_regex")
    async with cluster("p1 d1") as made, reading(made, a_request(constraint=constraint)) as reader:
        assert [submit.grammar for submit in made["p1"].submits] == ['{"kind": "regex", "value": "[a"}']
        reason = "grammar: regex cannot be used: Unclosed '['"
        made["p1"].emit(Rejected(tid=_tid(1), code=BAD_GRAMMAR, retryable=False, reason=reason))
        await settle()
        assert isinstance(reader.error, RequestRefused)
        assert (reader.error.param, reader.error.code) == ("guided_regex", "bad_grammar")
        assert reader.error.message == "guided_regex cannot be used: regex cannot be used: Unclosed '['"
        assert made.dispatcher.num_in_flight == 0


CHOICE = Constraint(spec=GrammarSpec(kind="choice", choices=("a", "b")), field="guided_choice")


@pytest.mark.parametrize(
    ("asked", "param", "message"),
    [
        ({"constraint": CHOICE}, "guided_choice", "guided_choice must leave a token"),
        (
            {"constraint": CHOICE, "allowed_token_ids": (5,), "banned_sequences": ((5,),), "min_tokens": 1},
            "guided_choice",
            "guided_choice and allowed_token_ids and bad_words and min_tokens must leave a token",
        ),
        (
            {"allowed_token_ids": (5,), "banned_sequences": ((5, 5),)},
            "allowed_token_ids",
            "allowed_token_ids and bad_words must leave a token",
        ),
    ],
)
@virtual
async def test_fields_that_together_leave_no_token_are_a_refusal_that_names_them(
    asked: dict[str, Any], param: str, message: str
) -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request(**asked)) as reader:
        made["d1"].emit(_failed(1, "no_token", retryable=False))
        await settle()
        assert isinstance(reader.error, RequestRefused)
        assert (reader.error.http_status, reader.error.code, reader.error.param) == (400, "no_token", param)
        assert reader.error.message == f"{message} to go on with, and left none"
        assert made["d2"].submits == []


@virtual
async def test_no_token_for_a_request_that_forbids_nothing_is_the_node_s_fault() -> None:
    async with cluster("p1 d1") as made, reading(made, a_request()) as reader:
        made["d1"].emit(_failed(1, "no_token", retryable=False))
        await settle()
        assert isinstance(reader.error, NodeFailed)


@virtual
async def test_the_next_attempt_has_the_same_grammar_and_what_was_delivered() -> None:
    async with cluster("p1 d1") as made, reading(made, a_request(1, 2, constraint=CHOICE)):
        made["p1"].emit(Tokens(tid=_tid(1), first_index=0, ids=(7,)))
        await settle()
        made["d1"].emit(Preempted(tid=_tid(1), next_index=1))
        await asyncio.sleep(1.0)
        first, second = made["d1"].submits
        assert second.grammar == first.grammar == CHOICE.spec.to_text()
        assert (second.prompt_ids, second.num_prompt_tokens) == ((1, 2, 7), 2)


@virtual
async def test_preemptions_have_a_bound_of_their_own() -> None:
    async with (
        cluster(dispatch=DispatchConfig(max_attempts=1, max_preemptions=2)) as made,
        reading(made, a_request()) as reader,
    ):
        for attempt in (1, 2, 3):
            made["d1"].emit(Preempted(tid=_tid(attempt), next_index=0))
            await asyncio.sleep(1.0)
        assert len(made["d1"].submits) == 3
        assert isinstance(reader.error, NodesBusy)


FINAL_WORDS: list[tuple[Event, type[RouterError], str]] = [
    (_rejected(1, "context_length_exceeded", retryable=False), RequestRefused, "context_length_exceeded"),
    (_failed(1, "grammar", retryable=False), NodeFailed, "node_failed"),
    (_failed(1, "deadline", retryable=False), DeadlineExceeded, "deadline_exceeded"),
]


@pytest.mark.parametrize(("event", "kind", "code"), FINAL_WORDS)
@virtual
async def test_an_error_that_no_retry_can_mend_reaches_the_user_at_once(
    event: Event, kind: type[RouterError], code: str
) -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request()) as reader:
        made["d1"].emit(event)
        await settle()
        assert type(reader.error) is kind
        assert isinstance(reader.error, RouterError)
        assert reader.error.code == code
        assert made["p1"].cancels == [_tid(1)]
        assert made["d2"].submits == []


@virtual
async def test_a_tid_that_a_node_has_seen_before_is_not_the_users_fault() -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request()) as reader:
        made["d1"].emit(_rejected(1, "duplicate", retryable=False))
        await settle()
        assert [submit.tid for submit in made["d2"].submits] == [_tid(2)]
        assert reader.error is None


@pytest.mark.parametrize(
    ("max_tokens", "min_tokens", "stop_token_ids", "reason", "stop_token_id"),
    [(3, 0, (), "length", None), (9, 0, (12,), "stop", 12), (9, 5, (12,), "stop", 12)],
)
@virtual
async def test_a_request_whose_tokens_are_complete_is_not_dispatched_again(
    max_tokens: int, min_tokens: int, stop_token_ids: tuple[int, ...], reason: str, stop_token_id: int | None
) -> None:
    """The last: a stop token that comes before `min_tokens` ends a finished grammar."""
    request = a_request(max_tokens=max_tokens, min_tokens=min_tokens, stop_token_ids=stop_token_ids)
    async with cluster("p1 d1 d2") as made, reading(made, request) as reader:
        await _decode_three(made, reader)
        made["d1"].die()
        await settle()
        assert (reader.outcome.reason, reader.outcome.stop_token_id) == (reason, stop_token_id)
        assert (reader.outcome.decode_node, reader.outcome.attempts) == ("d1", 1)
        assert made["d2"].submits == []


@virtual
async def test_a_broken_request_waits_for_its_node_to_come_back() -> None:
    async with cluster() as made, reading(made, a_request()) as reader:
        made["p1"].tokens(0, 10)
        await settle()
        made["d1"].break_off()
        await asyncio.sleep(5.0)
        assert [submit.prompt_ids for submit in made["d1"].submits] == [(1, 2, 3), (1, 2, 3, 10)]
        assert reader.error is None


@virtual
async def test_a_broken_request_gives_up_when_no_pair_comes_back_in_time() -> None:
    async with (
        cluster(dispatch=DispatchConfig(requeue_wait_s=2.0)) as made,
        reading(made, a_request()) as reader,
    ):
        made["d1"].die()
        await asyncio.sleep(1.9)
        assert reader.error is None
        await asyncio.sleep(0.2)
        assert isinstance(reader.error, NoReadyPair)


@virtual
async def test_a_consumer_that_leaves_between_attempts_leaves_nothing_behind() -> None:
    async with cluster() as made:
        async with reading(made, a_request()):
            made["d1"].die()
            await settle()
        await settle()
        assert made["p1"].cancels == [_tid(1)]
        assert made.dispatcher.num_in_flight == 0
