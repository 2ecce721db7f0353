"""What passes between a node's I/O side (the host) and its core (the loop object). Plain values.

The host turns streams into events; the core answers with outputs. In production two queues lie
between them, in simulation nothing does. A link is one router's `Work` stream.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NewType, Protocol

from engine.page_hash import CacheChanges
from kv_transfer.ids import Incarnation
from kv_transfer.messages import Hello, Refused, ToDecode, ToPrefill
from wire.records import Load
from wire.tally import Distribution
from wire.work import Cancel, Event, Submit

Link = NewType("Link", int)
"""Number of one router's stream, unique in this process."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkOpened:
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkMessage:
    link: Link
    message: Submit | Cancel


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkClosed:
    link: Link


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerHello:
    """A session opened and the peer said who it is. The core answers with PeerAccepted or PeerRefused."""

    hello: Hello


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMessage:
    """Of heartbeats only those that tell of steps since the one before."""

    peer: Incarnation
    message: ToPrefill | ToDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerClosed:
    peer: Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Drain:
    """Stop admitting; what runs goes on."""


HostEvent = LinkOpened | LinkMessage | LinkClosed | PeerHello | PeerMessage | PeerClosed | Drain


@dataclass(frozen=True, slots=True, kw_only=True)
class ToLink:
    """One event for the router behind `link`; the host sends all of one step as one Frame."""

    link: Link
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class ToPeer:
    peer: Incarnation
    message: ToPrefill | ToDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerAccepted:
    """The pair fits; `reply` is P's Hello, which its host sends back. D has said its own already: None.

    note: what an operator should be told of the pair, the first time it is accepted.
    """

    peer: Incarnation
    reply: Hello | None
    note: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerRefused:
    """The pair does not fit. The host tells the peer (P) and closes the session; it does not retry it."""

    peer: Incarnation
    refused: Refused


@dataclass(frozen=True, slots=True, kw_only=True)
class DropPeer:
    """Tear the session to this peer down; a new one may follow."""

    peer: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PagesChanged:
    """What the prefix cache took in and gave up in a step; the first has all there is."""

    changes: CacheChanges


Output = ToLink | ToPeer | PeerAccepted | PeerRefused | DropPeer | PagesChanged


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeStatus:
    """A snapshot of the core for the status RPC, metrics and heartbeats."""

    step: int
    load: Load
    quarantined_pages: int
    is_draining: bool
    is_idle: bool
    integrity: str  # of an idle node; empty when every page has exactly one owner
    counters: dict[str, float]
    peers: dict[str, str]
    distributions: Mapping[str, Distribution] = field(default_factory=dict)  # not told over gRPC


class NodeCore(Protocol):
    """A node without I/O: called from one thread only."""

    def hello(self) -> Hello:
        """What this node says first on a session."""
        ...

    def handle(self, event: HostEvent, now: float) -> None:
        """Take one event in. Never raises for anything a peer or a router sent."""
        ...

    def step(self, now: float) -> bool:
        """Do the work there is, at most one forward. False when there was nothing to do."""
        ...

    def take_outputs(self) -> list[Output]:
        """What is to be sent since the last call, in order."""
        ...

    @property
    def idle_wait_s(self) -> float:
        """How long the host may sleep without an event before it must call `step` again."""
        ...

    def status(self) -> NodeStatus:
        """Cheap enough for every heartbeat: only an idle node compares its books of pages."""
        ...

    def problems(self) -> list[str]:
        """What is wrong with the books of pages at this moment. Costs time with every page of the pool."""
        ...
