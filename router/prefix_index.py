"""Which node has which pages cached, as the nodes tell it.

Owns the copies of what they told. Must never know requests or policies. Being wrong only costs time: a node
uses what it has, whatever is believed here.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from wire.kv_events import KvUpdate, PageHash
from wire.work import Incarnation

_PAGES_PER_TURN = 128


@dataclass(slots=True)
class _Known:
    hashing: PageHash
    sequence: int
    pages: set[bytes] = field(default_factory=set)


class PrefixIndex:
    """Invariant: at most `max_pages` pages are known in all; those told beyond that are not noted."""

    def __init__(
        self, *, max_pages: int = 1_000_000, on_size: Callable[[int], None] = lambda _count: None
    ) -> None:
        self._max_pages = max_pages
        self._on_size = on_size
        self._known: dict[Incarnation, _Known] = {}
        self._num_pages = 0

    @property
    def num_pages(self) -> int:
        return self._num_pages

    def take(self, node: Incarnation, update: KvUpdate) -> bool:
        """One message of a node. False when something before it is missing: subscribe again."""
        if update.hashing is not None:
            self.forget(node)
            self._known[node] = _Known(update.hashing, update.previous)
        known = self._known.get(node)
        if known is None or (update.hashing is None and update.previous != known.sequence):
            self.forget(node)
            return False
        known.sequence = update.sequence
        before = len(known.pages)
        known.pages.difference_update(update.removed)
        room = self._max_pages - (self._num_pages - before) - len(known.pages)
        known.pages.update(update.stored[: max(0, room)])
        self._count(len(known.pages) - before)
        return True

    def forget(self, node: Incarnation) -> None:
        """The node is gone, or what is known of it is no longer true."""
        known = self._known.pop(node, None)
        if known is not None:
            self._count(-len(known.pages))

    async def cached(self, tokens: Sequence[int], salt: str) -> dict[Incarnation, int]:
        """Prompt tokens that each node has cached, for those that have any.

        Hashes no further than somebody has pages, and lets others run in between.
        """
        found: dict[Incarnation, int] = {}
        for hashing in {known.hashing for known in self._known.values()}:
            nodes = [node for node, known in self._known.items() if known.hashing == hashing]
            num_pages = hashing.num_shareable(len(tokens))
            for number, digest in enumerate(hashing.chain(tokens, salt, max_pages=num_pages), start=1):
                nodes = [node for node in nodes if (one := self._known.get(node)) and digest in one.pages]
                if not nodes:
                    break
                found.update(dict.fromkeys(nodes, number * hashing.page_size))
                if number % _PAGES_PER_TURN == 0:
                    await asyncio.sleep(0)
        return found

    def _count(self, change: int) -> None:
        self._num_pages += change
        self._on_size(self._num_pages)
