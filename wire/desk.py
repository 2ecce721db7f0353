"""Who may talk to a node's core, and what it has to tell them: its desk. The same for both roles.

Owns the links to routers, the requests not taken on yet, which peers are let in, and the outputs to all of
them; what is left for the core to act on comes out as `News`. Must never know a transfer, nor a role.
"""

from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass

from engine.grammar import Grammars
from engine.kv_cache import KvCache
from engine.page_hash import CacheChanges
from engine.scheduler import Scheduler
from kv_transfer import errors
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Hello, Refused, ToDecode, ToPrefill
from kv_transfer.peers import PeerTable
from wire.arrivals import Arrival, Arrivals
from wire.core_counts import CoreCounts
from wire.host_events import (
    Drain,
    DropPeer,
    HostEvent,
    LinkClosed,
    LinkMessage,
    LinkOpened,
    NodeStatus,
    Output,
    PagesChanged,
    PeerAccepted,
    PeerClosed,
    PeerHello,
    PeerMessage,
    PeerRefused,
    ToPeer,
)
from wire.intake import PAIR_REFUSED, Intake
from wire.link_table import LinkTable
from wire.records import Load
from wire.work import Accepted, Cancel, Event, Submit


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled:
    """The router wants no more of it; nothing is said back."""

    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerReady:
    """The session and the transport to this peer are up."""

    peer: Incarnation
    has_checksums: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerLost:
    """The connection is torn down, or the peer was refused: nothing of it can write here."""

    peer: Incarnation
    reason: str
    code: str = errors.PEER_LOST


News = Arrival | Cancelled | PeerReady | PeerLost | PeerMessage


class Desk:
    """Invariant: a Submit is answered or comes out as an Arrival; only agreed peers' messages come out."""

    def __init__(
        self, *, peers: PeerTable, intake: Intake, grammars: Grammars | None, counts: CoreCounts
    ) -> None:
        """`grammars` None: this node cannot constrain its output."""
        self._peers = peers
        self._counts = counts
        self._links = LinkTable()
        self._arrivals = Arrivals(intake=intake, links=self._links, grammars=grammars)
        self._outputs: list[Output] = []
        self._num_steps = 0
        self._is_draining = False

    # what comes in

    def read(
        self, event: HostEvent, *, running: Container[TransferId], num_waiting: int, now: float
    ) -> Iterator[News]:
        """Deal with it as far as both roles do alike. `running`, `num_waiting`: what the core took on."""
        match event:
            case LinkOpened(link=link):
                self._links.open(link)
            case LinkMessage(link=link, message=Submit() as submit):
                arrival = self._arrivals.submit(
                    link,
                    submit,
                    num_waiting=num_waiting,
                    is_live=submit.tid in running,
                    is_draining=self._is_draining,
                    now=now,
                )
                yield from self._let_in(arrival)
            case LinkMessage(message=Cancel(tid=tid)):
                yield self._cancel(tid, running)
            case LinkClosed(link=link):
                for tid in self._links.close(link):
                    yield self._cancel(tid, running)
            case PeerHello(hello=hello):
                yield self._meet(hello)
            case PeerMessage(peer=peer):
                # What a peer that we dropped said before it knows is of no use; its close is on the way.
                if self._peers.agreement(peer) is not None:
                    yield event
            case PeerClosed(peer=peer):
                yield self._lose(peer, "its session closed")
            case Drain():
                self._is_draining = True

    def compiled(self, *, now: float) -> Iterator[Arrival]:
        """The requests whose grammar is ready by now."""
        for arrival in self._arrivals.take(now=now):
            yield from self._let_in(arrival)

    @property
    def num_held(self) -> int:
        """Requests that wait for their grammar, apart from all the core has taken on."""
        return self._arrivals.num_held

    # requests

    def accept(self, arrival: Arrival, *, queued_behind: int) -> None:
        """The core takes it on; it may `tell` of it now."""
        self._links.own(arrival.link, arrival.submit.tid)
        self._links.emit(Accepted(tid=arrival.submit.tid, queued_behind=queued_behind))

    def refuse(self, arrival: Arrival, code: str, reason: str, *, retryable: bool = False) -> None:
        """The core does not take it on."""
        self._arrivals.refuse(arrival, code, reason, retryable=retryable)

    def tell(self, event: Event) -> None:
        """To the router that submitted `event.tid`; dropped when it is gone or has heard the end."""
        self._links.emit(event)

    # peers

    def send(self, peer: Incarnation, message: ToPrefill | ToDecode) -> None:
        self._outputs.append(ToPeer(peer=peer, message=message))

    def drop(self, peer: Incarnation, reason: str) -> PeerLost:
        """Tear its connection and its session down; a new one may follow."""
        self._counts.count("peers_dropped")
        self._outputs.append(DropPeer(peer=peer, reason=reason))
        return self._lose(peer, reason)

    def unexpected(self, peer: Incarnation, message: ToPrefill | ToDecode) -> PeerLost:
        """It said what its role never says."""
        self._counts.unexpected_message()
        return self.drop(peer, f"unexpected {type(message).__name__}")

    # what goes out

    def stepped(self, *, has_progress: bool, changes: CacheChanges | None) -> None:
        """A step is over. `changes`: of the prefix cache."""
        self._num_steps += has_progress
        if changes is not None:
            self._outputs.append(PagesChanged(changes=changes))

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = [*self._outputs, *self._links.take()], []
        return outputs

    def status(
        self,
        *,
        cache: KvCache,
        scheduler: Scheduler,
        num_incoming: int = 0,
        is_idle: bool,
        problems: Callable[[], list[str]],
        counters: Mapping[str, float],
    ) -> NodeStatus:
        """`num_incoming`: requests unknown to the scheduler. `counters`: those of the core's parts."""
        is_idle = is_idle and not self.num_held
        return NodeStatus(
            step=self._num_steps,
            load=Load(
                free_pages=cache.num_available,
                total_pages=cache.num_pages,
                running=scheduler.num_running,
                waiting=scheduler.num_waiting + num_incoming + self.num_held,
                queued_tokens=scheduler.queued_tokens,
            ),
            quarantined_pages=cache.num_quarantined,
            is_draining=self._is_draining,
            is_idle=is_idle,
            integrity="; ".join(problems()) if is_idle else "",
            counters={**counters, **self._counts.totals, "rejected": self._arrivals.num_rejected},
            peers=self._peers.states(),
            distributions=self._counts.times.read(),
        )

    def _let_in(self, arrival: Arrival | None) -> Iterator[Arrival]:
        if arrival is None:
            return
        peer = arrival.submit.peer
        refused = None if peer is None else self._peers.refusal(peer.incarnation)
        if refused is None:
            yield arrival
        else:
            self.refuse(arrival, PAIR_REFUSED, f"refused at handshake: {refused}", retryable=True)

    def _cancel(self, tid: TransferId, running: Container[TransferId]) -> Cancelled:
        self._links.forget(tid)
        self._counts.count("cancelled", self._arrivals.drop(tid) + (tid in running))
        return Cancelled(tid=tid)

    def _meet(self, hello: Hello) -> PeerReady | PeerLost:
        peer = hello.incarnation
        agreed = self._peers.accept(hello)
        reply = agreed if isinstance(agreed, Refused) else self._peers.reply(peer)
        if isinstance(reply, Refused):
            self._counts.count("peers_refused")
            self._outputs.append(PeerRefused(peer=peer, refused=reply))
            code = errors.PEER_LOST if reply.is_transient else errors.INCOMPATIBLE
            return PeerLost(peer=peer, reason=f"refused at handshake: {reply}", code=code)
        assert not isinstance(agreed, Refused)
        self._counts.count("degraded/transport_fallback", self._peers.is_fallback(agreed))
        note = self._peers.fresh_note(peer)
        self._outputs.append(PeerAccepted(peer=peer, reply=reply, note=note))
        return PeerReady(peer=peer, has_checksums=agreed.has_checksums)

    def _lose(self, peer: Incarnation, reason: str) -> PeerLost:
        self._peers.drop(peer)
        return PeerLost(peer=peer, reason=reason)
