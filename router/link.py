"""One `Work` stream to one incarnation of one node: opened, kept open, shared by many requests.

Owns the stream and which request listens for which tid. Must never know pairs, policies or why a
request was sent.
"""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from router.prefix_index import PrefixIndex
from wire.channel import Channel, ChannelClosed, Connector
from wire.kv_events import KvSubscribe, KvUpdate
from wire.outbox import run_until_closed
from wire.records import NodeRecord
from wire.work import (
    Cancel,
    Event,
    Failed,
    Finished,
    Frame,
    Incarnation,
    Preempted,
    Rejected,
    Submit,
    TransferId,
    WorkHello,
)

_log = logging.getLogger(__name__)

_LAST_WORDS = (Rejected, Finished, Preempted, Failed)

UNSENDABLE = "invalid_request"
"""The code of a Submit that the wire cannot carry, as if the node had refused it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """`outbox_messages` bounds the submits that wait for a node that reads slowly."""

    open_timeout_s: float = 5.0
    first_backoff_s: float = 0.1
    max_backoff_s: float = 5.0
    outbox_messages: int = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkLost:
    """Stands in for the last word of a node whose stream broke, or was never open."""

    reason: str


Hear = Callable[[str, Event | LinkLost], None]
"""Told of every event of a leg at once, and of the leg's side of the pair: "prefill" or "decode"."""


@dataclass(slots=True)
class Leg:
    """One tid on one node, as the attempt that opened it holds it. Ended: the node said its last word."""

    link: "Link"
    tid: TransferId
    side: str
    hear: Hear
    is_ended: bool = False

    def close(self, *, cancel: bool) -> None:
        """Stop listening; with `cancel`, a node that has not said its last word is told to stop."""
        self.link.forget(self, cancel=cancel)


class Link:
    """`is_open` from the node's Hello until the stream breaks; breaking ends every leg on it."""

    def __init__(
        self,
        record: NodeRecord,
        *,
        connector: Connector,
        router: Incarnation,
        config: LinkConfig,
        on_change: Callable[[], None],
        on_late: Callable[[], None],
        index: PrefixIndex | None = None,
    ) -> None:
        self.record = record
        self.is_open = False
        self.reason = "connecting"
        self._connector = connector
        self._router = router
        self._config = config
        self._on_change = on_change
        self._on_late = on_late
        self._index = index
        self._legs: dict[TransferId, Leg] = {}
        self._outbox: asyncio.Queue[Submit | Cancel | KvSubscribe] = asyncio.Queue()

    def submit(self, submit: Submit, *, side: str, hear: Hear) -> Leg:
        """Send work and listen for its events. A link that is down answers LinkLost before it returns."""
        leg = Leg(self, submit.tid, side, hear)
        if not self.is_open:
            self._end(leg, f"{self.record.address}: {self.reason}")
        elif self._outbox.qsize() >= self._config.outbox_messages:
            self._end(leg, f"{self.record.address}: too much waits to be sent")
        else:
            self._legs[submit.tid] = leg
            self._outbox.put_nowait(submit)
        return leg

    def forget(self, leg: Leg, *, cancel: bool) -> None:
        """Stop listening for a leg. The cancels that wait are never more than the submits were."""
        if self._legs.get(leg.tid) is not leg:
            return
        del self._legs[leg.tid]
        leg.is_ended = True
        if cancel:
            self._outbox.put_nowait(Cancel(tid=leg.tid))

    async def run(self) -> None:
        """Keep the stream open until cancelled."""
        delay = self._config.first_backoff_s
        try:
            while True:
                opened = False
                try:
                    await self._serve()
                except Exception as error:  # noqa: BLE001  task boundary: a broken link is a state, not a crash
                    opened = self.is_open
                    self._lose(_reason_of(error))
                    _log.warning("%s: no link: %s", self.record.address, self.reason)
                delay = self._config.first_backoff_s if opened else delay
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._config.max_backoff_s)
        finally:
            self._lose("gone from the registry")

    async def _serve(self) -> None:
        async with asyncio.timeout(self._config.open_timeout_s):
            channel = await self._connector.work(self.record.address)
        try:
            async with asyncio.timeout(self._config.open_timeout_s):
                hello = await self._greet(channel)
            self._outbox = asyncio.Queue()
            if self._index is not None and hello.has_kv_events:
                self._outbox.put_nowait(KvSubscribe())
            self.is_open, self.reason = True, ""
            self._on_change()
            raise ChannelClosed(await run_until_closed(self._read(channel), self._write(channel)))
        finally:
            await channel.close()

    async def _greet(self, channel: Channel) -> WorkHello:
        await channel.send(WorkHello(incarnation=self._router, role="router"))
        hello = await channel.receive()
        expected = (self.record.role, self.record.incarnation)
        if not isinstance(hello, WorkHello) or (hello.role, hello.incarnation) != expected:
            raise ChannelClosed(f"expected a hello of {expected}, got {hello!r}")
        return hello

    async def _read(self, channel: Channel) -> None:
        while True:
            frame = await channel.receive()
            if isinstance(frame, KvUpdate):
                self._note_pages(frame)
                continue
            if not isinstance(frame, Frame):
                raise ChannelClosed(f"expected a Frame, got {frame!r}")
            for event in frame.events:
                self._deliver(event)

    async def _write(self, channel: Channel) -> None:
        while True:
            message = await self._outbox.get()
            try:
                await channel.send(message)
            except ValueError as error:  # it fits no wire message: its own request's fault, not the link's
                if isinstance(message, KvSubscribe):
                    raise
                self._deliver(Rejected(tid=message.tid, code=UNSENDABLE, retryable=False, reason=str(error)))

    def _note_pages(self, update: KvUpdate) -> None:
        if self._index is not None and not self._index.take(self.record.incarnation, update):
            self._outbox.put_nowait(KvSubscribe())

    def _deliver(self, event: Event) -> None:
        leg = self._legs.get(event.tid)
        if leg is None:
            self._on_late()
            return
        if isinstance(event, _LAST_WORDS):
            del self._legs[event.tid]
            leg.is_ended = True
        leg.hear(leg.side, event)

    def _lose(self, reason: str) -> None:
        self.is_open, self.reason = False, reason
        if self._index is not None:
            self._index.forget(self.record.incarnation)
        self._on_change()
        legs, self._legs = self._legs, {}
        for leg in legs.values():
            self._end(leg, f"{self.record.address}: {reason}")

    def _end(self, leg: Leg, reason: str) -> None:
        leg.is_ended = True
        leg.hear(leg.side, LinkLost(reason=reason))


def _reason_of(error: Exception) -> str:
    """One line for a broken link; an error that is not the network's is also logged in full."""
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    if isinstance(error, TimeoutError):
        return "timed out"
    if not isinstance(error, OSError):
        _log.error("link task failed", exc_info=error)
    return str(error) or type(error).__name__
