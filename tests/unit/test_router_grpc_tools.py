"""Tool calls and reasoning over gRPC: the same as over HTTP, in typed fields."""

import json
from typing import Any

import grpc
import pytest

from tests.fakes_dispatch import FakeDispatcher
from tests.unit.test_http_tools import ANSWER, CALLS, HERMES
from tests.unit.test_router_grpc import EOS, channel, ids_of, stub, trailing
from wire.gen import generate_pb2 as pb

WEATHER = pb.Tool(name="weather", description="of a city", parameters='{"type": "object"}')
TOOLS = [WEATHER, pb.Tool(name="clock")]
USER = pb.ChatMessage(role="user", content="hi")


async def asked(chat: pb.ChatMessages, *, text: str = ANSWER, width: int = 1, **fields: Any) -> Any:
    """The responses, and what the nodes were sent."""
    dispatcher = FakeDispatcher(script=(*ids_of(text), EOS), rounds=(width,))
    async with channel(dispatcher, answer_format=HERMES) as opened:
        request = pb.GenerateRequest(chat=chat, **fields)
        return [one async for one in stub(opened).Generate(request)], dispatcher.requests


def calls_of(responses: list[pb.GenerateResponse]) -> list[tuple[str, str, str]]:
    calls: list[tuple[str, str, str]] = []
    for call in (call for response in responses for call in response.tool_calls):
        if call.id:
            assert call.index == len(calls)
            calls.append((call.id, call.name, ""))
        found = calls[call.index]
        calls[call.index] = (*found[:2], found[2] + call.arguments)
    return calls


@pytest.mark.parametrize("width", [1, 3, 64])
async def test_reasoning_content_and_calls_come_in_fields_of_their_own(width: int) -> None:
    responses, _ = await asked(pb.ChatMessages(messages=[USER], tools=TOOLS), width=width)
    assert "".join(one.reasoning for one in responses) == "Both, then."
    assert "".join(one.text for one in responses) == "One moment 👍."
    calls = calls_of(responses)
    assert [(name, arguments) for _, name, arguments in calls] == CALLS
    assert len({call_id for call_id, _, _ in calls}) == 2
    assert [one.finish_reason for one in responses if one.finish_reason] == ["tool_calls"]
    assert [i for one in responses for i in one.token_ids] == [*ids_of(ANSWER), EOS]


async def test_a_text_is_not_taken_apart() -> None:
    dispatcher = FakeDispatcher(script=(*ids_of(ANSWER), EOS))
    async with channel(dispatcher, answer_format=HERMES) as opened:
        responses = [one async for one in stub(opened).Generate(pb.GenerateRequest(text="hi"))]
    assert "".join(one.text for one in responses) == ANSWER
    assert not any(one.reasoning or one.tool_calls for one in responses)


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({"tool_choice": "required"}, '[{"name": "weather", "parameters": {"city": "Bern"}}]'),
        ({"tool_choice": "named", "named_tool": "weather"}, '{"city": "Bern"}'),
    ],
)
async def test_a_call_can_be_forced_by_grammar(choice: dict[str, Any], text: str) -> None:
    chat = pb.ChatMessages(messages=[USER], tools=TOOLS, parallel_tool_calls=False, **choice)
    responses, (sent,) = await asked(chat, text=text)
    ((_, name, arguments),) = calls_of(responses)
    assert (name, arguments) == ("weather", '{"city": "Bern"}')
    assert sent.constraint is not None
    assert json.loads(sent.constraint.spec.value).get("maxItems", 1) == 1


async def test_each_choice_is_taken_apart_by_itself() -> None:
    responses, _ = await asked(pb.ChatMessages(messages=[USER], tools=TOOLS), n=2)
    for index in (0, 1):
        own = [one for one in responses if one.index == index]
        assert [(name, arguments) for _, name, arguments in calls_of(own)] == CALLS


async def test_calls_and_results_are_taken_as_messages() -> None:
    call = pb.ToolCall(id="c1", name="weather", arguments='{"city": "Bern"}')
    messages = [
        USER,
        pb.ChatMessage(role="assistant", reasoning="hm", tool_calls=[call]),
        pb.ChatMessage(role="tool", tool_call_id="c1", content="sunny"),
    ]
    # SmolLM2's template adds content to text, so that a call must have some.
    messages[1].content = "one moment"
    responses, _ = await asked(pb.ChatMessages(messages=messages))
    assert responses[-1].finish_reason == "stop"


@pytest.mark.parametrize(
    ("chat", "param"),
    [
        ({"tools": [pb.Tool(name="a b")]}, "tools[0].function.name"),
        ({"tools": [pb.Tool(name="a", parameters="{")]}, "tools[0].parameters"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "named", "named_tool": "x"}, "tool_choice.function.name"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [pb.ChatMessage(role="tool", content="x")]}, "messages[0].tool_call_id"),
    ],
)
async def test_what_cannot_be_is_an_invalid_argument_that_names_its_field(
    chat: dict[str, Any], param: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await asked(pb.ChatMessages(**{"messages": [USER], **chat}))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(caught.value)["paceline-param"] == param
