"""The pages of one transfer on the prefill node: which are computed, which D asked for, which have left.

Owns that bookkeeping for one request. Must never know states, deadlines, peers or how writes settle.
"""

from collections.abc import Callable

from kv_transfer.ids import TransferId
from kv_transfer.messages import Final, Handoff, Reserve
from kv_transfer.transport import Completed, CompletionEvent, Ready

MAX_WRITE_PAGES = 256
"""A write tells nothing until all of it has settled: of a long prompt whose Reserve came late both sides
would see no progress for longer than they wait."""


class OutgoingPages:
    """Invariant: pages [first wanted, _next) have been handed out as Ready, each exactly once."""

    def __init__(self, *, tid: TransferId, page_size: int, num_tokens: int) -> None:
        self._tid = tid
        self._page_size = page_size
        self._num_tokens = num_tokens
        self._stop = -(-num_tokens // page_size)
        self._local: tuple[int, ...] = ()
        self._num_ready = 0  # pages of the request computed whole, or the last one
        self._event: CompletionEvent = Completed()
        self._remote: tuple[int, ...] | None = None
        self._first = 0
        self._next = 0
        self.handoff: Handoff | None = None  # known once the last chunk is computed

    @property
    def is_reserved(self) -> bool:
        return self._remote is not None

    @property
    def num_sent(self) -> int:
        return self._next - self._first

    def reserve(self, message: Reserve) -> str:
        """Take D's pages for everything after its `skip_tokens`. Returns the problem, or ""."""
        first, rest = divmod(message.skip_tokens, self._page_size)
        if rest or not 0 <= first <= self._stop:
            return f"reserve skips {message.skip_tokens} tokens"
        if len(message.page_ids) != self._stop - first or len(set(message.page_ids)) != self._stop - first:
            return f"reserve of {len(message.page_ids)} pages for {self._stop - first}"
        self._remote = message.page_ids
        self._first = self._next = first
        return ""

    def computed(
        self, num_tokens: int, *, pages: tuple[int, ...], event: CompletionEvent, handoff: Handoff | None
    ) -> None:
        """The first `num_tokens` are in `pages`, final once `event` is complete; `handoff`: that is all."""
        assert handoff is None or num_tokens == self._num_tokens, "a handoff comes with the last chunk"
        assert len(pages) * self._page_size >= num_tokens, f"{len(pages)} pages hold {num_tokens} tokens"
        self._local = pages
        self._event = event
        self.handoff = handoff
        self._num_ready = self._stop if handoff else num_tokens // self._page_size

    def take_ready(self) -> Ready | None:
        """The next pages that can leave now and have not, for one write; None when there are none."""
        if self._remote is None or self._next >= self._num_ready:
            return None
        start, self._next = self._next, min(self._num_ready, self._next + MAX_WRITE_PAGES)
        return Ready(
            tid=self._tid,
            start=start,
            local_pages=self._local[start : self._next],
            remote_pages=self._remote[start - self._first : self._next - self._first],
            event=self._event,
        )

    def final(self, handoff: Handoff, page_checksum: Callable[[int], int] | None) -> Final:
        """P's last word; pass `page_checksum` only once every byte is final."""
        wanted = self._local[self._first : self._stop]
        return Final(
            tid=self._tid,
            ranges=((self._first, self._stop),) if wanted else (),
            handoff=handoff,
            checksums=None if page_checksum is None else tuple(map(page_checksum, wanted)),
        )
