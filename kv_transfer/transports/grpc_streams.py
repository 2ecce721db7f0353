"""The two ends of the `grpc` transport's stream: page frames going out, page frames coming in.

Each end is shared by the engine thread (submit, cancel, close) and the event loop (everything else) and
guards its state with one lock, held for one frame's copy at most. Owns credit, acknowledgement and what
may be written; must never know how peers are found or what a request is in.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.transport import (
    Landed,
    PeerGone,
    PoolMemory,
    Ready,
    TransportEvent,
    WriteDone,
    WriteFailed,
    WriteHandle,
)
from kv_transfer.transports.grpc_frames import Ack, FrameHead, pack_frame, parse_frame
from kv_transfer.transports.outbox import CANCELLED

MayWrite = Callable[[Incarnation, TransferId, tuple[int, ...]], bool]
"""Asked on the event loop before every copy: did we lease these pages to that peer for that transfer?"""

NOT_LEASED = "pages are not leased to this transfer"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Frame:
    """Pages waiting to be sent: references into the pool, serialised when the stream can take them."""

    handle: WriteHandle
    first: int
    local_pages: tuple[int, ...]
    remote_pages: tuple[int, ...]


@dataclass(slots=True, kw_only=True)
class _Write:
    handle: WriteHandle
    num_queued: int  # frames not sent
    num_unacknowledged: int = 0
    failure: str = ""


@dataclass(slots=True)
class OutgoingPages:
    """Frames to one peer. Every submitted write settles once in `emit`: acknowledged, refused or closed."""

    peer: Incarnation
    memory: PoolMemory
    copy_bytes: int  # the leading bytes of every page that travel
    emit: Callable[[TransportEvent], None]
    wake: Callable[[], None]  # tells the event loop that `take_frame` may have something; any thread
    frame_bytes: int
    credit_bytes: int
    is_closed: bool = False
    has_stream: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _frames: deque[_Frame] = field(default_factory=deque)
    _writes: dict[int, _Write] = field(default_factory=dict)
    _in_flight: dict[tuple[int, int], int] = field(default_factory=dict)  # (write, first page) -> bytes

    def submit(self, handle: WriteHandle, pages: Ready) -> bool:
        """Queue a write as frames; False when the peer is closed."""
        size = max(1, self.frame_bytes // self.copy_bytes)
        frames = [
            _Frame(
                handle=handle,
                first=pages.start + at,
                local_pages=pages.local_pages[at : at + size],
                remote_pages=pages.remote_pages[at : at + size],
            )
            for at in range(0, len(pages.local_pages), size)
        ]
        with self._lock:
            if self.is_closed:
                return False
            self._writes[handle.number] = _Write(handle=handle, num_queued=len(frames))
            self._frames.extend(frames)
        self.wake()
        return True

    def cancel(self, handle: WriteHandle) -> None:
        """Send no further frame of this write; it settles once the sent ones are acknowledged."""
        with self._lock:
            self._stop(handle.number, CANCELLED)

    def take_frame(self) -> bytes | None:
        """The next frame, if there is one and the peer has credit for it."""
        with self._lock:
            if not self._frames or sum(self._in_flight.values()) >= self.credit_bytes:
                return None
            frame = self._frames.popleft()
            handle = frame.handle
            write = self._writes[handle.number]
            write.num_queued -= 1
            write.num_unacknowledged += 1
            self._in_flight[handle.number, frame.first] = len(frame.local_pages) * self.copy_bytes
            head = FrameHead(
                write=handle.number,
                tid=handle.tid,
                start=handle.start,
                stop=handle.stop,
                first=frame.first,
                page_ids=frame.remote_pages,
            )
            pages = [self.memory.page(page_id)[: self.copy_bytes] for page_id in frame.local_pages]
            return pack_frame(head, pages)

    def acknowledged(self, ack: Ack) -> None:
        """The peer wrote or refused a frame. An acknowledgement of nothing is ignored."""
        with self._lock:
            if self._in_flight.pop((ack.write, ack.first), None) is None:
                return
            self._writes[ack.write].num_unacknowledged -= 1
            self._stop(ack.write, ack.error)
        self.wake()

    def close(self, reason: str, *, is_lost: bool) -> None:
        """Settle everything; nothing is sent any more. `is_lost` reports the peer as gone first."""
        with self._lock:
            if self.is_closed:
                return
            self.is_closed = True
            if is_lost:
                self.emit(PeerGone(peer=self.peer, reason=reason))
            for write in self._writes.values():
                self.emit(WriteFailed(handle=write.handle, reason=reason))
            self._writes.clear()
            self._frames.clear()
            self._in_flight.clear()
        self.wake()

    def _stop(self, number: int, failure: str) -> None:
        """Note a failure, if any, and settle the write when nothing of it is open. Under the lock."""
        write = self._writes.get(number)
        if write is None:
            return
        if failure:
            write.failure = write.failure or failure
            self._frames = deque(frame for frame in self._frames if frame.handle.number != number)
            write.num_queued = 0
        if write.num_queued or write.num_unacknowledged:
            return
        del self._writes[number]
        if write.failure:
            self.emit(WriteFailed(handle=write.handle, reason=write.failure))
        else:
            self.emit(WriteDone(handle=write.handle))


@dataclass(slots=True)
class IncomingPages:
    """Frames from one peer. A frame is copied only while open and leased; frames of a write come in a row."""

    peer: Incarnation
    memory: PoolMemory
    copy_bytes: int  # the leading bytes of every page that travel
    emit: Callable[[TransportEvent], None]
    may_write: MayWrite
    address: str
    is_closed: bool = False
    discarded_pages: int = 0
    task: "asyncio.Task[None] | None" = None  # the stream's, on the event loop
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _write: int = -1  # the write whose frames are coming in
    _num_written: int = 0

    def take(self, message: bytes) -> Ack | None:
        """Copy one frame's pages into the pool; None when closed. Raises FrameError."""
        head, data = parse_frame(message, self.copy_bytes)
        with self._lock:
            if self.is_closed:
                self.discarded_pages += len(head.page_ids)
                return None
            if head.write != self._write:
                self._write, self._num_written = head.write, 0
            error = self._refusal(head)
            if not error:
                self._copy(head, data)
            return Ack(write=head.write, first=head.first, error=error)

    def _refusal(self, head: FrameHead) -> str:
        if not self.memory.holds(head.page_ids):
            return f"remote_pages: not pages of the peer's pool: {head.page_ids}"
        return "" if self.may_write(self.peer, head.tid, head.page_ids) else NOT_LEASED

    def _copy(self, head: FrameHead, data: memoryview) -> None:
        size = self.copy_bytes
        for index, page_id in enumerate(head.page_ids):
            self.memory.page(page_id)[:size] = data[index * size : (index + 1) * size]
        self._num_written += len(head.page_ids)
        if self._num_written == head.stop - head.start:
            self.emit(Landed(peer=self.peer, tid=head.tid, start=head.start, stop=head.stop))

    def close(self) -> None:
        """After this returns no frame of this connection is copied."""
        with self._lock:
            self.is_closed = True

    def lost(self, reason: str) -> None:
        """The stream broke: report it, unless we closed it ourselves."""
        with self._lock:
            if not self.is_closed:
                self.is_closed = True
                self.emit(PeerGone(peer=self.peer, reason=reason))
