"""The measuring client and the front of a vLLM pair over real sockets, against stand-ins for vLLM."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.contenders import Wave
from bench.openai import OpenAi
from bench.servers import running
from bench.vllm import Paused
from bench.vllm_pair import Address, PairFront
from deploy.errors import GatewayError
from deploy.ports import free_port
from deploy.processes import Child, Command

Answer = Callable[[dict[str, Any]], bytes]
HANDED_OVER = {"remote_engine_id": "e", "remote_port": 7}


def plain(value: Any, status: str = "200 OK") -> bytes:
    body = json.dumps(value).encode()
    head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
    return head.encode() + body


def streamed(*events: Any) -> bytes:
    parts = [b"data: " + json.dumps(event).encode() + b"\n\n" for event in events] + [
        b"data: [DONE]\n\n",
        b"",
    ]
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
    return head + b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts)


@asynccontextmanager
async def a_server(answer: Answer) -> AsyncIterator[int]:
    """Answers GET with one model and POST with what `answer` makes of the body."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        length = int(head.partition("content-length:")[2].split()[0])
        body = await reader.readexactly(length)
        writer.write(answer(json.loads(body)) if head.startswith("post") else plain({"data": [{"id": "m"}]}))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        yield server.sockets[0].getsockname()[1]


@asynccontextmanager
async def a_front(prefill: int, decode: int) -> AsyncIterator[int]:
    port = free_port()
    front = PairFront(Address("127.0.0.1", prefill), Address("127.0.0.1", decode))
    serving = asyncio.create_task(front.serve("127.0.0.1", port))
    try:
        async with asyncio.timeout(60):
            while True:
                try:
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                except OSError:
                    await asyncio.sleep(0.01)
                    continue
                writer.close()
                break
        yield port
    finally:
        serving.cancel()
        await asyncio.gather(serving, return_exceptions=True)


async def test_a_pair_behind_its_front_looks_like_one_server() -> None:
    asked: dict[str, dict[str, Any]] = {}

    def prefill(body: dict[str, Any]) -> bytes:
        asked["prefill"] = body
        return plain({"choices": [{"text": "a"}], "kv_transfer_params": HANDED_OVER})

    def decode(body: dict[str, Any]) -> bytes:
        asked["decode"] = body
        usage = {"prompt_tokens": 3, "completion_tokens": body["max_tokens"]}
        return streamed({"choices": [{"text": "a"}]}, {"choices": [], "usage": usage})

    async with a_server(prefill) as p, a_server(decode) as d, a_front(p, d) as port:
        client = OpenAi(f"http://127.0.0.1:{port}/v1")
        assert await client.model() == "m"
        completion = await client.complete("hello", model="m", max_tokens=5)
    assert (completion.num_prompt_tokens, completion.num_output_tokens) == (3, 5)
    assert asked["prefill"]["max_tokens"] == 1
    assert asked["decode"]["max_tokens"] == 5
    assert asked["decode"]["kv_transfer_params"] == HANDED_OVER


async def test_a_server_that_refuses_is_an_error_with_its_words() -> None:
    async with a_server(lambda _: plain({"error": "no such model"}, "404 Not Found")) as port:
        with pytest.raises(GatewayError, match=r"404.*no such model"):
            await OpenAi(f"127.0.0.1:{port}").complete("hello", model="x", max_tokens=2)


async def test_nobody_listening_is_an_error_with_the_url() -> None:
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(GatewayError, match=url):
        await OpenAi(url).model()


async def test_a_prefill_server_that_hands_nothing_over_is_a_bad_gateway() -> None:
    async with (
        a_server(lambda _: plain({"choices": []})) as p,
        a_server(lambda _: b"") as d,
        a_front(p, d) as port,
    ):
        with pytest.raises(GatewayError, match=r"502.*handed nothing over"):
            await OpenAi(f"http://127.0.0.1:{port}").complete("hello", model="m", max_tokens=2)


@pytest.mark.parametrize("url", ["ftp://host", "http://"])
def test_urls_that_cannot_be_asked_are_refused(url: str) -> None:
    with pytest.raises(ValueError, match="against must be"):
        OpenAi(url)


class Watcher:
    """A contender that looks at the state of a process while it answers."""

    name = "watcher"

    def __init__(self, child: Child) -> None:
        self._child = child
        self.num_answers = 0

    async def answer(self, prompts: Sequence[str], *, max_tokens: int) -> Wave:
        await until_stopped(self._child, is_stopped=False)
        self.num_answers += 1
        return Wave(elapsed_s=1.0, answers=())


async def until_stopped(child: Child, *, is_stopped: bool) -> None:
    async with asyncio.timeout(60):
        while (state_of(child.pid) == "T") != is_stopped:  # noqa: ASYNC110  another process
            await asyncio.sleep(0.01)


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
async def test_a_paused_server_runs_only_while_it_answers_and_can_be_stopped(tmp_path: Path) -> None:
    command = Command(name="sleeper", arguments=["sleep", "1000"], environment={})
    async with running(command, tmp_path) as child:
        watcher = Watcher(child)
        paused = Paused(watcher, [child], settle_s=0.0)
        await until_stopped(child, is_stopped=True)
        await paused.answer([], max_tokens=2)
        await until_stopped(child, is_stopped=True)
        paused.go_on()
    assert (watcher.num_answers, child.is_running) == (1, False)
