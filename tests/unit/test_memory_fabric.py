from collections.abc import Callable

import pytest

from kv_transfer.ids import TransferId
from kv_transfer.transport import Landed, PeerGone, Ready, WriteDone, WriteFailed, WriteHandle
from kv_transfer.transports.memory import Fault
from tests.fakes_transport import PAGE_BYTES, MemoryBench, TransportNode, make_pool, pair

TID = TransferId("request", 1)
Faults = Callable[[WriteHandle], Fault]


def joined(faults: Faults) -> tuple[MemoryBench, TransportNode, TransportNode]:
    """A writer whose pages are all ones, and a receiver whose pages are all zeros."""
    bench = MemoryBench(faults)
    writer, receiver = bench.node(pool=make_pool(1)), bench.node()
    pair(writer, receiver)
    return bench, writer, receiver


def send(writer: TransportNode, receiver: TransportNode, *, start: int = 0) -> WriteHandle:
    ready = Ready(tid=TID, start=start, local_pages=(start,), remote_pages=(start,))
    return writer.transport.write(receiver.incarnation, TID, ready)


def at(bench: MemoryBench, now: float, *nodes: TransportNode) -> None:
    bench.clock.now = now
    for _ in range(2):
        for node in nodes:
            node.poll()


def landed(node: TransportNode) -> list[int]:
    return [event.start for event in node.of_type(Landed)]


def test_delayed_write_lands_when_it_is_due() -> None:
    bench, writer, receiver = joined(lambda _: Fault(delay_s=2.0))
    handle = send(writer, receiver)
    at(bench, 1.99, writer, receiver)
    assert (receiver.page(0), receiver.events, writer.events) == (bytes(PAGE_BYTES), [], [])
    assert bench.fabric.next_due() == 3.99  # due counts from the poll that started it
    at(bench, 3.99, writer, receiver)
    assert receiver.page(0) == b"\x01" * PAGE_BYTES
    assert writer.events == [WriteDone(handle=handle)]
    assert bench.fabric.next_due() is None


def test_different_delays_reorder() -> None:
    bench, writer, receiver = joined(lambda handle: Fault(delay_s=3.0 - handle.start))
    for start in range(3):
        send(writer, receiver, start=start)
    at(bench, 0.0, writer, receiver)
    at(bench, 9.0, writer, receiver)
    assert landed(receiver) == [2, 1, 0]


def test_notice_may_come_after_the_bytes() -> None:
    bench, writer, receiver = joined(lambda _: Fault(notice_delay_s=1.0))
    send(writer, receiver)
    at(bench, 0.0, writer, receiver)
    assert receiver.page(0) == b"\x01" * PAGE_BYTES
    assert receiver.events == writer.events == []
    at(bench, 1.0, writer, receiver)
    assert landed(receiver) == [0]


def test_dropped_write_never_settles_until_the_peer_is_closed() -> None:
    bench, writer, receiver = joined(lambda _: Fault(is_dropped=True))
    handle = send(writer, receiver)
    at(bench, 100.0, writer, receiver)
    assert receiver.events == writer.events == []
    writer.transport.close_peer(receiver.incarnation)
    at(bench, 101.0, writer, receiver)
    assert writer.events == [WriteFailed(handle=handle, reason="peer closed")]
    assert not any(receiver.page(0))


def test_failed_write_writes_nothing() -> None:
    bench, writer, receiver = joined(lambda _: Fault(failure="link flap"))
    handle = send(writer, receiver)
    at(bench, 0.0, writer, receiver)
    assert writer.events == [WriteFailed(handle=handle, reason="link flap")]
    assert not any(receiver.page(0))


def test_duplicate_lands_twice_and_settles_once() -> None:
    bench, writer, receiver = joined(lambda _: Fault(delay_s=1.0, num_duplicates=1))
    handle = send(writer, receiver)
    at(bench, 0.0, writer, receiver)
    at(bench, 1.0, writer, receiver)
    receiver.pool.page(0)[:] = bytes(PAGE_BYTES)
    at(bench, 2.0, writer, receiver)
    assert landed(receiver) == [0, 0]
    assert receiver.page(0) == b"\x01" * PAGE_BYTES
    assert writer.events == [WriteDone(handle=handle)]


def test_cancel_stops_a_write_under_way() -> None:
    bench, writer, receiver = joined(lambda _: Fault(delay_s=1.0))
    handle = send(writer, receiver)
    at(bench, 0.0, writer, receiver)
    writer.transport.cancel(handle)
    at(bench, 2.0, writer, receiver)
    assert writer.events == [WriteFailed(handle=handle, reason="cancelled")]
    assert not any(receiver.page(0))


def test_late_write_lands_in_spite_of_cancel() -> None:
    bench, writer, receiver = joined(lambda _: Fault(delay_s=1.0, ignores_cancel=True))
    handle = send(writer, receiver)
    at(bench, 0.0, writer, receiver)
    writer.transport.cancel(handle)
    at(bench, 0.5, writer, receiver)
    assert writer.events == []
    at(bench, 1.0, writer, receiver)
    assert writer.events == [WriteDone(handle=handle)]
    assert receiver.page(0) == b"\x01" * PAGE_BYTES


def test_late_write_of_a_closed_connection_is_discarded_and_counted() -> None:
    bench, writer, receiver = joined(lambda _: Fault(delay_s=1.0, ignores_cancel=True))
    handle = send(writer, receiver)
    at(bench, 0.0, writer, receiver)
    receiver.transport.close_peer(writer.incarnation)
    at(bench, 1.0, writer, receiver)
    assert not any(receiver.page(0))
    assert bench.fabric.discarded_pages == 1
    gone = PeerGone(peer=receiver.incarnation, reason="peer closed")
    assert writer.events == [gone, WriteFailed(handle=handle, reason="peer closed")]
    assert receiver.events == []


def test_late_write_of_an_old_connection_is_discarded_after_the_pair_connected_again() -> None:
    bench, writer, receiver = joined(lambda handle: Fault(delay_s=1.0 if handle.start == 0 else 0.0))
    send(writer, receiver, start=0)
    at(bench, 0.0, writer, receiver)
    receiver.transport.close_peer(writer.incarnation)
    writer.transport.close_peer(receiver.incarnation)
    pair(writer, receiver)
    send(writer, receiver, start=1)
    at(bench, 5.0, writer, receiver)
    assert landed(receiver) == [1]
    assert not any(receiver.page(0))
    assert writer.of_type(PeerGone) == []
    assert bench.fabric.discarded_pages == 1


def test_cut_reports_both_sides_and_lets_bytes_under_way_land_until_closed() -> None:
    bench, writer, receiver = joined(lambda handle: Fault(delay_s=1.0 + handle.start))
    handles = [send(writer, receiver, start=start) for start in range(2)]
    at(bench, 0.0, writer, receiver)
    bench.fabric.cut(writer.incarnation, receiver.incarnation, "cable")
    at(bench, 1.0, writer, receiver)
    assert receiver.page(0) == b"\x01" * PAGE_BYTES
    receiver.transport.close_peer(writer.incarnation)
    at(bench, 2.0, writer, receiver)
    assert not any(receiver.page(1))
    assert receiver.events[0] == PeerGone(peer=writer.incarnation, reason="cable")
    assert writer.events == [
        PeerGone(peer=receiver.incarnation, reason="cable"),
        *(WriteFailed(handle=handle, reason="cable") for handle in handles),
    ]


def test_write_on_a_cut_connection_fails_until_it_is_made_anew() -> None:
    bench, writer, receiver = joined(lambda _: Fault())
    bench.fabric.cut(writer.incarnation, receiver.incarnation)
    handle = send(writer, receiver)
    at(bench, 1.0, writer, receiver)
    assert writer.of_type(WriteFailed) == [WriteFailed(handle=handle, reason="peer not connected")]
    for node, peer in ((writer, receiver), (receiver, writer)):
        node.transport.close_peer(peer.incarnation)
    pair(writer, receiver)
    send(writer, receiver)
    at(bench, 2.0, writer, receiver)
    assert landed(receiver) == [0]


def test_member_that_leaves_is_gone_for_its_peers() -> None:
    bench, writer, receiver = joined(lambda _: Fault())
    writer.transport.close()
    at(bench, 0.0, receiver)
    assert receiver.events == [PeerGone(peer=writer.incarnation, reason="peer left")]


def test_negative_delay_is_refused() -> None:
    with pytest.raises(ValueError, match="delay_s"):
        Fault(delay_s=-1.0)


def test_news_of_a_connection_that_we_closed_is_not_told_of_the_next() -> None:
    bench, writer, receiver = joined(lambda _: Fault())
    send(writer, receiver)
    writer.transport.poll()
    bench.fabric.cut(writer.incarnation, receiver.incarnation)
    for node, peer in ((writer, receiver), (receiver, writer)):
        node.transport.close_peer(peer.incarnation)
    pair(writer, receiver)
    at(bench, 1.0, writer, receiver)
    assert (writer.events, receiver.events) == ([], [])
    handle = send(writer, receiver, start=1)
    at(bench, 2.0, writer, receiver)
    assert writer.events == [WriteDone(handle=handle)]
    assert landed(receiver) == [1]


@pytest.mark.parametrize("outlives_peer", [False, True])
def test_a_write_reads_its_pages_until_it_settles_and_no_longer(outlives_peer: bool) -> None:
    bench, writer, receiver = joined(lambda _: Fault(delay_s=1.0, outlives_peer=outlives_peer))
    handle = send(writer, receiver)
    at(bench, 0.0, writer)
    writer.transport.close_peer(receiver.incarnation)
    at(bench, 0.5, writer)
    assert writer.is_settled(handle) is not outlives_peer
    writer.pool.page(0)[:] = bytes([7]) * PAGE_BYTES
    at(bench, 1.0, writer, receiver)
    assert writer.is_settled(handle)
    assert receiver.page(0) == bytes([7 if outlives_peer else 1]) * PAGE_BYTES
