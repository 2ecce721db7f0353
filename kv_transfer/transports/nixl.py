"""The `nixl` transport: one-sided writes through NIXL's UCX backend (RDMA, shared memory, TCP).

Owns the NIXL agents of this process: one sender for all peers, and one receiving agent ("gate") per offer.
Must be called from one thread only (NIXL's own locking is off); each agent runs a NIXL progress thread, so
data also moves while that thread computes. A posted write passes page indices into lists prepared once, and
its notification carries (transfer id, range), which is what the receiver reports as Landed.

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
- At the writer, `close_peer` releases the handles and drops the peer; a write that cannot be released settles
  when it can, and until then NIXL reads its pages. A failure that may leave bytes under way is preceded by
  PeerGone: the receiver must tear down.
"""

import itertools
import logging
import os
from dataclasses import dataclass, field
from typing import Any

import nixl._bindings as nixl_bindings
import numpy as np
from nixl._api import nixl_agent, nixl_agent_config

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import TransportOffer
from kv_transfer.transport import (
    PeerGone,
    PoolMemory,
    Ready,
    TransportError,
    TransportEvent,
    WriteDone,
    WriteHandle,
)
from kv_transfer.transports.nixl_messages import (
    BIND,
    NAME,
    NixlOffer,
    pack_notice,
    unpack_notice,
    unpack_offer,
)
from kv_transfer.transports.outbox import CANCELLED, PEER_CLOSED, PEER_UNKNOWN, Outbox
from kv_transfer.transports.registry import Built, Setup

MAX_UNBOUND_GATES = 8
PROGRESS_DELAY_US = 100

_NAME_SEPARATOR = "/"

NIXL_ERRORS: tuple[type[Exception], ...] = (
    nixl_bindings.nixlBackendError,
    nixl_bindings.nixlCancelledError,
    nixl_bindings.nixlInvalidParamError,
    nixl_bindings.nixlMismatchError,
    nixl_bindings.nixlNotAllowedError,
    nixl_bindings.nixlNotFoundError,
    nixl_bindings.nixlNotPostedError,
    nixl_bindings.nixlNotSupportedError,
    nixl_bindings.nixlRemoteDisconnectError,
    nixl_bindings.nixlRepostActiveError,
    nixl_bindings.nixlUnknownError,
)


@dataclass(slots=True, kw_only=True)
class _Gate:
    """A receiving agent. Destroyed by dropping it: nothing else may hold a reference to `agent`."""

    name: str
    agent: Any
    registration: Any
    peer: Incarnation | None = None


@dataclass(slots=True, kw_only=True)
class _Link:
    """The sending side of one connected peer."""

    agent_name: str
    num_pages: int
    local_pages: Any  # prepared descriptor list of our pool, of as many bytes of a page as travel
    pages: Any  # the same of the peer's pool
    writes: dict[int, tuple[WriteHandle, Any]] = field(default_factory=dict)  # posted, by handle number
    is_lost: bool = False


@dataclass(slots=True, kw_only=True)
class _Zombie:
    """A posted write of a dropped peer that NIXL would not release yet."""

    handle: WriteHandle
    transfer: Any
    reason: str


def default_ucx_options() -> dict[str, str]:
    """UCX settings that keep the teardown guarantee; a UCX_TLS in the environment has the last word."""
    return {} if "UCX_TLS" in os.environ else {"engine_config": "TLS=^cma"}


def make_agent(name: str, memory: PoolMemory, ucx_options: dict[str, str]) -> tuple[Any, Any]:
    """An agent with the pool registered, and the registration.

    NIXL's Python class hard-codes a progress thread that spins on a whole core, so it wraps an agent of our
    own configuration instead: a thread that wakes on traffic and every PROGRESS_DELAY_US.
    """
    config = nixl_bindings.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = PROGRESS_DELAY_US
    config.syncMode = nixl_bindings.NIXL_THREAD_SYNC_NONE
    agent = nixl_agent(name, nixl_agent_config(enable_prog_thread=False, backends=[]))
    agent.agent = nixl_bindings.nixlAgent(name, config)
    agent.create_backend("UCX", dict(ucx_options))
    return agent, agent.register_memory([(memory.address, memory.buffer.nbytes, 0, "")], "DRAM")


class NixlTransport:
    """See the module docstring for who owns which agent."""

    def __init__(self, incarnation: Incarnation, *, ucx_options: dict[str, str] | None = None) -> None:
        self.incarnation = incarnation
        self._ucx_options = default_ucx_options() if ucx_options is None else ucx_options
        self._outbox = Outbox()
        self._gate_numbers = itertools.count(1)
        self._gates: dict[str, _Gate] = {}
        self._links: dict[Incarnation, _Link] = {}
        self._zombies: list[_Zombie] = []
        self._memory: PoolMemory | None = None
        self._sender: Any = None
        self._registration: Any = None
        self._local_pages: dict[int, Any] = {}  # prepared descriptor lists by bytes of a page
        if "NIXL_LOG_LEVEL" not in os.environ:
            logging.getLogger("nixl").setLevel(logging.WARNING)

    @property
    def name(self) -> str:
        return NAME

    @property
    def memory(self) -> PoolMemory:
        if self._memory is None:
            raise TransportError("memory: not registered")
        return self._memory

    def register(self, memory: PoolMemory) -> None:
        self._memory = memory
        try:
            self._sender, self._registration = make_agent(self.incarnation, self.memory, self._ucx_options)
            self._prepare(memory.page_bytes)
        except NIXL_ERRORS as error:
            raise TransportError(f"memory: NIXL cannot register the pool: {error}") from error

    def offer(self) -> TransportOffer:
        """Makes a fresh gate (tens of milliseconds). At most MAX_UNBOUND_GATES unclaimed ones are kept."""
        unbound = [gate.name for gate in self._gates.values() if gate.peer is None]
        for name in unbound[: max(0, len(unbound) + 1 - MAX_UNBOUND_GATES)]:
            self._destroy_gate(name)
        name = f"{self.incarnation}{_NAME_SEPARATOR}{next(self._gate_numbers)}"
        try:
            agent, registration = make_agent(name, self.memory, self._ucx_options)
            metadata = agent.get_agent_metadata()
        except NIXL_ERRORS as error:
            raise TransportError(f"memory: NIXL cannot register the pool: {error}") from error
        self._gates[name] = _Gate(name=name, agent=agent, registration=registration)
        blob = NixlOffer(
            address=self.memory.address,
            page_bytes=self.memory.page_bytes,
            num_pages=self.memory.num_pages,
            gate=name,
            metadata=metadata,
        ).pack()
        return TransportOffer(name=NAME, blob=blob)

    def connect(self, peer: Incarnation, offer: TransportOffer, *, copy_bytes: int | None = None) -> None:
        theirs = unpack_offer(offer)
        if theirs.gate.split(_NAME_SEPARATOR, 1)[0] != peer:
            raise TransportError(f"offer.gate: incarnation {peer!r} expected, got {theirs.gate!r}")
        num_bytes = self.memory.check_copy(copy_bytes, theirs.page_bytes)
        if peer in self._links:
            raise TransportError(f"peer: {peer} is connected already, close it first")
        try:
            loaded = self._sender.add_remote_agent(theirs.metadata)
            name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)
            if name != theirs.gate:
                self._sender.remove_remote_agent(name)
                raise TransportError(f"offer.metadata: agent {theirs.gate!r} expected, got {name!r}")
            local_pages = self._prepare(num_bytes)
            pages = self._sender.prep_xfer_dlist(name, _strided(theirs, num_bytes), "DRAM")
            self._sender.send_notif(name, BIND)
        except NIXL_ERRORS as error:
            raise TransportError(f"offer.metadata: NIXL refuses it: {error}") from error
        self._links[peer] = _Link(
            agent_name=name, num_pages=theirs.num_pages, local_pages=local_pages, pages=pages
        )

    def write(self, peer: Incarnation, tid: TransferId, pages: Ready) -> WriteHandle:
        """Posts at once when the pages are final, so that bytes move while the caller computes."""
        if not self.memory.holds(pages.local_pages):
            raise ValueError(f"local_pages must be pages of the pool, got {pages.local_pages}")
        handle = self._outbox.open(peer, tid, pages)
        link = self._links.get(peer)
        if link is None or link.is_lost:
            self._outbox.fail(handle, PEER_UNKNOWN)
        elif min(pages.remote_pages) < 0 or max(pages.remote_pages) >= link.num_pages:
            self._outbox.fail(handle, f"remote_pages: not pages of the peer's pool: {pages.remote_pages}")
        elif pages.event.is_complete():
            self._post(link, handle, pages)
        else:
            self._outbox.park(handle, pages)
        return handle

    def poll(self) -> list[TransportEvent]:
        for handle, pages in self._outbox.take_complete():
            link = self._links[handle.peer]  # a parked write is withdrawn with its link
            self._post(link, handle, pages)
        for peer, link in self._links.items():
            self._check_writes(peer, link)
        self._zombies = [zombie for zombie in self._zombies if not self._bury(zombie)]
        for gate in list(self._gates.values()):
            self._read_notices(gate)
        return self._outbox.drain()

    def cancel(self, handle: WriteHandle) -> None:
        """Only a write that is not posted can be stopped; a posted one settles by itself."""
        self._outbox.withdraw(handle, CANCELLED)

    def close_peer(self, peer: Incarnation) -> None:
        for gate in [gate for gate in self._gates.values() if gate.peer is None]:
            self._read_notices(gate)  # the peer's first notification may be waiting
        was_connected = peer in self._links
        self._drop_link(peer, PEER_CLOSED)
        bound = [gate.name for gate in self._gates.values() if gate.peer == peer]
        for name in bound:
            self._destroy_gate(name)
        if was_connected and not bound:
            self._destroy_unbound_gates()
        self._outbox.forget(peer)

    def close(self) -> None:
        for peer in list(self._links):
            self._drop_link(peer, PEER_CLOSED)
        for name in list(self._gates):
            self._destroy_gate(name)
        for zombie in self._zombies:
            self._outbox.fail(zombie.handle, zombie.reason)
        self._zombies.clear()
        self._local_pages = {}
        self._registration = None
        self._sender = None

    def _prepare(self, num_bytes: int) -> Any:
        """Our pages as a prepared list of so many bytes each; peers with the same terms share one."""
        if num_bytes not in self._local_pages:
            rows = _strided(self.memory, num_bytes)
            self._local_pages[num_bytes] = self._sender.prep_xfer_dlist("NIXL_INIT_AGENT", rows, "DRAM")
        return self._local_pages[num_bytes]

    def _destroy_gate(self, name: str) -> None:
        """The agent's destructor joins its progress thread: after this line nothing is written through it."""
        del self._gates[name]

    def _destroy_unbound_gates(self) -> None:
        """Any of them may be the closed peer's. Connected peers that lose theirs must pair again."""
        for name in [gate.name for gate in self._gates.values() if gate.peer is None]:
            self._destroy_gate(name)
        bound = {gate.peer for gate in self._gates.values()}
        for peer, link in self._links.items():
            if peer not in bound:
                self._lose(peer, link, "receiving agent given up")

    def _drop_link(self, peer: Incarnation, reason: str) -> None:
        link = self._links.pop(peer, None)
        if link is not None:
            self._outbox.withdraw_peer(peer, reason)
            self._disconnect(link, reason)

    def _disconnect(self, link: _Link, reason: str) -> None:
        """Release what was posted, then forget the peer's agent. Settles every write of the link."""
        if link.is_lost:
            return
        link.is_lost = True
        for handle, transfer in link.writes.values():
            zombie = _Zombie(handle=handle, transfer=transfer, reason=reason)
            if not self._bury(zombie):
                self._zombies.append(zombie)
        link.writes.clear()
        try:
            link.pages.release()
            self._sender.remove_remote_agent(link.agent_name)
        except NIXL_ERRORS:
            pass  # NIXL forgot the agent by itself when its connection broke

    def _bury(self, zombie: _Zombie) -> bool:
        """Try to release; NIXL refuses while it still reads the local pages."""
        try:
            zombie.transfer.release()
        except NIXL_ERRORS:
            return False
        self._outbox.fail(zombie.handle, zombie.reason)
        return True

    def _lose(self, peer: Incarnation, link: _Link, reason: str) -> None:
        """The connection broke: say so before the writes that fail with it."""
        if link.is_lost:
            return
        self._outbox.emit(PeerGone(peer=peer, reason=reason))
        self._outbox.withdraw_peer(peer, reason)
        self._disconnect(link, reason)

    def _post(self, link: _Link, handle: WriteHandle, pages: Ready) -> None:
        if link.is_lost:
            self._outbox.fail(handle, PEER_UNKNOWN)
            return
        try:
            transfer = self._sender.make_prepped_xfer(
                "WRITE",
                link.local_pages,
                np.array(pages.local_pages, dtype=np.int32),
                link.pages,
                np.array(pages.remote_pages, dtype=np.int32),
                pack_notice(handle),
            )
            link.writes[handle.number] = (handle, transfer)
            state = self._sender.transfer(transfer)
        except NIXL_ERRORS as error:
            state = "ERR"
            reason = str(error)
            if handle.number not in link.writes:
                self._outbox.fail(handle, reason)
            self._lose(handle.peer, link, reason)
            return
        self._settle(handle.peer, link, handle, state)

    def _check_writes(self, peer: Incarnation, link: _Link) -> None:
        for handle, transfer in list(link.writes.values()):
            try:
                state = self._sender.check_xfer_state(transfer)
            except NIXL_ERRORS as error:
                self._lose(peer, link, str(error))
                return
            self._settle(peer, link, handle, state)

    def _settle(self, peer: Incarnation, link: _Link, handle: WriteHandle, state: str) -> None:
        if state == "DONE":
            _, transfer = link.writes.pop(handle.number)
            transfer.release()
            self._outbox.emit(WriteDone(handle=handle))
        elif state != "PROC":
            self._lose(peer, link, f"NIXL transfer state {state}")

    def _read_notices(self, gate: _Gate) -> None:
        try:
            notices: dict[str, list[bytes]] = gate.agent.get_new_notifs()
        except NIXL_ERRORS as error:
            self._gates.pop(gate.name, None)
            if gate.peer is not None:
                self._outbox.emit(PeerGone(peer=gate.peer, reason=str(error)))
            return
        for sender, messages in notices.items():
            peer = Incarnation(sender)
            gate.peer = gate.peer or peer
            for message in messages:
                self._take_notice(gate, peer, message)

    def _take_notice(self, gate: _Gate, peer: Incarnation, message: bytes) -> None:
        if message == BIND:
            return
        landed = unpack_notice(peer, message)
        if landed is not None and gate.peer == peer and peer in self._links:
            self._outbox.emit(landed)


def _strided(pool: PoolMemory | NixlOffer, num_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """The first bytes of every page of a pool as NIXL's (address, len, device, stride, count) row."""
    return np.array([[pool.address, num_bytes, 0, pool.page_bytes, pool.num_pages]], dtype=np.uint64)


def create(setup: Setup) -> Built:
    """The registry's entry."""
    transport = NixlTransport(setup.incarnation)
    return Built(transport=transport, attach=lambda _loop: None, rpc_handlers=())
