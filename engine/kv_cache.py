"""The KV pages of one engine: requests grow and shrink here, leases come and go, prefixes are shared.

Owns the ledger and the prefix cache. Must never know what is computed into the pages, nor why a
lease exists.
"""

from collections.abc import Hashable, Iterable, Sequence

from engine.errors import OutOfPages
from engine.page_hash import CacheChanges, PageHash
from engine.pages import Owner, PageLedger
from engine.prefix_cache import PrefixCache
from engine.request import Request


class KvCache:
    """Invariant: the ledger's books equal what requests, cache, leases and quarantine hold.

    lookahead: how many tokens after a page its contents depend on.
    """

    def __init__(self, *, num_pages: int, page_size: int, fingerprint: str, lookahead: int = 0) -> None:
        self.page_size = page_size
        self._lookahead = lookahead
        self._ledger = PageLedger(num_pages)
        self._hashing = PageHash(fingerprint=fingerprint, page_size=page_size, lookahead=lookahead)
        self._prefix = PrefixCache(self._hashing)
        self._leases: dict[Hashable, list[int]] = {}
        self._quarantine: dict[Hashable, list[int]] = {}

    @property
    def num_pages(self) -> int:
        return self._ledger.num_pages

    @property
    def num_available(self) -> int:
        """Pages that an allocation could get: free, or cached and unused."""
        return self._ledger.num_free + self._prefix.num_idle

    @property
    def num_quarantined(self) -> int:
        return sum(map(len, self._quarantine.values()))

    def pages_for(self, num_slots: int) -> int:
        return -(-num_slots // self.page_size)

    def attach_prefix(self, request: Request) -> None:
        """Give a new request the cached pages its prompt starts with; at least one token stays to compute.

        All of them stay when log-probabilities of the prompt are wanted: a cached page has no logits.
        Sets pages, num_committed and num_cached_tokens.
        """
        assert not request.pages
        assert request.num_committed == 0
        prompt = request.prompt_ids
        is_target_only = request.draft_start > 0
        max_pages = 0 if request.sampling.prompt_logprobs is not None else self._max_shared(request)
        found = self._prefix.match(
            prompt, request.cache_salt, max_pages=max_pages, is_target_only=is_target_only
        )
        root = self._hashing.root(request.cache_salt, is_target_only=is_target_only)
        self._prefix.acquire(found)
        request.pages = [entry.page for entry in found]
        request.chain = found[-1].digest if found else root
        request.num_published_pages = len(found)
        request.num_committed = request.num_cached_tokens = len(found) * self.page_size

    def cached_pages(self, prompt: Sequence[int], salt: str) -> int:
        """How many pages `attach_prefix` would find."""
        return len(self._prefix.match(prompt, salt, max_pages=self._hashing.num_shareable(len(prompt))))

    def grow(self, request: Request, num_slots: int) -> None:
        """Give the request pages for `num_slots` slots. Raises OutOfPages and changes nothing."""
        missing = self.pages_for(num_slots) - len(request.pages)
        if missing > 0:
            request.pages += self._take(missing, Owner.REQUEST, request.key)

    def num_final(self, request: Request) -> int:
        """Committed slots that nothing will write again: all their contents depend on is known."""
        return max(0, min(request.num_committed, len(request.tokens) - self._lookahead))

    def publish(self, request: Request) -> None:
        """Hand the request's full committed pages to the prefix cache; it goes on using them."""
        size = self.page_size
        num_final = self.num_final(request)
        while (request.num_published_pages + 1) * size <= num_final:
            index = request.num_published_pages
            tokens = request.tokens[index * size : (index + 1) * size + self._lookahead]
            request.chain = self._hashing.link(request.chain, tokens)
            request.num_published_pages += 1
            page = request.pages[index]
            if self._prefix.insert(request.chain, page):
                self._ledger.move([page], source=(Owner.REQUEST, request.key), to=(Owner.CACHE, None))

    def release(self, request: Request) -> None:
        """Take every page back; cached ones lose a user, last page first, so that prefixes stay longest."""
        for page in reversed(request.pages):
            if page in self._prefix:
                self._prefix.release(page)
            else:
                self._ledger.release([page], Owner.REQUEST, request.key)
        request.pages = []
        request.num_committed = request.num_published_pages = 0

    def take_changes(self) -> CacheChanges | None:
        """What the prefix cache took in and gave up since the last call; None when nothing."""
        return self._prefix.take_changes()

    def lease(self, holder: Hashable, count: int) -> tuple[int, ...]:
        """Pages whose addresses go to a peer. Raises OutOfPages."""
        assert holder not in self._leases, f"{holder} already holds a lease"
        pages = self._take(count, Owner.LEASE, holder)
        self._leases[holder] = pages
        return tuple(pages)

    def has_lease(self, holder: Hashable) -> bool:
        return holder in self._leases

    def holds_lease(self, holder: Hashable, pages: Iterable[int]) -> bool:
        """Are all of these pages leased to `holder` now? Safe to ask from another thread."""
        leased = self._leases.get(holder)
        return leased is not None and set(pages) <= set(leased)

    def lease_to_request(self, holder: Hashable, request: Request) -> None:
        """The pages have landed: they follow the request's cached ones."""
        pages = self._leases.pop(holder)
        self._ledger.move(pages, source=(Owner.LEASE, holder), to=(Owner.REQUEST, request.key))
        request.pages += pages

    def release_lease(self, holder: Hashable) -> None:
        self._ledger.release(self._leases.pop(holder), Owner.LEASE, holder)

    def quarantine(self, holder: Hashable) -> None:
        """The peer may still write: nobody gets these pages until `release_quarantine`."""
        pages = self._leases.pop(holder)
        self._ledger.move(pages, source=(Owner.LEASE, holder), to=(Owner.QUARANTINE, holder))
        self._quarantine[holder] = pages

    def release_quarantine(self, holder: Hashable) -> None:
        self._ledger.release(self._quarantine.pop(holder), Owner.QUARANTINE, holder)

    def problems(self, requests: Iterable[Request]) -> list[str]:
        """What is wrong with the books, given every live request; empty when nothing is."""
        users: dict[int, int] = {}
        held: list[tuple[Owner, Hashable, Sequence[int]]] = [(Owner.CACHE, None, self._prefix.pages())]
        for request in requests:
            own = [page for page in request.pages if page not in self._prefix]
            held.append((Owner.REQUEST, request.key, own))
            for page in request.pages:
                if page in self._prefix:
                    users[page] = users.get(page, 0) + 1
        held += [(Owner.LEASE, holder, pages) for holder, pages in self._leases.items()]
        held += [(Owner.QUARANTINE, holder, pages) for holder, pages in self._quarantine.items()]
        found = self._ledger.problems(held)
        for page, count in self._prefix.users().items():
            if users.get(page, 0) != count:
                found.append(f"cached page {page} counts {count} users, {users.get(page, 0)} exist")
        return found

    def _max_shared(self, request: Request) -> int:
        """What lies past `draft_start` is written for the request alone."""
        most = self._hashing.num_shareable(len(request.prompt_ids))
        return min(most, request.draft_start // self.page_size) if request.draft_start else most

    def _take(self, count: int, owner: Owner, holder: Hashable) -> list[int]:
        if count > self.num_available:
            raise OutOfPages(wanted=count, available=self.num_available)
        while self._ledger.num_free < count:
            page = self._prefix.evict()
            self._ledger.release([page], Owner.CACHE, None)
        return self._ledger.take(count, owner, holder)
