"""Channels in memory, for the simulation and tests: values pass as they are, in order, after a delay.

Owns the network of addresses and what breaks on it. All waiting is in loop time, so it runs on a
virtual clock. Must never look into a message.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from wire.channel import Accept, Channel, ChannelClosed
from wire.serving import serve_accepted


def no_delay() -> float:
    return 0.0


class _End:
    """Last item of a pipe: its writer closed it."""


class _Pipe:
    """One direction of a channel. Invariant: items become readable in the order they were put."""

    def __init__(self, *, capacity: int, delay_s: Callable[[], float]) -> None:
        self._capacity = capacity
        self._delay_s = delay_s
        self._items: deque[tuple[float, Any]] = deque()
        self._broken = ""
        self._changed = asyncio.Event()

    async def put(self, message: Any) -> None:
        while not self._broken and len(self._items) >= self._capacity:
            await self._wait(None)
        if self._broken:
            raise ChannelClosed(self._broken)
        self._append(message)

    async def get(self) -> Any:
        while not self._broken:
            wait_s = self._items[0][0] - asyncio.get_running_loop().time() if self._items else None
            if wait_s is not None and wait_s <= 0.0:
                return self._take()
            await self._wait(wait_s)
        raise ChannelClosed(self._broken)

    def end(self) -> None:
        """What was put is still read, then the reader sees the end."""
        if not self._broken:
            self._append(_End())

    def break_off(self, reason: str) -> None:
        """Nothing more is read or put."""
        self._broken = self._broken or reason
        self._items.clear()
        self._changed.set()

    def _append(self, item: Any) -> None:
        due = asyncio.get_running_loop().time() + self._delay_s()
        last = self._items[-1][0] if self._items else due
        self._items.append((max(due, last), item))
        self._changed.set()

    def _take(self) -> Any:
        message = self._items.popleft()[1]
        self._changed.set()
        if isinstance(message, _End):
            self.break_off("closed by the peer")
            raise ChannelClosed(self._broken)
        return message

    async def _wait(self, timeout_s: float | None) -> None:
        self._changed.clear()
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        except TimeoutError:
            pass  # the first item is due now


class MemoryChannel:
    """One end of a channel; the other end holds the same two pipes the other way round."""

    def __init__(self, *, peer: str, inbox: _Pipe, outbox: _Pipe, send_timeout_s: float) -> None:
        self._peer = peer
        self._inbox = inbox
        self._outbox = outbox
        self._send_timeout_s = send_timeout_s

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: Any) -> None:
        try:
            async with asyncio.timeout(self._send_timeout_s):
                await self._outbox.put(message)
        except TimeoutError:
            self.cut(f"{self._peer} stopped reading")
            raise ChannelClosed(f"{self._peer} stopped reading") from None

    async def receive(self) -> Any:
        return await self._inbox.get()

    async def close(self) -> None:
        self._outbox.end()
        self._inbox.break_off("closed here")

    def cut(self, reason: str) -> None:
        """Break both directions at once, losing what is under way."""
        self._inbox.break_off(reason)
        self._outbox.break_off(reason)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Endpoint:
    work: Accept
    session: Accept
    tasks: asyncio.TaskGroup


class MemoryNetwork:
    """Addresses that accept channels, and the channels between them.

    delay_s: drawn once per message; messages of one direction never overtake each other.
    capacity: messages under way in one direction before `send` waits.
    """

    def __init__(
        self,
        *,
        delay_s: Callable[[], float] = no_delay,
        capacity: int = 1024,
        send_timeout_s: float = 30.0,
    ) -> None:
        self._delay_s = delay_s
        self._capacity = capacity
        self._send_timeout_s = send_timeout_s
        self._endpoints: dict[str, _Endpoint] = {}
        self._open: dict[MemoryChannel, tuple[str, str]] = {}
        self._isolated: set[str] = set()
        self._parted: set[frozenset[str]] = set()

    @asynccontextmanager
    async def serve(self, address: str, *, work: Accept, session: Accept) -> AsyncIterator[None]:
        """Accept channels at `address` until the block ends; then every one of them breaks."""
        if address in self._endpoints:
            raise ValueError(f"address must be free, got {address!r}")
        async with asyncio.TaskGroup() as tasks:
            self._endpoints[address] = _Endpoint(work=work, session=session, tasks=tasks)
            try:
                yield
            finally:
                del self._endpoints[address]
                self.cut(address)

    def connector(self, origin: str) -> "MemoryConnector":
        """Opens channels on behalf of the process at `origin`."""
        return MemoryConnector(self, origin)

    def cut(self, address: str, other: str | None = None) -> None:
        """Break every channel from or to `address`, or only those with `other`; new ones may follow."""
        for channel, ends in list(self._open.items()):
            if address in ends and (other is None or other in ends):
                del self._open[channel]
                channel.cut(f"connection between {ends[0]} and {ends[1]} was cut")

    def isolate(self, address: str) -> None:
        """Cut `address` off: nothing opens from or to it until it rejoins."""
        self._isolated.add(address)
        self.cut(address)

    def rejoin(self, address: str) -> None:
        self._isolated.discard(address)
        self._parted = {ends for ends in self._parted if address not in ends}

    def part(self, one: str, other: str) -> None:
        """Nothing opens between these two until one of them rejoins; others still reach both."""
        self._parted.add(frozenset((one, other)))
        self.cut(one, other)

    async def connect(self, origin: str, address: str, *, to_session: bool) -> Channel:
        await asyncio.sleep(self._delay_s())
        endpoint = self._endpoints.get(address)
        is_apart = not self._isolated.isdisjoint((origin, address)) or {origin, address} in self._parted
        if endpoint is None or is_apart:
            raise ChannelClosed(f"{address} cannot be reached")
        accept = endpoint.session if to_session else endpoint.work
        there, here = self._pipe(), self._pipe()
        accepted = MemoryChannel(peer=origin, inbox=there, outbox=here, send_timeout_s=self._send_timeout_s)
        opened = MemoryChannel(peer=address, inbox=here, outbox=there, send_timeout_s=self._send_timeout_s)
        self._open[accepted] = (origin, address)
        endpoint.tasks.create_task(self._serve(accept, accepted))
        return opened

    async def _serve(self, accept: Accept, channel: MemoryChannel) -> None:
        try:
            await serve_accepted(accept, channel)
        finally:
            self._open.pop(channel, None)

    def _pipe(self) -> _Pipe:
        return _Pipe(capacity=self._capacity, delay_s=self._delay_s)


class MemoryConnector:
    """A Connector over a MemoryNetwork."""

    def __init__(self, network: MemoryNetwork, origin: str) -> None:
        self._network = network
        self._origin = origin

    async def work(self, address: str) -> Channel:
        return await self._network.connect(self._origin, address, to_session=False)

    async def session(self, address: str) -> Channel:
        return await self._network.connect(self._origin, address, to_session=True)
