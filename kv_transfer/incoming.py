"""The pages of one transfer on the decode node: which are leased, which landed, which `Final` promised.

Owns that bookkeeping for one lease. Must never know states, deadlines or peers. Anything a peer says
that does not fit the lease is answered by naming the problem, never by an exception.
"""

from collections.abc import Callable

from kv_transfer.messages import Final


class IncomingPages:
    """Invariant: `landed` and the ranges of `final` lie in [first_page, stop_page) of the request."""

    def __init__(
        self, *, page_size: int, page_ids: tuple[int, ...], skip_tokens: int, num_tokens: int
    ) -> None:
        """`page_ids` are our pages for all of the request's `num_tokens` but the first `skip_tokens`.

        Raises ValueError when they are not as many as that takes.
        """
        self.first_page, rest = divmod(skip_tokens, page_size)
        self.stop_page = -(-num_tokens // page_size)
        if rest or self.first_page > self.stop_page:
            raise ValueError(f"skip_tokens must be whole pages of {num_tokens} tokens, got {skip_tokens}")
        if len(page_ids) != self.stop_page - self.first_page:
            raise ValueError(f"page_ids must be {self.stop_page - self.first_page}, got {len(page_ids)}")
        self.page_ids = page_ids
        self.skip_tokens = skip_tokens
        self.final: Final | None = None
        self._num_tokens = num_tokens
        self._landed: set[int] = set()

    @property
    def has_all_landed(self) -> bool:
        return len(self._landed) == len(self.page_ids)

    def land(self, start: int, stop: int) -> str:
        """Note pages [start, stop) of the request; again is harmless. Returns the problem, or ""."""
        if not self._covers(start, stop):
            return "landed outside the lease"
        self._landed.update(range(start, stop))
        return ""

    def expect(self, final: Final, *, has_checksums: bool) -> str:
        """Take P's last word; its ranges must be the lease exactly. Returns the problem, or ""."""
        if self.final is not None:
            return "second final"
        if len(final.ranges) > len(self.page_ids):
            return "final with more ranges than pages"
        if not all(self._covers(start, stop) for start, stop in final.ranges):
            return "final outside the lease"
        pages = _pages(final)
        if len(pages) != len(self.page_ids) or len(set(pages)) != len(pages):
            return "final short of the lease"
        if final.handoff.num_tokens != self._num_tokens:
            return "final of another length"
        if final.checksums is None and has_checksums:
            return "final without checksums"
        if final.checksums is not None and len(final.checksums) != len(pages):
            return "final with the wrong number of checksums"
        self.final = final
        return ""

    def corrupt_page(self, page_checksum: Callable[[int], int]) -> int | None:
        """The first page (of the request) whose bytes are not those P summed; None without checksums."""
        if self.final is None or self.final.checksums is None:
            return None
        for page, checksum in zip(_pages(self.final), self.final.checksums, strict=True):
            if page_checksum(self.page_ids[page - self.first_page]) != checksum:
                return page
        return None

    def _covers(self, start: int, stop: int) -> bool:
        return self.first_page <= start < stop <= self.stop_page


def _pages(final: Final) -> list[int]:
    return [page for start, stop in final.ranges for page in range(start, stop)]
