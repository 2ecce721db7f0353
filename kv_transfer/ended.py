"""A bounded memory of transfers that are over, so that what still arrives for them can be told from news.

Owns codes by transfer id, kept per peer incarnation and dropped with it. Must never know any state machine.
"""

from collections import OrderedDict

from kv_transfer.ids import Incarnation, TransferId


class EndedTransfers:
    """Invariant: at most `max_per_peer` ids of each of at most `max_peers` peers. The oldest ids go first,
    and the peers of which nothing ended for longest: those that never came back."""

    def __init__(self, *, max_per_peer: int = 4096, max_peers: int = 256) -> None:
        self._max_per_peer = max_per_peer
        self._max_peers = max_peers
        self._peers: OrderedDict[Incarnation, OrderedDict[TransferId, str]] = OrderedDict()
        self._peer_of: dict[TransferId, Incarnation] = {}

    def remember(self, peer: Incarnation, tid: TransferId, code: str) -> None:
        """Note how a transfer ended; what one peer's ended as, another peer cannot change."""
        if self._peer_of.get(tid, peer) != peer:
            return
        codes = self._peers.setdefault(peer, OrderedDict())
        self._peers.move_to_end(peer)
        codes[tid] = code
        self._peer_of[tid] = peer
        if len(codes) > self._max_per_peer:
            del self._peer_of[codes.popitem(last=False)[0]]
        if len(self._peers) > self._max_peers:
            self.drop(next(iter(self._peers)))

    def code(self, tid: TransferId) -> str | None:
        """How it ended, or None when nothing is known of it."""
        peer = self._peer_of.get(tid)
        return None if peer is None else self._peers[peer][tid]

    def drop(self, peer: Incarnation) -> None:
        """Forget everything of one incarnation."""
        for tid in self._peers.pop(peer, ()):
            del self._peer_of[tid]
