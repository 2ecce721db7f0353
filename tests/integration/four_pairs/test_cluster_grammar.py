"""Structured output through a real cluster: valid on every pair, drafted or not; refused under its name."""

import asyncio
import json
from typing import Annotated, Any, Literal

import pytest
from openai import AsyncOpenAI, BadRequestError
from pydantic import BaseModel, Field

from tests.integration.cluster import Json
from tests.integration.four_pairs.conftest import FourPairs

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(600)]

QUESTION = "A red apple costs 3 dollars. Describe it as JSON."
ASK: Json = {"messages": [{"role": "user", "content": QUESTION}], "model": "SmolLM2-135M-Instruct"}


DATE = r"20[0-9]{2}-[01][0-9]-[0-3][0-9]"


class Fruit(BaseModel):
    name: Annotated[str, Field(max_length=12)]
    colour: Literal["red", "green", "yellow"]
    price: Annotated[int, Field(ge=0, le=99)]


def client_of(pairs: FourPairs) -> AsyncOpenAI:
    return AsyncOpenAI(base_url=str(pairs.router.http.base_url.join("/v1")), api_key="x", max_retries=0)


async def test_a_schema_holds_on_every_pair_and_gives_the_same_text(four_pairs: FourPairs) -> None:
    """Four choices, one from each pair: ngram and none, nixl and grpc; then again with a seed, in turn."""
    async with client_of(four_pairs) as client:
        answer = await client.chat.completions.parse(
            **ASK, response_format=Fruit, n=4, temperature=0, max_tokens=80
        )
        assert [choice.finish_reason for choice in answer.choices] == ["stop"] * 4
        (text,) = {choice.message.content for choice in answer.choices}
        assert text is not None
        assert answer.choices[0].message.parsed == Fruit.model_validate_json(text)
        asks = [
            client.chat.completions.parse(
                **ASK, response_format=Fruit, seed=7, temperature=0.7, max_tokens=80
            )
            for _ in range(4)
        ]
        drawn = await asyncio.gather(*asks)
        assert all(one.choices[0].message.parsed for one in drawn)
        assert len({one.choices[0].message.content for one in drawn}) == 1
        assert len({(one.model_extra or {})["paceline"]["decode"] for one in drawn}) == 4
    await four_pairs.settle()


async def test_what_a_regex_and_a_choice_allow_is_what_comes(four_pairs: FourPairs) -> None:
    for router in (four_pairs.router, four_pairs.colocated):
        answer = await router.complete(
            prompt="The date is",
            temperature=0,
            structured_outputs={"regex": DATE},
        )
        (choice,) = answer["choices"]
        assert (len(choice["text"]), choice["finish_reason"]) == (10, "stop")
        assert choice["text"].startswith("20")
        answer = await router.chat(
            messages=ASK["messages"], temperature=0, guided_choice=["an apple", "a pear"], ignore_eos=True
        )
        assert answer["choices"][0]["message"]["content"] in ("an apple", "a pear")
        assert answer["choices"][0]["finish_reason"] == "stop"
    await four_pairs.settle()


async def test_a_json_object_cut_at_max_tokens_is_the_beginning_of_one(four_pairs: FourPairs) -> None:
    body: Json = {"messages": ASK["messages"], "response_format": {"type": "json_object"}, "temperature": 0}
    answer = await four_pairs.router.chat(**body, max_tokens=24)
    text = answer["choices"][0]["message"]["content"]
    assert text.startswith("{")
    if answer["choices"][0]["finish_reason"] == "stop":
        assert isinstance(json.loads(text), dict)


async def test_a_pattern_that_means_nothing_is_a_bad_request_under_its_name(four_pairs: FourPairs) -> None:
    async with client_of(four_pairs) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.completions.create(
                model=ASK["model"], prompt="a", extra_body={"structured_outputs": {"regex": "[a"}}
            )
    assert caught.value.param == "structured_outputs.regex"
    assert caught.value.code == "bad_grammar"
    assert "Unclosed '['" in caught.value.message
    await four_pairs.settle()


async def test_a_form_that_bans_leave_no_token_for_is_a_bad_request_under_its_name(
    four_pairs: FourPairs,
) -> None:
    extra: Json = {"structured_outputs": {"choice": ["yes"]}, "allowed_token_ids": [0]}
    async with client_of(four_pairs) as client:
        with pytest.raises(BadRequestError) as caught:
            await client.completions.create(model=ASK["model"], prompt="a", extra_body=extra)
    assert (caught.value.param, caught.value.code) == ("structured_outputs.choice", "no_token")
    await four_pairs.settle()


async def test_a_tool_that_must_be_called_is_called_with_arguments_of_its_schema(
    four_pairs: FourPairs,
) -> None:
    """Whole and streamed; the model has no format of its own for calls, the grammar gives it one."""
    function: Json = {"name": "save_fruit", "parameters": Fruit.model_json_schema(), "strict": True}
    tools: Json = {"tools": [{"type": "function", "function": function}], "parallel_tool_calls": False}
    options: Json = ASK | tools | {"temperature": 0, "max_tokens": 100}
    choices: list[Any] = ["required", {"type": "function", "function": {"name": "save_fruit"}}]
    async with client_of(four_pairs) as client:
        for choice in choices:
            answer = await client.chat.completions.create(**options, tool_choice=choice)
            (call,) = answer.choices[0].message.tool_calls or []
            assert call.type == "function"
            assert call.function.name == "save_fruit"
            Fruit.model_validate_json(call.function.arguments)
            async with client.chat.completions.stream(**options, tool_choice=choice) as stream:
                streamed = (await stream.get_final_completion()).choices[0].message.tool_calls or []
            assert streamed[0].function.arguments == call.function.arguments
    await four_pairs.settle()
