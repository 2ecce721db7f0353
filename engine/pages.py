"""Who owns which KV page. The single place where a page changes hands.

A page is owned by exactly one of: the free list, a request, the prefix cache, a transfer lease,
quarantine. Must never know what is in a page or why it moves.
"""

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from enum import StrEnum

from engine.errors import OutOfPages


class Owner(StrEnum):
    FREE = "free"
    REQUEST = "request"
    CACHE = "cache"
    LEASE = "lease"
    QUARANTINE = "quarantine"


class PageLedger:
    """Invariant: every page has one owner and one holder; free pages have no holder.

    Free pages are handed out in first-in first-out order, so that a freed page rests longest.
    """

    def __init__(self, num_pages: int) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.num_pages = num_pages
        self._owner = [Owner.FREE] * num_pages
        self._holder: list[Hashable] = [None] * num_pages
        self._free: deque[int] = deque(range(num_pages))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def owner(self, page: int) -> Owner:
        return self._owner[page]

    def count(self, owner: Owner) -> int:
        return self._owner.count(owner)

    def take(self, count: int, owner: Owner, holder: Hashable) -> list[int]:
        """Move `count` free pages to an owner. Raises OutOfPages and moves nothing if there are fewer."""
        if count > len(self._free):
            raise OutOfPages(wanted=count, available=len(self._free))
        pages = [self._free.popleft() for _ in range(count)]
        for page in pages:
            self._owner[page], self._holder[page] = owner, holder
        return pages

    def move(
        self, pages: Iterable[int], *, source: tuple[Owner, Hashable], to: tuple[Owner, Hashable]
    ) -> None:
        """Hand pages from one owner to another, or free them (`to=(Owner.FREE, None)`)."""
        for page in pages:
            held = (self._owner[page], self._holder[page])
            assert held == source, f"page {page} belongs to {held}, not to {source}"
            self._owner[page], self._holder[page] = to
            if to[0] is Owner.FREE:
                self._free.append(page)

    def release(self, pages: Iterable[int], owner: Owner, holder: Hashable) -> None:
        self.move(pages, source=(owner, holder), to=(Owner.FREE, None))

    def problems(self, held: Sequence[tuple[Owner, Hashable, Sequence[int]]]) -> list[str]:
        """Compare the books with what holders say they hold; empty when they partition the pool."""
        found: list[str] = []
        said: dict[int, tuple[Owner, Hashable]] = dict.fromkeys(self._free, (Owner.FREE, None))
        if len(said) != len(self._free):
            found.append("a page is twice in the free list")
        for owner, holder, pages in held:
            for page in pages:
                if page in said:
                    found.append(f"page {page} is held by {said[page]} and by {(owner, holder)}")
                said[page] = (owner, holder)
        for page in range(self.num_pages):
            booked = (self._owner[page], self._holder[page])
            if said.get(page) != booked:
                found.append(f"page {page} is booked to {booked} but held by {said.get(page)}")
        return found
