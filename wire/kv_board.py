"""Which pages this node has cached, as its routers are told: a copy of the cache's names, and a feed each.

Owns numbers of changes, and what a slow router is told instead of every change. Lives on the event loop.
Must never know what a page holds.
"""

import asyncio
from collections.abc import Iterator

from engine.page_hash import CacheChanges, PageHash
from wire.channel import Channel
from wire.kv_events import KvUpdate

PAGES_PER_MESSAGE = 4096
"""64 KiB: tokens of other requests wait behind no more than that."""

MAX_PENDING = 16384
PAUSE_S = 0.05


class KvBoard:
    """Invariant: `pages` is what the cache held after change number `sequence`."""

    def __init__(self) -> None:
        self.hashing: PageHash | None = None
        self.pages: dict[bytes, None] = {}
        self.sequence = 0
        self._feeds: set[KvFeed] = set()

    def take(self, changes: CacheChanges) -> None:
        """One step's news from the core."""
        self.sequence += 1
        if changes.hashing is not None:
            self.hashing, self.pages = changes.hashing, {}
        self.pages.update(dict.fromkeys(changes.stored))
        for digest in changes.removed:
            self.pages.pop(digest, None)
        for feed in self._feeds:
            feed.note(changes)

    def open(self) -> "KvFeed":
        """A feed for one router; `close` it."""
        feed = KvFeed(self)
        self._feeds.add(feed)
        return feed

    def close(self, feed: "KvFeed") -> None:
        self._feeds.discard(feed)


class KvFeed:
    """What one router is still to be told: nothing until it subscribes, and never more than a bound.

    A router that reads too slowly for the changes is told everything anew instead.
    """

    def __init__(self, board: KvBoard) -> None:
        self._board = board
        self._is_subscribed = False
        self._starts_over = False
        self._pending: dict[bytes, bool] = {}
        self._told = 0
        self._has_news = asyncio.Event()

    def subscribe(self) -> None:
        self._is_subscribed = self._starts_over = True
        self._has_news.set()

    def note(self, changes: CacheChanges) -> None:
        if not self._is_subscribed:
            return
        self._pending.update(dict.fromkeys(changes.stored, True))
        self._pending.update(dict.fromkeys(changes.removed, False))
        if changes.hashing is not None or len(self._pending) > MAX_PENDING:
            self._starts_over = True
            self._pending.clear()
        self._has_news.set()

    async def run(self, channel: Channel) -> None:
        """Tell the router, a few times a second at most. Never returns."""
        while True:
            await self._has_news.wait()
            self._has_news.clear()
            for update in list(self._take()):
                await channel.send(update)
            await asyncio.sleep(PAUSE_S)

    def _take(self) -> Iterator[KvUpdate]:
        board, pending = self._board, self._pending
        if board.hashing is None:
            return
        if self._starts_over:
            pending = dict.fromkeys(board.pages, True)
        hashing, previous = (board.hashing if self._starts_over else None), self._told
        self._starts_over, self._pending, self._told = False, {}, board.sequence
        items = list(pending.items())
        for start in range(0, max(len(items), 1), PAGES_PER_MESSAGE):
            some = items[start : start + PAGES_PER_MESSAGE]
            yield KvUpdate(
                previous=previous,
                sequence=board.sequence,
                stored=tuple(digest for digest, is_stored in some if is_stored),
                removed=tuple(digest for digest, is_stored in some if not is_stored),
                hashing=hashing,
            )
            hashing, previous = None, board.sequence
