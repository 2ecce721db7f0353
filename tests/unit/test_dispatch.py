"""One attempt of one request on a pair of nodes that do what they should, or nearly."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.admission import QueueConfig
from router.dispatch import DispatchConfig, Dispatcher
from router.errors import (
    ConsumerTooSlow,
    DeadlineExceeded,
    NoReadyPair,
    QueueFull,
    RouterDraining,
    TokenConflict,
)
from router.merge import MergeFault, TokenMerger
from router.pairs import PairConfig
from router.requests import Delta, GenerateRequest, Outcome, Timings
from tests.fakes_nodes import Cluster, a_request, cluster, reading, settle, virtual
from wire.work import NodeRef, PromptInfo, Submit, TokenLogprob, Tokens, TransferId

TID = TransferId("r1", 1)


@virtual
async def test_both_legs_open_at_once_each_naming_the_other() -> None:
    async with cluster() as made, reading(made, a_request(1, 2, 3, cache_salt="s", priority=2)):
        p, d = made["p1"], made["d1"]
        request = a_request()
        expected = Submit(
            tid=TID,
            prompt_ids=(1, 2, 3),
            num_prompt_tokens=3,
            sampling=request.sampling,
            peer=NodeRef(address="d1", incarnation=d.record.incarnation),
            deadline_s=600.0,
            priority=2,
            cache_salt="s",
        )
        assert p.submits == [expected]
        [to_decode] = d.submits
        assert to_decode.peer == NodeRef(address="p1", incarnation=p.record.incarnation)
        assert to_decode.tid == TID
        assert to_decode.prompt_ids == (1, 2, 3)


@virtual
async def test_tokens_of_both_nodes_become_one_stream_with_one_outcome() -> None:
    async with cluster() as made, reading(made, a_request(max_tokens=4)) as reader:
        p, d = made["p1"], made["d1"]
        p.emit(PromptInfo(tid=TID, cached_tokens=2))
        await asyncio.sleep(0.25)
        p.tokens(0, 10)
        await settle()
        assert reader.tokens == [(0, (10,))]
        p.finish("handed_over", queue_s=0.1, compute_s=0.2, kv_bytes=64)
        d.tokens(1, 11, 12, drafted=3, accepted=1)
        d.tokens(3, 13)
        d.finish("length", transfer_s=0.3, kv_bytes=64, transport="memory", num_steps=2)
        await settle()
        assert reader.tokens == [(0, (10,)), (1, (11, 12)), (3, (13,))]
        assert reader.outcome == Outcome(
            reason="length",
            stop_token_id=None,
            cached_tokens=2,
            num_output_tokens=4,
            num_steps=2,
            drafted=3,
            accepted=1,
            kv_bytes=64,
            transport="memory",
            timings=Timings(queue_s=0.1, prefill_s=0.2, transfer_s=0.3, ttft_s=0.25, total_s=0.25),
            prefill_node="p1",
            decode_node="d1",
            attempts=1,
        )
        assert (p.cancels, d.cancels) == ([], [])
        assert made.dispatcher.num_in_flight == 0


@virtual
async def test_tokens_that_overtake_the_first_one_wait_for_it() -> None:
    async with cluster() as made, reading(made, a_request(max_tokens=3)) as reader:
        made["d1"].tokens(1, 11)
        made["d1"].tokens(2, 12)
        made["d1"].finish("length")
        await settle()
        assert reader.items == []
        made["p1"].tokens(0, 10)
        await settle()
        assert reader.tokens == [(0, (10,)), (1, (11,)), (2, (12,))]
        assert reader.outcome.reason == "length"


@virtual
async def test_equal_duplicates_are_delivered_once_and_counted() -> None:
    async with cluster() as made, reading(made, a_request(max_tokens=3)) as reader:
        made["p1"].tokens(0, 10)
        await settle()
        made["d1"].tokens(0, 10, 11, drafted=1, accepted=1)
        made["d1"].tokens(1, 11)
        made["d1"].tokens(2, 12)
        made["d1"].finish("length")
        await settle()
        assert reader.tokens == [(0, (10,)), (1, (11,)), (2, (12,))]
        assert reader.outcome.attempts == 1
        assert made.counted("duplicate_tokens_total") == 2.0


@virtual
async def test_a_differing_duplicate_is_a_counted_fault_that_fails_the_request() -> None:
    async with cluster() as made, reading(made, a_request()) as reader:
        made["p1"].tokens(0, 10)
        made["d1"].tokens(0, 99)
        await settle()
        assert isinstance(reader.error, TokenConflict)
        assert "decode node d1: index 0: (10,) delivered, now (99,)" in str(reader.error)
        assert made.counted("duplicate_faults_total") == 1.0
        assert (made["p1"].cancels, made["d1"].cancels) == ([TID], [TID])
        assert len(made["p1"].submits) == 1


@virtual
async def test_a_request_that_ends_with_its_first_token_ends_on_the_prefill_node() -> None:
    async with cluster() as made, reading(made, a_request(max_tokens=1)) as reader:
        made["p1"].tokens(0, 10)
        made["p1"].finish("length", queue_s=0.5, compute_s=0.25)
        await settle()
        assert reader.tokens == [(0, (10,))]
        assert (reader.outcome.reason, reader.outcome.num_output_tokens) == ("length", 1)
        assert (reader.outcome.timings.queue_s, reader.outcome.timings.prefill_s) == (0.5, 0.25)
        assert (made["p1"].cancels, made["d1"].cancels) == ([], [])


@virtual
async def test_decode_dropping_a_request_that_prefill_ended_does_not_end_it_early() -> None:
    async with cluster() as made, reading(made, a_request(max_tokens=8, stop_token_ids=(10,))) as reader:
        made["d1"].finish("handed_over")
        await settle()
        assert reader.items == []
        made["p1"].tokens(0, 10)
        made["p1"].finish("stop", stop_token_id=10)
        await settle()
        assert (reader.outcome.reason, reader.outcome.stop_token_id) == ("stop", 10)


@virtual
async def test_logprobs_travel_with_their_tokens() -> None:
    async with cluster() as made, reading(made, a_request()) as reader:
        a, b = TokenLogprob(-0.5), TokenLogprob(-1.5, ((4, -0.25),))
        made["p1"].tokens(0, 10, logprobs=(a,))
        await settle()
        made["d1"].tokens(0, 10, 11, logprobs=(a, b), drafted=2, accepted=1)
        await settle()
        assert reader.items == [
            Delta(first_index=0, ids=(10,), logprobs=(a,)),
            Delta(first_index=1, ids=(11,), logprobs=(b,), drafted=2, accepted=0),
        ]


@virtual
async def test_colocated_requests_go_to_the_decode_node_alone() -> None:
    async with (
        cluster(
            "d1",
            dispatch=DispatchConfig(colocated=True),
            pairs=PairConfig(with_prefill=False, with_local=True),
        ) as made,
        reading(made, a_request(max_tokens=2)) as reader,
    ):
        [submit] = made["d1"].submits
        assert submit.peer is None
        made["d1"].emit(PromptInfo(tid=TID, cached_tokens=1))
        made["d1"].tokens(0, 10)
        made["d1"].tokens(1, 11)
        made["d1"].finish("length", queue_s=0.5)
        await settle()
        assert reader.tokens == [(0, (10,)), (1, (11,))]
        assert (reader.outcome.prefill_node, reader.outcome.decode_node) == ("", "d1")
        assert (reader.outcome.cached_tokens, reader.outcome.timings.queue_s) == (1, 0.5)
        assert made.counted("decisions_total{decision=colocated,policy=least_load}") == 1.0


@virtual
async def test_short_prompts_stay_on_decode_when_that_is_asked_for() -> None:
    async with cluster(
        dispatch=DispatchConfig(local_prompt_tokens=3), pairs=PairConfig(with_local=True)
    ) as made:
        async with reading(made, a_request(1, 2, 3)):
            assert [submit.peer for submit in made["d1"].submits] == [None]
            assert made["p1"].submits == []
        async with reading(made, a_request(1, 2, 3, 4)):
            assert [submit.prompt_ids for submit in made["p1"].submits] == [(1, 2, 3, 4)]
        assert made.counted("decisions_total{decision=local_short,policy=least_load}") == 1.0
        assert made.counted("decisions_total{decision=remote,policy=least_load}") == 1.0


async def _before_any_token(made: Cluster) -> None:
    await settle()


async def _after_the_first_token(made: Cluster) -> None:
    made["p1"].tokens(0, 10)
    await settle()


async def _while_decode_waits_for_the_first_token(made: Cluster) -> None:
    made["d1"].tokens(1, 11)
    await settle()


async def _in_decode_before_prefill_said_its_last_word(made: Cluster) -> None:
    made["p1"].tokens(0, 10)
    made["d1"].tokens(1, 11)
    await settle()


@pytest.mark.parametrize(
    "phase",
    [
        _before_any_token,
        _after_the_first_token,
        _while_decode_waits_for_the_first_token,
        _in_decode_before_prefill_said_its_last_word,
    ],
)
@virtual
async def test_a_consumer_that_leaves_cancels_both_legs(
    phase: Callable[[Cluster], Awaitable[None]],
) -> None:
    async with cluster() as made:
        async with reading(made, a_request()):
            await phase(made)
        await settle()
        assert (made["p1"].cancels, made["d1"].cancels) == ([TID], [TID])
        assert made.dispatcher.num_in_flight == 0
        assert made.counted("requests_total{outcome=closed}") == 1.0


@virtual
async def test_a_leg_that_said_its_last_word_is_not_cancelled() -> None:
    async with cluster() as made:
        async with reading(made, a_request()):
            made["p1"].tokens(0, 10)
            made["p1"].finish("handed_over")
            made["d1"].tokens(1, 11)
            await settle()
        await settle()
        assert (made["p1"].cancels, made["d1"].cancels) == ([], [TID])


@virtual
async def test_wanting_no_more_at_a_delta_cancels_both_legs() -> None:
    taken: list[Delta] = []

    def take(delta: Delta) -> bool:
        taken.append(delta)
        return len(taken) < 2

    async with cluster() as made:
        pending = asyncio.ensure_future(made.dispatcher.generate(a_request(), take))
        await settle()
        made["d1"].tokens(1, 11)
        made["d1"].tokens(2, 12)
        made["p1"].tokens(0, 10)  # three at once
        assert await pending is None
        assert taken == [Delta(first_index=0, ids=(10,)), Delta(first_index=1, ids=(11,))]
        await settle()
        assert (made["p1"].cancels, made["d1"].cancels) == ([TID], [TID])


@virtual
async def test_requests_over_the_bound_are_told_to_come_back() -> None:
    async with cluster(
        dispatch=DispatchConfig(queue=QueueConfig(max_in_flight=1, max_queue=0, retry_after_s=3.0))
    ) as made:
        async with reading(made, a_request()):
            error = await _refusal(made.dispatcher, a_request())
            assert isinstance(error, QueueFull)
            assert (error.http_status, error.retry_after_s, error.code) == (429, 3.0, "queue_full")
        await settle()
        async with reading(made, a_request()) as reader:
            assert reader.error is None
        assert len(made["p1"].submits) == 2
        assert made.counted("requests_total{outcome=queue_full}") == 1.0


@virtual
async def test_a_request_without_a_ready_pair_is_refused_at_once() -> None:
    async with cluster("p1") as made:
        error = await _refusal(made.dispatcher, a_request())
        assert isinstance(error, NoReadyPair)
        assert (error.http_status, error.grpc_status, error.retry_after_s) == (503, "UNAVAILABLE", 1.0)
        assert made.dispatcher.num_in_flight == 0
        assert asyncio.get_running_loop().time() == 0.0


@virtual
async def test_a_request_for_another_model_finds_no_pair() -> None:
    async with cluster() as made:
        assert isinstance(await _refusal(made.dispatcher, a_request(model="other")), NoReadyPair)
        async with reading(made, a_request(model="m")) as reader:
            assert reader.error is None


@virtual
async def test_no_request_may_take_longer_than_the_router_allows() -> None:
    async with cluster() as made, reading(made, a_request(deadline_s=1e6)):
        assert made["d1"].submits[0].deadline_s == 600.0


@virtual
async def test_the_deadline_ends_the_request_and_cancels_both_legs() -> None:
    async with cluster() as made, reading(made, a_request(deadline_s=2.0)) as reader:
        assert made["d1"].submits[0].deadline_s == 2.0
        await asyncio.sleep(1.9)
        assert made.dispatcher.num_in_flight == 1
        await asyncio.sleep(0.2)
        assert isinstance(reader.error, DeadlineExceeded)
        assert (made["p1"].cancels, made["d1"].cancels) == ([TID], [TID])


@virtual
async def test_what_the_reader_of_one_request_raises_ends_that_request_alone() -> None:
    def take(_: Delta) -> bool:
        raise ConsumerTooSlow("it reads nothing")

    async with cluster() as made, reading(made, a_request()) as other:
        doomed = asyncio.ensure_future(made.dispatcher.generate(a_request(), take))
        await settle()
        for attempt in (1, 2):
            made["p1"].emit(Tokens(tid=TransferId(f"r{attempt}", 1), first_index=0, ids=(10,)))
        with pytest.raises(ConsumerTooSlow):
            await doomed
        await settle()
        assert (made["p1"].cancels, made["d1"].cancels) == ([TransferId("r2", 1)], [TransferId("r2", 1)])
        assert other.tokens == [(0, (10,))]
        assert made.counted("requests_total{outcome=consumer_too_slow}") == 1.0


@virtual
async def test_a_draining_router_finishes_what_it_has_and_takes_nothing_new() -> None:
    async with cluster() as made, reading(made, a_request(max_tokens=1)) as reader:
        drained = asyncio.ensure_future(made.dispatcher.drain())
        await settle()
        assert isinstance(await _refusal(made.dispatcher, a_request()), RouterDraining)
        was_drained = drained.done()
        made["p1"].tokens(0, 10)
        made["p1"].finish("length")
        await settle()
        assert reader.outcome.reason == "length"
        assert (was_drained, drained.done()) == (False, True)


def test_a_report_that_cannot_be_of_this_request_is_a_fault() -> None:
    merger = TokenMerger(max_tokens=4)
    for first_index, ids in ((0, ()), (-1, (1,)), (3, (1, 2))):
        with pytest.raises(MergeFault):
            merger.add(Tokens(tid=TID, first_index=first_index, ids=ids))
    assert merger.delivered == []


def test_two_early_reports_that_differ_are_a_fault_before_either_is_delivered() -> None:
    merger = TokenMerger(max_tokens=8)
    assert merger.add(Tokens(tid=TID, first_index=2, ids=(5, 6))) == []
    with pytest.raises(MergeFault, match="index 2"):
        merger.add(Tokens(tid=TID, first_index=2, ids=(5, 7)))


def test_a_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(ValueError, match="prompt_ids must hold at least one token id"):
        GenerateRequest(prompt_ids=(), sampling=a_request().sampling)


async def _refusal(dispatcher: Dispatcher, request: GenerateRequest) -> Exception:
    with pytest.raises(Exception) as caught:
        await dispatcher.generate(request, lambda _: True)
    return caught.value
