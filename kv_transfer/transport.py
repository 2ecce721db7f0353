"""The data-plane seam: how KV pages, or the first bytes of each, get from a prefill node's pool into a
decode node's.

Owns the `Transport` protocol and the values that cross it. Torch-free; must never know who owns a page,
what a request is in, or how a session is spoken. A transport is called from one thread (the engine's).

Every write settles exactly once, as `WriteDone` or `WriteFailed`, cancelled and torn-down writes too. Once
settled, the transport reads no local page of it any more; until then it may, even after `close_peer`, so a
writer keeps the pages. Nor does any remote page change through it any more, with one exception: failures
that follow a `PeerGone` of that peer, or our own `close_peer`. Then bytes may still be under way, and only
the receiver's `close_peer` ends that (each transport's docstring, "Teardown", says how). So a writer never
calls such a write drained; it drops the peer.
"""

from dataclasses import dataclass, field
from typing import Protocol

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import TransportOffer


class TransportError(Exception):
    """The peer's offer or our own setup is unusable; the text names the field. Only from setup calls."""


class CompletionEvent(Protocol):
    """Tells when the device has finished computing the pages it was recorded behind."""

    def is_complete(self) -> bool:
        """True once the bytes are final; never blocks."""
        ...


@dataclass(frozen=True, slots=True)
class Completed:
    """The event of pages whose bytes are final already (CPU compute, prefix-cache hits)."""

    def is_complete(self) -> bool:
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolMemory:
    """A page pool: `num_pages` pages of `page_bytes`, back to back. The caller keeps `buffer` alive."""

    address: int
    page_bytes: int
    num_pages: int
    buffer: memoryview  # writable, uint8, the whole pool

    def __post_init__(self) -> None:
        if self.buffer.readonly or self.buffer.ndim != 1 or self.buffer.itemsize != 1:
            raise ValueError(f"buffer must be a writable flat view of bytes, got {self.buffer!r}")
        if self.buffer.nbytes != self.page_bytes * self.num_pages:
            raise ValueError(
                f"buffer must hold {self.num_pages} pages of {self.page_bytes} bytes, "
                f"got {self.buffer.nbytes}"
            )

    def page(self, page_id: int) -> memoryview:
        """The bytes of one page, no copy."""
        return self.buffer[page_id * self.page_bytes : (page_id + 1) * self.page_bytes]

    def check_copy(self, copy_bytes: int | None, their_page_bytes: int) -> int:
        """How many leading bytes of every page a connection moves; None: whole pages, of equal size.

        Raises TransportError naming what does not fit.
        """
        if copy_bytes is None and their_page_bytes != self.page_bytes:
            raise TransportError(f"offer.page_bytes: {self.page_bytes} here, {their_page_bytes} there")
        least = min(self.page_bytes, their_page_bytes)
        if copy_bytes is not None and not 0 < copy_bytes <= least:
            raise TransportError(f"copy_bytes: at most {least} fit the pages of both, got {copy_bytes}")
        return copy_bytes or self.page_bytes

    def holds(self, page_ids: tuple[int, ...]) -> bool:
        """True when every id is a page of this pool."""
        return not page_ids or (min(page_ids) >= 0 and max(page_ids) < self.num_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ready:
    """Pages `[start, stop)` of a request, computed or about to be: sendable once `event` is complete.

    `local_pages[i]` goes to the peer's page `remote_pages[i]`; `start` counts pages of the request.
    """

    tid: TransferId
    start: int
    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]
    event: CompletionEvent = field(default_factory=Completed)

    def __post_init__(self) -> None:
        if not self.local_pages or len(self.local_pages) != len(self.remote_pages):
            raise ValueError(
                f"remote_pages must be as many as local_pages and at least one, "
                f"got {len(self.remote_pages)} for {len(self.local_pages)}"
            )
        if self.start < 0:
            raise ValueError(f"start must be at least 0, got {self.start}")

    @property
    def stop(self) -> int:
        return self.start + len(self.local_pages)


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteHandle:
    """Names one write until it settles; `number` is unique per transport."""

    number: int
    peer: Incarnation
    tid: TransferId
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteDone:
    """The peer has the bytes."""

    handle: WriteHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class WriteFailed:
    """The write ended without the peer having all bytes, or without our knowing."""

    handle: WriteHandle
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Landed:
    """Pages `[start, stop)` of a transfer are in our pool, as seen by us, the receiver."""

    peer: Incarnation
    tid: TransferId
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerGone:
    """The data connection to this peer broke. The owner must answer with `close_peer`.

    Comes before the WriteFailed of the writes that broke with it. Not every break is noticed by a side
    that has nothing to write: the session is what tells that a peer died.
    """

    peer: Incarnation
    reason: str


TransportEvent = WriteDone | WriteFailed | Landed | PeerGone


class Transport(Protocol):
    """One data plane. Setup calls may raise `TransportError`; `write`, `poll`, `cancel` never raise it."""

    @property
    def name(self) -> str: ...

    def register(self, memory: PoolMemory) -> None:
        """Make the pool readable for our writes and writable for connected peers. Once, before `offer`."""
        ...

    def offer(self) -> TransportOffer:
        """What a peer's `connect` needs to reach us; goes into our Hello."""
        ...

    def connect(self, peer: Incarnation, offer: TransportOffer, *, copy_bytes: int | None = None) -> None:
        """Both sides call it after Hello, the writer first: the receiver may dial it at once. Raises
        TransportError naming the field that does not fit.

        copy_bytes: the leading bytes of every page that move, the same on both sides; the rest of the
        receiver's page stays as it is. None: whole pages, which must be of equal size.

        A peer that is connected must be closed first, also when it is lost.
        """
        ...

    def write(self, peer: Incarnation, tid: TransferId, pages: Ready) -> WriteHandle:
        """Queue a write; never blocks. What the peer got wrong settles as WriteFailed in a later `poll`."""
        ...

    def poll(self) -> list[TransportEvent]:
        """Make progress and say what happened since the last call, in order."""
        ...

    def cancel(self, handle: WriteHandle) -> None:
        """Stop a write where that is still possible; it settles in a later `poll` either way."""
        ...

    def close_peer(self, peer: Incarnation) -> None:
        """Tear the connection down: nothing of that peer can write to us after it. Its writes settle in later
        polls, as soon as they read our pages no more; no other event of this connection comes after it."""
        ...

    def close(self) -> None:
        """Close every peer and give the registration back."""
        ...
