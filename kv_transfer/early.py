"""Reserves that reached the prefill node before the router's Submit for the same id.

Owns them, bounded per peer and each with its own deadline. Must never know what is answered to D.
"""

from dataclasses import dataclass, replace

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Reserve


@dataclass(frozen=True, slots=True, kw_only=True)
class _Early:
    message: Reserve
    expires: float


class EarlyReserves:
    """Invariant: at most `max_per_peer` of any peer."""

    def __init__(self, *, max_per_peer: int = 1024) -> None:
        self._max_per_peer = max_per_peer
        self._peers: dict[Incarnation, dict[TransferId, _Early]] = {}

    def put(self, peer: Incarnation, message: Reserve, *, now: float) -> bool:
        """Keep it for as long as it says; False when the peer has too many waiting."""
        waiting = self._peers.setdefault(peer, {})
        if len(waiting) >= self._max_per_peer:
            return False
        waiting[message.tid] = _Early(message=message, expires=now + message.deadline_s)
        return True

    def take(self, peer: Incarnation, tid: TransferId) -> Reserve | None:
        """The one that waits for this id, no longer kept; None when there is none."""
        early = self._peers.get(peer, {}).pop(tid, None)
        return None if early is None else early.message

    def renew(self, peer: Incarnation, tids: tuple[TransferId, ...], *, now: float) -> None:
        """Start their deadlines afresh."""
        waiting = self._peers.get(peer, {})
        for tid in tids:
            if tid in waiting:
                waiting[tid] = replace(waiting[tid], expires=now + waiting[tid].message.deadline_s)

    def expired(self, now: float) -> list[tuple[Incarnation, TransferId]]:
        return [
            (peer, tid)
            for peer, waiting in self._peers.items()
            for tid, early in waiting.items()
            if early.expires <= now
        ]

    def next_deadline(self) -> float | None:
        every = (early.expires for waiting in self._peers.values() for early in waiting.values())
        return min(every, default=None)

    def drop(self, peer: Incarnation) -> None:
        self._peers.pop(peer, None)
