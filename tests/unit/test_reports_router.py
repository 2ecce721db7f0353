"""Reports against other systems (shared/checks/reports.md), as claims about this router."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from router.admission import QueueConfig
from router.dispatch import DispatchConfig
from router.errors import NoReadyPair
from router.requests import SamplingParams
from tests.fakes_nodes import Cluster, Reader, a_request, cluster, reading, settle, virtual
from wire.work import Finished, Tokens, TransferId

ONE_AT_A_TIME = DispatchConfig(queue=QueueConfig(max_in_flight=1))


# R10: the client is gone, a worker generates on


async def _in_prefill(made: Cluster) -> None:
    await settle()


async def _in_transfer(made: Cluster) -> None:
    made["p1"].tokens(0, 10)
    await settle()


async def _after_three_chunks(made: Cluster) -> None:
    made["p1"].tokens(0, 10)
    for index in (1, 2, 3):
        made["d1"].tokens(index, 10 + index)
    await settle()


@pytest.mark.parametrize("phase", [_in_prefill, _in_transfer, _after_three_chunks])
@virtual
async def test_r10_a_client_that_leaves_stops_both_nodes_and_lets_the_next_one_in(
    phase: Callable[[Cluster], Awaitable[None]],
) -> None:
    async with cluster(dispatch=ONE_AT_A_TIME) as made:
        async with reading(made, a_request(max_tokens=2000)):
            await phase(made)
            waiting = asyncio.create_task(_first_item(made))
            await settle()
            assert made.dispatcher.num_queued == 1
        await settle()
        assert (made["p1"].cancels, made["d1"].cancels) == ([TransferId("r1", 1)], [TransferId("r1", 1)])
        assert [submit.tid for submit in made["p1"].submits][1:] == [TransferId("r2", 1)]
        waiting.cancel()


@virtual
async def test_r10_a_client_that_leaves_the_queue_never_reaches_a_node() -> None:
    async with cluster(dispatch=ONE_AT_A_TIME) as made, reading(made, a_request()) as first:
        async with reading(made, a_request()):
            assert made.dispatcher.num_queued == 1
        await settle()
        assert made.dispatcher.num_queued == 0
        made["p1"].tokens(0, 10)
        made["p1"].finish("length")
        await settle()
        assert first.error is None
        assert [len(made[name].submits) for name in ("p1", "d1")] == [1, 1]


# R12: ready too early; a dead first worker; a drain that drops streams


@virtual
async def test_r12_not_ready_until_a_prefill_and_a_decode_node_have_served_one_request() -> None:
    async with cluster("") as made:
        assert not made.pairs.is_ready
        made.registry.add("p1")
        await settle()
        assert not made.pairs.is_ready
        slow = made.registry.add("d1")
        slow.on_canary = lambda _submit: ()
        await settle()
        assert (made.pairs.is_ready, len(slow.canaries)) == (False, 1)
        reader = Reader(made.dispatcher, a_request())
        await reader.run()
        assert isinstance(reader.error, NoReadyPair)
        slow.emit(*slow._pass_canary(slow.canaries[0]))
        await settle()
        assert made.pairs.is_ready


@virtual
async def test_r12_the_first_listed_prefill_node_may_die() -> None:
    async with cluster("p1 p2 d1") as made:
        made["p1"].die()
        await settle()
        assert made.pairs.is_ready
        assert made.states() == {("p1", "d1"): "waiting", ("p2", "d1"): "ready"}
        async with reading(made, a_request(max_tokens=1)) as reader:
            tid = made["p2"].submits[0].tid
            made["p2"].emit(Tokens(tid=tid, first_index=0, ids=(9,)), Finished(tid=tid, reason="length"))
            await settle()
            assert reader.outcome.reason == "length"


@pytest.mark.parametrize("name", ["p1", "d1"])
@virtual
async def test_r12_a_draining_node_finishes_what_it_has_and_new_work_avoids_it(name: str) -> None:
    async with cluster("p1 p2 d1 d2") as made, reading(made, a_request(max_tokens=2)) as first:
        [submit] = made["p1"].submits
        assert submit.peer is not None
        assert submit.peer.address == "d1"
        made.registry.update(name, is_draining=True)
        await settle()
        for _ in range(4):
            async with reading(made, a_request()):
                pass
        assert len(made[name].submits) == 1
        made["p1"].tokens(0, 10)
        made["p1"].finish("handed_over")
        made["d1"].tokens(1, 11)
        made["d1"].finish("length")
        await settle()
        assert (first.outcome.reason, first.outcome.attempts) == ("length", 1)


# R15: what the router sends to prefill


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=1, max_tokens=50),
        SamplingParams(seed=1, max_tokens=4000),
        SamplingParams(seed=1, max_tokens=30, min_tokens=20),
        SamplingParams(seed=1, max_tokens=30, logprobs=5, stop_token_ids=(7,), logit_bias=((3, 1.0),)),
    ],
)
@virtual
async def test_r15_both_nodes_get_the_whole_request_and_each_other(sampling: SamplingParams) -> None:
    """A prefill node stops after the first token by its role, so nothing has to be capped or left out for it,
    and no endpoint can slip past it."""
    request = a_request(1, 2, 3)
    request = type(request)(prompt_ids=request.prompt_ids, sampling=sampling, cache_salt="s")
    async with cluster() as made, reading(made, request):
        [to_prefill], [to_decode] = made["p1"].submits, made["d1"].submits
        assert to_prefill.sampling == to_decode.sampling == sampling
        assert (to_prefill.prompt_ids, to_prefill.num_prompt_tokens) == ((1, 2, 3), 3)
        assert to_prefill.tid == to_decode.tid
        assert to_prefill.peer is not None
        assert to_decode.peer is not None
        assert (to_prefill.peer.address, to_decode.peer.address) == ("d1", "p1")


# K12: two live requests with one id


@virtual
async def test_k12_requests_with_one_label_are_two_and_ending_one_leaves_the_other() -> None:
    async with cluster() as made, reading(made, a_request(1, max_tokens=2, label="same")) as first:
        async with reading(made, a_request(2, label="same")):
            tids = [submit.tid for submit in made["p1"].submits]
            assert tids == [TransferId("r1", 1), TransferId("r2", 1)]
        await settle()
        assert made["p1"].cancels == made["d1"].cancels == [TransferId("r2", 1)]
        made["p1"].tokens(0, 10)
        made["d1"].tokens(1, 11)
        made["d1"].finish("length")
        await settle()
        assert first.tokens == [(0, (10,)), (1, (11,))]


@virtual
async def test_k12_a_label_may_be_used_again_right_after_its_request_was_stopped() -> None:
    async with cluster() as made:
        for _ in range(100):
            async with reading(made, a_request(label="same")):
                pass
        await settle()
        tids = [submit.tid for submit in made["d1"].submits]
        assert len(set(tids)) == 100
        assert made["d1"].cancels == tids
        assert made.dispatcher.num_in_flight == 0


async def _first_item(made: Cluster) -> None:
    await made.dispatcher.generate(a_request(), lambda _: False)
