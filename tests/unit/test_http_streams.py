"""Streams through the real HTTP server: what a client cannot take yet waits, and all comes in order."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager

import pytest

from bench.http_stream import StreamParser
from router.event_stream import EventStream
from router.http_edge import RequestIds
from tests.fakes_dispatch import listening

NUM_EVENTS = 50
BUFFER_BYTES = 32768
REQUEST = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"


def payload(index: int) -> bytes:
    return b"%d-%s" % (index, 65536 * b"x")  # together more than the buffers of two sockets


ALL = [payload(index) for index in range(NUM_EVENTS)]


class Producer:
    """Puts everything at once, however little of it is taken, and then lasts until `may_end`."""

    def __init__(self, *, shows_now: bool = True) -> None:
        self.shows_now = shows_now
        self.may_end = asyncio.Event()
        self.has_put = asyncio.Event()
        self.is_over = asyncio.Event()

    async def stream(self, put: Callable[[bytes], None]) -> None:
        try:
            for index in range(NUM_EVENTS):
                put(b"data: " + payload(index) + b"\n\n")
                await asyncio.sleep(0)
            self.has_put.set()
            await self.may_end.wait()
        finally:
            self.is_over.set()

    async def shown(self, told: bytes) -> bytes:
        return told

    def shown_now(self, told: bytes) -> bytes | None:
        return told if self.shows_now else None


@asynccontextmanager
async def connected(
    producer: Producer,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    app = RequestIds(EventStream(producer), lambda: "r")
    # With buffers as narrow as those, little is sent that nobody reads.
    async with listening(app, buffer_bytes=BUFFER_BYTES) as address:
        host, port = address.split(":")
        narrow = socket.create_connection((host, int(port)))
        narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
        reader, writer = await asyncio.open_connection(sock=narrow, limit=1024)
        try:
            yield reader, writer
        finally:
            writer.close()


async def answers(reader: asyncio.StreamReader, count: int) -> list[list[bytes]]:
    """The events of so many answers, one after the other."""
    received = bytearray()
    while received.count(b"\r\n0\r\n\r\n") < count:
        piece = await reader.read(1 << 20)
        assert piece, "the connection was closed"
        received += piece
    heads = bytes(received).split(b"HTTP/1.1 200 OK")[1:]
    return [StreamParser().feed(b"HTTP/1.1 200 OK" + one) for one in heads]


@pytest.mark.parametrize("shows_now", [False, True])
async def test_a_client_that_pauses_gets_all_of_its_answer_in_order_when_it_goes_on(shows_now: bool) -> None:
    producer = Producer(shows_now=shows_now)
    producer.may_end.set()
    async with connected(producer) as (reader, writer):
        for _ in range(2):  # a connection serves one request after the other
            writer.write(REQUEST)
            await producer.is_over.wait()
            assert await answers(reader, 1) == [ALL]
            producer.is_over.clear()


async def test_two_requests_sent_at_once_on_one_connection_are_answered_one_after_the_other() -> None:
    producer = Producer()
    producer.may_end.set()
    async with connected(producer) as (reader, writer):
        writer.write(2 * REQUEST)
        assert await answers(reader, 2) == [ALL, ALL]


async def test_a_client_that_leaves_what_it_has_not_read_ends_the_answer() -> None:
    producer = Producer()
    async with connected(producer) as (_reader, writer):
        writer.write(REQUEST)
        await producer.has_put.wait()
        writer.transport.abort()
        await asyncio.wait_for(producer.is_over.wait(), timeout=60)
