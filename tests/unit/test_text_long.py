"""Long texts stay off the event loop, on a pool that is bounded."""

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers

from router.errors import QueueFull
from router.grpc_service import GenerationService
from router.requests import Delta, GenerateRequest, TokenLogprob
from router.text import model_text
from router.text.chat import ChatTemplate
from router.text.model_text import ModelText
from router.text.options import TemplateOptions
from router.text.tokenizer import Tokenizer
from tests.fakes_dispatch import FakeDispatcher, chat_format, front_door, http_app, open_to_all, record
from tests.smollm2_text import NOON, smollm2_tokenizer_folder
from wire.gen import generate_pb2 as pb

Json = dict[str, Any]
USER: Json = {"role": "user", "content": "hi"}
LAG_S = 0.05
"""Of computing: ten times what is seen, a third of what tokenising on the loop takes."""

NUM_TRIES = 5
"""The loop may be stopped while the thread computes on; it is blamed when it lags every time."""


class NotingTokenizer(Tokenizer):
    """A real tokenizer that notes on which thread it works; waits for `gate` where one is set."""

    def __init__(self, backend: tokenizers.Tokenizer, **options: Any) -> None:
        super().__init__(backend, **options)
        self.threads: list[str] = []
        self.gate: threading.Event | None = None

    def reset(self) -> None:
        self.threads, self.gate = [], None

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        if self.gate is not None:
            self.gate.wait()
        return super().encode(text, add_special_tokens=add_special_tokens)

    def decode(self, ids: Sequence[int], *, shows_special: bool = False) -> str:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        return super().decode(ids, shows_special=shows_special)

    def token_bytes(self, token_id: int) -> bytes:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        return super().token_bytes(token_id)


@functools.cache
def parts() -> tuple[NotingTokenizer, ChatTemplate | None]:
    folder = smollm2_tokenizer_folder()
    tokenizer = NotingTokenizer.from_folder(folder)
    assert isinstance(tokenizer, NotingTokenizer)
    special_tokens = tokenizer.special_tokens
    return tokenizer, ChatTemplate.from_folder(folder, special_tokens=special_tokens, local_time=lambda: NOON)


@asynccontextmanager
async def noting() -> AsyncIterator[tuple[ModelText, NotingTokenizer]]:
    tokenizer, template = parts()
    tokenizer.reset()
    text = ModelText(tokenizer, template=template)
    try:
        yield text, tokenizer
    finally:
        if tokenizer.gate is not None:
            tokenizer.gate.set()
        text.close()


class NotingScores(tuple[TokenLogprob, ...]):
    """Scores of a prompt that note on which threads they are gone through."""

    threads: list[str]

    def __iter__(self) -> Iterator[TokenLogprob]:
        self.threads.append(threading.current_thread().name.partition("_")[0])
        return super().__iter__()


@dataclass
class Scoring(FakeDispatcher):
    """Tells these scores of every prompt."""

    scores: NotingScores = field(default_factory=NotingScores)

    def _delta(self, request: GenerateRequest, first: int, ids: Sequence[int]) -> Delta:
        return msgspec.structs.replace(super()._delta(request, first, ids), prompt_logprobs=self.scores)


class Taking:
    """A call's context that takes every message."""

    def __init__(self) -> None:
        self.messages: list[pb.GenerateResponse] = []

    def invocation_metadata(self) -> tuple[tuple[str, str], ...]:
        return ()

    def time_remaining(self) -> float | None:
        return None

    async def write(self, message: pb.GenerateResponse) -> None:
        self.messages.append(message)


def tale(num_words: int) -> str:
    return " ".join(f"word{number} of the long tale" for number in range(num_words))


async def worst_lag_during(work: asyncio.Task[Any]) -> float:
    """The most this process computed between two turns of the loop, while `work` runs.

    Not the time that passed, in which other processes may have computed.
    """
    worst = 0.0
    while not work.done():
        before = time.process_time()
        await asyncio.sleep(0.001)
        worst = max(worst, time.process_time() - before)
    return worst


async def least_lag(make: Callable[[], Coroutine[Any, Any, tuple[int, ...]]]) -> float:
    """Of some tries to make a prompt of 100k tokens, the one that held the loop up least."""
    least = float("inf")
    for _ in range(NUM_TRIES):
        work = asyncio.create_task(make())
        least = min(least, await worst_lag_during(work))
        assert len(work.result()) > 100_000
        if least < LAG_S:
            break
    return least


async def test_a_prompt_of_100k_tokens_is_tokenised_on_a_thread_while_the_loop_runs_on() -> None:
    async with noting() as (text, tokenizer):
        prompt = tale(15_000)
        assert await least_lag(lambda: text.encode(prompt)) < LAG_S
        assert set(tokenizer.threads) == {"aside"}


async def test_a_long_chat_is_rendered_and_tokenised_on_a_thread() -> None:
    async with noting() as (text, tokenizer):
        messages = [{"role": "user", "content": tale(15_000)}]
        assert await least_lag(lambda: text.encode_chat(messages)) < LAG_S
        assert set(tokenizer.threads) == {"aside"}


IDS = list(range(100, 6100))
LONG_SHOWS: dict[str, tuple[str, Json]] = {
    "tokens as text": ("/tokenize", {"prompt": tale(1500), "return_token_strs": True}),
    "ids as text": ("/detokenize", {"tokens": IDS}),
    "an echo": ("/v1/completions", {"prompt": IDS, "echo": True}),
    "a scored echo": ("/v1/completions", {"prompt": IDS, "echo": True, "logprobs": 1, "max_tokens": 0}),
    "a scored echo in a stream": (
        "/v1/completions",
        {"prompt": tale(1500), "echo": True, "logprobs": 1, "max_tokens": 0, "stream": True},
    ),
    "a scored prompt": ("/v1/completions", {"prompt": IDS, "prompt_logprobs": 1}),
    "a scored chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": tale(1500)}], "prompt_logprobs": 1},
    ),
    "a scored answer": ("/v1/chat/completions", {"messages": [USER], "logprobs": True, "top_logprobs": 1}),
}


@pytest.mark.parametrize("what", LONG_SHOWS)
async def test_what_is_long_to_show_is_made_on_a_thread(what: str) -> None:
    path, body = LONG_SHOWS[what]
    script = IDS[:2000] if what == "a scored answer" else IDS[:1]
    async with noting() as (text, tokenizer):
        app = http_app(FakeDispatcher(script=script), text, node=record(max_model_len=50_000))
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
            response = await http.post(path, json=body)
        assert response.status_code == 200, response.text
    on_loop = tokenizer.threads.count("MainThread")
    assert "aside" in tokenizer.threads
    assert on_loop < 100, on_loop  # a short chat is tokenised there, and the end of a chat's prompt looked at


async def test_grpc_tells_the_scores_of_a_long_prompt_from_a_thread() -> None:
    """Called as gRPC would call it, with a context that takes every message."""
    scores = NotingScores([TokenLogprob(-1.0, ((5, -1.0),))] * (len(IDS) - 1))
    scores.threads = []
    async with noting() as (text, _):
        door = front_door(Scoring(script=IDS[:1], scores=scores), text, node=record(max_model_len=50_000))
        service = GenerationService(
            door, new_id=lambda: "x", keys=open_to_all(), chat_format=chat_format(text)
        )
        request = pb.GenerateRequest(
            token_ids=pb.TokenIds(ids=IDS), sampling=pb.Sampling(prompt_logprobs=1, max_tokens=1)
        )
        context = Taking()
        await service.Generate(request, context)
    assert len(context.messages[0].prompt_logprobs) == len(IDS) - 1
    assert scores.threads == ["aside"]


async def test_the_text_of_tools_counts_too() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": tale(200)}}]
    async with noting() as (text, tokenizer):
        await text.encode_chat([{"role": "user", "content": "x"}], TemplateOptions(tools=tools))
        assert tokenizer.threads == ["aside"]


async def test_a_short_text_is_not_worth_a_thread() -> None:
    async with noting() as (text, tokenizer):
        await text.encode("Hello")
        assert tokenizer.threads == ["MainThread"]


@pytest.mark.parametrize(("name", "bound"), [("_MAX_WAITING", 2), ("_MAX_WAITING_CHARS", 2 * len(tale(400)))])
async def test_long_texts_that_wait_are_bounded(
    name: str, bound: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(model_text, name, bound)
    async with noting() as (text, tokenizer):
        tokenizer.gate = threading.Event()
        waiting = [asyncio.create_task(text.encode(tale(400))) for _ in range(2)]
        await asyncio.sleep(0)
        with pytest.raises(QueueFull) as caught:
            await text.encode(tale(400))
        assert (caught.value.http_status, caught.value.retry_after_s) == (429, 1.0)
        tokenizer.gate.set()
        assert len({len(ids) for ids in await asyncio.gather(*waiting)}) == 1
        await text.encode(tale(400))
