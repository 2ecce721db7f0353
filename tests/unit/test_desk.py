"""A core's desk: what of its routers and peers reaches the core, and what they are told without it."""

from collections.abc import Container

from engine.admission import EngineLimits
from kv_transfer import errors
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Heartbeat, Renew, SemanticIdentity
from tests.unit.test_peers import FlakyTransport, hello, make
from wire.arrivals import Arrival
from wire.core_counts import CoreCounts
from wire.desk import Cancelled, Desk, News, PeerLost, PeerReady
from wire.host_events import (
    Drain,
    DropPeer,
    HostEvent,
    Link,
    LinkClosed,
    LinkMessage,
    LinkOpened,
    PeerAccepted,
    PeerClosed,
    PeerHello,
    PeerMessage,
    PeerRefused,
    ToLink,
)
from wire.intake import Intake
from wire.work import Accepted, Cancel, Finished, NodeRef, Rejected, SamplingParams, Submit

D = Incarnation("decode-1")
LINK = Link(1)
FIRST, SECOND = TransferId("first", 1), TransferId("second", 1)


def make_desk() -> tuple[Desk, FlakyTransport, CoreCounts]:
    """Of a prefill node, with one link open."""
    transport, peers = make(is_decode=False)
    limits = EngineLimits(max_model_len=64, vocab_size=8, num_pages=16, page_size=4)
    counts = CoreCounts()
    desk = Desk(peers=peers, intake=Intake(limits=limits, max_waiting=2), grammars=None, counts=counts)
    assert read(desk, LinkOpened(link=LINK)) == []
    return desk, transport, counts


def read(
    desk: Desk, event: HostEvent, *, running: Container[TransferId] = (), num_waiting: int = 0
) -> list[News]:
    return list(desk.read(event, running=running, num_waiting=num_waiting, now=1.0))


def submit(tid: TransferId) -> LinkMessage:
    message = Submit(
        tid=tid,
        prompt_ids=(1, 2),
        num_prompt_tokens=2,
        sampling=SamplingParams(seed=0, max_tokens=4),
        peer=NodeRef(address="d", incarnation=D),
        deadline_s=9.0,
    )
    return LinkMessage(link=LINK, message=message)


def arrive(desk: Desk, tid: TransferId) -> Arrival:
    [arrival] = read(desk, submit(tid))
    assert isinstance(arrival, Arrival)
    return arrival


def rejections(desk: Desk) -> list[tuple[TransferId, str]]:
    """All that is to be told is refusals."""
    outputs = desk.take_outputs()
    events = [output.event for output in outputs if isinstance(output, ToLink)]
    assert len(events) == len(outputs)
    return [(event.tid, event.code) for event in events if isinstance(event, Rejected)]


def test_a_submit_comes_out_once_and_is_told_of_until_its_last_event() -> None:
    desk, _, _ = make_desk()
    arrival = arrive(desk, FIRST)
    assert (arrival.link, arrival.submit.tid, arrival.received) == (LINK, FIRST, 1.0)
    desk.accept(arrival, queued_behind=3)
    for _ in range(2):
        desk.tell(Finished(tid=FIRST, reason="stop"))
    assert desk.take_outputs() == [
        ToLink(link=LINK, event=Accepted(tid=FIRST, queued_behind=3)),
        ToLink(link=LINK, event=Finished(tid=FIRST, reason="stop")),
    ]
    assert desk.take_outputs() == []


def test_a_submit_that_runs_already_or_finds_no_place_or_a_draining_node_is_refused_here() -> None:
    desk, _, _ = make_desk()
    assert read(desk, submit(FIRST), running={FIRST}) == []
    assert read(desk, submit(SECOND), num_waiting=2) == []
    assert read(desk, Drain()) == []
    assert read(desk, submit(SECOND)) == []
    assert rejections(desk) == [(FIRST, "duplicate"), (SECOND, "overloaded"), (SECOND, "draining")]


def test_what_a_closed_link_leaves_is_cancelled_oldest_first_and_counted_where_it_runs() -> None:
    desk, _, counts = make_desk()
    for tid in (FIRST, SECOND):
        desk.accept(arrive(desk, tid), queued_behind=0)
    assert read(desk, LinkMessage(link=LINK, message=Cancel(tid=TransferId("other", 1)))) == [
        Cancelled(tid=TransferId("other", 1))
    ]
    assert read(desk, LinkClosed(link=LINK), running={FIRST, SECOND}) == [
        Cancelled(tid=FIRST),
        Cancelled(tid=SECOND),
    ]
    assert desk.take_outputs() == []
    assert counts.totals["cancelled"] == 2


def test_only_what_an_agreed_peer_says_comes_out() -> None:
    desk, _, _ = make_desk()
    said = PeerMessage(peer=D, message=Renew(tids=(FIRST,)))
    assert read(desk, said) == []
    assert read(desk, PeerHello(hello=hello(D))) == [PeerReady(peer=D, has_checksums=False)]
    assert read(desk, said) == [said]
    assert read(desk, PeerClosed(peer=D)) == [PeerLost(peer=D, reason="its session closed")]
    assert read(desk, said) == []
    [accepted] = desk.take_outputs()
    assert isinstance(accepted, PeerAccepted)
    assert accepted.reply is not None
    assert accepted.reply.incarnation == Incarnation("D")  # the name of `make`'s table


def test_a_peer_that_says_what_its_role_never_says_is_dropped() -> None:
    desk, transport, counts = make_desk()
    read(desk, PeerHello(hello=hello(D)))
    desk.take_outputs()
    lost = desk.unexpected(D, Heartbeat(engine_step=1))
    assert lost == PeerLost(peer=D, reason="unexpected Heartbeat")
    assert desk.take_outputs() == [DropPeer(peer=D, reason="unexpected Heartbeat")]
    assert transport.open == []
    assert counts.totals == {
        "degraded/transport_fallback": 0,
        "transfer_faults/unexpected_message": 1,
        "peers_dropped": 1,
    }


def test_requests_of_a_pair_that_differs_for_good_are_refused_here() -> None:
    desk, _, _ = make_desk()
    other = SemanticIdentity(model="m", revision="", weights="x", dtype="float32", tokenizer="t")
    [lost] = read(desk, PeerHello(hello=hello(D, identity=other)))
    assert isinstance(lost, PeerLost)
    assert lost.code == errors.INCOMPATIBLE
    assert [type(output) for output in desk.take_outputs()] == [PeerRefused]
    assert read(desk, submit(FIRST)) == []
    assert rejections(desk) == [(FIRST, "pair_refused")]


def test_requests_of_a_pair_that_was_refused_for_the_moment_are_taken() -> None:
    desk, transport, _ = make_desk()
    transport.is_broken = True
    [lost] = read(desk, PeerHello(hello=hello(D)))
    assert isinstance(lost, PeerLost)
    assert lost.code == errors.PEER_LOST
    assert arrive(desk, FIRST).submit.tid == FIRST
