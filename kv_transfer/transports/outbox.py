"""What every transport keeps about writes before their bytes move, and about events before they are polled.

Owns handle numbers, the writes whose completion event is still open, and the events of the next `poll`.
Must never know how bytes travel.
"""

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.transport import Landed, PeerGone, Ready, TransportEvent, WriteFailed, WriteHandle

CANCELLED = "cancelled"
PEER_CLOSED = "peer closed"
PEER_UNKNOWN = "peer not connected"


class Outbox:
    """A write is parked here from `park` until it is taken or withdrawn; each handle number is used once."""

    def __init__(self) -> None:
        self._next_number = 0
        self._parked: dict[int, tuple[WriteHandle, Ready]] = {}
        self._events: list[TransportEvent] = []

    def open(self, peer: Incarnation, tid: TransferId, pages: Ready) -> WriteHandle:
        """A fresh handle for this write."""
        number = self._next_number
        self._next_number += 1
        return WriteHandle(number=number, peer=peer, tid=tid, start=pages.start, stop=pages.stop)

    def park(self, handle: WriteHandle, pages: Ready) -> None:
        """Keep the write until its completion event is complete."""
        self._parked[handle.number] = (handle, pages)

    def take_complete(self) -> list[tuple[WriteHandle, Ready]]:
        """The parked writes whose pages are final, in the order they were written."""
        complete = [entry for entry in self._parked.values() if entry[1].event.is_complete()]
        for handle, _ in complete:
            del self._parked[handle.number]
        return complete

    def withdraw(self, handle: WriteHandle, reason: str) -> bool:
        """Fail a parked write; False when it is not parked (any more)."""
        if self._parked.pop(handle.number, None) is None:
            return False
        self.fail(handle, reason)
        return True

    def withdraw_peer(self, peer: Incarnation, reason: str) -> None:
        """Fail every parked write to this peer."""
        for handle, _ in list(self._parked.values()):
            if handle.peer == peer:
                self.withdraw(handle, reason)

    def fail(self, handle: WriteHandle, reason: str) -> None:
        self._events.append(WriteFailed(handle=handle, reason=reason))

    def emit(self, event: TransportEvent) -> None:
        self._events.append(event)

    def forget(self, peer: Incarnation) -> None:
        """Our end of its connection is closed: what waits to be told of it must not be taken for news of the
        next one. Its writes still settle."""
        self._events = [
            event for event in self._events if not isinstance(event, PeerGone | Landed) or event.peer != peer
        ]

    def drain(self) -> list[TransportEvent]:
        """The events since the last call, oldest first."""
        events, self._events = self._events, []
        return events
