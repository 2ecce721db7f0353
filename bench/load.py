"""Loads one router from a process of its own: raw sockets and bytes, so that the client costs little.

Owns the sending and the counting. Must never parse more of an answer than its framing.
"""

import argparse
import asyncio
import dataclasses
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import cast

import uvloop

from bench.ticks import TickReader
from kv_transfer.ids import new_incarnation
from wire.channel import Channel
from wire.grpc_client import GrpcConnector
from wire.work import Finished, Frame, SamplingParams, Submit, Tokens, TransferId, WorkHello

_END = b"0\r\n\r\n"
_MARK = b"data: "
_TAIL = max(len(_END), len(_MARK) - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadSpec:
    """`direct` is a stub's address: then each request is followed by a direct call on it.

    words: the answers are made of these, which tell the time (see `bench.ticks`); empty: they are not read.
    model: named in the requests unless empty. prompt: the text to send instead of `prompt_ids`.
    """

    host: str
    port: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    num_requests: int
    concurrency: int
    direct: str = ""
    words: tuple[str, ...] = ()
    model: str = ""
    prompt: str = ""


@dataclass(slots=True, kw_only=True)
class LoadResult:
    """Seconds. `ttft_s` and `direct_s` are in the order of sending; `num_events` counts SSE events.

    lateness_s: of every word, from its sending to its reading here.
    """

    elapsed_s: float = 0.0
    client_cpu_s: float = 0.0
    num_events: int = 0
    num_failed: int = 0
    ttft_s: list[float] = field(default_factory=list)
    total_s: list[float] = field(default_factory=list)
    direct_s: list[float] = field(default_factory=list)
    lateness_s: list[float] = field(default_factory=list)


class AnswerCounter:
    """Counts the events of one streamed answer in whatever pieces it arrives."""

    def __init__(self) -> None:
        self.num_events = 0
        self.is_complete = False
        self._tail = b""

    def feed(self, data: bytes) -> None:
        # The kept end is shorter than a mark, so no mark is counted twice.
        joined = self._tail[-(len(_MARK) - 1) :] + data
        self.num_events += joined.count(_MARK)
        self._tail = (self._tail + data)[-_TAIL:]
        self.is_complete = self._tail.endswith(_END)


class WordFinder:
    """Finds the texts of one streamed answer in whatever pieces it arrives. They hold no escapes."""

    _BEGIN = b'"text":"'

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        self._rest += data
        words: list[bytes] = []
        while True:
            start = self._rest.find(self._BEGIN)
            end = self._rest.find(b'"', start + len(self._BEGIN)) if start >= 0 else -1
            if end < 0:
                self._rest = self._rest[start:] if start >= 0 else self._rest[-len(self._BEGIN) :]
                return words
            words.append(self._rest[start + len(self._BEGIN) : end])
            self._rest = self._rest[end:]


class _Connection(asyncio.Protocol):
    """One connection that sends the same request again and again until there are no more to send."""

    def __init__(
        self,
        request: bytes,
        result: LoadResult,
        *,
        take: Callable[[], bool],
        reader: TickReader | None = None,
    ) -> None:
        self._reader = reader
        self._words = WordFinder()
        self._request = request
        self._result = result
        self._take = take
        self._counter = AnswerCounter()
        self._started = 0.0
        self._first = 0.0
        self._transport: asyncio.Transport | None = None
        self.done = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is none of asyncio's
        self.send()

    def connection_lost(self, _error: Exception | None) -> None:
        if not self.done.done():
            self._result.num_failed += 1
            self.done.set_result(None)

    def send(self) -> None:
        assert self._transport is not None
        if not self._take():
            if not self.done.done():
                self.done.set_result(None)
            return
        self._counter, self._first = AnswerCounter(), 0.0
        self._started = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        counter = self._counter
        counter.feed(data)
        if self._reader is not None:
            for word in self._words.feed(data):
                if (lateness_s := self._reader.lateness_s(word)) is not None:
                    self._result.lateness_s.append(lateness_s)
        if counter.num_events and not self._first:
            self._first = time.perf_counter()
        if counter.is_complete:
            self._finish()

    def _finish(self) -> None:
        now = time.perf_counter()
        self._result.num_events += self._counter.num_events
        if not self._first:
            self._result.num_failed += 1
        self._result.ttft_s.append((self._first or now) - self._started)
        self._result.total_s.append(now - self._started)
        self.send()


async def run(spec: LoadSpec) -> LoadResult:
    """Send all requests; with `direct`, one by one and each next to a direct call."""
    result = LoadResult()
    cpu, started = time.process_time(), time.perf_counter()
    if spec.direct:
        await _interleave(spec, result)
    else:
        await _flood(spec, result)
    result.elapsed_s = time.perf_counter() - started
    result.client_cpu_s = time.process_time() - cpu
    return result


async def _flood(spec: LoadSpec, result: LoadResult) -> None:
    left = iter(range(spec.num_requests))
    loop, request = asyncio.get_running_loop(), request_bytes(spec)
    reader = TickReader([word.encode() for word in spec.words]) if spec.words else None
    connections: list[_Connection] = []
    for _ in range(min(spec.concurrency, spec.num_requests)):
        _, connection = await loop.create_connection(
            lambda: _Connection(request, result, take=lambda: next(left, None) is not None, reader=reader),
            spec.host,
            spec.port,
        )
        connections.append(connection)
    await asyncio.gather(*(connection.done for connection in connections))


async def _interleave(spec: LoadSpec, result: LoadResult) -> None:
    loop, request = asyncio.get_running_loop(), request_bytes(spec)
    budget = [0]

    def take() -> bool:
        budget[0] -= 1
        return budget[0] >= 0

    _, connection = await loop.create_connection(
        lambda: _Connection(request, result, take=take), spec.host, spec.port
    )
    async with GrpcConnector() as connector:
        channel = await connector.work(spec.direct)
        await channel.send(WorkHello(incarnation=new_incarnation(), role="router"))
        await channel.receive()
        for index in range(spec.num_requests):
            budget[0] = 1
            connection.done = loop.create_future()
            connection.send()
            await connection.done
            result.direct_s.append(await _direct(channel, spec, index))


async def _direct(channel: Channel, spec: LoadSpec, index: int) -> float:
    """Seconds until the stub's first token, asked on a stream of our own."""
    submit = Submit(
        tid=TransferId(f"direct-{index}", 1),
        prompt_ids=spec.prompt_ids,
        num_prompt_tokens=len(spec.prompt_ids),
        sampling=SamplingParams(seed=0, max_tokens=spec.max_tokens, temperature=0.0),
        peer=None,
        deadline_s=60.0,
    )
    started, first, is_over = time.perf_counter(), 0.0, False
    await channel.send(submit)
    while not is_over:
        frame = await channel.receive()
        assert isinstance(frame, Frame)
        if not first and any(isinstance(event, Tokens) for event in frame.events):
            first = time.perf_counter()
        is_over = any(isinstance(event, Finished) for event in frame.events)
    return first - started


def request_bytes(spec: LoadSpec) -> bytes:
    """The HTTP request that every connection repeats."""
    body = json.dumps(
        {
            **({"model": spec.model} if spec.model else {}),
            "prompt": spec.prompt or spec.prompt_ids,
            "max_tokens": spec.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
        }
    ).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nhost: {spec.host}:{spec.port}\r\n"
        f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("spec", help="LoadSpec as JSON")
    values = json.loads(parser.parse_args().spec)
    tuples = {name: tuple(values[name]) for name in ("prompt_ids", "words")}
    spec = LoadSpec(**{**values, **tuples})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        print(json.dumps(dataclasses.asdict(runner.run(run(spec)))))


if __name__ == "__main__":
    main()
