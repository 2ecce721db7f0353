"""Where an answer ends: exactly there, on every pair, and usage says the same."""

import asyncio
from typing import Any

import pytest

from tests.integration.cluster import Json
from tests.integration.four_pairs.conftest import NUM_LONG_TOKENS, FourPairs
from tests.integration.reference import COUNTING, Reference, prompt_of, text_of, tokenizer

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(600)]

ON_EVERY_PAIR: Json = {"n": 4, "temperature": 0, "return_token_ids": True, "logprobs": 1}


def counting(reference: Reference) -> list[int]:
    """What follows COUNTING: it goes on counting, so nearly all of it is drafted."""
    return reference.ids(tokenizer()(COUNTING).input_ids, NUM_LONG_TOKENS)


def check(answer: Json, ids: list[int], text: str, reason: str) -> None:
    assert len(answer["choices"]) == 4
    for choice in answer["choices"]:
        shown = {"ids": choice["token_ids"], "text": choice["text"], "reason": choice["finish_reason"]}
        assert shown == {"ids": ids, "text": text, "reason": reason}
        assert len(choice["logprobs"]["token_logprobs"]) == len(ids)
    assert answer["usage"]["completion_tokens"] == 4 * len(ids)


async def streamed(pairs: FourPairs, **body: Any) -> Json:
    """A streamed answer put together; after a choice's finish reason nothing of it may follow."""
    choices: dict[int, Json] = {}
    answer: Json = {}
    async for chunk in pairs.router.chunks(**body, stream_options={"include_usage": True}):
        answer |= {"usage": chunk["usage"], "metrics": chunk.get("metrics")}
        for part in chunk["choices"]:
            new: Json = {"text": "", "token_ids": [], "finish_reason": None, "tokens": 0}
            choice = choices.setdefault(part["index"], new)
            assert choice["finish_reason"] is None
            choice["text"] += part["text"]
            choice["token_ids"] += part.get("token_ids", [])
            choice["finish_reason"] = part["finish_reason"]
            choice["tokens"] += len((part["logprobs"] or {"tokens": []})["tokens"])
    for choice in choices.values():
        choice["logprobs"] = {"token_logprobs": [0.0] * choice.pop("tokens")}
    return {**answer, "choices": [choices[index] for index in sorted(choices)]}


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_max_tokens_is_exact(four_pairs: FourPairs, reference: Reference, max_tokens: int) -> None:
    """K07 of the reports from the field, as is the stop at the first token."""
    expected = counting(reference)[:max_tokens]
    answer = await four_pairs.router.complete(prompt=COUNTING, max_tokens=max_tokens, **ON_EVERY_PAIR)
    check(answer, expected, text_of(expected), "length")
    await four_pairs.settle()


async def test_a_stop_token_ends_the_answer_where_it_stands(
    four_pairs: FourPairs, reference: Reference
) -> None:
    ids = counting(reference)
    first_seen = [at for at in range(12) if ids[at] not in ids[:at]]
    for at in first_seen[1:5:2]:
        answer = await four_pairs.router.complete(
            prompt=COUNTING, max_tokens=30, stop_token_ids=[ids[at]], **ON_EVERY_PAIR
        )
        check(answer, ids[: at + 1], text_of(ids[:at]), "stop")
    await four_pairs.settle()


async def test_a_stop_string_inside_an_accepted_run_ends_the_answer_there(
    four_pairs: FourPairs, reference: Reference
) -> None:
    """Stops over two tokens each, streamed and whole, 8 at once."""
    ids = counting(reference)
    whole = text_of(ids)
    cases: list[tuple[str, int]] = []
    for at in range(20):
        stop = text_of(ids[at : at + 2])
        if whole.index(stop) == len(text_of(ids[:at])):  # it does not occur earlier
            cases.append((stop, next(n for n in range(len(ids)) if stop in text_of(ids[:n]))))
    cases = cases[:10]
    assert len(cases) == 10
    at_once = asyncio.Semaphore(8)

    async def one(stop: str, num_tokens: int, is_stream: bool) -> None:
        body: Json = {"prompt": COUNTING, "max_tokens": NUM_LONG_TOKENS, "stop": [stop], **ON_EVERY_PAIR}
        async with at_once:
            ask = streamed(four_pairs, **body) if is_stream else four_pairs.router.complete(**body)
            answer = await ask
        check(answer, ids[:num_tokens], whole[: whole.index(stop)], "stop")
        accepted.append(answer["metrics"]["speculative_decoding"]["num_accepted"])

    accepted: list[int] = []
    async with asyncio.TaskGroup() as group:
        for turn, (stop, num_tokens) in enumerate(cases):
            group.create_task(one(stop, num_tokens, is_stream=turn % 2 == 0))
    assert max(accepted) > 8, accepted
    await four_pairs.settle()


async def test_a_stop_that_stands_one_beyond_the_cap_is_not_reached(
    four_pairs: FourPairs, reference: Reference
) -> None:
    ids = counting(reference)
    at = max(at for at in range(12) if ids[at] not in ids[:at])
    answer = await four_pairs.router.complete(
        prompt=COUNTING, max_tokens=at, stop_token_ids=[ids[at]], **ON_EVERY_PAIR
    )
    check(answer, ids[:at], text_of(ids[:at]), "length")
    await four_pairs.settle()


@pytest.mark.parametrize("field", ["stop", "stop_token_ids"])
async def test_the_first_token_may_be_the_stop(
    four_pairs: FourPairs, reference: Reference, field: str
) -> None:
    expected = reference.ids(prompt_of(33), 1)
    stop: Json = {"stop": text_of(expected)} if field == "stop" else {"stop_token_ids": expected}
    answer = await four_pairs.router.complete(prompt=prompt_of(33), max_tokens=8, **stop, **ON_EVERY_PAIR)
    check(answer, expected, "", "stop")
    await four_pairs.settle()
