"""What a node does while nothing happens: it sleeps, and it looks at its books only then."""

from kv_transfer.checksums import checksums_of_copies
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.prefill_side import PrefillTransfers
from kv_transfer.transports.memory import Fault, MemoryFabric
from prefill_node.loop import PrefillLoop
from tests.conformance.test_loop import prompt_of
from tests.engines import make_engine, make_request
from tests.node_pair import IDENTITY, LINK, NodePair, intake_of, make_decode, make_prefill, peers_of
from wire.host_events import LinkMessage, LinkOpened, PeerAccepted, PeerHello
from wire.work import Cancel, NodeRef, SamplingParams, Submit


def waits(pair: NodePair) -> tuple[float, float]:
    return pair.prefill.idle_wait_s, pair.decode.idle_wait_s


def test_a_request_that_waits_for_an_event_of_the_host_keeps_no_node_awake() -> None:
    pair = NodePair(faults=lambda _: Fault(delay_s=0.05))
    pair.disconnect()
    tid = pair.submit("r", prompt_of(20))
    for _ in range(5):
        pair.step()
    assert waits(pair) == (0.1, 0.1)  # P has computed and waits for a Reserve, D for its session with P
    pair.connect()
    for _ in range(2):
        pair.step()
    assert waits(pair) == (0.0005, 0.002)  # bytes are under way
    pair.run()
    assert pair.ends(tid) == ("handed_over", "length")
    assert waits(pair) == (0.1, 0.1)


def test_only_an_idle_node_compares_its_books_for_a_status() -> None:
    engine = make_engine()
    peers = peers_of(engine, "P", MemoryFabric(clock=lambda: 0.0), is_decode=False, identity=IDENTITY)
    core = PrefillLoop(
        engine=engine,
        transfers=PrefillTransfers(
            page_size=engine.cache.page_size,
            page_checksum=checksums_of_copies(engine.pool.page, peers),
        ),
        peers=peers,
        intake=intake_of(engine),
    )
    engine.cache.grow(make_request("unknown to the engine", [1]), 1)
    problem = "page 0 is booked to (<Owner.REQUEST: 'request'>, 'unknown to the engine') but held by None"
    core.handle(LinkOpened(link=LINK), 0.0)
    assert core.status().integrity == problem
    tid = TransferId("r", 1)
    submit = Submit(
        tid=tid,
        prompt_ids=(1, 2, 3),
        num_prompt_tokens=3,
        sampling=SamplingParams(seed=0, max_tokens=4),
        peer=NodeRef(address="D", incarnation=Incarnation("D")),
        deadline_s=9.0,
    )
    core.handle(LinkMessage(link=LINK, message=submit), 0.0)
    assert (core.status().is_idle, core.status().integrity) == (False, "")
    assert core.problems() == [problem]
    core.handle(LinkMessage(link=LINK, message=Cancel(tid=tid)), 0.0)
    assert (core.status().is_idle, core.status().integrity) == (True, problem)


def test_decode_node_offers_a_peer_one_connection_only() -> None:
    fabric = MemoryFabric(clock=lambda: 0.0)
    core = make_decode("D", fabric)
    core.handle(PeerHello(hello=make_prefill("P", fabric).hello()), 0.0)
    assert core.take_outputs() == [PeerAccepted(peer=Incarnation("P"), reply=None)]
