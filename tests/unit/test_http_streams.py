"""Streams through the real HTTP server: what a client cannot take yet waits, and all comes in order."""

import asyncio
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from bench.http_stream import StreamParser
from router.http_edge import EventStream, RequestIds
from tests.fakes_dispatch import listening

NUM_EVENTS = 50
BUFFER_BYTES = 32768
REQUEST = b"POST / HTTP/1.1\r\nhost: h\r\ncontent-length: 0\r\n\r\n"


def payload(index: int) -> bytes:
    return b"%d-%s" % (index, 65536 * b"x")  # together more than the buffers of two sockets


ALL = [payload(index) for index in range(NUM_EVENTS)]


class Producer:
    """Sends as fast as it is let."""

    def __init__(self) -> None:
        self.num_sent = 0

    async def produce(self, send: Callable[[bytes], Awaitable[None]]) -> None:
        for index in range(NUM_EVENTS):
            await send(b"data: " + payload(index) + b"\n\n")
            self.num_sent += 1
            await asyncio.sleep(0)

    async def until_held(self) -> None:
        """Until something was sent, and then nothing for a while."""
        before = 0
        while not self.num_sent or self.num_sent > before:
            before = self.num_sent
            await asyncio.sleep(0.2)


@asynccontextmanager
async def connected(
    producer: Producer,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    app = RequestIds(EventStream(producer.produce), lambda: "r")
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


async def test_a_client_that_pauses_holds_the_answer_up_and_then_gets_all_of_it_in_order() -> None:
    producer = Producer()
    async with connected(producer) as (reader, writer):
        for _ in range(2):  # a connection serves one request after the other
            producer.num_sent = 0
            writer.write(REQUEST)
            await producer.until_held()
            assert 0 < producer.num_sent < NUM_EVENTS
            assert await answers(reader, 1) == [ALL]


async def test_two_requests_sent_at_once_on_one_connection_are_answered_one_after_the_other() -> None:
    producer = Producer()
    async with connected(producer) as (reader, writer):
        writer.write(2 * REQUEST)
        assert await answers(reader, 2) == [ALL, ALL]


async def test_a_client_that_leaves_in_the_middle_ends_the_answer() -> None:
    producer = Producer()
    async with connected(producer) as (_reader, writer):
        writer.write(REQUEST)
        await producer.until_held()
        writer.transport.abort()
        await producer.until_held()
        assert producer.num_sent < NUM_EVENTS
