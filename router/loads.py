"""What this router has sent each node, and got back, that the node's last heartbeat cannot contain yet.

Must never know policies; they read it through `NodeLoad`.
"""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

from router.policies import NodeLoad
from wire.records import NodeRecord
from wire.work import Incarnation, TransferId


class _Sent(NamedTuple):
    tokens: int
    pages: int


@dataclass(slots=True)
class _Heartbeat:
    """What came after one. `tokens`, `pages`: of all that is in `sent`, kept as it changes, for a node is
    judged several times for every request."""

    sent: dict[TransferId, _Sent] = field(default_factory=dict)
    tokens: int = 0
    pages: int = 0
    freed_pages: int = 0

    def take_out(self, tid: TransferId) -> bool:
        """False when it had not been sent since."""
        if (entry := self.sent.pop(tid, None)) is None:
            return False
        self.tokens -= entry.tokens
        self.pages -= entry.pages
        return True


class SentBook:
    """An entry lives from its submit to the node's next heartbeat, or until its leg is closed.

    Pages of a leg that outlived a heartbeat count as free from its end to the next one.
    """

    def __init__(self) -> None:
        self._since: defaultdict[Incarnation, _Heartbeat] = defaultdict(_Heartbeat)

    def add(self, node: Incarnation, tid: TransferId, *, tokens: int, pages: int) -> None:
        since = self._since[node]
        since.take_out(tid)
        since.sent[tid] = _Sent(tokens, pages)
        since.tokens += tokens
        since.pages += pages

    def remove(self, node: Incarnation, tid: TransferId) -> None:
        if node in self._since:
            self._since[node].take_out(tid)

    def end(self, node: Incarnation, tid: TransferId, *, pages: int) -> None:
        """A leg that held so many pages is closed."""
        since = self._since[node]
        if not since.take_out(tid):
            since.freed_pages += pages

    def clear(self, node: Incarnation) -> None:
        """The node has told its load anew, so it knows all we sent."""
        self._since.pop(node, None)

    def retain(self, nodes: Collection[Incarnation]) -> None:
        """Only these are left. Legs on others may end later, so they are looked for every time."""
        for gone in self._since.keys() - nodes:
            del self._since[gone]

    def load_of(self, record: NodeRecord) -> NodeLoad:
        since = self._since[record.incarnation]
        return NodeLoad(
            incarnation=record.incarnation,
            load=record.load,
            page_size=record.page_size,
            sent_requests=len(since.sent),
            sent_tokens=since.tokens,
            sent_pages=since.pages,
            freed_pages=since.freed_pages,
        )
