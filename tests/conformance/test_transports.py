import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import TransportOffer
from kv_transfer.transport import (
    Completed,
    CompletionEvent,
    Landed,
    PeerGone,
    Ready,
    TransportError,
    WriteDone,
    WriteFailed,
    WriteHandle,
)
from kv_transfer.transports import registry
from tests.fakes_transport import (
    NUM_PAGES,
    PAGE_BYTES,
    Bench,
    OpenLater,
    TransportNode,
    idle,
    make_bench,
    make_pool,
    pair,
    pump,
)

KINDS = ("memory", "nixl", "grpc")
PROCESS_KINDS = ("nixl", "grpc")
TID = TransferId("request-1", 3)


@pytest.fixture(params=KINDS)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield from _open_bench(request.param)


@pytest.fixture(params=PROCESS_KINDS)
def process_bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    yield from _open_bench(request.param)


@pytest.fixture
def grpc_bench() -> Iterator[Bench]:
    yield from _open_bench("grpc")


def _open_bench(kind: str) -> Iterator[Bench]:
    reason = registry.unusable(kind) if kind in registry.BACKENDS else ""
    if reason:
        pytest.skip(reason)
    opened = make_bench(kind)
    yield opened
    opened.close()


def paired(bench: Bench) -> tuple[TransportNode, TransportNode]:
    writer, receiver = bench.node(receives=False), bench.node()
    writer.scribble(random.Random(1))
    pair(writer, receiver)
    return writer, receiver


def send(
    writer: TransportNode,
    receiver: TransportNode,
    local: tuple[int, ...],
    remote: tuple[int, ...],
    *,
    tid: TransferId = TID,
    start: int = 0,
    event: CompletionEvent | None = None,
) -> WriteHandle:
    ready = Ready(tid=tid, start=start, local_pages=local, remote_pages=remote, event=event or Completed())
    return writer.transport.write(receiver.incarnation, tid, ready)


def hear(bench: Bench, writer: TransportNode, *receivers: TransportNode) -> None:
    """Wait for each receiver's first word, which may come at any time: over `nixl`, closing a receiver before
    it costs others their connection."""
    if bench.kind != "nixl":
        return
    for receiver in receivers:
        send(receiver, writer, (0,), (0,))
    pump(bench, (writer, *receivers), lambda: len(writer.of_type(Landed)) == len(receivers))
    writer.events.clear()


def is_clean(node: TransportNode) -> bool:
    return not any(node.pool.buffer)


def test_scattered_pages_arrive_byte_identical_where_they_were_meant(bench: Bench) -> None:
    writer, receiver = paired(bench)
    local, remote = (7, 3, 60, 4, 5, 0), (9, 63, 1, 30, 2, 31)
    handle = send(writer, receiver, local, remote)
    pump(bench, (writer, receiver), lambda: bool(receiver.of_type(Landed)) and writer.is_settled(handle))
    assert [receiver.page(page) for page in remote] == [writer.page(page) for page in local]
    untouched = set(range(NUM_PAGES)) - set(remote)
    assert all(not any(receiver.page(page)) for page in untouched)


def test_bytes_are_there_when_landed_is_reported(bench: Bench) -> None:
    writer, receiver = paired(bench)
    pages = tuple(range(NUM_PAGES))
    send(writer, receiver, pages, pages)
    pump(bench, (writer, receiver), lambda: bool(receiver.of_type(Landed)))
    assert receiver.pool.buffer == writer.pool.buffer


def test_landed_carries_sender_transfer_and_range(bench: Bench) -> None:
    writer, receiver = paired(bench)
    handle = send(writer, receiver, (1, 2, 3), (4, 5, 6), start=5)
    pump(bench, (writer, receiver), lambda: bool(receiver.events) and writer.is_settled(handle))
    assert receiver.events == [Landed(peer=writer.incarnation, tid=TID, start=5, stop=8)]
    assert writer.events == [WriteDone(handle=handle)]
    assert (handle.peer, handle.tid, handle.start, handle.stop) == (receiver.incarnation, TID, 5, 8)


def test_request_ids_of_any_text_come_back_unchanged(bench: Bench) -> None:
    writer, receiver = paired(bench)
    tid = TransferId("запрос/\N{SNOWMAN} " + "x" * 200, 2**31)
    send(writer, receiver, (0,), (0,), tid=tid)
    pump(bench, (writer, receiver), lambda: bool(receiver.events))
    assert receiver.events == [Landed(peer=writer.incarnation, tid=tid, start=0, stop=1)]


def test_chunks_of_one_transfer_land_as_the_ranges_they_were_written(bench: Bench) -> None:
    writer, receiver = paired(bench)
    handles = [send(writer, receiver, (i, i + 1), (40 - 2 * i, 41 - 2 * i), start=2 * i) for i in range(10)]
    pump(bench, (writer, receiver), lambda: len(receiver.events) == 10 and len(writer.events) == 10)
    landed = sorted((event.start, event.stop) for event in receiver.of_type(Landed))
    assert landed == [(2 * i, 2 * i + 2) for i in range(10)]
    assert {event.handle.number for event in writer.of_type(WriteDone)} == {h.number for h in handles}


def test_random_writes_of_several_writers_to_several_receivers_all_land(bench: Bench) -> None:
    rng = random.Random(7)
    writers, receivers = [bench.node(receives=False) for _ in range(2)], [bench.node() for _ in range(2)]
    expected: dict[tuple[int, int], bytes] = {}
    free = {at: rng.sample(range(NUM_PAGES), NUM_PAGES) for at in range(2)}
    for writer in writers:
        writer.scribble(rng)
        for receiver in receivers:
            pair(writer, receiver)
    num_writes = 24
    for number in range(num_writes):
        at, count = rng.randrange(2), rng.randint(1, 2)
        writer = rng.choice(writers)
        local = tuple(rng.sample(range(NUM_PAGES), count))
        remote = tuple(free[at].pop() for _ in range(count))
        expected.update({(at, r): writer.page(p) for p, r in zip(local, remote, strict=True)})
        send(writer, receivers[at], local, remote, tid=TransferId(f"r{number}", 1), start=number)
    nodes = writers + receivers
    pump(bench, nodes, lambda: sum(len(node.events) for node in nodes) == 2 * num_writes)
    assert sum(len(node.of_type(Landed)) for node in receivers) == num_writes
    for (at, page), content in expected.items():
        assert receivers[at].page(page) == content
    assert all(not any(receivers[at].page(page)) for at in range(2) for page in free[at])


def test_pages_are_not_sent_before_their_event_completes(bench: Bench) -> None:
    writer, receiver = paired(bench)
    event = OpenLater()
    handle = send(writer, receiver, (1,), (2,), event=event)
    idle(bench, (writer, receiver))
    assert is_clean(receiver)
    assert writer.events == receiver.events == []
    writer.pool.page(1)[:] = b"\x42" * PAGE_BYTES  # what the device wrote last
    event.is_open = True
    pump(bench, (writer, receiver), lambda: bool(receiver.events) and writer.is_settled(handle))
    assert receiver.page(2) == b"\x42" * PAGE_BYTES


def test_an_incomplete_write_does_not_hold_up_a_complete_one(bench: Bench) -> None:
    writer, receiver = paired(bench)
    send(writer, receiver, (1,), (2,), event=OpenLater(), start=0)
    send(writer, receiver, (3,), (4,), start=1)
    pump(bench, (writer, receiver), lambda: bool(receiver.events))
    assert receiver.events == [Landed(peer=writer.incarnation, tid=TID, start=1, stop=2)]


def test_cancelled_unsent_write_fails_and_sends_nothing(bench: Bench) -> None:
    writer, receiver = paired(bench)
    event = OpenLater()
    handle = send(writer, receiver, (1,), (2,), event=event)
    writer.transport.cancel(handle)
    event.is_open = True
    pump(bench, (writer, receiver), lambda: writer.is_settled(handle))
    idle(bench, (writer, receiver))
    assert writer.events == [WriteFailed(handle=handle, reason="cancelled")]
    assert is_clean(receiver)


def test_cancelled_sent_write_settles_exactly_once(bench: Bench) -> None:
    writer, receiver = paired(bench)
    pages = tuple(range(NUM_PAGES))
    handle = send(writer, receiver, pages, pages)
    writer.transport.cancel(handle)
    writer.transport.cancel(handle)
    pump(bench, (writer, receiver), lambda: writer.is_settled(handle))
    idle(bench, (writer, receiver))
    assert len(writer.events) == 1


def test_write_to_a_peer_that_was_never_connected_fails(bench: Bench) -> None:
    writer, stranger = bench.node(receives=False), bench.node()
    handle = send(writer, stranger, (0,), (0,))
    writer.poll()
    assert writer.events == [WriteFailed(handle=handle, reason="peer not connected")]


def test_write_to_a_peer_we_closed_fails(bench: Bench) -> None:
    writer, receiver = paired(bench)
    writer.transport.close_peer(receiver.incarnation)
    handle = send(writer, receiver, (0,), (0,))
    idle(bench, (writer, receiver))
    assert writer.of_type(WriteFailed) == [WriteFailed(handle=handle, reason="peer not connected")]
    assert is_clean(receiver)


def test_closing_a_peer_settles_its_writes_and_no_others(bench: Bench) -> None:
    writer, receiver = paired(bench)
    other = bench.node()
    pair(writer, other)
    hear(bench, writer, receiver, other)
    lost = send(writer, receiver, (0,), (0,), event=OpenLater())
    kept = send(writer, other, (1,), (1,))
    writer.transport.close_peer(receiver.incarnation)
    pump(bench, (writer, other), lambda: writer.is_settled(lost) and writer.is_settled(kept))
    assert writer.of_type(WriteFailed) == [WriteFailed(handle=lost, reason="peer closed")]
    assert writer.of_type(WriteDone) == [WriteDone(handle=kept)]


def test_nothing_of_a_closed_peer_is_written_and_it_learns_so(bench: Bench) -> None:
    writer, receiver = paired(bench)
    first = send(writer, receiver, (0,), (0,))
    pump(bench, (writer, receiver), lambda: writer.is_settled(first) and bool(receiver.events))
    receiver.transport.close_peer(writer.incarnation)
    receiver.events.clear()
    receiver.pool.page(0)[:] = bytes(PAGE_BYTES)
    handles = [send(writer, receiver, (i,), (i,), start=i) for i in range(8)]
    pump(bench, (writer, receiver), lambda: all(writer.is_settled(handle) for handle in handles))
    idle(bench, (writer, receiver))
    assert is_clean(receiver)
    assert receiver.events == []
    failed = [event.handle for event in writer.of_type(WriteFailed)]
    assert (
        sorted(failed, key=lambda handle: handle.number) == handles
    )  # each once; which is noticed first is open
    assert [event.peer for event in writer.of_type(PeerGone)] == [receiver.incarnation]


def test_closing_one_writer_leaves_the_other_writing(bench: Bench) -> None:
    writer, receiver = paired(bench)
    other = bench.node(receives=False)
    other.scribble(random.Random(2))
    pair(other, receiver)
    for node in (writer, other):
        send(node, receiver, (0,), (0,))
    pump(bench, (writer, other, receiver), lambda: len(receiver.events) == 2)
    receiver.transport.close_peer(writer.incarnation)
    send(other, receiver, (1,), (1,), start=1)
    pump(bench, (other, receiver), lambda: len(receiver.events) == 3)
    assert receiver.page(1) == other.page(1)
    assert receiver.of_type(PeerGone) == other.of_type(PeerGone) == []


def test_same_pair_connects_again_after_both_closed(bench: Bench) -> None:
    writer, receiver = paired(bench)
    send(writer, receiver, (0,), (0,))
    pump(bench, (writer, receiver), lambda: bool(receiver.events))
    receiver.transport.close_peer(writer.incarnation)
    writer.transport.close_peer(receiver.incarnation)
    idle(bench, (writer, receiver), 0.1)
    receiver.events.clear()
    pair(writer, receiver)
    send(writer, receiver, (5,), (6,), start=9)
    pump(bench, (writer, receiver), lambda: bool(receiver.events))
    assert receiver.events == [Landed(peer=writer.incarnation, tid=TID, start=9, stop=10)]
    assert receiver.page(6) == writer.page(5)


def test_new_incarnation_at_the_same_address_is_a_new_peer(bench: Bench) -> None:
    writer, receiver = paired(bench)
    send(writer, receiver, (0,), (0,))
    pump(bench, (writer, receiver), lambda: bool(receiver.events))
    bench.stop(writer)
    receiver.transport.close_peer(writer.incarnation)
    receiver.events.clear()
    reborn = bench.node(address=writer.address, receives=False)
    reborn.scribble(random.Random(3))
    assert reborn.address == writer.address
    pair(reborn, receiver)
    send(reborn, receiver, (4,), (4,))
    pump(bench, (reborn, receiver), lambda: bool(receiver.of_type(Landed)))
    assert receiver.of_type(Landed) == [Landed(peer=reborn.incarnation, tid=TID, start=0, stop=1)]
    assert receiver.page(4) == reborn.page(4)


def test_connecting_a_connected_peer_is_refused(bench: Bench) -> None:
    writer, receiver = paired(bench)
    with pytest.raises(TransportError, match=r"^peer: .* is connected already"):
        writer.transport.connect(receiver.incarnation, receiver.transport.offer())


def test_malformed_offers_are_refused_by_field(bench: Bench) -> None:
    writer, receiver = bench.node(receives=False), bench.node()
    good = receiver.transport.offer()
    cases = {
        r"^offer\.name: ": TransportOffer(name="carrier-pigeon", blob=good.blob),
        r"^offer\.blob: ": TransportOffer(name=good.name, blob=b""),
        r"^offer\.blob: .*": TransportOffer(name=good.name, blob=b"XXXX" + good.blob[4:]),
    }
    for pattern, offer in cases.items():
        with pytest.raises(TransportError, match=pattern):
            writer.transport.connect(receiver.incarnation, offer)
    writer.transport.connect(receiver.incarnation, good)


def test_offer_cut_anywhere_never_connects_with_another_error(process_bench: Bench) -> None:
    writer, receiver = process_bench.node(), process_bench.node()
    good = receiver.transport.offer().blob
    for length in range(0, len(good), 7):
        offer = TransportOffer(name=process_bench.kind, blob=good[:length])
        error = connect_error(writer, receiver, offer)
        if error is None:
            writer.transport.close_peer(receiver.incarnation)  # a shortened address is an address
        else:
            assert str(error).startswith("offer.")


def connect_error(
    writer: TransportNode, receiver: TransportNode, offer: TransportOffer
) -> TransportError | None:
    try:
        writer.transport.connect(receiver.incarnation, offer)
    except TransportError as error:
        return error
    return None


def test_pools_of_different_page_size_do_not_connect(bench: Bench) -> None:
    writer = bench.node(receives=False)
    receiver = bench.node(pool=make_pool(page_bytes=PAGE_BYTES // 2))
    with pytest.raises(TransportError, match=rf"page_bytes: {PAGE_BYTES} here, {PAGE_BYTES // 2} there"):
        writer.transport.connect(receiver.incarnation, receiver.transport.offer())


def test_only_the_agreed_bytes_of_pages_of_unequal_size_move(bench: Bench) -> None:
    writer = bench.node(receives=False)
    receiver = bench.node(pool=make_pool(page_bytes=PAGE_BYTES // 2))
    writer.scribble(random.Random(1))
    copy_bytes = 3 * PAGE_BYTES // 8
    pair(writer, receiver, copy_bytes=copy_bytes)
    local, remote = (7, 3, 60), (9, 63, 1)
    handle = send(writer, receiver, local, remote)
    pump(bench, (writer, receiver), lambda: bool(receiver.of_type(Landed)) and writer.is_settled(handle))
    rest = bytes(PAGE_BYTES // 2 - copy_bytes)
    assert [receiver.page(page) for page in remote] == [
        writer.page(page)[:copy_bytes] + rest for page in local
    ]
    assert all(not any(receiver.page(page)) for page in set(range(NUM_PAGES)) - set(remote))


def test_pairs_that_move_pages_whole_and_in_part_share_one_pool(bench: Bench) -> None:
    writer, whole = paired(bench)
    part = bench.node()
    pair(writer, part, copy_bytes=64)
    handles = [send(writer, receiver, (5,), (6,)) for receiver in (whole, part)]
    pump(bench, (writer, whole, part), lambda: all(writer.is_settled(handle) for handle in handles))
    pump(bench, (whole, part), lambda: bool(whole.of_type(Landed) and part.of_type(Landed)))
    assert whole.page(6) == writer.page(5)
    assert part.page(6) == writer.page(5)[:64] + bytes(PAGE_BYTES - 64)


@pytest.mark.parametrize("copy_bytes", [0, -1, PAGE_BYTES // 2 + 1])
def test_more_than_a_page_of_either_side_is_never_agreed(bench: Bench, copy_bytes: int) -> None:
    writer = bench.node(receives=False)
    receiver = bench.node(pool=make_pool(page_bytes=PAGE_BYTES // 2))
    with pytest.raises(TransportError, match=rf"copy_bytes: at most {PAGE_BYTES // 2} .* got {copy_bytes}$"):
        writer.transport.connect(receiver.incarnation, receiver.transport.offer(), copy_bytes=copy_bytes)


def test_pools_of_different_length_connect(bench: Bench) -> None:
    writer = bench.node(receives=False)
    writer.scribble(random.Random(4))
    receiver = bench.node(pool=make_pool(num_pages=2 * NUM_PAGES))
    pair(writer, receiver)
    send(writer, receiver, (1,), (2 * NUM_PAGES - 1,))
    pump(bench, (writer, receiver), lambda: bool(receiver.events))
    assert receiver.page(2 * NUM_PAGES - 1) == writer.page(1)


def test_page_the_peer_does_not_have_fails_the_write_only(bench: Bench) -> None:
    writer, receiver = paired(bench)
    bad = send(writer, receiver, (0, 1), (1, NUM_PAGES))
    good = send(writer, receiver, (2,), (2,), start=2)
    pump(bench, (writer, receiver), lambda: writer.is_settled(bad) and writer.is_settled(good))
    failures = writer.of_type(WriteFailed)
    assert [failure.handle for failure in failures] == [bad]
    assert "remote_pages" in failures[0].reason
    assert not any(receiver.page(1))
    assert writer.of_type(WriteDone) == [WriteDone(handle=good)]


def test_page_we_do_not_have_is_our_error(bench: Bench) -> None:
    writer, receiver = paired(bench)
    with pytest.raises(ValueError, match="local_pages"):
        send(writer, receiver, (NUM_PAGES,), (0,))


def test_news_of_a_connection_that_we_closed_is_not_told_of_the_next(grpc_bench: Bench) -> None:
    writer, receiver = paired(grpc_bench)
    send(writer, receiver, (1,), (2,))
    pump(grpc_bench, [writer, receiver], lambda: bool(receiver.of_type(Landed)))
    receiver.transport.close_peer(writer.incarnation)
    idle(grpc_bench, [receiver])  # the writer's stream ends meanwhile, and nobody asks it
    writer.transport.close_peer(receiver.incarnation)
    pair(writer, receiver)
    handle = send(writer, receiver, (3,), (4,))
    pump(grpc_bench, [writer, receiver], lambda: writer.is_settled(handle))
    assert receiver.page(4) == writer.page(3)
    assert writer.of_type(PeerGone) == receiver.of_type(PeerGone) == []


def test_a_node_that_meets_many_peers_between_two_polls_keeps_the_connection_of_each(
    process_bench: Bench,
) -> None:
    """As one does that starts when its peers all run already."""
    receiver, writers = process_bench.node(), [process_bench.node(receives=False) for _ in range(9)]
    for number, writer in enumerate(writers):
        writer.scribble(random.Random(number))
        pair(writer, receiver)
    handles = [send(writer, receiver, (1,), (number,)) for number, writer in enumerate(writers)]

    def all_settled() -> bool:
        return all(writer.is_settled(handle) for writer, handle in zip(writers, handles, strict=True))

    pump(process_bench, [receiver, *writers], all_settled)
    for number, writer in enumerate(writers):
        assert (number, receiver.page(number)) == (number, writer.page(1))


def test_refused_pages_stay_untouched_and_the_write_fails(grpc_bench: Bench) -> None:
    writer, receiver = paired(grpc_bench)
    receiver.leases.allowed = {1, 2}
    refused = send(writer, receiver, (0, 1), (2, 3))
    granted = send(writer, receiver, (4, 5), (1, 2), start=2)
    pump(grpc_bench, (writer, receiver), lambda: writer.is_settled(refused) and writer.is_settled(granted))
    reason = "pages are not leased to this transfer"
    assert writer.of_type(WriteFailed) == [WriteFailed(handle=refused, reason=reason)]
    assert [(event.start, event.stop) for event in receiver.of_type(Landed)] == [(2, 4)]
    assert receiver.page(2) == writer.page(5)
    assert not any(receiver.page(3))


def test_write_refused_in_its_middle_never_lands(grpc_bench: Bench) -> None:
    writer = grpc_bench.node(receives=False, pool=make_pool(1, page_bytes=1 << 20))
    receiver = grpc_bench.node(pool=make_pool(page_bytes=1 << 20))
    pair(writer, receiver)
    receiver.leases.allowed = {page for page in range(NUM_PAGES) if page != 40}
    pages = tuple(range(NUM_PAGES))
    handle = send(writer, receiver, pages, pages)
    pump(grpc_bench, (writer, receiver), lambda: writer.is_settled(handle))
    idle(grpc_bench, (writer, receiver))
    assert len(writer.of_type(WriteFailed)) == 1
    assert receiver.of_type(Landed) == []
    assert not any(receiver.page(40))


class Child:
    """The other end in its own process."""

    def __init__(
        self, process: "subprocess.Popen[str]", bench: Bench, role: str, node: TransportNode
    ) -> None:
        self._process = process
        assert process.stdout is not None
        theirs = json.loads(process.stdout.readline())
        self.incarnation = Incarnation(theirs["incarnation"])
        offer = TransportOffer(name=bench.kind, blob=bytes.fromhex(theirs["blob"]))
        ends: list[Callable[[], None]] = [
            lambda: node.transport.connect(self.incarnation, offer),
            lambda: self._connect(node),
        ]
        for connect in ends if role == "receiver" else reversed(ends):
            connect()  # the writer before the receiver, as after a Hello

    def _connect(self, node: TransportNode) -> None:
        """Let the child connect to `node`."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        ours = {"incarnation": node.incarnation, "blob": node.transport.offer().blob.hex()}
        self._process.stdin.write(json.dumps(ours) + "\n")
        self._process.stdin.flush()
        assert self._process.stdout.readline() == "connected\n"

    def send(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


StartChild = Callable[[str, TransportNode], Child]


@pytest.fixture
def start_child(process_bench: Bench) -> Iterator[StartChild]:
    """Starts the other end of a node, in the role given. Killed with the test at the latest."""
    with ExitStack() as stack:

        def start(role: str, node: TransportNode) -> Child:
            command = [sys.executable, "-m", "tests.fakes_transport", process_bench.kind, role]
            process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
            stack.enter_context(process)
            stack.callback(process.kill)
            return Child(process, process_bench, role, node)

        yield start


def test_killed_receiver_fails_the_writes_and_is_reported_gone(
    process_bench: Bench, start_child: StartChild
) -> None:
    writer, healthy = paired(process_bench)
    hear(process_bench, writer, healthy)
    child = start_child("receiver", writer)
    pages = tuple(range(NUM_PAGES))
    ready = Ready(tid=TID, start=0, local_pages=pages, remote_pages=pages)
    first = writer.transport.write(child.incarnation, TID, ready)
    pump(process_bench, (writer,), lambda: writer.is_settled(first))
    assert writer.events == [WriteDone(handle=first)]
    child.send(signal.SIGSTOP)
    handles = [writer.transport.write(child.incarnation, TID, ready) for _ in range(8)]
    idle(process_bench, (writer,), 0.05)
    child.kill()
    pump(process_bench, (writer,), lambda: all(writer.is_settled(handle) for handle in handles))
    later = writer.transport.write(child.incarnation, TID, ready)
    pump(process_bench, (writer,), lambda: writer.is_settled(later) and bool(writer.of_type(PeerGone)))
    assert [event.peer for event in writer.of_type(PeerGone)] == [child.incarnation]
    assert later in [event.handle for event in writer.of_type(WriteFailed)]
    writer.transport.close_peer(child.incarnation)
    send(writer, healthy, (0,), (0,))
    pump(process_bench, (writer, healthy), lambda: bool(healthy.of_type(Landed)))


def test_killed_writer_leaves_the_receiver_working(process_bench: Bench, start_child: StartChild) -> None:
    receiver, healthy = process_bench.node(), process_bench.node(receives=False)
    child = start_child("writer", receiver)
    pump(process_bench, (receiver,), lambda: len(receiver.of_type(Landed)) >= 3)
    child.kill()
    idle(process_bench, (receiver,))
    receiver.transport.close_peer(child.incarnation)
    pair(healthy, receiver)
    receiver.events.clear()
    send(healthy, receiver, (0,), (0,))
    pump(process_bench, (healthy, receiver), lambda: bool(receiver.of_type(Landed)))
    assert receiver.of_type(Landed)[-1].peer == healthy.incarnation


def test_stopped_writer_that_resumes_after_teardown_changes_nothing(
    process_bench: Bench, start_child: StartChild
) -> None:
    receiver = process_bench.node()
    child = start_child("writer", receiver)
    pump(process_bench, (receiver,), lambda: len(receiver.of_type(Landed)) >= 3)
    child.send(signal.SIGSTOP)
    receiver.transport.close_peer(child.incarnation)
    receiver.pool.buffer[:] = b"\x55" * receiver.pool.buffer.nbytes
    receiver.poll()
    receiver.events.clear()
    child.send(signal.SIGCONT)
    idle(process_bench, (receiver,), 1.0)
    child.kill()
    assert receiver.pool.buffer == b"\x55" * receiver.pool.buffer.nbytes
    assert receiver.of_type(Landed) == []
