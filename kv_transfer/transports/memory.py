"""The `memory` transport: real page copies between pools of one process, with every fault injectable.

Owns the fabric that joins transports by incarnation and the copies under way. No thread and no clock of
its own: whatever is due by the injected clock happens in a `poll` of any member.

Teardown: `close_peer` ends the connection for its own side at once. A copy of that connection that falls
due later is discarded and counted (`discarded_pages`), also after the same two connect again.
The writer's `close_peer` settles its writes; their bytes, read by then, stay under way.
A cut alone does not protect the receiver: bytes under way still land until it calls `close_peer`.
"""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import TransportOffer
from kv_transfer.transport import (
    Landed,
    PeerGone,
    PoolMemory,
    Ready,
    TransportError,
    TransportEvent,
    WriteDone,
    WriteHandle,
)
from kv_transfer.transports.outbox import CANCELLED, PEER_CLOSED, PEER_UNKNOWN, Outbox

NAME = "memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """What goes wrong with one write. The default is a write that lands at the next poll."""

    delay_s: float = 0.0  # bytes land this long after the pages are ready; different delays reorder
    notice_delay_s: float = 0.0  # Landed and WriteDone come this long after the bytes
    is_dropped: bool = False  # the bytes never land and the write never settles by itself
    failure: str = ""  # settles as WriteFailed with this reason instead of landing
    num_duplicates: int = 0  # lands again this many times, `delay_s` apart, with a Landed each
    ignores_cancel: bool = False  # under way beyond recall: a late write
    outlives_peer: bool = False  # `close_peer` cannot release it: it settles, read until then, when it is due

    def __post_init__(self) -> None:
        if self.delay_s < 0 or self.notice_delay_s < 0:
            raise ValueError(f"delay_s and notice_delay_s must be at least 0, got {self}")


def no_faults(handle: WriteHandle) -> Fault:  # noqa: ARG001 - a policy sees the write it decides on
    """The policy of a fabric on which nothing goes wrong."""
    return Fault()


@dataclass(slots=True, kw_only=True)
class _Copy:
    """One write under way, on the receiver's `connection` and the writer's `return_connection`."""

    writer: "MemoryTransport"
    receiver: "MemoryTransport"
    connection: int
    return_connection: int | None
    handle: WriteHandle
    pages: Ready
    fault: Fault
    due: float
    is_settled: bool = False
    is_duplicate: bool = False
    are_bytes_moved: bool = False
    read: tuple[bytes, ...] | None = None  # what the pages held when it settled before its bytes moved

    def source(self) -> tuple[bytes | memoryview, ...]:
        """The bytes of its pages, as they are or were when the writer could have them back."""
        memory = self.writer.memory
        return self.read or tuple(memory.page(page) for page in self.pages.local_pages)


class MemoryFabric:
    """Joins MemoryTransports by incarnation. Copies happen in due order, ties in the order written."""

    def __init__(
        self, *, clock: Callable[[], float], faults: Callable[[WriteHandle], Fault] = no_faults
    ) -> None:
        self.clock = clock
        self.faults = faults
        self.discarded_pages = 0
        self._members: dict[Incarnation, MemoryTransport] = {}
        self._copies: list[_Copy] = []
        self._connections = itertools.count(1)

    def next_due(self) -> float | None:
        """When the next copy or notice falls due; None when nothing is under way."""
        return min((copy.due for copy in self._copies if not copy.fault.is_dropped), default=None)

    def cut(self, one: Incarnation, other: Incarnation, reason: str = "cut") -> None:
        """Break a connection: both sides see PeerGone, open writes fail, bytes under way still land."""
        for here, there in ((one, other), (other, one)):
            member = self._members.get(here)
            if member is not None:
                member.lose(there, reason)

    def join(self, member: "MemoryTransport") -> None:
        self._members[member.incarnation] = member

    def leave(self, member: "MemoryTransport") -> None:
        """Take a member out; its peers see PeerGone, as when a process dies."""
        if self._members.pop(member.incarnation, None) is not None:
            for other in list(self._members.values()):
                other.lose(member.incarnation, "peer left")

    def member(self, incarnation: Incarnation) -> "MemoryTransport | None":
        return self._members.get(incarnation)

    def connection(self) -> int:
        """A connection number that was never used before."""
        return next(self._connections)

    def start(self, writer: "MemoryTransport", handle: WriteHandle, pages: Ready) -> None:
        """Put a write under way as the fault policy says."""
        receiver = self._members.get(handle.peer)
        connection = None if receiver is None else receiver.connection_to(writer.incarnation)
        if receiver is None or connection is None:
            writer.lose(handle.peer, PEER_CLOSED)
            writer.outbox.fail(handle, PEER_CLOSED)
            return
        fault = self.faults(handle)
        for index in range(1 + fault.num_duplicates):
            self._copies.append(
                _Copy(
                    writer=writer,
                    receiver=receiver,
                    connection=connection,
                    return_connection=writer.connection_to(handle.peer),
                    handle=handle,
                    pages=pages,
                    fault=fault,
                    due=self.clock() + fault.delay_s * (1 + index),
                    is_duplicate=index > 0,
                )
            )

    def advance(self) -> None:
        """Do what is due by now."""
        now = self.clock()
        while True:
            due = [copy for copy in self._copies if copy.due <= now and not copy.fault.is_dropped]
            if not due:
                return
            self._step(min(due, key=lambda copy: copy.due))

    def _step(self, copy: _Copy) -> None:
        if not copy.are_bytes_moved and not copy.fault.failure:
            if not copy.receiver.accept(copy.writer.incarnation, copy.connection, copy.pages, copy.source()):
                self._discard(copy)
                return
            copy.are_bytes_moved = True
            copy.due += copy.fault.notice_delay_s
            if copy.fault.notice_delay_s > 0:
                return
        self._finish(copy, copy.fault.failure)

    def _discard(self, copy: _Copy) -> None:
        self.discarded_pages += len(copy.pages.remote_pages)
        peer = copy.receiver.incarnation
        if copy.writer.connection_to(peer) == copy.return_connection:
            copy.writer.lose(peer, PEER_CLOSED)
        self._finish(copy, PEER_CLOSED)

    def _finish(self, copy: _Copy, failure: str) -> None:
        self._copies.remove(copy)
        if not failure:
            copy.receiver.notice(copy.writer.incarnation, copy.connection, copy.handle)
        if copy.is_settled or copy.is_duplicate:
            return
        copy.is_settled = True
        if failure:
            copy.writer.outbox.fail(copy.handle, failure)
        else:
            copy.writer.outbox.emit(WriteDone(handle=copy.handle))

    def cancel(self, handle: WriteHandle, writer: "MemoryTransport") -> None:
        """Stop the copies of one write that have not moved their bytes, unless the fault forbids it."""
        for copy in [c for c in self._copies if c.writer is writer and c.handle == handle]:
            if not copy.fault.ignores_cancel and not copy.are_bytes_moved:
                self._finish(copy, CANCELLED)

    def abandon(self, writer: "MemoryTransport", peer: Incarnation, reason: str) -> None:
        """Settle the writer's open writes to a peer; their bytes, read by now, stay under way."""
        for copy in self._copies:
            is_open = copy.writer is writer and copy.handle.peer == peer and not copy.is_settled
            if is_open and not (copy.fault.outlives_peer and not copy.fault.is_dropped):
                copy.is_settled = True
                copy.read = tuple(map(bytes, copy.source()))
                if not copy.is_duplicate:
                    writer.outbox.fail(copy.handle, reason)
        self._copies = [copy for copy in self._copies if not (copy.is_settled and copy.fault.is_dropped)]


class MemoryTransport:
    """One node's end of the fabric."""

    def __init__(self, incarnation: Incarnation, fabric: MemoryFabric) -> None:
        self.incarnation = incarnation
        self.outbox = Outbox()
        self._fabric = fabric
        self._memory: PoolMemory | None = None
        self._connected: dict[Incarnation, int] = {}
        self._copy_bytes: dict[Incarnation, int] = {}
        self._lost: set[Incarnation] = set()

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
        self._fabric.join(self)

    def offer(self) -> TransportOffer:
        return TransportOffer(name=NAME, blob=self.incarnation.encode())

    def connect(self, peer: Incarnation, offer: TransportOffer, *, copy_bytes: int | None = None) -> None:
        if offer.name != NAME:
            raise TransportError(f"offer.name: {NAME!r} here, {offer.name!r} there")
        if offer.blob != peer.encode():
            raise TransportError(f"offer.blob: incarnation {peer!r} expected, got {offer.blob!r}")
        other = self._fabric.member(peer)
        if other is None:
            raise TransportError(f"offer.blob: no member {peer!r} on this fabric")
        num_bytes = self.memory.check_copy(copy_bytes, other.memory.page_bytes)
        if peer in self._connected:
            raise TransportError(f"peer: {peer} is connected already, close it first")
        self._connected[peer] = self._fabric.connection()
        self._copy_bytes[peer] = num_bytes
        self._lost.discard(peer)

    def connection_to(self, peer: Incarnation) -> int | None:
        return self._connected.get(peer)

    def write(self, peer: Incarnation, tid: TransferId, pages: Ready) -> WriteHandle:
        if not self.memory.holds(pages.local_pages):
            raise ValueError(f"local_pages must be pages of the pool, got {pages.local_pages}")
        handle = self.outbox.open(peer, tid, pages)
        receiver = self._fabric.member(peer)
        if peer not in self._connected or peer in self._lost or receiver is None:
            self.outbox.fail(handle, PEER_UNKNOWN)
        elif not receiver.memory.holds(pages.remote_pages):
            self.outbox.fail(handle, f"remote_pages: not pages of the peer's pool: {pages.remote_pages}")
        else:
            self.outbox.park(handle, pages)
        return handle

    def poll(self) -> list[TransportEvent]:
        for handle, pages in self.outbox.take_complete():
            self._fabric.start(self, handle, pages)
        self._fabric.advance()
        return self.outbox.drain()

    def cancel(self, handle: WriteHandle) -> None:
        if not self.outbox.withdraw(handle, CANCELLED):
            self._fabric.cancel(handle, self)

    def close_peer(self, peer: Incarnation) -> None:
        self._lost.discard(peer)
        self._copy_bytes.pop(peer, None)
        if self._connected.pop(peer, None) is not None:
            self.outbox.withdraw_peer(peer, PEER_CLOSED)
            self._fabric.abandon(self, peer, PEER_CLOSED)
        self.outbox.forget(peer)

    def close(self) -> None:
        for peer in list(self._connected):
            self.close_peer(peer)
        self._fabric.leave(self)

    def lose(self, peer: Incarnation, reason: str) -> None:
        """The connection broke: say so before the writes it failed."""
        if peer in self._connected and peer not in self._lost:
            self._lost.add(peer)
            self.outbox.emit(PeerGone(peer=peer, reason=reason))
            self.outbox.withdraw_peer(peer, reason)
            self._fabric.abandon(self, peer, reason)

    def accept(
        self, peer: Incarnation, connection: int, pages: Ready, source: Sequence[bytes | memoryview]
    ) -> bool:
        """Copy pages into our pool; False when the connection they came on is closed."""
        if self._connected.get(peer) != connection:
            return False
        size = self._copy_bytes[peer]
        for page, remote in zip(source, pages.remote_pages, strict=True):
            self.memory.page(remote)[:size] = page[:size]
        return True

    def notice(self, peer: Incarnation, connection: int, handle: WriteHandle) -> None:
        """Report landed pages, unless the connection closed in the meantime."""
        if self._connected.get(peer) == connection:
            self.outbox.emit(Landed(peer=peer, tid=handle.tid, start=handle.start, stop=handle.stop))
