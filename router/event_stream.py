"""Answers as server-sent events over HTTP: each goes out at once where its client takes it, else in its turn.

Owns a stream's head, its end and its errors. Must never know what an event says.
"""

import logging
from collections.abc import Callable
from functools import partial
from typing import Generic, Never, Protocol, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.errors import RouterError
from router.http_edge import ClientGone, disconnect, error_body, error_response
from router.leaving import Sending, left_or_unread, until_left
from router.openai.exchange import sse
from router.outlet import Outlet
from wire.logs import about

logger = logging.getLogger(__name__)

Told = TypeVar("Told")

_STREAM_HEADERS = {
    "content-type": "text/event-stream",
    "cache-control": "no-cache",
    "x-accel-buffering": "no",
}


class Events(Protocol[Told]):
    """One answer as server-sent events: what there is to show, and how it is shown when its turn has come."""

    async def stream(self, put: Callable[[Told], None]) -> None:
        """Puts everything as soon as it is there. Raises RouterError."""
        ...

    async def shown(self, told: Told) -> bytes:
        """The next of what was put, as events; there may be none."""
        ...

    def shown_now(self, told: Told) -> bytes | None:
        """The same at once; None for what may take long."""
        ...


class Connection(Protocol):
    """A short way for the pieces of a chunked body, once its head is sent."""

    @property
    def is_free(self) -> bool:
        """Whether it takes a piece at once."""
        ...

    def write_piece(self, piece: bytes) -> None: ...


class EventStream(Response, Generic[Told]):
    """Server-sent events. The status line waits for the first event, so an early refusal has its own status.

    A failure after that becomes an error event, and the stream ends without `[DONE]`.
    """

    def __init__(self, events: Events[Told]) -> None:
        super().__init__(headers=_STREAM_HEADERS)
        del self.headers["content-length"]
        self._events = events

    async def __call__(self, scope: Scope, receive: Receive, start: Send) -> None:
        body = _Body(start, scope, headers=self.raw_headers)
        events = self._events

        async def send(told: Told) -> None:
            await body.send(await events.shown(told))

        def send_now(told: Told) -> bool:
            if not body.is_free:
                return False
            if data := events.shown_now(told):
                body.write(data)
            return data is not None

        outlet = Outlet(send, send_now=send_now)
        work = outlet.through(events.stream(outlet.put))
        try:
            await until_left(_raise_when_unread(receive, outlet), work, outlet.pump())
        except ClientGone:
            return
        except RouterError as error:
            await self._fail(error, body, scope, receive=receive, start=start)
        except Exception:
            logger.exception("a stream failed", extra=about(str(scope.get("paceline.request_id", ""))))
            await self._fail(RouterError("internal error"), body, scope, receive=receive, start=start)
        else:
            await body.close()

    async def _fail(
        self, error: RouterError, body: "_Body", scope: Scope, *, receive: Receive, start: Send
    ) -> None:
        if not body.is_open:
            await error_response(error)(scope, receive, start)
            return
        await body.send(sse(error_body(error)))
        await body.close()


class _Body:
    """A response body that begins with its first bytes. `start` sends its head; all the rest goes past what
    wraps it."""

    def __init__(self, start: Send, scope: Scope, *, headers: list[tuple[bytes, bytes]]) -> None:
        self._start = start
        self._rest: Send = scope["paceline.send"]
        self._connection: Connection | None = scope.get("paceline.connection")
        self._headers = headers
        self.is_open = False

    @property
    def is_free(self) -> bool:
        """Whether `write` may be called."""
        return self.is_open and self._connection is not None and self._connection.is_free

    def write(self, data: bytes) -> None:
        assert self._connection is not None
        self._connection.write_piece(data)

    async def send(self, data: bytes) -> None:
        if not data:
            return
        if not self.is_open:
            self.is_open = True
            await self._start({"type": "http.response.start", "status": 200, "headers": self._headers})
        await self._rest({"type": "http.response.body", "body": data, "more_body": True})

    async def close(self) -> None:
        await self._rest({"type": "http.response.body", "body": b"", "more_body": False})


async def _raise_when_unread(receive: Receive, sending: Sending) -> Never:
    if not await left_or_unread(partial(disconnect, receive), sending):
        logger.info("a client reads its stream no longer")
    raise ClientGone
