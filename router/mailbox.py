"""Where the events of one attempt wait for the request that reads them, bounded.

Both legs of an attempt deliver into one mailbox. Must never know links or what an event means.
"""

import asyncio
from dataclasses import dataclass

import msgspec

from router.errors import ConsumerTooSlow, DeadlineExceeded
from wire.work import Event


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """Stands in for the last word of a node whose stream broke, or was never open."""

    reason: str


class Arrival(msgspec.Struct, frozen=True, gc=False):
    """One event and the side of the pair it came from: "prefill" or "decode"."""

    side: str
    event: Event | LinkLost


class Mailbox:
    """One writer at a time, one reader. A reader that lets `capacity` events pile up loses its stream."""

    def __init__(self, *, capacity: int) -> None:
        self._capacity = capacity
        self._waiting: list[Arrival] = []
        self._loop = asyncio.get_running_loop()
        self._news: asyncio.Future[None] | None = None
        self._is_overflowing = False
        self._is_expired = False

    def put(self, arrival: Arrival) -> None:
        if len(self._waiting) >= self._capacity:
            self._is_overflowing = True
        else:
            self._waiting.append(arrival)
        self._wake()

    def expire(self) -> None:
        """The reader's time is up: it still gets what waits, then DeadlineExceeded."""
        self._is_expired = True
        self._wake()

    def news(self) -> asyncio.Future[None]:
        """Done as soon as there is something to `take`."""
        self._news = news = self._loop.create_future()
        if self._waiting or self._is_expired:
            self._wake()
        return news

    def take(self) -> list[Arrival]:
        """All that waits, at least one, in order of arrival, when there are news. Raises ConsumerTooSlow,
        DeadlineExceeded."""
        if self._is_overflowing:
            raise ConsumerTooSlow(f"the stream was not read: {self._capacity} events are waiting")
        if not self._waiting:
            raise DeadlineExceeded("the request's deadline passed")
        arrivals, self._waiting = self._waiting, []
        return arrivals

    def _wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)
