"""What this router has sent each node, and got back, that the node's last heartbeat cannot contain yet.

Must never know policies; they read it through `NodeLoad`.
"""

from collections.abc import Collection
from typing import NamedTuple

from router.policies import NodeLoad
from wire.records import NodeRecord
from wire.work import Incarnation, TransferId


class _Sent(NamedTuple):
    tokens: int
    pages: int


class SentBook:
    """An entry lives from its submit to the node's next heartbeat, or until its leg is closed.

    Pages of a leg that outlived a heartbeat count as free from its end to the next one.
    """

    def __init__(self) -> None:
        self._freed: dict[Incarnation, int] = {}
        self._sent: dict[Incarnation, dict[TransferId, _Sent]] = {}

    def add(self, node: Incarnation, tid: TransferId, *, tokens: int, pages: int) -> None:
        self._sent.setdefault(node, {})[tid] = _Sent(tokens, pages)

    def remove(self, node: Incarnation, tid: TransferId) -> None:
        self._sent.get(node, {}).pop(tid, None)

    def end(self, node: Incarnation, tid: TransferId, *, pages: int) -> None:
        """A leg that held so many pages is closed."""
        if self._sent.get(node, {}).pop(tid, None) is None:
            self._freed[node] = self._freed.get(node, 0) + pages

    def clear(self, node: Incarnation) -> None:
        """The node has told its load anew, so it knows all we sent."""
        self._sent.pop(node, None)
        self._freed.pop(node, None)

    def retain(self, nodes: Collection[Incarnation]) -> None:
        """Only these are left. Legs on others may end later, so they are looked for every time."""
        for book in (self._sent, self._freed):
            for gone in book.keys() - nodes:
                del book[gone]

    def load_of(self, record: NodeRecord) -> NodeLoad:
        sent = self._sent.get(record.incarnation, {}).values()
        return NodeLoad(
            incarnation=record.incarnation,
            load=record.load,
            page_size=record.page_size,
            sent_requests=len(sent),
            sent_tokens=sum(entry.tokens for entry in sent),
            sent_pages=sum(entry.pages for entry in sent),
            freed_pages=self._freed.get(record.incarnation, 0),
        )
