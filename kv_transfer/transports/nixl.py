"""The `nixl` transport: one-sided writes through NIXL's UCX backend (RDMA, shared memory, TCP).

Owns the NIXL agent that sends to all peers, and its writes; the receiving ones are `nixl_gates`'.
Must be called from one thread only (NIXL's own locking is off); each agent runs a NIXL progress thread, so
data also moves while that thread computes. A posted write passes page indices into lists prepared once, and
its notification carries (transfer id, range), which is what the receiver reports as Landed.

Teardown: `close_peer` releases the handles and drops the peer; a write that cannot be released settles when
it can, and until then NIXL reads its pages. A failure that may leave bytes under way is preceded by PeerGone:
the receiver must tear down, which is what a gate per peer is for (`nixl_gates`).
"""

import logging
import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np

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
from kv_transfer.transports.nixl_agent import NIXL_ERRORS, default_ucx_options, make_agent
from kv_transfer.transports.nixl_gates import NixlGates, owner_of
from kv_transfer.transports.nixl_messages import BIND, NAME, NixlOffer, pack_notice, unpack_offer
from kv_transfer.transports.outbox import CANCELLED, PEER_CLOSED, PEER_UNKNOWN, Outbox
from kv_transfer.transports.registry import Built, Setup


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


class NixlTransport:
    """Invariant: every write is posted on a link, parked in the outbox, a zombie, or settled."""

    def __init__(self, incarnation: Incarnation, *, ucx_options: dict[str, str] | None = None) -> None:
        self.incarnation = incarnation
        self._ucx_options = default_ucx_options() if ucx_options is None else ucx_options
        self._outbox = Outbox()
        self._gates = NixlGates(incarnation, ucx_options=self._ucx_options)
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
        """Makes a fresh gate (tens of milliseconds)."""
        self._read_gates(only_unbound=True)  # those whose peer has come by now are not given up for it
        return TransportOffer(name=NAME, blob=self._gates.open(self.memory).pack())

    def connect(self, peer: Incarnation, offer: TransportOffer, *, copy_bytes: int | None = None) -> None:
        theirs = unpack_offer(offer)
        if owner_of(theirs.gate) != peer:
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
        self._read_gates()
        return self._outbox.drain()

    def cancel(self, handle: WriteHandle) -> None:
        """Only a write that is not posted can be stopped; a posted one settles by itself."""
        self._outbox.withdraw(handle, CANCELLED)

    def close_peer(self, peer: Incarnation) -> None:
        self._read_gates(only_unbound=True)  # the peer's first notification may be waiting
        was_connected = peer in self._links
        self._drop_link(peer, PEER_CLOSED)
        if not self._gates.destroy_of(peer) and was_connected:
            self._destroy_unbound_gates()
        self._outbox.forget(peer)

    def close(self) -> None:
        for peer in list(self._links):
            self._drop_link(peer, PEER_CLOSED)
        self._gates.close()
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

    def _read_gates(self, *, only_unbound: bool = False) -> None:
        for event in self._gates.read(self._links, only_unbound=only_unbound):
            self._outbox.emit(event)

    def _destroy_unbound_gates(self) -> None:
        """Any of them may be the closed peer's. Connected peers that lose theirs must pair again."""
        bound = self._gates.destroy_unbound()
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


def _strided(pool: PoolMemory | NixlOffer, num_bytes: int) -> "np.ndarray[Any, np.dtype[np.uint64]]":
    """The first bytes of every page of a pool as NIXL's (address, len, device, stride, count) row."""
    return np.array([[pool.address, num_bytes, 0, pool.page_bytes, pool.num_pages]], dtype=np.uint64)


def create(setup: Setup) -> Built:
    """The registry's entry."""
    transport = NixlTransport(setup.incarnation)
    return Built(transport=transport, attach=lambda _loop: None, rpc_handlers=())
