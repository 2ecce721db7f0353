"""How a router listens: its sockets, its HTTP server, and the signals that end it.

Owns ports, addresses and signal handlers. Must never know what is served.
"""

import asyncio
import contextlib
import signal
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.access import Access
from router.config import RouterConfig

_KEEP_ALIVE_S = 75


class StopSignal:
    """Counts the signals that ask us to stop: the first to drain, the second to hurry."""

    def __init__(self) -> None:
        self._first = asyncio.Event()
        self._second = asyncio.Event()

    def note(self) -> None:
        (self._second if self._first.is_set() else self._first).set()

    async def wait(self) -> None:
        await self._first.wait()

    async def wait_again(self) -> None:
        await self._second.wait()


@contextlib.contextmanager
def stop_signals() -> Iterator[StopSignal]:
    loop, stop = asyncio.get_running_loop(), StopSignal()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.note)
    try:
        yield stop
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)


class HttpServer(uvicorn.Server):
    """Signals are ours: a router drains before its server stops."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class _Connection(HttpToolsProtocol):
    """Lets a stream write its pieces at once, which through ASGI's messages costs several times as much."""

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self.scope["paceline.connection"] = self  # type: ignore[typeddict-unknown-key]

    @property
    def is_free(self) -> bool:
        """False where a piece must wait or has nowhere to go: ASGI's way knows how."""
        return not (self.flow.write_paused or self.transport.is_closing())

    def write_piece(self, piece: bytes) -> None:
        """Of a chunked body whose head is sent."""
        self.transport.write(b"%x\r\n%b\r\n" % (len(piece), piece))


def uvicorn_config(app: ASGIApp, access: Access | None = None) -> uvicorn.Config:
    """How the HTTP server runs in a loop and with sockets that are ours."""
    access = access or Access()
    return uvicorn.Config(
        app,
        ssl_certfile=access.tls_cert_file or None,
        ssl_keyfile=access.tls_key_file or None,
        http=_Connection,
        lifespan="off",
        access_log=False,
        log_config=None,
        server_header=False,
        proxy_headers=False,  # nobody asks where a request came from
        timeout_keep_alive=_KEEP_ALIVE_S,
        timeout_graceful_shutdown=1,
    )


@contextlib.contextmanager
def listeners_of(config: RouterConfig) -> Iterator[list[socket.socket]]:
    """The main one first."""
    with contextlib.ExitStack() as stack:
        ports = [config.port, *filter(None, [config.monitoring.admin_port])]
        yield [stack.enter_context(contextlib.closing(_listen(config, port))) for port in ports]


def _listen(config: RouterConfig, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in config.host else socket.AF_INET
    # Only the users' port is shared: of the operators' pages each router has its own.
    listener = socket.create_server(
        (config.host, port),
        family=family,
        backlog=2048,
        reuse_port=config.reuse_port and port == config.port,
    )
    listener.setblocking(False)
    return listener


def shown(host: str) -> str:
    """An address that a client on this machine can use."""
    if host in ("", "0.0.0.0", "::"):
        return "127.0.0.1"
    return bracketed(host)


def bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
