"""The edge between HTTP and everything else: bodies in, errors out, clients that leave.

Owns status codes, headers and disconnects. Must never know what a request means.
"""

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from typing import Any, Never, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from router.errors import BadRequest, BodyTooLarge, RouterError
from router.leaving import until_left

T = TypeVar("T")

_MAX_LABEL_CHARS = 128
_CLIENT_GONE_STATUS = 499
_MAX_SILENCE_S = 60.0


class UnsupportedMediaType(BadRequest):
    http_status = 415
    default_code = "unsupported_media_type"


class BodyTooSlow(BadRequest):
    http_status = 408
    default_code = "body_timeout"


class ClientGone(Exception):
    """The client closed its connection, or has stopped reading: nobody reads an answer any more."""


class JsonResponse(Response):
    """JSON by msgspec."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


def error_body(error: RouterError) -> dict[str, Any]:
    """The OpenAI error shape."""
    return {"error": {"message": error.message, "type": error.type, "param": error.param, "code": error.code}}


def error_response(error: RouterError) -> Response:
    headers = {"x-paceline-reason": error.code}
    if isinstance(error, BodyTooSlow):
        headers["connection"] = "close"  # the rest of the body is no next request
    if error.retry_after is not None:
        headers["retry-after"] = str(error.retry_after)
    return JsonResponse(error_body(error), status_code=error.http_status, headers=headers)


def client_gone_response() -> Response:
    """For the server's own books: it reaches nobody."""
    return Response(status_code=_CLIENT_GONE_STATUS)


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """A JSON body; reads no more than it must.

    Raises UnsupportedMediaType, BodyTooLarge, BodyTooSlow or ClientGone.
    """
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type and media_type != "application/json" and not media_type.endswith("+json"):
        raise UnsupportedMediaType(f"content-type must be application/json, got {media_type!r}")
    declared = request.headers.get("content-length", "")
    too_large = BodyTooLarge(f"the body must have at most {max_bytes} bytes")
    if declared.isdigit() and int(declared) > max_bytes:
        raise too_large
    chunks: list[bytes] = []
    num_bytes = 0
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(_MAX_SILENCE_S) as patience:
            async for chunk in request.stream():
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise too_large
                chunks.append(chunk)
                patience.reschedule(loop.time() + _MAX_SILENCE_S)
    except TimeoutError:
        raise BodyTooSlow(f"the body must not pause for {_MAX_SILENCE_S:.0f} seconds") from None
    except ClientDisconnect:
        raise ClientGone from None
    return b"".join(chunks)


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled as soon as the client leaves; then raises ClientGone.

    The request body must have been read before.
    """
    return await until_left(_raise_on_disconnect(receive), work)


async def _raise_on_disconnect(receive: Receive) -> Never:
    await disconnect(receive)
    raise ClientGone


async def disconnect(receive: Receive) -> None:
    """Until the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def by_port(apps: Mapping[int, ASGIApp], *, otherwise: ASGIApp) -> ASGIApp:
    """Another application on some of the ports of one server."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        port = (scope.get("server") or ("", -1))[1] or -1
        await apps.get(port, otherwise)(scope, receive, send)

    return app


class RequestIds:
    """Answers every request with an `x-request-id`: the client's, where it is one, else a new one.

    It is a label for people and logs; `request_label` reads it. Nothing inside is keyed by it. Whatever wraps
    `send` wants to see heads only: streams send their bodies past it, by the server's own.
    """

    def __init__(self, app: ASGIApp, new_id: Callable[[], str]) -> None:
        self._app = app
        self._new_id = new_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        is_label = given.isascii() and given.isprintable() and 0 < len(given) <= _MAX_LABEL_CHARS
        label = given if is_label else self._new_id()
        scope["paceline.request_id"] = label
        scope["paceline.send"] = send

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), (b"x-request-id", label.encode())]
            await send(message)

        await self._app(scope, receive, send_with_id)


def request_label(request: Request) -> str:
    return str(request.scope["paceline.request_id"])
