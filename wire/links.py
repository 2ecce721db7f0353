"""Links: the routers' `Work` streams of one node.

Owns the greeting, the numbers of links and one outbox each, which turns the events of a step into a
frame. Must never know what an event means.
"""

import logging
from collections.abc import Callable, Iterable

from wire.channel import Channel, ChannelClosed
from wire.host_events import HostEvent, Link, LinkClosed, LinkMessage, LinkOpened, ToLink
from wire.intake import INVALID
from wire.kv_board import KvBoard, KvFeed
from wire.kv_events import KvSubscribe
from wire.outbox import Outbox, receive_within, run_until_closed
from wire.work import Cancel, Event, Frame, Rejected, Submit, Unreadable, WorkHello

logger = logging.getLogger(__name__)

Post = Callable[[HostEvent], None]

MAX_FRAME_EVENTS = 256
"""A backlog of log-probabilities must not make a message larger than gRPC carries: that ends the link."""


class Links:
    """Every accepted link is posted as LinkOpened, then its messages, then LinkClosed exactly once.

    `max_backlog` events may wait for one router; behind that it is dropped.
    """

    def __init__(
        self,
        *,
        hello: WorkHello,
        post: Post,
        kv: KvBoard,
        max_backlog: int,
        handshake_timeout_s: float,
    ) -> None:
        self._hello = hello
        self._post = post
        self._kv = kv
        self._max_backlog = max_backlog
        self._handshake_timeout_s = handshake_timeout_s
        self._outboxes: dict[Link, Outbox] = {}
        self._num_opened = 0
        self._step = 0
        self.num_dropped = 0

    async def serve(self, channel: Channel) -> None:
        """Serve one router's stream to its end."""
        await self._greet(channel)
        self._num_opened += 1
        link = Link(self._num_opened)
        outbox = self._outboxes[link] = Outbox(self._max_backlog)
        feed = self._kv.open()
        self._post(LinkOpened(link=link))
        try:
            reason = await run_until_closed(
                self._read(channel, link, outbox, feed),
                self._write(channel, outbox),
                feed.run(channel),
                outbox.raise_when_dropped(),
            )
            logger.info("link %d of %s ended: %s", link, channel.peer, reason)
        finally:
            self._kv.close(feed)
            del self._outboxes[link]
            self.num_dropped += outbox.has_overflowed
            self._post(LinkClosed(link=link))

    def deliver(self, outputs: Iterable[ToLink]) -> None:
        """Queue the events of one step. Links that are gone are skipped: their LinkClosed is posted."""
        self._step += 1
        for output in outputs:
            outbox = self._outboxes.get(output.link)
            if outbox is not None:
                outbox.put((self._step, output.event))

    def close(self, reason: str) -> None:
        for outbox in self._outboxes.values():
            outbox.drop(reason)

    @property
    def is_flushed(self) -> bool:
        return all(outbox.is_flushed for outbox in self._outboxes.values())

    @property
    def num_open(self) -> int:
        return len(self._outboxes)

    async def _greet(self, channel: Channel) -> None:
        hello = await receive_within(channel, self._handshake_timeout_s)
        if not isinstance(hello, WorkHello):
            raise ChannelClosed(f"{channel.peer} must say hello first, sent {type(hello).__name__}")
        await channel.send(self._hello)
        if hello.version != self._hello.version:
            raise ChannelClosed(f"{channel.peer} speaks version {hello.version}, we {self._hello.version}")

    async def _read(self, channel: Channel, link: Link, outbox: Outbox, feed: KvFeed) -> None:
        while True:
            message = await channel.receive()
            if isinstance(message, KvSubscribe):
                feed.subscribe()
                continue
            if isinstance(message, Unreadable):
                logger.warning("unreadable submit %s from %s: %s", message.tid, channel.peer, message.reason)
                outbox.put((self._step, _refusal(message)))
                continue
            if not isinstance(message, Submit | Cancel):
                raise ChannelClosed(f"{channel.peer} sent an unexpected {type(message).__name__}")
            self._post(LinkMessage(link=link, message=message))

    async def _write(self, channel: Channel, outbox: Outbox) -> None:
        async def send(items: list[tuple[int, Event]]) -> None:
            # More than one step under backlog: a frame bears the newest of its events.
            for start in range(0, len(items), MAX_FRAME_EVENTS):
                some = items[start : start + MAX_FRAME_EVENTS]
                await channel.send(Frame(step=some[-1][0], events=tuple(event for _, event in some)))

        await outbox.send_all(send)


def _refusal(submit: Unreadable) -> Rejected:
    return Rejected(tid=submit.tid, code=INVALID, retryable=False, reason=submit.reason)
