"""What was made for one reader and waits for the network, bounded. Must never know what it is."""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Generic, Never, TypeVar

from router.errors import ConsumerTooSlow, RouterError

T = TypeVar("T")

MAX_WAITING = 4096


class Outlet(Generic[T]):
    """Invariant: items go in the order they were put in, and at most `capacity` wait.

    `send` may wait for the reader. `send_now` must not: False where it would have to, or cannot yet. Somebody
    must run `pump` while items are put in.
    """

    def __init__(
        self,
        send: Callable[[T], Awaitable[None]],
        *,
        send_now: Callable[[T], bool] = lambda _: False,
        capacity: int = MAX_WAITING,
    ) -> None:
        self._send = send
        self._send_now = send_now
        self._capacity = capacity
        self._waiting: deque[T] = deque()  # the first one is on its way
        self._has_some = asyncio.Event()
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.num_sent = 0

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting)

    def put(self, item: T) -> None:
        """Raises ConsumerTooSlow when too much waits."""
        if not self._waiting and self._send_now(item):
            return
        if len(self._waiting) >= self._capacity:
            raise ConsumerTooSlow(f"the stream was not read: {self._capacity} events are waiting")
        self._waiting.append(item)
        self._has_some.set()
        self._is_empty.clear()

    async def pump(self) -> Never:
        """Send what waits, again and again."""
        while True:
            await self._has_some.wait()
            while self._waiting:
                await self._send(self._waiting[0])
                self._waiting.popleft()
                self.num_sent += 1
            self._has_some.clear()
            self._is_empty.set()

    async def through(self, work: Coroutine[Any, Any, None]) -> None:
        """Does `work` and waits until all that it put in is sent, also where a RouterError ends it."""
        try:
            await work
        except RouterError:
            await self._is_empty.wait()
            raise
        await self._is_empty.wait()
