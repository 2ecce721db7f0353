"""One bidirectional gRPC call as a Channel, on either side.

Owns reading ahead, write time limits and how a call ends. Must never look into a message: packing
and unpacking come with the stream.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc

from wire.cancels import num_cancels
from wire.channel import ChannelClosed

logger = logging.getLogger(__name__)

NUM_UNREAD = 16
"""Messages read ahead of the reader; behind them HTTP/2 flow control holds the writer back."""

CALL_ERRORS = (grpc.RpcError, grpc.aio.BaseError, asyncio.InvalidStateError)
"""What reading or writing raises when the call is over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stream:
    """One call seen from one side: protobuf messages in and out, and how to end it."""

    read: Callable[[], Awaitable[Any]]
    write: Callable[[Any], Awaitable[None]]
    cancel: Callable[[], object]
    pack: Callable[[Any], Any]
    unpack: Callable[[Any], Any]


class GrpcChannel:
    """A Channel over one call. Somebody must run `pump` while it is open.

    Writes are not queued: `send` returns when HTTP/2 took the message. A peer that takes none for
    `send_timeout_s` is dropped. Cancelling a `send` half way ends the channel, a `receive` does not.
    """

    def __init__(self, stream: Stream, *, peer: str, send_timeout_s: float) -> None:
        self._stream = stream
        self._peer = peer
        self._send_timeout_s = send_timeout_s
        self._send_lock = asyncio.Lock()
        self._unread: deque[Any] = deque()
        self._arrived = asyncio.Event()
        self._taken = asyncio.Event()
        self._ended_by = ""

    @property
    def peer(self) -> str:
        return self._peer

    async def send(self, message: Any) -> None:
        packed = self._stream.pack(message)
        before = num_cancels()
        try:
            async with asyncio.timeout(self._send_timeout_s), self._send_lock:
                self._raise_if_ended()
                await self._stream.write(packed)
        except TimeoutError:
            self._end("it stopped reading")
        except CALL_ERRORS as error:
            self._end(describe(error))
        except asyncio.CancelledError:
            self._end("cancelled while sending")
            if num_cancels() > before:  # else the call was cancelled under us
                raise
        self._raise_if_ended()

    async def receive(self) -> Any:
        while not self._unread:
            self._raise_if_ended()
            self._arrived.clear()
            await self._arrived.wait()
        self._taken.set()
        return self._unread.popleft()

    async def close(self) -> None:
        self._unread.clear()
        self._end("closed here")

    async def pump(self) -> None:
        """Read messages until the call ends or the channel is closed."""
        before = num_cancels()
        try:
            while not self._ended_by:
                await self._pump_one()
        except ValueError as error:
            logger.warning("malformed message from %s: %s", self._peer, error)
            self._end(f"malformed message: {error}")
        except CALL_ERRORS as error:
            self._end(describe(error))
        except asyncio.CancelledError:
            self._end("cancelled")
            if num_cancels() > before:
                raise

    async def _pump_one(self) -> None:
        packed = await self._stream.read()
        if packed is grpc.aio.EOF:  # type: ignore[attr-defined]  # stubs miss it
            self._end("closed by the peer")
            return
        self._unread.append(self._stream.unpack(packed))
        self._arrived.set()
        while len(self._unread) >= NUM_UNREAD and not self._ended_by:
            self._taken.clear()
            await self._taken.wait()

    def _end(self, reason: str) -> None:
        if self._ended_by:
            return
        self._ended_by = reason
        self._arrived.set()
        self._taken.set()
        self._stream.cancel()

    def _raise_if_ended(self) -> None:
        if self._ended_by:
            raise ChannelClosed(f"channel of {self._peer}: {self._ended_by}")


def describe(error: BaseException) -> str:
    """A call's error in one line, without gRPC's debug dump."""
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    return str(error) or type(error).__name__
