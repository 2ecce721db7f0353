"""A node's own HTTP server: a few pages to read, nothing to send. For Prometheus and for health checks.

Owns the listening socket and just enough HTTP/1.1. Must never know what a page says.
"""

import asyncio
import logging
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass

logger = logging.getLogger(__name__)

_MAX_HEAD_BYTES = 8192
_MAX_CONNECTIONS = 32
_HEAD_TIMEOUT_S = 5.0
_REASONS = {
    200: "OK",
    400: "Bad Request",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Page:
    body: bytes
    content_type: str = "application/json"
    status: int = 200


Pages = Mapping[str, Callable[[], Awaitable[Page]]]


class MetricsServer:
    """Listens from construction on, serves from `start` on. Raises OSError when it cannot bind.

    One request a connection: a scraper comes every few seconds.
    """

    def __init__(self, *, host: str, port: int) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._socket = socket.create_server((host, port), family=family)
        self.port = int(self._socket.getsockname()[1])
        self._pages: Pages = {}
        self._server: asyncio.Server | None = None
        self._num_open = 0

    async def start(self, pages: Pages) -> None:
        """Serve `pages`, by path."""
        self._pages = pages
        self._server = await asyncio.start_server(self._serve, sock=self._socket, limit=_MAX_HEAD_BYTES)

    async def stop(self) -> None:
        """Stop listening. Idempotent."""
        if self._server is None:
            self._socket.close()
            return
        self._server.close()
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._num_open += 1
        try:
            if self._num_open <= _MAX_CONNECTIONS:
                await self._answer(reader, writer)
        except (OSError, TimeoutError, asyncio.IncompleteReadError):
            pass  # the client is gone, or never said what it wants
        except Exception:
            logger.exception("a page could not be made")
        finally:
            self._num_open -= 1
            writer.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_HEAD_TIMEOUT_S):
                head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.LimitOverrunError:
            head = b""
        method, page = await self._page(head)
        lines = (
            f"HTTP/1.1 {page.status} {_REASONS[page.status]}",
            f"content-type: {page.content_type}",
            f"content-length: {len(page.body)}",
            "connection: close",
        )
        writer.write("\r\n".join((*lines, "", "")).encode() + (b"" if method == "HEAD" else page.body))
        await writer.drain()

    async def _page(self, head: bytes) -> tuple[str, Page]:
        words = head.partition(b"\r\n")[0].decode("latin-1").split()
        if len(words) != 3 or not words[2].startswith("HTTP/1."):
            return "", _problem(400, "not an HTTP/1.1 request")
        method, path = words[0], words[1].partition("?")[0]
        if path not in self._pages:
            return method, _problem(404, "no such page")
        if method not in ("GET", "HEAD"):
            return method, _problem(405, "pages here can only be read")
        return method, await self._pages[path]()


def _problem(status: int, text: str) -> Page:
    return Page(body=f'{{"error":"{text}"}}'.encode(), status=status)
