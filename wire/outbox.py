"""What waits to be sent on one channel: bounded, and how a channel's reader and writer end together.

Owns the bound. Must never know what the messages mean.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

from wire.channel import Channel, ChannelClosed


class Outbox:
    """Invariant: at most `bound` items wait; one more drops the channel.

    put and drop never block, so that the engine's outputs are taken in whatever a peer does.
    """

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._items: list[Any] = []
        self._changed = asyncio.Event()
        self._dropped = asyncio.Event()
        self._reason = ""
        self._is_sending = False
        self.has_overflowed = False

    def put(self, item: Any) -> None:
        if len(self._items) >= self._bound:
            self.has_overflowed = True
            self.drop(f"it reads too slowly, {self._bound} items wait")
        elif not self._reason:
            self._items.append(item)
            self._changed.set()

    def drop(self, reason: str) -> None:
        """End the channel as soon as possible; what waits is lost."""
        if not self._reason:
            self._reason = reason
            self._items.clear()
            self._dropped.set()
            self._changed.set()

    async def send_all(self, send: Callable[[list[Any]], Coroutine[Any, Any, None]]) -> None:
        """Hand everything that waits to `send`, again and again. Never returns."""
        while True:
            while not self._items:
                self._changed.clear()
                await self._changed.wait()
            items, self._items = self._items, []
            self._is_sending = True
            await send(items)
            self._is_sending = False
            self._changed.set()

    async def raise_when_dropped(self) -> None:
        await self._dropped.wait()
        raise ChannelClosed(self._reason)

    @property
    def is_flushed(self) -> bool:
        return bool(self._reason) or not (self._items or self._is_sending)


async def run_until_closed(*loops: Coroutine[Any, Any, None]) -> str:
    """Run endless loops until the first raises ChannelClosed; end the others. Returns the reason.

    No loop's error reaches the task group: one that fails while its own task is being cancelled
    forgets the cancellation in Python 3.11 and 3.12.
    """
    reasons: list[str] = []
    tasks: list[asyncio.Task[None]] = []

    async def run(loop: Coroutine[Any, Any, None]) -> None:
        try:
            await loop
        except ChannelClosed as closed:
            reasons.append(str(closed))
            for task in tasks:
                task.cancel()

    try:
        async with asyncio.TaskGroup() as group:
            tasks += [group.create_task(run(loop)) for loop in loops]
    finally:
        for loop in loops:
            loop.close()  # one that was cancelled before it began
    return reasons[0] if reasons else ""


async def receive_within(channel: Channel, timeout_s: float | None) -> object:
    """The next message. Raises ChannelClosed when none comes in time."""
    try:
        async with asyncio.timeout(timeout_s):
            message: object = await channel.receive()
            return message
    except TimeoutError:
        raise ChannelClosed(f"{channel.peer} said nothing for {timeout_s} s") from None
