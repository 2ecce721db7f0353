"""Writes that outlive their transfer: its peer is gone, but the transport has not let go of our pages yet.

Owns which of them are open. Must never know a state, a peer or why a write settles.
"""

from collections.abc import Iterable

from kv_transfer.ids import TransferId
from kv_transfer.transport import WriteHandle


class UnsettledWrites:
    """Invariant: a tid is here while at least one of its writes is open."""

    def __init__(self) -> None:
        self._open: dict[TransferId, set[WriteHandle]] = {}

    def keep(self, tid: TransferId, handles: Iterable[WriteHandle]) -> None:
        """Remember the open writes of a transfer that is over, if it has any."""
        still_open = set(handles)
        if still_open:
            self._open[tid] = still_open

    def settle(self, handle: WriteHandle) -> bool:
        """A write settled, of whatever transfer; True when it was the last one kept of its tid."""
        still_open = self._open.get(handle.tid, set())
        if handle not in still_open:
            return False
        still_open.remove(handle)
        if not still_open:
            del self._open[handle.tid]
        return not still_open

    def __contains__(self, tid: TransferId) -> bool:
        return tid in self._open

    def __bool__(self) -> bool:
        return bool(self._open)
