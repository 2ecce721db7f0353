"""The official client against a real server on loopback."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import openai
import pytest

from deploy.client import ChatClient
from router.errors import NodeFailed, NodesBusy
from tests.fakes_dispatch import FakeDispatcher, http_app, listening
from tests.smollm2_text import smollm2_text

TEXT = "Hello world, a flag: 🇰🇷. END"
MESSAGES: Any = [{"role": "user", "content": "hi"}]


@asynccontextmanager
async def served(dispatcher: FakeDispatcher, **options: Any) -> AsyncGenerator[str]:
    """Base URL of the front end on a free port."""
    async with listening(http_app(dispatcher, smollm2_text(), **options)) as address:
        yield f"http://{address}"


@asynccontextmanager
async def client(dispatcher: FakeDispatcher, **options: Any) -> AsyncGenerator[openai.AsyncOpenAI]:
    async with (
        served(dispatcher, **options) as url,
        openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as opened,
    ):
        yield opened


def answering(text: str = TEXT, **options: Any) -> FakeDispatcher:
    ids = smollm2_text().tokenizer.encode(text, add_special_tokens=False)
    return FakeDispatcher(script=(*ids, 2), **options)


async def test_the_official_client_reads_a_chat() -> None:
    async with client(answering()) as ai:
        chat = await ai.chat.completions.create(
            model="smol", messages=MESSAGES, logprobs=True, top_logprobs=1
        )
    assert chat.choices[0].message.content == TEXT
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert chat.usage.prompt_tokens_details is not None
    assert (chat.usage.completion_tokens, chat.usage.prompt_tokens_details.cached_tokens) == (
        len(script()),
        3,
    )
    assert chat.choices[0].logprobs is not None
    assert chat.choices[0].logprobs.content is not None
    raw = b"".join(bytes(entry.bytes or []) for entry in chat.choices[0].logprobs.content[:-1])
    assert raw.decode() == TEXT


def script() -> tuple[int, ...]:
    return tuple(answering().script)


async def test_the_official_client_reads_a_chat_stream() -> None:
    async with client(answering(rounds=(1, 4))) as ai:
        stream = await ai.chat.completions.create(
            model="smol", messages=MESSAGES, stream=True, n=2, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    usage = chunks.pop().usage
    assert usage is not None
    assert usage.completion_tokens == 2 * len(script())
    for index in (0, 1):
        choices = [choice for chunk in chunks for choice in chunk.choices if choice.index == index]
        assert choices[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in choices) == TEXT
        assert [choice.finish_reason for choice in choices if choice.finish_reason] == ["stop"]


async def test_the_official_client_reads_completions() -> None:
    async with client(answering()) as ai:
        whole = await ai.completions.create(model="smol", prompt=["a", "b"], stop=["END"], logprobs=1)
        stream = await ai.completions.create(model="smol", prompt=[5, 6], stream=True)
        text = "".join([chunk.choices[0].text async for chunk in stream])
        models = [model.id async for model in ai.models.list()]
    assert [choice.text for choice in whole.choices] == [TEXT.removesuffix("END")] * 2
    assert text == TEXT
    assert models == ["smol"]


async def test_the_official_client_raises_its_own_errors() -> None:
    async with client(answering()) as ai:
        with pytest.raises(openai.NotFoundError, match="got 'other'"):
            await ai.chat.completions.create(model="other", messages=MESSAGES)
        with pytest.raises(openai.BadRequestError, match="temperature must be in") as caught:
            await ai.chat.completions.create(model="smol", messages=MESSAGES, temperature=3)
        assert caught.value.param == "temperature"
    async with client(answering(error=NodesBusy("full", retry_after_s=1))) as ai:
        with pytest.raises(openai.RateLimitError):
            await ai.chat.completions.create(model="smol", messages=MESSAGES, stream=True)


async def test_an_error_in_the_stream_reaches_the_official_client() -> None:
    async with client(answering(error=NodeFailed("node broke"), fail_after=2)) as ai:
        stream = await ai.chat.completions.create(model="smol", messages=MESSAGES, stream=True)
        with pytest.raises(openai.APIError, match="node broke"):
            async for _ in stream:
                pass


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("stall_after", [0, 2])
@pytest.mark.parametrize(
    ("path", "fields"), [("/v1/completions", {"prompt": "hi", "n": 2}), ("/v1/responses", {"input": "hi"})]
)
async def test_closing_the_socket_cancels_the_generation(
    path: str, fields: dict[str, Any], is_stream: bool, stall_after: int
) -> None:
    dispatcher = answering(stall_after=stall_after)
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        asking = asyncio.ensure_future(http.post(path, json={**fields, "stream": is_stream}))
        count = fields.get("n", 1)
        await asyncio.wait_for(dispatcher.until_stalled(count), timeout=60)
        asking.cancel()
        await asyncio.gather(asking, return_exceptions=True)
        await asyncio.wait_for(dispatcher.until_idle(), timeout=60)
    assert dispatcher.num_closed_early == count


async def test_events_leave_the_server_as_they_are_made() -> None:
    dispatcher = answering(stall_after=2)
    async with served(dispatcher) as url, httpx.AsyncClient(base_url=url, timeout=60) as http:
        async with http.stream("POST", "/v1/completions", json={"prompt": "hi", "stream": True}) as response:
            lines = response.aiter_lines()
            assert '"text":"Hello"' in await asyncio.wait_for(anext(lines), timeout=60)
        await asyncio.wait_for(dispatcher.until_idle(), timeout=60)


async def test_our_own_client_takes_either_form_of_the_url_and_no_proxy_to_this_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    async with served(answering()) as url:
        for form in (url, f"{url}/", f"{url}/v1", f"{url}/v1/"):
            own = ChatClient(form)
            try:
                assert await own.model() == "smol"
            finally:
                await own.close()
