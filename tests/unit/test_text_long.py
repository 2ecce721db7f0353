"""Long texts stay off the event loop, on a pool that is bounded."""

import asyncio
import functools
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import pytest
import tokenizers

from router.errors import QueueFull
from router.text import model_text
from router.text.chat import ChatTemplate
from router.text.model_text import ModelText
from router.text.options import TemplateOptions
from router.text.tokenizer import Tokenizer
from tests.smollm2_text import NOON, smollm2_tokenizer_folder

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
        assert set(tokenizer.threads) == {"tokenize"}


async def test_a_long_chat_is_rendered_and_tokenised_on_a_thread() -> None:
    async with noting() as (text, tokenizer):
        messages = [{"role": "user", "content": tale(15_000)}]
        assert await least_lag(lambda: text.encode_chat(messages)) < LAG_S
        assert set(tokenizer.threads) == {"tokenize"}


async def test_the_text_of_tools_counts_too() -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": tale(200)}}]
    async with noting() as (text, tokenizer):
        await text.encode_chat([{"role": "user", "content": "x"}], TemplateOptions(tools=tools))
        assert tokenizer.threads == ["tokenize"]


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
