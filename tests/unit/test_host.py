import asyncio

import pytest

from engine.params import TokenLogprob
from engine.scheduler import SchedulerLimits
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import CancelTransfer, Drained, Heartbeat, Hello, Refused, Reserve
from tests.fakes_host import Cluster, FakeNode, open_link
from tests.simulation.virtual_loop import run_virtual
from wire.channel import Channel, ChannelClosed
from wire.convert import pack_from_node
from wire.grpc_options import MAX_MESSAGE_BYTES
from wire.host import HostConfig
from wire.host_events import (
    Drain,
    DropPeer,
    Link,
    LinkClosed,
    LinkMessage,
    LinkOpened,
    PeerClosed,
    PeerHello,
    PeerMessage,
    ToLink,
    ToPeer,
)
from wire.links import MAX_FRAME_EVENTS
from wire.memory_channel import MemoryNetwork
from wire.work import (
    Accepted,
    Cancel,
    Frame,
    PromptInfo,
    PromptLogprobs,
    Rejected,
    Unreadable,
    WorkHello,
)

TID = TransferId("r", 1)
P, D = Incarnation("p-1"), Incarnation("d-1")
RESERVE = Reserve(tid=TID, page_ids=(1, 2), skip_tokens=0, deadline_s=5.0)


def accepted(link: int, number: int) -> ToLink:
    return ToLink(link=Link(link), event=Accepted(tid=TransferId("r", number), queued_behind=0))


async def read_to_end(channel: Channel) -> list[object]:
    messages: list[object] = []
    try:
        while True:
            messages.append(await channel.receive())
    except ChannelClosed:
        return messages


def test_a_link_is_opened_read_and_closed_once() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            first, second = await open_link(cluster, "p:1"), await open_link(cluster, "p:1", "other")
            await second.send(Cancel(tid=TID))
            await asyncio.sleep(1.0)
            await first.close()
            await asyncio.sleep(1.0)
            assert node.core.events == [
                LinkOpened(link=Link(1)),
                LinkOpened(link=Link(2)),
                LinkMessage(link=Link(2), message=Cancel(tid=TID)),
                LinkClosed(link=Link(1)),
            ]
            await second.close()
            await asyncio.sleep(1.0)
            assert node.seen(LinkClosed) == [LinkClosed(link=Link(1)), LinkClosed(link=Link(2))]

    run_virtual(main())


def test_all_events_of_a_step_come_as_one_frame_per_link() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            first, second = await open_link(cluster, "p:1"), await open_link(cluster, "p:1", "other")
            node.driver.emit(accepted(1, 1), accepted(2, 2), accepted(1, 3))
            one, other = await first.receive(), await second.receive()
            assert [event.tid.attempt for event in one.events] == [1, 3]
            assert [event.tid.attempt for event in other.events] == [2]
            info = PromptInfo(tid=TID, cached_tokens=4)
            node.driver.emit(ToLink(link=Link(1), event=info))
            later = await first.receive()
            assert later == Frame(step=one.step + 1, events=(info,))

    run_virtual(main())


def test_frames_coalesce_while_the_reader_lags() -> None:
    async def main() -> None:
        cluster = Cluster(network=MemoryNetwork(capacity=1))
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            channel = await open_link(cluster, "p:1")
            for number in range(1, 11):
                node.driver.emit(accepted(1, number))
                await asyncio.sleep(0.1)
            frames = [await channel.receive() for _ in range(3)]
            assert [len(frame.events) for frame in frames] == [1, 1, 8]
            attempts = [event.tid.attempt for frame in frames for event in frame.events]
            assert attempts == list(range(1, 11))

    run_virtual(main())


def test_a_large_backlog_comes_as_several_frames_each_of_which_grpc_carries() -> None:
    scored = TokenLogprob(-1.5, tuple((100_000 + one, -2.5) for one in range(20)))
    largest = PromptLogprobs(tid=TID, first_index=1, logprobs=(scored,) * SchedulerLimits().scored_tokens)
    frame_bytes = MAX_FRAME_EVENTS * pack_from_node(Frame(step=1, events=(largest,))).ByteSize()
    assert frame_bytes < MAX_MESSAGE_BYTES

    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            channel = await open_link(cluster, "p:1")
            node.driver.emit(*(accepted(1, number) for number in range(600)))
            frames = [await channel.receive() for _ in range(3)]
            assert [len(frame.events) for frame in frames] == [256, 256, 88]
            attempts = [event.tid.attempt for frame in frames for event in frame.events]
            assert attempts == list(range(600))

    run_virtual(main())


def test_a_router_that_stops_reading_is_dropped_and_others_are_served() -> None:
    async def main() -> None:
        config = HostConfig(max_link_backlog=5)
        cluster = Cluster(network=MemoryNetwork(capacity=1), config=config)
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            slow, good = await open_link(cluster, "p:1"), await open_link(cluster, "p:1", "good")
            for number in range(8):
                node.driver.emit(accepted(1, number), accepted(2, number))
                assert (await good.receive()).events[0].tid.attempt == number
            await asyncio.sleep(0.1)
            assert node.seen(LinkClosed) == [LinkClosed(link=Link(1))]
            assert (await node.host.status()).counters["links_dropped"] == 1.0
            with pytest.raises(ChannelClosed):
                await slow.send(Cancel(tid=TID))
            node.driver.emit(accepted(1, 99), accepted(2, 99))
            assert (await good.receive()).events[0].tid.attempt == 99

    run_virtual(main())


def test_a_submit_that_cannot_be_read_is_refused_and_the_stream_serves_on() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            channel = await open_link(cluster, "p:1")
            await channel.send(Unreadable(tid=TID, reason="submit.sampling must be set, got None"))
            [refusal] = (await channel.receive()).events
            assert refusal == Rejected(
                tid=TID,
                code="invalid_request",
                retryable=False,
                reason="submit.sampling must be set, got None",
            )
            await channel.send(Cancel(tid=TransferId("other", 1)))
            await asyncio.sleep(1.0)
            assert node.core.events == [
                LinkOpened(link=Link(1)),
                LinkMessage(link=Link(1), message=Cancel(tid=TransferId("other", 1))),
            ]

    run_virtual(main())


@pytest.mark.parametrize("first", [Cancel(tid=TID), WorkHello(incarnation=D, role="router", version=1)])
def test_a_stream_without_a_fitting_hello_becomes_no_link(first: Cancel | WorkHello) -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            channel = await cluster.network.connector("r").work("p:1")
            await channel.send(first)
            ours = WorkHello(incarnation=P, role="prefill", has_kv_events=True)
            assert await read_to_end(channel) in ([], [ours])
            assert node.core.events == []

    run_virtual(main())


def test_a_decode_node_opens_a_session_to_every_prefill_node_of_its_model() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with (
            FakeNode(cluster, "prefill", "p:1", P) as prefill,
            FakeNode(cluster, "prefill", "p:2", "p-2"),
            FakeNode(cluster, "prefill", "p:3", "p-3", model="other"),
            FakeNode(cluster, "decode", "d:1", D) as decode,
        ):
            await asyncio.sleep(3.0)
            hellos = {event.hello.incarnation for event in decode.seen(PeerHello)}  # type: ignore[union-attr]
            assert hellos == {"p-1", "p-2"}
            assert prefill.core.events == [PeerHello(hello=decode.core.hello())]
            assert (await decode.host.status()).peers == {"p-1": "ready", "p-2": "ready"}
            decode.driver.emit(ToPeer(peer=P, message=RESERVE))
            prefill.driver.emit(ToPeer(peer=D, message=Drained(tid=TID)))
            await asyncio.sleep(0.1)
            assert prefill.seen(PeerMessage) == [PeerMessage(peer=D, message=RESERVE)]
            assert decode.seen(PeerMessage) == [PeerMessage(peer=P, message=Drained(tid=TID))]

    run_virtual(main())


def test_our_hello_precedes_what_the_core_says_with_its_answer() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as prefill:
            channel = await cluster.network.connector("d").session("p:1")
            hello = Hello(
                incarnation=D,
                identity=prefill.core.hello().identity,
                layout=prefill.core.hello().layout,
                offers=(),
            )
            await channel.send(hello)
            prefill.core.says_on_hello = (ToPeer(peer=D, message=Drained(tid=TID)),)
            assert await channel.receive() == prefill.core.hello()
            assert await channel.receive() == Drained(tid=TID)
            assert await channel.receive() == Heartbeat(engine_step=1)

    run_virtual(main())


def test_a_refusal_by_prefill_is_remembered_and_not_tried_again() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as prefill:
            prefill.core.refuses[D] = Refused(field="dtype", ours="bfloat16", theirs="float32")
            async with FakeNode(cluster, "decode", "d:1", D) as decode:
                await asyncio.sleep(60.0)
                assert len(prefill.seen(PeerHello)) == 1
                assert decode.core.events == []
                states = (await decode.host.status()).peers
                assert states == {"p-1": "refused: dtype: 'float32' here, 'bfloat16' there"}
        async with (
            FakeNode(cluster, "prefill", "p:1", "p-2"),
            FakeNode(cluster, "decode", "d:1", "d-2") as decode,
        ):
            await asyncio.sleep(3.0)
            assert (await decode.host.status()).peers == {"p-2": "ready"}

    run_virtual(main())


def test_a_refusal_by_decode_ends_the_session_for_prefill() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with (
            FakeNode(cluster, "prefill", "p:1", P) as prefill,
            FakeNode(cluster, "decode", "d:1", D) as decode,
        ):
            decode.core.refuses[P] = Refused(field="layout", ours="a", theirs="b")
            await asyncio.sleep(60.0)
            assert prefill.core.events == [PeerHello(hello=decode.core.hello()), PeerClosed(peer=D)]
            assert len(decode.core.events) == 1
            assert (await decode.host.status()).peers == {"p-1": "refused: layout: 'a' here, 'b' there"}

    run_virtual(main())


def test_decode_reconnects_after_a_cut_and_each_side_hears_of_it_once() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with (
            FakeNode(cluster, "prefill", "p:1", P) as prefill,
            FakeNode(cluster, "decode", "d:1", D) as decode,
        ):
            await asyncio.sleep(3.0)
            cluster.network.cut("d:1")
            await asyncio.sleep(3.0)
            to_prefill, to_decode = prefill.core.hello(), decode.core.hello()
            again = [PeerHello(hello=to_decode), PeerClosed(peer=D), PeerHello(hello=to_decode)]
            assert prefill.core.events == again
            assert decode.core.events == [
                PeerHello(hello=to_prefill),
                PeerClosed(peer=P),
                PeerHello(hello=to_prefill),
            ]

    run_virtual(main())


def test_decode_finds_a_restarted_prefill_node_under_its_new_incarnation() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "decode", "d:1", D) as decode:
            async with FakeNode(cluster, "prefill", "p:1", P) as first:
                await asyncio.sleep(3.0)
                first_hello = first.core.hello()
            await asyncio.sleep(1.0)
            async with FakeNode(cluster, "prefill", "p:1", "p-2") as second:
                await asyncio.sleep(5.0)
                assert decode.core.events == [
                    PeerHello(hello=first_hello),
                    PeerClosed(peer=P),
                    PeerHello(hello=second.core.hello()),
                ]
                assert (await decode.host.status()).peers == {"p-2": "ready"}

    run_virtual(main())


def test_a_silent_prefill_node_counts_as_gone() -> None:
    async def main() -> None:
        config = HostConfig(heartbeat_s=1000.0, peer_timeout_s=15.0)
        cluster = Cluster(config=config)
        async with (
            FakeNode(cluster, "prefill", "p:1", P),
            FakeNode(cluster, "decode", "d:1", D) as decode,
        ):
            await asyncio.sleep(14.0)
            assert decode.seen(PeerClosed) == []
            await asyncio.sleep(3.0)
            assert decode.seen(PeerClosed) == [PeerClosed(peer=P)]

    run_virtual(main())


def test_heartbeats_keep_a_quiet_session_alive() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with (
            FakeNode(cluster, "prefill", "p:1", P) as prefill,
            FakeNode(cluster, "decode", "d:1", D) as decode,
        ):
            await asyncio.sleep(600.0)
            assert len(prefill.core.events) == len(decode.core.events) == 1

    run_virtual(main())


def test_the_core_hears_of_heartbeats_that_tell_of_steps_and_of_no_others() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with (
            FakeNode(cluster, "prefill", "p:1", P) as prefill,
            FakeNode(cluster, "decode", "d:1", D) as decode,
        ):
            for _ in range(3):
                await asyncio.sleep(60.0)
                prefill.core.num_steps += 5
            await asyncio.sleep(60.0)
            heard = [event.message for event in decode.core.events if isinstance(event, PeerMessage)]
            assert heard == [Heartbeat(engine_step=step) for step in (6, 11, 16)]
            assert [type(event) for event in prefill.core.events] == [PeerHello]

    run_virtual(main())


def test_drop_peer_closes_the_session_and_a_new_one_follows() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with (
            FakeNode(cluster, "prefill", "p:1", P) as prefill,
            FakeNode(cluster, "decode", "d:1", D) as decode,
        ):
            await asyncio.sleep(3.0)
            prefill.driver.emit(DropPeer(peer=D, reason="a handle did not settle"))
            await asyncio.sleep(3.0)
            for node in (prefill, decode):
                assert [type(event) for event in node.core.events] == [PeerHello, PeerClosed, PeerHello]

    run_virtual(main())


def test_a_hello_that_cannot_be_made_now_is_made_later() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with (
            FakeNode(cluster, "prefill", "p:1", P) as prefill,
            FakeNode(cluster, "decode", "d:1", D) as decode,
        ):
            decode.core.num_failing_hellos = 2
            await asyncio.sleep(3.0)
            assert decode.core.events == [PeerHello(hello=prefill.core.hello())]

    run_virtual(main())


def test_a_newer_session_of_the_same_peer_replaces_the_older() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as prefill:
            connector = cluster.network.connector("d:1")
            hello = FakeNode(cluster, "decode", "d:1", D).core.hello()
            first = await connector.session("p:1")
            await first.send(hello)
            assert await first.receive() == prefill.core.hello()
            second = await connector.session("p:1")
            await second.send(hello)
            assert await second.receive() == prefill.core.hello()
            await read_to_end(first)
            await second.send(CancelTransfer(tid=TID))
            await asyncio.sleep(0.1)
            assert prefill.core.events == [
                PeerHello(hello=hello),
                PeerClosed(peer=D),
                PeerHello(hello=hello),
                PeerMessage(peer=D, message=CancelTransfer(tid=TID)),
            ]

    run_virtual(main())


def test_a_drop_said_before_the_core_met_the_peer_again_does_not_end_the_new_session() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as prefill:
            hello = FakeNode(cluster, "decode", "d:1", D).core.hello()
            prefill.core.outputs.append(DropPeer(peer=D, reason="a step that took longer than to come back"))
            channel = await cluster.network.connector("d:1").session("p:1")
            await channel.send(hello)
            assert await channel.receive() == prefill.core.hello()
            await channel.send(CancelTransfer(tid=TID))
            await asyncio.sleep(0.1)
            assert prefill.core.events == [
                PeerHello(hello=hello),
                PeerMessage(peer=D, message=CancelTransfer(tid=TID)),
            ]

    run_virtual(main())


def test_decode_nodes_accept_no_sessions() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "decode", "d:1", D) as decode:
            channel = await cluster.network.connector("x").session("d:1")
            with pytest.raises(ChannelClosed):
                await channel.receive()
            assert decode.core.events == []

    run_virtual(main())


def test_the_record_is_renewed_and_expires_after_a_crash() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P):
            await asyncio.sleep(100.0)
            [record] = await cluster.registry.snapshot()
            assert (record.incarnation, record.load.free_pages) == (P, 4)
        await asyncio.sleep(cluster.config.ttl_s + 0.1)
        assert await cluster.registry.snapshot() == []

    run_virtual(main())


def test_a_node_serves_on_while_the_registry_is_away_and_comes_back(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            await asyncio.sleep(1.0)
            cluster.registry.set_available(False)
            await asyncio.sleep(60.0)
            await open_link(cluster, "p:1")
            cluster.registry.set_available(True)
            await asyncio.sleep(3.0)
            assert [one.incarnation for one in await cluster.registry.snapshot()] == [P]
            assert (await node.host.status()).counters["registry_failures"] == 30.0

    run_virtual(main())
    assert caplog.text.count("registry is away") == 1


def test_stop_drains_waits_for_the_core_then_unregisters_then_closes() -> None:
    async def main() -> None:
        cluster = Cluster()
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            channel = await open_link(cluster, "p:1")
            await asyncio.sleep(1.0)
            node.core.is_idle = False
            async with asyncio.TaskGroup() as group:
                stopping = group.create_task(node.host.stop())
                await asyncio.sleep(5.0)
                assert node.seen(Drain) == [Drain()]
                assert [one.is_draining for one in await cluster.registry.snapshot()] == [True]
                assert not stopping.done()
                node.driver.emit(accepted(1, 7))
                node.core.is_idle = True
            assert (await channel.receive()).events[0].tid.attempt == 7
            with pytest.raises(ChannelClosed):
                await channel.receive()
            assert await cluster.registry.snapshot() == []
            await node.running
            await asyncio.sleep(10.0)
            assert await cluster.registry.snapshot() == []
            assert node.core.events == [LinkOpened(link=Link(1)), Drain(), LinkClosed(link=Link(1))]

    run_virtual(main())


def test_stop_gives_up_on_a_core_that_stays_busy() -> None:
    async def main() -> None:
        cluster = Cluster(config=HostConfig(drain_timeout_s=7.0))
        async with FakeNode(cluster, "prefill", "p:1", P) as node:
            node.core.is_idle = False
            started = asyncio.get_running_loop().time()
            await node.host.stop()
            await node.running
            assert asyncio.get_running_loop().time() - started == pytest.approx(7.0)

    run_virtual(main())
