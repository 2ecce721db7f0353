"""A prefill and a decode core joined by hand: real engines, the memory transport, no host, our own clock."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from decode_node.loop import DecodeLoop
from engine.admission import EngineLimits
from engine.grammar import Grammars
from kv_transfer.checksums import checksums_of_copies
from kv_transfer.decode_side import DecodeTransfers
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Hello, SemanticIdentity, TransportOffer
from kv_transfer.peers import PeerTable
from kv_transfer.prefill_side import PrefillTransfers
from kv_transfer.transport import PoolMemory, Transport, WriteHandle
from kv_transfer.transports.memory import Fault, MemoryFabric, MemoryTransport
from prefill_node.loop import PrefillLoop
from speculative.loop import EngineLoop
from speculative.null import NullConfig, NullProposer
from speculative.proposer import Proposer
from speculative.registry import create_proposer
from tests.engines import VOCAB_SIZE, make_engine
from tests.fakes_transport import Bench
from wire.host_events import (
    DropPeer,
    Link,
    LinkClosed,
    LinkMessage,
    LinkOpened,
    NodeCore,
    PeerAccepted,
    PeerClosed,
    PeerHello,
    PeerMessage,
    PeerRefused,
    ToLink,
    ToPeer,
)
from wire.intake import Intake
from wire.work import (
    Cancel,
    Event,
    Failed,
    Finished,
    NodeRef,
    Preempted,
    Rejected,
    SamplingParams,
    Submit,
    Tokens,
)

IDENTITY = SemanticIdentity(model="tiny", revision="", weights="w", dtype="float32", tokenizer="t")
STEP_S = 0.01
LINK = Link(1)


def peers_of(
    engine: EngineLoop,
    name: str,
    plane: MemoryFabric | Bench,
    *,
    is_decode: bool,
    identity: SemanticIdentity,
    hello: Mapping[str, bool] | None = None,
) -> PeerTable:
    """`plane`: the fabric, or a bench that makes transports of another kind. `hello`: what else it says."""
    layout = engine.pool.layout
    incarnation = Incarnation(name)
    memory = memory_of(engine)
    if isinstance(plane, MemoryFabric):
        transport: Transport = MemoryTransport(incarnation, plane)
        transport.register(memory)
    else:
        transport = plane.node(pool=memory, receives=is_decode, incarnation=incarnation).transport
    ours = Hello(
        incarnation=incarnation,
        identity=with_draft(identity, engine.proposer),
        layout=layout,
        offers=(TransportOffer(name=transport.name, blob=b""),),
        **{"checksums": True, **(hello or {})},
    )
    return PeerTable(ours=ours, transports={transport.name: transport}, is_decode=is_decode)


def memory_of(engine: EngineLoop) -> PoolMemory:
    pool = engine.pool
    return PoolMemory(
        address=pool.address,
        page_bytes=pool.layout.page_bytes,
        num_pages=pool.num_pages,
        buffer=pool.buffer,
    )


def with_draft(identity: SemanticIdentity, proposer: Proposer) -> SemanticIdentity:
    """As a node names itself that runs this proposer."""
    needs = proposer.needs
    return replace(
        identity,
        draft=needs.draft,
        draft_weights=needs.draft_weights,
        algorithm=needs.prefill_identity,
    )


def make_prefill(
    name: str,
    fabric: MemoryFabric | Bench,
    *,
    proposer: Proposer | None = None,
    identity: SemanticIdentity = IDENTITY,
    grammars: Grammars | None = None,
    hello: Mapping[str, bool] | None = None,
    **engine_options: int,
) -> PrefillLoop:
    engine = make_engine(proposer, **engine_options)  # type: ignore[arg-type]
    peers = peers_of(engine, name, fabric, is_decode=False, identity=identity, hello=hello)
    return PrefillLoop(
        engine=engine,
        transfers=PrefillTransfers(
            page_size=engine.cache.page_size,
            page_checksum=checksums_of_copies(engine.pool.page, peers),
        ),
        peers=peers,
        intake=intake_of(engine),
        grammars=grammars,
    )


def make_decode(
    name: str,
    fabric: MemoryFabric | Bench,
    *,
    algorithm: str = "none",
    proposer: Proposer | None = None,
    identity: SemanticIdentity = IDENTITY,
    grammars: Grammars | None = None,
    hello: Mapping[str, bool] | None = None,
    **engine_options: int,
) -> DecodeLoop:
    proposer = proposer or create_proposer(algorithm, default_options(algorithm))
    engine = make_engine(proposer, **engine_options)  # type: ignore[arg-type]
    peers = peers_of(engine, name, fabric, is_decode=True, identity=identity, hello=hello)
    return DecodeLoop(
        engine=engine,
        transfers=DecodeTransfers(
            page_size=engine.cache.page_size,
            page_checksum=checksums_of_copies(engine.pool.page, peers),
        ),
        peers=peers,
        intake=intake_of(engine),
        grammars=grammars,
    )


def default_options(algorithm: str) -> dict[str, object]:
    return {} if algorithm == "none" else {"num_draft_tokens": 6}


def prefill_proposer(algorithm: str, options: Mapping[str, object]) -> Proposer:
    """What a prefill node runs: the algorithm where it needs the prompt, else nothing."""
    proposer = create_proposer(algorithm, options)
    return proposer if proposer.needs.prefill_identity else NullProposer(NullConfig())


def intake_of(engine: EngineLoop) -> Intake:
    limits = EngineLimits(
        max_model_len=512,
        vocab_size=VOCAB_SIZE,
        num_pages=engine.cache.num_pages,
        page_size=engine.cache.page_size,
    )
    return Intake(limits=limits, max_waiting=64)


class NodePair:
    """One P and one D, one router link to each. `events` holds what each told the router, in order."""

    def __init__(
        self,
        *,
        faults: Callable[[WriteHandle], Fault] | None = None,
        algorithm: str = "none",
        draft_options: Mapping[str, object] | None = None,
        decode_proposer: Proposer | None = None,
        bench: Bench | None = None,
        prefill_options: Mapping[str, Any] | None = None,
        decode_options: Mapping[str, Any] | None = None,
    ) -> None:
        """The options go to `make_prefill` and `make_decode`. `bench`: makes the transports."""
        self.now = 0.0
        self._bench = bench
        clock = lambda: self.now  # noqa: E731 - the fabric's clock is ours
        self.fabric = MemoryFabric(clock=clock, **({} if faults is None else {"faults": faults}))
        options = draft_options or default_options(algorithm)
        self.prefill = make_prefill(
            "P",
            bench or self.fabric,
            **{"proposer": prefill_proposer(algorithm, options), **(prefill_options or {})},
        )
        self.decode = make_decode(
            "D",
            bench or self.fabric,
            **{
                "proposer": decode_proposer or create_proposer(algorithm, options),
                **(decode_options or {}),
            },
        )
        self.events: dict[str, list[Event]] = {"P": [], "D": []}
        self.timeline: list[tuple[float, str, str]] = []
        self.refused: list[str] = []
        self.notes: list[str] = []
        self.tamper: Callable[[Any], Any] = lambda message: message
        self.is_connected = False
        for core in (self.prefill, self.decode):
            core.handle(LinkOpened(link=LINK), 0.0)
        self.connect()

    def connect(self) -> None:
        self.is_connected = True
        self.prefill.handle(PeerHello(hello=self.decode.hello()), self.now)
        self.decode.handle(PeerHello(hello=self.prefill.hello()), self.now)
        self.deliver()

    def disconnect(self) -> None:
        if self.is_connected:
            self.is_connected = False
            self.prefill.handle(PeerClosed(peer=Incarnation("D")), self.now)
            self.decode.handle(PeerClosed(peer=Incarnation("P")), self.now)
            self.deliver()

    def submit(
        self,
        key: str,
        prompt: list[int],
        *,
        deadline_s: float = 1e6,
        grammar: str = "",
        delivered: Sequence[int] = (),
        attempt: int = 1,
        **sampling: object,
    ) -> TransferId:
        """`delivered`: outputs of earlier attempts."""
        tid = TransferId(key, attempt)
        params = {"seed": 0, "max_tokens": 12, "temperature": 0.0, **sampling}
        for core, peer in ((self.prefill, "D"), (self.decode, "P")):
            core.handle(
                LinkMessage(
                    link=LINK,
                    message=Submit(
                        tid=tid,
                        prompt_ids=(*prompt, *delivered),
                        num_prompt_tokens=len(prompt),
                        sampling=SamplingParams(**params),  # type: ignore[arg-type]
                        peer=NodeRef(address=peer, incarnation=Incarnation(peer)),
                        deadline_s=deadline_s,
                        grammar=grammar,
                    ),
                ),
                self.now,
            )
        self.deliver()
        return tid

    def cancel(self, tid: TransferId) -> None:
        for core in (self.prefill, self.decode):
            core.handle(LinkMessage(link=LINK, message=Cancel(tid=tid)), self.now)
        self.deliver()

    def lose_router(self) -> None:
        for core in (self.prefill, self.decode):
            core.handle(LinkClosed(link=LINK), self.now)
            core.handle(LinkOpened(link=LINK), self.now)
        self.deliver()

    def step(self) -> None:
        for core in (self.prefill, self.decode):
            core.step(self.now)
            self.deliver()
            self.check()
        if self._bench is None:
            self.now += STEP_S
        else:
            self._bench.tick()  # its time is not ours: however slow it is, no deadline passes

    def run(self, *, limit: int = 3000) -> None:
        """Step until both nodes are idle."""
        for _ in range(limit):
            if self.prefill.status().is_idle and self.decode.status().is_idle:
                return
            self.step()
        raise AssertionError("the pair does not come to rest")

    def deliver(self) -> None:
        """Carry outputs over until there are none."""
        while True:
            moved = False
            for name, core, other in (("P", self.prefill, self.decode), ("D", self.decode, self.prefill)):
                for output in core.take_outputs():
                    moved = True
                    self._carry(name, output, other)
            if not moved:
                return

    def _carry(self, name: str, output: object, other: NodeCore) -> None:
        match output:
            case ToLink(event=event):
                self.events[name].append(event)
            case ToPeer(message=message):
                self.timeline.append((self.now, name, type(message).__name__))
                if self.is_connected:
                    sent = self.tamper(message)
                    other.handle(PeerMessage(peer=Incarnation(name), message=sent), self.now)
            case PeerRefused(refused=refused):
                self.refused.append(str(refused))
            case DropPeer():
                self.is_connected = False
                other.handle(PeerClosed(peer=Incarnation(name)), self.now)
            case PeerAccepted(note=note):
                self.notes += [f"{name}: {note}"] if note else []

    def check(self) -> None:
        assert [core.problems() for core in (self.prefill, self.decode)] == [[], []]

    def tokens(self, tid: TransferId) -> list[int]:
        """Output ids by index; every index exactly once."""
        found: dict[int, int] = {}
        for events in self.events.values():
            for event in events:
                if isinstance(event, Tokens) and event.tid == tid:
                    for offset, token in enumerate(event.ids):
                        assert event.first_index + offset not in found, f"{tid}: index twice"
                        found[event.first_index + offset] = token
        assert sorted(found) == list(range(len(found)))
        return [found[index] for index in sorted(found)]

    def rounds(self, tid: TransferId) -> list[tuple[int, tuple[int, ...], int, int]]:
        """(first index, ids, drafted, accepted) of every report, P's first token included."""
        found = [
            (event.first_index, event.ids, event.drafted, event.accepted)
            for events in self.events.values()
            for event in events
            if isinstance(event, Tokens) and event.tid == tid
        ]
        return sorted(found)

    def ends(self, tid: TransferId) -> tuple[str, str]:
        """How P and D ended it: the reason or code of the one terminal event each sent ("" for none)."""
        return self._end("P", tid), self._end("D", tid)

    def _end(self, name: str, tid: TransferId) -> str:
        ends = [
            event
            for event in self.events[name]
            if event.tid == tid and isinstance(event, Finished | Failed | Rejected | Preempted)
        ]
        assert len(ends) <= 1, f"{tid} ended {len(ends)} times on {name}: {ends}"
        if not ends:
            return ""
        assert [event for event in self.events[name] if event.tid == tid][-1] is ends[0]
        (end,) = ends
        if isinstance(end, Finished):
            return end.reason
        return "preempted" if isinstance(end, Preempted) else end.code

    def is_at_rest(self) -> bool:
        """Every page available again on both sides."""
        loads = [core.status().load for core in (self.prefill, self.decode)]
        return all(load.free_pages == load.total_pages for load in loads)
