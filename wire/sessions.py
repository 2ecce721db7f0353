"""Sessions with the nodes of the other role, whichever side opened them.

Owns the greeting, one outbox per peer and liveness. Must never know what a transfer is.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from kv_transfer.ids import Incarnation
from kv_transfer.messages import Heartbeat, Hello, Refused
from wire.channel import Channel, ChannelClosed
from wire.host_events import (
    DropPeer,
    HostEvent,
    PeerAccepted,
    PeerClosed,
    PeerHello,
    PeerMessage,
    PeerRefused,
    ToPeer,
)
from wire.outbox import Outbox, receive_within, run_until_closed

logger = logging.getLogger(__name__)

PeerOutput = ToPeer | PeerAccepted | PeerRefused | DropPeer


@dataclass(slots=True, kw_only=True)
class _Session:
    """`answer` is the core's word on the peer's hello; `is_gone` says that the stream has ended.

    Once both are there the session is settled: PeerClosed was posted if the answer was yes.
    """

    outbox: Outbox
    sends_hello: bool
    answer: PeerAccepted | PeerRefused | None = None
    is_gone: bool = False
    answered: asyncio.Event = field(default_factory=asyncio.Event)
    settled: asyncio.Event = field(default_factory=asyncio.Event)


class Sessions:
    """At most one session per peer incarnation: a newer stream of the same peer replaces the older.

    Every PeerHello is posted once; when the core accepts it, PeerClosed follows exactly once, after
    the last PeerMessage, however the session ended.
    """

    def __init__(
        self,
        *,
        post: Callable[[HostEvent], None],
        engine_step: Callable[[], int],
        max_backlog: int,
        handshake_timeout_s: float,
        heartbeat_s: float,
        peer_timeout_s: float,
    ) -> None:
        self._post = post
        self._engine_step = engine_step
        self._max_backlog = max_backlog
        self._handshake_timeout_s = handshake_timeout_s
        self._heartbeat_s = heartbeat_s
        self._peer_timeout_s = peer_timeout_s
        self._sessions: dict[Incarnation, _Session] = {}

    async def serve(self, channel: Channel) -> None:
        """Serve a session that the peer opened; we answer its hello and send heartbeats."""
        hello = await receive_within(channel, self._handshake_timeout_s)
        if not isinstance(hello, Hello):
            raise ChannelClosed(f"{channel.peer} must say hello first, sent {type(hello).__name__}")
        session = await self._enter(hello, sends_hello=True)
        try:
            answer = await self._answer(session)
            if isinstance(answer, PeerRefused):
                logger.warning("refused %s: %s", channel.peer, answer.refused)
                await channel.send(answer.refused)
                return
            heartbeats = self._send_heartbeats(session.outbox)
            await self._run(channel, hello.incarnation, session, timeout_s=None, more=(heartbeats,))
        finally:
            self._leave(hello.incarnation, session)

    async def open(self, channel: Channel, *, hello: Hello, expected: Incarnation) -> Refused | None:
        """Run a session that we opened, to its end; `hello` is ours. Returns either side's refusal, as ours.

        Raises ChannelClosed when another incarnation than `expected` answers: its own record will follow.
        """
        await channel.send(hello)
        reply = await receive_within(channel, self._handshake_timeout_s)
        if isinstance(reply, Refused):
            return reply.seen_from_peer()
        if not isinstance(reply, Hello) or reply.incarnation != expected:
            raise ChannelClosed(f"{channel.peer} is not incarnation {expected}")
        session = await self._enter(reply, sends_hello=False)
        try:
            answer = await self._answer(session)
            if isinstance(answer, PeerRefused):
                return answer.refused
            await self._run(channel, expected, session, timeout_s=self._peer_timeout_s)
            return None
        finally:
            self._leave(expected, session)

    def deliver(self, output: PeerOutput) -> None:
        """Carry out one output of the core. Peers that are gone are skipped: their PeerClosed is posted."""
        session = self._sessions.get(output.peer)
        if session is None:
            return
        if isinstance(output, PeerAccepted | PeerRefused):
            self._take_answer(session, output)
        elif isinstance(session.answer, PeerAccepted):  # else it is about the session before this one
            if isinstance(output, ToPeer):
                session.outbox.put(output.message)
            else:
                session.outbox.drop(output.reason)

    def close(self, reason: str) -> None:
        for session in self._sessions.values():
            session.outbox.drop(reason)

    @property
    def is_flushed(self) -> bool:
        return all(session.outbox.is_flushed for session in self._sessions.values())

    @property
    def accepted(self) -> tuple[Incarnation, ...]:
        return tuple(
            peer
            for peer, one in self._sessions.items()
            if isinstance(one.answer, PeerAccepted) and not one.is_gone
        )

    async def _enter(self, hello: Hello, *, sends_hello: bool) -> _Session:
        peer = hello.incarnation
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                while (previous := self._sessions.get(peer)) is not None:
                    previous.outbox.drop("the peer opened a newer session")
                    await previous.settled.wait()
        except TimeoutError:
            raise ChannelClosed(f"an older session of {peer} does not end") from None
        session = _Session(outbox=Outbox(self._max_backlog), sends_hello=sends_hello)
        self._sessions[peer] = session
        self._post(PeerHello(hello=hello))
        return session

    async def _answer(self, session: _Session) -> PeerAccepted | PeerRefused:
        try:
            async with asyncio.timeout(self._handshake_timeout_s):
                await session.answered.wait()
        except TimeoutError:
            raise ChannelClosed("our own engine did not answer a hello in time") from None
        assert session.answer is not None
        return session.answer

    def _take_answer(self, session: _Session, answer: PeerAccepted | PeerRefused) -> None:
        if session.answer is not None:
            return
        session.answer = answer
        session.answered.set()
        if isinstance(answer, PeerAccepted) and answer.note:
            logger.warning("paired with %s: %s", answer.peer, answer.note)
        if session.is_gone:
            self._settle(answer.peer, session)
        elif isinstance(answer, PeerAccepted) and answer.reply is not None and session.sends_hello:
            # Queued here, so that it precedes whatever the core says next to this peer.
            session.outbox.put(answer.reply)

    def _leave(self, peer: Incarnation, session: _Session) -> None:
        session.is_gone = True
        if session.answer is not None:
            self._settle(peer, session)

    def _settle(self, peer: Incarnation, session: _Session) -> None:
        del self._sessions[peer]
        if isinstance(session.answer, PeerAccepted):
            self._post(PeerClosed(peer=peer))
        session.settled.set()

    async def _run(
        self,
        channel: Channel,
        peer: Incarnation,
        session: _Session,
        *,
        timeout_s: float | None,
        more: tuple[Coroutine[Any, Any, None], ...] = (),
    ) -> None:
        async def send(messages: list[Any]) -> None:
            for message in messages:
                await channel.send(message)

        reason = await run_until_closed(
            self._read(channel, peer, timeout_s),
            session.outbox.send_all(send),
            session.outbox.raise_when_dropped(),
            *more,
        )
        logger.info("session with %s at %s ended: %s", peer, channel.peer, reason)

    async def _read(self, channel: Channel, peer: Incarnation, timeout_s: float | None) -> None:
        last_step: int | None = None
        while True:
            message: Any = await receive_within(channel, timeout_s)
            if isinstance(message, Hello | Refused):
                raise ChannelClosed(f"{channel.peer} sent an unexpected {type(message).__name__}")
            if isinstance(message, Heartbeat):
                has_stepped = last_step is not None and message.engine_step > last_step
                last_step = message.engine_step
                if not has_stepped:
                    continue  # the peer lives, which is all there is to it
            self._post(PeerMessage(peer=peer, message=message))

    async def _send_heartbeats(self, outbox: Outbox) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            outbox.put(Heartbeat(engine_step=self._engine_step()))
