"""Streams to nodes: opened and closed with their records, reopened when they break."""

import asyncio
from typing import Any

import pytest

from router.errors import RequestRefused
from router.link import LinkConfig, LinkLost
from tests.fakes_nodes import a_request, cluster, reading, settle, virtual
from wire.work import Accepted, Event, Submit, TransferId

TID = TransferId("r1", 1)
Heard = tuple[str, Event | LinkLost]


def _submit(attempt: int = 1) -> Submit:
    return Submit(
        tid=TransferId("r1", attempt),
        prompt_ids=(1,),
        num_prompt_tokens=1,
        sampling=a_request().sampling,
        peer=None,
        deadline_s=1.0,
    )


@virtual
async def test_a_link_closes_when_its_record_disappears_and_its_requests_are_told() -> None:
    async with cluster("d1") as made:
        d, heard = made["d1"], list[Heard]()
        made.links.submit(d.record, _submit(), side="decode", hear=lambda *what: heard.append(what))
        await settle()
        made.registry.remove("d1")
        await settle()
        assert d.channels[0].is_closed
        assert heard == [("decode", LinkLost(reason="d1: gone from the registry"))]
        assert made.links.records() == []


@virtual
async def test_nothing_is_remembered_of_what_was_sent_to_nodes_that_are_gone() -> None:
    async with cluster("p1 d1") as made, reading(made, a_request()):
        gone = made["d1"].record
        made.registry.remove("d1")
        made.registry.add("d1", incarnation="d1-again")
        await asyncio.sleep(1.0)
        made.registry.update("d1", max_model_len=17)
        await settle()
        load = made.links.sent.load_of(gone)
        assert (load.sent_requests, load.freed_pages) == (0, 0)


@virtual
async def test_another_incarnation_at_the_same_address_is_another_link() -> None:
    async with cluster("p1 d1") as made, reading(made, a_request()) as reader:
        old = made["d1"]
        made.registry.remove("d1")
        new = made.registry.add("d1", incarnation="d1-again")
        await asyncio.sleep(1.0)
        assert [submit.tid for submit in old.submits] == [TID]
        assert [submit.tid for submit in new.submits] == [TransferId("r1", 2)]
        assert made["p1"].submits[-1].peer is not None
        assert made["p1"].submits[-1].peer.incarnation == "d1-again"
        assert reader.error is None


@virtual
async def test_a_heartbeat_keeps_the_link() -> None:
    async with cluster("d1") as made:
        made.registry.update("d1", max_model_len=17)
        await settle()
        assert len(made["d1"].channels) == 1
        assert [record.max_model_len for record in made.links.records()] == [17]


@virtual
async def test_reconnecting_waits_longer_each_time_and_starts_over_after_a_success() -> None:
    async with cluster("d1", link=LinkConfig(first_backoff_s=1.0, max_backoff_s=3.0)) as made:
        made["d1"].die()
        await settle()
        # Tries at 1, 3 and 6 s find nobody; the next ones come every 3 s.
        await asyncio.sleep(6.5)
        made["d1"].is_up = True
        await asyncio.sleep(2.4)
        assert not made.links.is_open(made["d1"].record.incarnation)
        assert made.links.reason(made["d1"].record.incarnation) == "connection refused"
        await asyncio.sleep(0.2)
        assert made.links.is_open(made["d1"].record.incarnation)
        made["d1"].break_off()
        await asyncio.sleep(1.1)
        assert made.links.is_open(made["d1"].record.incarnation)


@virtual
async def test_work_for_a_node_that_is_down_is_answered_at_once() -> None:
    async with cluster("d1") as made:
        made["d1"].die()
        await settle()
        heard: list[Heard] = []
        leg = made.links.submit(
            made["d1"].record, _submit(), side="decode", hear=lambda *what: heard.append(what)
        )
        assert leg.is_ended
        assert heard == [("decode", LinkLost(reason="d1: stream reset"))]


@virtual
async def test_submits_that_wait_to_be_sent_are_bounded() -> None:
    async with cluster("d1", link=LinkConfig(outbox_messages=1)) as made:
        heard: list[Heard] = []
        for attempt in (1, 2):
            made.links.submit(
                made["d1"].record, _submit(attempt), side="decode", hear=lambda *what: heard.append(what)
            )
        assert heard == [("decode", LinkLost(reason="d1: too much waits to be sent"))]
        await settle()
        assert [submit.tid for submit in made["d1"].submits] == [TID]


@pytest.mark.parametrize("unsendable", [{"cache_salt": "\ud800"}, {"priority": 2**31}])
@virtual
async def test_a_submit_that_the_wire_cannot_carry_is_refused_alone(unsendable: dict[str, Any]) -> None:
    async with cluster("p1 d1") as made, reading(made, a_request()) as other:
        async with reading(made, a_request(**unsendable)) as doomed:
            await settle()
        assert isinstance(doomed.error, RequestRefused)
        assert doomed.error.code == "invalid_request"
        made["p1"].tokens(0, 7)
        made["d1"].tokens(1, 8, 9, 10)
        made["d1"].finish("length")
        await settle()
        assert other.outcome.attempts == 1
        assert [len(made[name].channels) for name in ("p1", "d1")] == [1, 1]


@virtual
async def test_what_is_no_frame_breaks_the_link() -> None:
    async with cluster("d1") as made:
        made["d1"].channels[0].put("hello again")
        await settle()
        assert made.links.reason(made["d1"].record.incarnation) == "expected a Frame, got 'hello again'"


@virtual
async def test_events_of_a_tid_that_nobody_reads_are_counted_and_dropped() -> None:
    async with cluster("d1") as made:
        made["d1"].emit(Accepted(tid=TransferId("r9", 1), queued_behind=0))
        await settle()
        assert made.counted("late_events_total") == 1.0


@pytest.mark.parametrize("num_turns", range(6))
@virtual
async def test_a_link_whose_stream_breaks_just_as_its_record_disappears_is_over(num_turns: int) -> None:
    async with cluster("d1") as made:
        d = made["d1"]
        d.break_off()
        for _ in range(num_turns):
            await asyncio.sleep(0)
        made.registry.remove("d1")
        again = made.registry.add("d1", incarnation="d1-again")
        await asyncio.sleep(60.0)
        assert (len(d.channels), len(again.channels)) == (1, 1)
