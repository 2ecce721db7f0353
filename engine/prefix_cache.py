"""Full KV pages kept by content, so that an equal prefix is computed once.

Owns what is cached, and the news of it. Must never know about requests or transfers.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from engine.page_hash import CacheChanges, PageHash

MAX_CHANGES = 16384
"""News that nobody asked for; behind that all of it is told anew."""


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page in the cache. Evictable exactly when nobody uses it."""

    page: int
    digest: bytes
    num_users: int = 0


class PrefixCache:
    """Invariant: `_idle` holds exactly the cached pages without users, least recently used first."""

    def __init__(self, hashing: PageHash) -> None:
        self.hashing = hashing
        self._by_digest: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, CachedPage] = OrderedDict()
        self._changes: dict[bytes, bool] | None = None

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def pages(self) -> list[int]:
        return list(self._by_page)

    def match(
        self, tokens: Sequence[int], salt: str, *, max_pages: int, is_target_only: bool = False
    ) -> list[CachedPage]:
        """The longest cached run of pages at the start of `tokens`. Takes no reference."""
        found = []
        chain = self.hashing.chain(tokens, salt, max_pages=max_pages, is_target_only=is_target_only)
        for digest in chain:
            entry = self._by_digest.get(digest)
            if entry is None:
                break
            found.append(entry)
        return found

    def acquire(self, entries: Sequence[CachedPage]) -> None:
        for entry in entries:
            entry.num_users += 1
            self._idle.pop(entry.page, None)

    def insert(self, digest: bytes, page: int) -> bool:
        """Take a page in, with its present owner as first user. False if the content is already here."""
        if digest in self._by_digest:
            return False
        entry = CachedPage(page, digest, num_users=1)
        self._by_digest[digest] = entry
        self._by_page[page] = entry
        self._note(digest, is_stored=True)
        return True

    def release(self, page: int) -> None:
        entry = self._by_page[page]
        assert entry.num_users > 0, f"page {page} has no users"
        entry.num_users -= 1
        if entry.num_users == 0:
            self._idle[page] = entry

    def evict(self) -> int:
        """Forget the page that has been unused longest, and return it."""
        page, entry = self._idle.popitem(last=False)
        del self._by_page[page], self._by_digest[entry.digest]
        self._note(entry.digest, is_stored=False)
        return page

    def users(self) -> dict[int, int]:
        return {page: entry.num_users for page, entry in self._by_page.items()}

    def take_changes(self) -> CacheChanges | None:
        """News since the last call, None when there is none; first, and after too much of it, everything."""
        changes, self._changes = self._changes, {}
        if changes is None:
            return CacheChanges(stored=tuple(self._by_digest), hashing=self.hashing)
        if not changes:
            return None
        return CacheChanges(
            stored=tuple(digest for digest, is_stored in changes.items() if is_stored),
            removed=tuple(digest for digest, is_stored in changes.items() if not is_stored),
        )

    def _note(self, digest: bytes, *, is_stored: bool) -> None:
        if self._changes is None:
            return
        self._changes[digest] = is_stored
        if len(self._changes) > MAX_CHANGES:
            self._changes = None
