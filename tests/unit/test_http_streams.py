"""Streams through the real HTTP server: what a client cannot take yet waits, and all comes in order."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager

from bench.http_stream import StreamParser
from router.http_edge import EventStream, RequestIds
from router.listening import HttpServer, uvicorn_config

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
        """Until nothing was sent for a while."""
        before = -1
        while self.num_sent > before:
            before = self.num_sent
            await asyncio.sleep(0.2)


@asynccontextmanager
async def connected(
    producer: Producer,
) -> AsyncGenerator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    server = HttpServer(uvicorn_config(RequestIds(EventStream(producer.produce), lambda: "r")))
    with contextlib.closing(socket.create_server(("127.0.0.1", 0))) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
        async with asyncio.TaskGroup() as group:
            group.create_task(server.serve(sockets=[listener]))
            # With buffers as narrow as those, little is sent that nobody reads.
            narrow = socket.create_connection(listener.getsockname())
            narrow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER_BYTES)
            reader, writer = await asyncio.open_connection(sock=narrow, limit=1024)
            try:
                yield reader, writer
            finally:
                writer.close()
                server.should_exit = True


async def answers(reader: asyncio.StreamReader, count: int) -> list[list[bytes]]:
    """The events of so many answers, one after the other."""
    received = bytearray()
    while received.count(b"\r\n0\r\n\r\n") < count:
        received += await reader.read(1 << 20)
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
