"""Full KV pages kept by content, so that an equal prefix is computed once.

A page is known by a hash chain over (parent hash, its tokens and those after it that it depends on);
the chain starts from the model's fingerprint and the request's cache salt. Must never know about
requests or transfers.
"""

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class CachedPage:
    """A page in the cache. Evictable exactly when nobody uses it."""

    page: int
    digest: bytes
    num_users: int = 0


class PrefixCache:
    """Invariant: `_idle` holds exactly the cached pages without users, least recently used first."""

    def __init__(self, *, page_size: int, fingerprint: str, lookahead: int = 0) -> None:
        self.page_size = page_size
        self._lookahead = lookahead
        self._root = fingerprint.encode()
        self._by_digest: dict[bytes, CachedPage] = {}
        self._by_page: dict[int, CachedPage] = {}
        self._idle: OrderedDict[int, CachedPage] = OrderedDict()

    @property
    def num_idle(self) -> int:
        return len(self._idle)

    def __contains__(self, page: int) -> bool:
        return page in self._by_page

    def pages(self) -> list[int]:
        return list(self._by_page)

    def root(self, salt: str) -> bytes:
        return hashlib.blake2b(self._root + b"\0" + salt.encode(), digest_size=16).digest()

    def link(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Digest of the page holding `tokens` (`page_size` of them, then the lookahead) after `parent`."""
        return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=16).digest()

    def match(self, tokens: Sequence[int], salt: str, *, max_pages: int) -> list[CachedPage]:
        """The longest cached run of pages at the start of `tokens`. Takes no reference."""
        found = []
        for digest in self._chain(tokens, salt, max_pages):
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
        return page

    def users(self) -> dict[int, int]:
        return {page: entry.num_users for page, entry in self._by_page.items()}

    def _chain(self, tokens: Sequence[int], salt: str, max_pages: int) -> Iterator[bytes]:
        digest = self.root(salt)
        for start in range(0, min(max_pages * self.page_size, len(tokens)), self.page_size):
            page_tokens = tokens[start : start + self.page_size + self._lookahead]
            if len(page_tokens) < self.page_size + self._lookahead:
                return
            digest = self.link(digest, page_tokens)
            yield digest
