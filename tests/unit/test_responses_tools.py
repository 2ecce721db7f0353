"""/v1/responses with tools and reasoning: items, their events, and conversations that are sent back."""

import itertools
import json
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response
from pydantic import BaseModel

from router.errors import NodeFailed
from router.text.chat import ChatTemplate
from router.text.model_text import ModelText
from router.text.parsers.catalogue import AnswerFormat
from tests.fakes_dispatch import FakeDispatcher, http_app
from tests.smollm2_text import NOON, smollm2_text
from tests.unit.test_http import EOS, ids_of, post
from tests.unit.test_http_tools import ANSWER, CALLS, HERMES, PARAMETERS
from tests.unit.test_openai_client import client as ai_client
from tests.unit.test_responses import EVENT, PATH

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "name": "weather", "parameters": PARAMETERS, "strict": True},
    {"type": "function", "name": "clock", "description": "the time", "parameters": None, "strict": None},
]
ASKED: dict[str, Any] = {"input": "hi", "tools": TOOLS}
WIDTHS = pytest.mark.parametrize("width", [1, 2, 5, 64])
THOUGHT, SAID = "Both, then.", "One moment 👍."
WORDS = ["output_item.added", "content_part.added", "delta", "done", "content_part.done", "output_item.done"]
CALL = ["output_item.added", "delta", "done", "output_item.done"]


def scripted(text: str = ANSWER, width: int = 1, **options: Any) -> FakeDispatcher:
    return FakeDispatcher(script=(*ids_of(text), EOS), rounds=(width,), **options)


async def whole(body: dict[str, Any], *, text: str = ANSWER, width: int = 1, **options: Any) -> Any:
    response = await post(scripted(text, width), PATH, body, **{"answer_format": HERMES, **options})
    assert response.status_code == 200, response.text
    Response.model_validate(response.json(), strict=True)
    return response.json()


async def streamed(dispatcher: FakeDispatcher, body: dict[str, Any]) -> list[dict[str, Any]]:
    response = await post(dispatcher, PATH, body | {"stream": True}, answer_format=HERMES)
    assert response.status_code == 200, response.text
    found = [json.loads(frame.partition("data: ")[2]) for frame in response.text.split("\n\n")[:-1]]
    for event in found:
        EVENT.validate_python(event)
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def test_an_answer_is_items_in_the_order_the_model_wrote_them() -> None:
    answer = await whole(ASKED)
    reasoning, message, weather, clock = answer["output"]
    assert reasoning == {
        "type": "reasoning",
        "id": reasoning["id"],
        "summary": [],
        "encrypted_content": None,
        "status": "completed",
        "content": [{"type": "reasoning_text", "text": THOUGHT}],
    }
    assert message["content"] == [{"type": "output_text", "annotations": [], "text": SAID, "logprobs": []}]
    assert [(call["name"], call["arguments"]) for call in (weather, clock)] == CALLS
    assert [item["status"] for item in answer["output"]] == ["completed"] * 4
    assert [item["type"] for item in (message, weather, clock)] == ["message"] + ["function_call"] * 2
    assert len({item["id"] for item in answer["output"]} | {weather["call_id"], clock["call_id"]}) == 6
    assert (answer["tools"], answer["tool_choice"], answer["parallel_tool_calls"]) == (TOOLS, "auto", True)
    assert answer["status"] == "completed"


@WIDTHS
async def test_reasoning_is_counted_token_by_token(width: int) -> None:
    """With its opening marker; the closing one is of what follows."""
    answer = await whole(ASKED, width=width)
    thought = ANSWER.partition("\n</think>")[0]
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": len(ids_of(thought))}
    assert answer["usage"]["output_tokens"] == len(ids_of(ANSWER)) + 1


@WIDTHS
async def test_a_stream_tells_of_every_item_in_turn_and_comes_to_the_whole_answer(width: int) -> None:
    events = await streamed(scripted(width=width), ASKED)
    told = [event["type"].removeprefix("response.") for event in events]
    assert told[:2] == ["created", "in_progress"]
    assert told[-1] == "completed"
    indices = [event["output_index"] for event in events[2:-1]]
    assert indices == sorted(indices)
    names = {
        0: "reasoning_text.",
        1: "output_text.",
        2: "function_call_arguments.",
        3: "function_call_arguments.",
    }
    last = events[-1]["response"]
    for index, item in enumerate(last["output"]):
        about = [event for event in events[2:-1] if event["output_index"] == index]
        kinds = [event["type"].removeprefix("response.").removeprefix(names[index]) for event in about]
        assert [kind for kind, _ in itertools.groupby(kinds)] == (WORDS if index < 2 else CALL)
        assert {event.get("item_id", item["id"]) for event in about} == {item["id"]}
        text = "".join(event["delta"] for event in about if "delta" in event)
        assert text == [THOUGHT, SAID, *(arguments for _, arguments in CALLS)][index]
        done = next(
            event for event in about if event["type"].endswith((".text.done", "_text.done", "arguments.done"))
        )
        assert done.get("text", done.get("arguments")) == text
        empty: dict[str, Any] = {"content": []} if index < 2 else {"arguments": ""}
        assert about[0]["item"] == item | empty | {"status": "in_progress"}
        assert about[-1]["item"] == item
    assert last == await whole(ASKED, width=width) | {"id": last["id"], "output": last["output"]}


@WIDTHS
async def test_an_event_of_many_tokens_makes_one_delta_an_item(width: int) -> None:
    """A round that ends one item and begins the next is told as both, in that order."""
    events = await streamed(scripted(width=width), ASKED)
    deltas = [(event["output_index"], event["delta"]) for event in events if "delta" in event]
    if width == 64:
        assert deltas == list(enumerate([THOUGHT, SAID, *(arguments for _, arguments in CALLS)]))
    rounds = -(-(len(ids_of(ANSWER)) + 1) // width)
    assert all(sum(1 for i, _ in deltas if i == index) <= rounds for index in range(4))


@WIDTHS
async def test_log_probabilities_are_of_the_tokens_of_messages(width: int) -> None:
    asked = ASKED | {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    (message,) = [item for item in (await whole(asked, width=width))["output"] if item["type"] == "message"]
    entries = message["content"][0]["logprobs"]
    raw = b"".join(bytes(entry["bytes"]) for entry in entries).decode()
    assert raw == "\n</think>\n\n" + SAID  # what held the message back is its own
    assert entries == (await whole(asked, width=1))["output"][1]["content"][0]["logprobs"]
    events = await streamed(scripted(width=width), asked)
    assert [entry for event in events if "delta" in event for entry in event.get("logprobs", [])] == entries


async def test_a_model_without_a_format_writes_nothing_but_a_message() -> None:
    answer = await whole({"input": "hi"}, answer_format=AnswerFormat())
    assert [item["content"][0]["text"] for item in answer["output"]] == [ANSWER]
    answer = await whole({"input": "hi"}, text="", answer_format=AnswerFormat())
    assert [item["content"][0]["text"] for item in answer["output"]] == [""]


async def test_without_tools_calls_are_words() -> None:
    for body in ({"input": "hi"}, ASKED | {"tool_choice": "none"}):
        answer = await whole(body)
        assert [item["type"] for item in answer["output"]] == ["reasoning", "message"]
        assert answer["output"][1]["content"][0]["text"] == ANSWER.partition("</think>\n\n")[2]


async def test_words_after_a_call_are_a_message_of_their_own() -> None:
    answer = await whole(ASKED, text="a" + ANSWER.partition("👍.\n")[2] + "\nb")
    assert [item["type"] for item in answer["output"]] == ["message", *["function_call"] * 2, "message"]
    assert [answer["output"][i]["content"][0]["text"] for i in (0, 3)] == ["a", "b"]


async def test_one_call_where_that_was_asked_for() -> None:
    answer = await whole(ASKED | {"parallel_tool_calls": False})
    assert [item.get("name") for item in answer["output"]] == [None, None, "weather"]
    assert answer["parallel_tool_calls"] is False


async def test_an_answer_cut_inside_a_call_has_one_incomplete_item() -> None:
    num_tokens = len(ids_of(ANSWER.partition("Zür")[0]))
    answer = await whole(ASKED | {"max_output_tokens": num_tokens})
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert [item["status"] for item in answer["output"]] == ["completed", "completed", "incomplete"]
    events = await streamed(scripted(), ASKED | {"max_output_tokens": num_tokens})
    assert [event["type"] for event in events[-3:]] == [
        "response.function_call_arguments.done",
        "response.output_item.done",
        "response.incomplete",
    ]
    assert events[-1]["response"]["output"] == answer["output"]


async def test_an_answer_cut_inside_its_reasoning_has_nothing_else() -> None:
    answer = await whole(ASKED | {"max_output_tokens": 5})
    (reasoning,) = answer["output"]
    assert (reasoning["type"], reasoning["status"]) == ("reasoning", "incomplete")
    assert answer["usage"]["output_tokens_details"]["reasoning_tokens"] == 5


async def test_a_failure_inside_a_call_is_the_last_event() -> None:
    events = await streamed(scripted(error=NodeFailed("node broke"), fail_after=30), ASKED)
    assert [event["type"] for event in events[-2:]][1] == "response.failed"


@pytest.mark.parametrize(
    ("choice", "text", "made"),
    [
        (
            "required",
            '[{"name": "weather", "parameters": {"city": "Bern"}}]',
            [("weather", '{"city": "Bern"}')],
        ),
        ({"type": "function", "name": "weather"}, '{"city": "Bern"}', [("weather", '{"city": "Bern"}')]),
    ],
)
@pytest.mark.parametrize("form", [{}, {"text": {"format": {"type": "json_object"}}}])
async def test_a_forced_call_is_a_matter_of_grammar_whatever_the_model(
    choice: Any, text: str, made: Any, form: dict[str, Any]
) -> None:
    dispatcher = scripted(text)
    response = await post(dispatcher, PATH, ASKED | {"tool_choice": choice} | form)
    assert response.status_code == 200, response.text
    assert [(item["name"], item["arguments"]) for item in response.json()["output"]] == made
    assert response.json()["tool_choice"] == choice
    (request,) = dispatcher.requests
    assert request.constraint is not None
    schema = json.loads(request.constraint.spec.value)
    assert schema["$defs"] == PARAMETERS["$defs"]


def telling_text() -> ModelText:
    """A template that shows all it is told."""
    source = "{{ messages | tojson }}{{ tools | tojson }}"
    template = ChatTemplate(source, special_tokens={}, local_time=lambda: NOON)
    return ModelText(smollm2_text().tokenizer, template=template)


async def shown(path: str, body: dict[str, Any]) -> str:
    """What the template is told."""
    dispatcher, text = scripted("ok"), telling_text()
    transport = httpx.ASGITransport(app=http_app(dispatcher, text, answer_format=HERMES))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        response = await http.post(path, json=body)
    assert response.status_code == 200, response.text
    return text.tokenizer.decode(dispatcher.requests[0].prompt_ids)


async def test_a_conversation_sent_back_is_what_a_chat_would_be_told() -> None:
    answer = await whole(ASKED)
    calls = [item for item in answer["output"] if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": output}
        for call, output in zip(calls, ["rain", [{"type": "input_text", "text": "noon"}]], strict=True)
    ]
    asked = {"role": "user", "content": "hi"}
    told = await shown(PATH, {"input": [asked, *answer["output"], *results], "tools": TOOLS})
    functions = [{k: v for k, v in tool.items() if k != "type" and v is not None} for tool in TOOLS]
    chat = {
        "messages": [
            asked,
            {
                "role": "assistant",
                "content": SAID,
                "reasoning_content": THOUGHT,
                "tool_calls": [
                    {
                        "id": call["call_id"],
                        "type": "function",
                        "function": {k: call[k] for k in ("name", "arguments")},
                    }
                    for call in calls
                ],
            },
            *(
                {"role": "tool", "tool_call_id": call["call_id"], "content": output}
                for call, output in zip(calls, ["rain", "noon"], strict=True)
            ),
        ],
        "tools": [{"type": "function", "function": function} for function in functions],
    }
    assert told_in_order(told) == told_in_order(await shown("/v1/chat/completions", chat))


def told_in_order(told: str) -> Any:
    """Keys of a message have no order."""
    decoder = json.JSONDecoder()
    messages, end = decoder.raw_decode(told)
    return messages, decoder.raw_decode(told[end:])[0]


USER, SPOKEN = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}
F = {"type": "function_call", "call_id": "c", "name": "f", "arguments": '{"x": 1}'}
F_TOLD = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}}
R = {"type": "reasoning", "id": "r", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]}


@pytest.mark.parametrize(
    ("items", "messages"),
    [
        ([USER, SPOKEN, SPOKEN], [USER, SPOKEN, SPOKEN]),
        ([USER, F], [USER, {"role": "assistant", "content": "", "tool_calls": [F_TOLD]}]),
        ([USER, SPOKEN, F, F], [USER, {**SPOKEN, "tool_calls": [F_TOLD, F_TOLD]}]),
        ([USER, F, SPOKEN], [USER, {**SPOKEN, "tool_calls": [F_TOLD]}]),
        ([USER, R, SPOKEN, SPOKEN], [USER, {**SPOKEN, "reasoning_content": "hm"}, SPOKEN]),
        (
            [USER, R, R, F, SPOKEN, F, SPOKEN],
            [
                USER,
                {
                    "role": "assistant",
                    "content": "bb",
                    "reasoning_content": "hmhm",
                    "tool_calls": [F_TOLD, F_TOLD],
                },
            ],
        ),
        ([USER, R, USER], [USER, {"role": "assistant", "content": "", "reasoning_content": "hm"}, USER]),
        (
            [USER, SPOKEN, R, F],
            [
                USER,
                SPOKEN,
                {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [F_TOLD]},
            ],
        ),
        ([USER, {"type": "reasoning", "id": "r", "summary": [], "content": None}, USER], [USER, USER]),
        (
            [USER, R | {"content": None, "summary": [{"type": "summary_text", "text": "in short"}]}, SPOKEN],
            [USER, {**SPOKEN, "reasoning_content": "in short"}],
        ),
    ],
)
async def test_items_of_one_answer_are_one_message(items: list[Any], messages: list[Any]) -> None:
    assert told_in_order(await shown(PATH, {"input": items}))[0] == messages


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools[0].name"),
        ({"tools": [{"type": "function", "name": "f", "parameters": 3}]}, "tools[0].parameters"),
        ({"tools": [{"type": "function", "name": "f", "defer_loading": True}]}, "tools[0].defer_loading"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"tool_choice": {"type": "function", "name": "nobody"}}, "tool_choice.name"),
        ({"tool_choice": {"type": "function", "function": {"name": "clock"}}}, "tool_choice"),
        ({"tool_choice": {"type": "allowed_tools", "mode": "auto", "tools": []}}, "tool_choice"),
        ({"parallel_tool_calls": "no"}, "parallel_tool_calls"),
        ({"input": [F | {"call_id": None}]}, "input[0].call_id"),
        ({"input": [F | {"arguments": "{"}]}, "input[0].arguments"),
        ({"input": [USER, {"type": "function_call_output", "call_id": "c"}]}, "input[1].output"),
        (
            {
                "input": [
                    {"type": "function_call_output", "call_id": "c", "output": [{"type": "input_image"}]}
                ]
            },
            "input[0].output[0].type",
        ),
        ({"input": [R | {"encrypted_content": "x"}]}, "input[0].encrypted_content"),
        ({"input": [R | {"content": [{"type": "reasoning_text"}]}]}, "input[0].content[0].text"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_the_name_responses_have_for_it(
    changes: dict[str, Any], param: str
) -> None:
    dispatcher = scripted()
    response = await post(dispatcher, PATH, ASKED | changes, answer_format=HERMES)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text
    assert param in response.json()["error"]["message"]
    assert dispatcher.requests == []


async def test_tools_are_refused_where_the_model_has_no_format_for_them() -> None:
    response = await post(scripted(), PATH, ASKED, answer_format=AnswerFormat())
    assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")


class Weather(BaseModel):
    city: str


class Clock(BaseModel):
    pass


@pytest.mark.parametrize("width", [1, 64])
async def test_the_official_client_reads_calls_and_sends_them_back(width: int) -> None:
    tools: Any = [
        openai.pydantic_function_tool(Weather, name="weather"),
        openai.pydantic_function_tool(Clock, name="clock"),
    ]
    dispatcher = scripted(width=width)
    async with ai_client(dispatcher, answer_format=HERMES) as ai:
        parsed = await ai.responses.parse(model="smol", input="hi", tools=tools)
        async with ai.responses.stream(model="smol", input="hi", tools=tools) as stream:
            deltas = [
                event async for event in stream if event.type == "response.function_call_arguments.delta"
            ]
            final = await stream.get_final_response()
        made = [item for item in parsed.output if item.type == "function_call"]
        said: list[Any] = [{"role": "user", "content": "hi"}, *parsed.output]
        said += [{"type": "function_call_output", "call_id": call.call_id, "output": "x"} for call in made]
        again = await ai.responses.create(model="smol", input=said, tools=TOOLS)  # type: ignore[arg-type]  # plain dicts
    assert [call.parsed_arguments for call in made] == [Weather(city="Zürich"), Clock()]
    assert final.output_text == parsed.output_text == SAID
    assert [item.type for item in final.output] == ["reasoning", "message", "function_call", "function_call"]
    assert [event.snapshot for event in deltas if event.output_index == 2][-1] == CALLS[0][1]
    assert again.output[0].type == "reasoning"
