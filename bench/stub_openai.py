"""An OpenAI server that computes nothing: it streams ready-made words, one each step.

Owns what gateways for HTTP servers are measured against; a process of its own. Must never know a gateway.
"""

import argparse
import asyncio
import dataclasses
import json
from dataclasses import dataclass
from typing import cast

import uvloop

from bench.ticks import tick

_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncache-control: no-cache\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)
_END = b"0\r\n\r\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenAiStubConfig:
    """`step_s`: one word of every request each step. The first comes at once."""

    port: int
    model: str
    words: tuple[str, ...]
    step_s: float


class _Connection(asyncio.Protocol):
    """Answers one request after the other. Knows just enough of HTTP for the clients it has."""

    def __init__(self, server: "_Server") -> None:
        self._server = server
        self._received = b""
        self._transport: asyncio.Transport | None = None
        self._num_left = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own class is none of asyncio's

    def connection_lost(self, _error: Exception | None) -> None:
        self._server.running.discard(self)
        self._transport = None

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        length = next(
            (
                int(line.partition(b":")[2])
                for line in head.lower().split(b"\r\n")
                if line.startswith(b"content-length:")
            ),
            0,
        )
        if len(body) < length:
            return
        self._received = body[length:]
        self._answer(head.split(b" ", 2)[1], body[:length])

    def _answer(self, path: bytes, body: bytes) -> None:
        assert self._transport is not None
        if not path.startswith(b"/v1/completions"):
            self._transport.write(_json(self._server.about(path)))
            return
        self._num_left = int(json.loads(body)["max_tokens"])
        self._transport.write(_HEAD)
        self._server.running.add(self)
        self.step()

    def step(self) -> None:
        """One more word, and the end behind the last."""
        if self._transport is None:
            return
        self._num_left -= 1
        data = _chunk(self._server.event(is_last=self._num_left == 0))
        if not self._num_left:
            data += _chunk(b"data: [DONE]\n\n") + _END
            self._server.running.discard(self)
        self._transport.write(data)


class _Server:
    def __init__(self, config: OpenAiStubConfig) -> None:
        self._config = config
        self.running: set[_Connection] = set()

    def event(self, *, is_last: bool) -> bytes:
        words = self._config.words
        choice = {
            "index": 0,
            "text": words[tick() % len(words)],
            "logprobs": None,
            "finish_reason": "length" if is_last else None,
        }
        root = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": self._config.model}
        return b"data: " + json.dumps({**root, "choices": [choice]}, separators=(",", ":")).encode() + b"\n\n"

    def about(self, path: bytes) -> dict[str, object]:
        """What gateways ask a server before they use it."""
        if path.startswith(b"/v1/models"):
            return {"object": "list", "data": [{"id": self._config.model, "object": "model"}]}
        return {"status": "ok", "model_path": self._config.model, "served_model_name": self._config.model}

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        await loop.create_server(lambda: _Connection(self), "127.0.0.1", self._config.port, backlog=2048)
        print("listening", flush=True)
        while True:
            due = loop.time() + self._config.step_s
            for connection in list(self.running):
                connection.step()
            await asyncio.sleep(max(0.0, due - loop.time()))


def _chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def _json(value: dict[str, object]) -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("config", help="OpenAiStubConfig as JSON")
    values = json.loads(parser.parse_args().config)
    config = OpenAiStubConfig(**{**values, "words": tuple(values["words"])})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_Server(config).run())


def command_line(config: OpenAiStubConfig) -> str:
    """The argument of `python -m bench.stub_openai`."""
    return json.dumps(dataclasses.asdict(config))


if __name__ == "__main__":
    main()
