"""Who is a peer: agreed, refused for good, or only not connected this time."""

from engine.layout import PoolSpec, build_layout
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Hello, Refused, SemanticIdentity, TransportOffer
from kv_transfer.peers import PeerTable
from kv_transfer.transport import PoolMemory, Ready, TransportError, TransportEvent, WriteHandle

LAYOUT = build_layout(
    page_size=4,
    dtype="float32",
    pools=[PoolSpec(pool="target", num_layers=1, num_kv_heads=1, head_dim=4)],
)
IDENTITY = SemanticIdentity(model="m", revision="", weights="w", dtype="float32", tokenizer="t")


class FlakyTransport:
    """Connects unless told not to; numbers its offers."""

    name = "flaky"

    def __init__(self) -> None:
        self.is_broken = False
        self.num_offers = 0
        self.open: list[Incarnation] = []

    def register(self, memory: PoolMemory) -> None:
        pass

    def offer(self) -> TransportOffer:
        if self.is_broken:
            raise TransportError("memory: no more connections")
        self.num_offers += 1
        return TransportOffer(name=self.name, blob=b"%d" % self.num_offers)

    def connect(self, peer: Incarnation, offer: TransportOffer, *, copy_bytes: int | None = None) -> None:
        if self.is_broken:
            raise TransportError("offer.metadata: no route")
        self.open.append(peer)

    def write(self, peer: Incarnation, tid: TransferId, pages: Ready) -> WriteHandle:
        raise AssertionError("nothing is written here")

    def poll(self) -> list[TransportEvent]:
        return []

    def cancel(self, handle: WriteHandle) -> None:
        raise AssertionError(f"cancel reached the transport of a peer that is gone: {handle}")

    def close_peer(self, peer: Incarnation) -> None:
        self.open.remove(peer)

    def close(self) -> None:
        self.open.clear()


def hello(name: str, **changes: object) -> Hello:
    values = {
        "incarnation": Incarnation(name),
        "identity": IDENTITY,
        "layout": LAYOUT,
        "offers": (TransportOffer(name="flaky", blob=b""),),
        **changes,
    }
    return Hello(**values)  # type: ignore[arg-type]


def make(*, is_decode: bool = True) -> tuple[FlakyTransport, PeerTable]:
    transport = FlakyTransport()
    return transport, PeerTable(ours=hello("D"), transports={"flaky": transport}, is_decode=is_decode)


def test_every_session_gets_an_offer_of_its_own() -> None:
    _, peers = make()
    assert [peers.hello().offers[0].blob for _ in range(2)] == [b"1", b"2"]


def test_connection_that_fails_once_is_not_held_against_the_peer() -> None:
    transport, peers = make()
    transport.is_broken = True
    outcome = peers.accept(hello("P"))
    assert isinstance(outcome, Refused)
    assert outcome.is_transient
    assert str(outcome) == "transport flaky: 'usable' here, 'offer.metadata: no route' there"
    assert peers.refusal(Incarnation("P")) is None
    transport.is_broken = False
    assert not isinstance(peers.accept(hello("P")), Refused)
    assert peers.states() == {"P": "ready over flaky"}


def test_peer_to_which_no_connection_can_be_offered_is_not_connected_this_time() -> None:
    transport, peers = make(is_decode=False)
    peers.accept(hello("P"))
    transport.is_broken = True
    outcome = peers.reply(Incarnation("P"))
    assert isinstance(outcome, Refused)
    assert outcome.is_transient
    assert str(outcome) == "transport flaky: 'usable' here, 'memory: no more connections' there"
    assert transport.open == []
    assert peers.agreement(Incarnation("P")) is None
    transport.is_broken = False
    peers.accept(hello("P"))
    assert isinstance(peers.reply(Incarnation("P")), Hello)


def test_decode_node_has_said_its_hello_before_it_accepts() -> None:
    _, peers = make()
    peers.accept(hello("P"))
    assert peers.reply(Incarnation("P")) is None


def test_difference_is_remembered_for_the_incarnation() -> None:
    transport, peers = make()
    other = SemanticIdentity(model="m", revision="", weights="x", dtype="float32", tokenizer="t")
    assert isinstance(peers.accept(hello("P", identity=other)), Refused)
    assert peers.states() == {"P": "refused at handshake: weights: 'w' here, 'x' there"}
    assert transport.open == []


def test_dropped_peer_is_closed_once_and_its_late_cancels_go_nowhere() -> None:
    transport, peers = make()
    peers.accept(hello("P"))
    peers.drop(Incarnation("P"))
    peers.drop(Incarnation("P"))
    peers.cancel(WriteHandle(number=1, peer=Incarnation("P"), tid=TransferId("r", 1), start=0, stop=1))
    assert transport.open == []
    assert peers.agreement(Incarnation("P")) is None
