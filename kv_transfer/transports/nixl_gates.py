"""The receiving end of the `nixl` transport: one NIXL agent ("gate") per offer, for one peer each.

Owns the gates, and which peer each is bound to. Must never know a write of ours.

Teardown, as measured with NIXL 1.5.1 over shared memory and TCP, a peer writing all the while:
- `remove_remote_agent` at the receiver stops nothing: the writer reconnects by itself and goes on.
- `deregister_memory` at the receiver stops nothing either (over RDMA it must; not measured).
- Destroying the receiving agent stops everything, at once and for good: its worker is what copies arriving
  data (TCP, shared memory: measured), and its registration is what the NIC checks (RDMA: by contract).
Hence a gate per peer, made for the offer, bound to the peer by the peer's first notification and destroyed
by `close_peer`; other peers keep theirs. While no notification has bound a gate, it cannot be told whose it
is: closing a peer without a bound gate destroys every unbound one, and peers that then lose theirs
get PeerGone and pair again.
- Copies made by the writer's own CPU straight into our memory (UCX `cma`, also xpmem and knem) are outside
  the receiver's power: with `cma`, a writer stopped in the middle and resumed after the teardown did write
  on. So `cma` is off unless the user sets UCX_TLS, which is honoured as it is: on one host UCX_TLS=all is
  about twice as fast, without the guarantee.
"""

import itertools
from collections.abc import Container
from dataclasses import dataclass
from typing import Any

from kv_transfer.ids import Incarnation
from kv_transfer.transport import Landed, PeerGone, PoolMemory, TransportError
from kv_transfer.transports.nixl_agent import NIXL_ERRORS, make_agent
from kv_transfer.transports.nixl_messages import BIND, NixlOffer, unpack_notice

MAX_UNBOUND_GATES = 8

_NAME_SEPARATOR = "/"


def owner_of(gate_name: str) -> str:
    """The incarnation of the node whose gate it is."""
    return gate_name.split(_NAME_SEPARATOR, 1)[0]


@dataclass(slots=True, kw_only=True)
class _Gate:
    """A receiving agent. Destroyed by dropping it: nothing else may hold a reference to `agent`."""

    name: str
    agent: Any
    registration: Any
    peer: Incarnation | None = None


class NixlGates:
    """Invariant: a gate serves the peer whose notification reached it first, until it is destroyed."""

    def __init__(self, incarnation: Incarnation, *, ucx_options: dict[str, str]) -> None:
        self._incarnation = incarnation
        self._ucx_options = ucx_options
        self._numbers = itertools.count(1)
        self._gates: dict[str, _Gate] = {}

    def open(self, memory: PoolMemory) -> NixlOffer:
        """A fresh one (tens of milliseconds). At most MAX_UNBOUND_GATES unclaimed ones are kept."""
        unbound = self._names(None)
        for name in unbound[: max(0, len(unbound) + 1 - MAX_UNBOUND_GATES)]:
            self._destroy(name)
        name = f"{self._incarnation}{_NAME_SEPARATOR}{next(self._numbers)}"
        try:
            agent, registration = make_agent(name, memory, self._ucx_options)
            metadata = agent.get_agent_metadata()
        except NIXL_ERRORS as error:
            raise TransportError(f"memory: NIXL cannot register the pool: {error}") from error
        self._gates[name] = _Gate(name=name, agent=agent, registration=registration)
        return NixlOffer(
            address=memory.address,
            page_bytes=memory.page_bytes,
            num_pages=memory.num_pages,
            gate=name,
            metadata=metadata,
        )

    def read(
        self, connected: Container[Incarnation], *, only_unbound: bool = False
    ) -> list[Landed | PeerGone]:
        """What `connected` peers have written by now, and whose gates broke."""
        names = self._names(None) if only_unbound else list(self._gates)
        return [event for name in names for event in self._read(name, connected)]

    def destroy_of(self, peer: Incarnation) -> bool:
        """Nothing of the peer can write here any more; False when none of the gates is bound to it."""
        names = self._names(peer)
        for name in names:
            self._destroy(name)
        return bool(names)

    def destroy_unbound(self) -> set[Incarnation | None]:
        """Returns the peers whose gates are left."""
        for name in self._names(None):
            self._destroy(name)
        return {gate.peer for gate in self._gates.values()}

    def close(self) -> None:
        for name in list(self._gates):
            self._destroy(name)

    def _names(self, peer: Incarnation | None) -> list[str]:
        """Of the gates bound to `peer`, or (None) to nobody yet."""
        return [gate.name for gate in self._gates.values() if gate.peer == peer]

    def _destroy(self, name: str) -> None:
        """The agent's destructor joins its progress thread: after this line nothing is written through it."""
        del self._gates[name]

    def _read(self, name: str, connected: Container[Incarnation]) -> list[Landed | PeerGone]:
        gate = self._gates[name]
        try:
            notices: dict[str, list[bytes]] = gate.agent.get_new_notifs()
        except NIXL_ERRORS as error:
            self._destroy(name)
            return [] if gate.peer is None else [PeerGone(peer=gate.peer, reason=str(error))]
        events: list[Landed | PeerGone] = []
        for sender, messages in notices.items():
            peer = Incarnation(sender)
            gate.peer = gate.peer or peer
            if gate.peer == peer and peer in connected:
                landed = [unpack_notice(peer, message) for message in messages if message != BIND]
                events += [event for event in landed if event is not None]
        return events
