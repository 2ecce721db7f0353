import json
from typing import Any

import pytest

from router.text.chat import ChatTemplate
from router.text.model_text import ModelText
from router.text.options import TemplateOptions
from router.text.parsers.catalogue import AnswerFormat, answer_format
from tests.fakes_dispatch import FakeDispatcher
from tests.smollm2_text import NOON, smollm2_text
from tests.unit.test_http import CHAT, EOS, answering, client, events, ids_of, post

TOOLS: list[dict[str, Any]] = [
    {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}},
    {"type": "function", "function": {"name": "clock"}},
]
ASKED: dict[str, Any] = CHAT | {"tools": TOOLS}
ANSWER = (
    "<think>\nBoth, then.\n</think>\n\nOne moment 👍.\n"
    '<tool_call>\n{"name": "weather", "arguments": {"city": "Zürich"}}\n</tool_call>\n'
    '<tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>'
)
HERMES = answer_format(tool_parser="hermes", reasoning_parser="qwen3", template="")
CALLS = [("weather", '{"city": "Zürich"}'), ("clock", "{}")]


async def asked(body: dict[str, Any], *, text: str = ANSWER, width: int = 1, **options: Any) -> Any:
    dispatcher = FakeDispatcher(script=(*ids_of(text), EOS), rounds=(width,))
    response = await post(dispatcher, "/v1/chat/completions", body, **{"answer_format": HERMES, **options})
    assert response.status_code == 200, response.text
    return events(response) if body.get("stream") else response.json()


async def test_a_message_has_content_reasoning_and_calls_each_in_its_field() -> None:
    choice = (await asked(ASKED))["choices"][0]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls"
    assert message["content"] == "One moment 👍."
    assert message["reasoning_content"] == "Both, then."
    assert [(c["function"]["name"], c["function"]["arguments"]) for c in message["tool_calls"]] == CALLS
    assert [c["type"] for c in message["tool_calls"]] == ["function"] * 2
    assert len({c["id"] for c in message["tool_calls"]}) == 2


@pytest.mark.parametrize("width", [1, 2, 5, 64])
async def test_the_joined_stream_is_the_message_however_many_tokens_an_event_has(width: int) -> None:
    message = (await asked(ASKED, width=width))["choices"][0]["message"]
    choices = [chunk["choices"][0] for chunk in await asked(ASKED | {"stream": True}, width=width)]
    deltas = [choice["delta"] for choice in choices]
    assert deltas[0] == {"role": "assistant", "content": ""}
    assert [c["finish_reason"] for c in choices] == [None] * (len(choices) - 1) + ["tool_calls"]
    for field in ("content", "reasoning_content"):
        assert "".join(delta.get(field, "") for delta in deltas) == message[field]
    calls: list[dict[str, Any]] = []
    for call in (call for delta in deltas for call in delta.get("tool_calls", [])):
        if "id" in call:
            assert call["index"] == len(calls)
            calls.append({"name": call["function"]["name"], "arguments": ""})
        calls[call["index"]]["arguments"] += call["function"]["arguments"]
    assert [(call["name"], call["arguments"]) for call in calls] == CALLS
    assert all(delta for delta in deltas[1:-1]), "an empty chunk"


async def test_one_call_at_a_time_where_that_was_asked_for() -> None:
    message = (await asked(ASKED | {"parallel_tool_calls": False}))["choices"][0]["message"]
    assert [call["function"]["name"] for call in message["tool_calls"]] == ["weather"]


async def test_without_tools_calls_are_text() -> None:
    for body in (CHAT, ASKED | {"tool_choice": "none"}):
        choice = (await asked(body))["choices"][0]
        assert choice["finish_reason"] == "stop"
        assert choice["message"]["content"] == ANSWER.partition("</think>\n\n")[2]
        assert "tool_calls" not in choice["message"]


async def test_an_answer_cut_inside_a_call_says_length() -> None:
    num_tokens = len(ids_of(ANSWER.partition("Zür")[0]))
    choice = (await asked(ASKED | {"max_tokens": num_tokens}))["choices"][0]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["tool_calls"][0]["function"]["arguments"].startswith('{"city": "')


async def test_content_is_null_beside_nothing_but_calls() -> None:
    text = '<tool_call>{"name": "clock", "arguments": {}}</tool_call>'
    message = (await asked(ASKED, text=text))["choices"][0]["message"]
    assert message["content"] is None


async def test_tools_are_refused_where_the_model_has_no_format_for_them() -> None:
    dispatcher = FakeDispatcher(script=(EOS,))
    response = await post(dispatcher, "/v1/chat/completions", ASKED, answer_format=AnswerFormat())
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "tools"
    assert dispatcher.requests == []


async def test_the_template_is_shown_the_tools() -> None:
    source = "{% for tool in tools %}{{ tool.function.name }};{% endfor %}"
    template = ChatTemplate(source, special_tokens={}, local_time=lambda: NOON)
    text = ModelText(smollm2_text().tokenizer, template=template)
    ids = await text.encode_chat([{"role": "user", "content": "x"}], TemplateOptions(tools=TOOLS))
    assert text.tokenizer.decode(ids) == "weather;clock;"


PARAMETERS = {
    "type": "object",
    "properties": {"city": {"$ref": "#/$defs/City"}},
    "required": ["city"],
    "$defs": {"City": {"type": "string"}},
}
FORCED = [
    {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "clock"}},
]


async def forced(body: dict[str, Any], text: str) -> tuple[Any, dict[str, Any]]:
    """The choice, and the schema the nodes were given."""
    dispatcher = FakeDispatcher(script=(*ids_of(text), EOS))
    body = CHAT | {"tools": FORCED} | body
    # No format is needed: the answer is JSON whatever the model's own way of calling is.
    response = await post(dispatcher, "/v1/chat/completions", body)
    assert response.status_code == 200, response.text
    (request,) = dispatcher.requests
    assert request.constraint is not None
    return response.json()["choices"][0], json.loads(request.constraint.spec.value)


async def test_a_required_call_is_a_list_of_calls_by_grammar() -> None:
    text = '[{"name": "weather", "parameters": {"city": "Bern"}}, {"name": "clock", "parameters": {}}]'
    choice, schema = await forced({"tool_choice": "required"}, text)
    functions = [call["function"] for call in choice["message"]["tool_calls"]]
    assert functions == [
        {"name": "weather", "arguments": '{"city": "Bern"}'},
        {"name": "clock", "arguments": "{}"},
    ]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "tool_calls")
    assert (schema["type"], schema["minItems"]) == ("array", 1)
    assert schema["$defs"] == PARAMETERS["$defs"]
    weather, clock = schema["items"]["anyOf"]
    assert weather["properties"]["name"]["enum"] == ["weather"]
    assert "$defs" not in weather["properties"]["parameters"]
    assert clock["properties"]["parameters"] == {"type": "object", "properties": {}}


async def test_the_form_of_words_is_not_that_of_a_call() -> None:
    """A forced call has no words beside it, so both may be asked for, as instructor does."""
    form = {"response_format": {"type": "json_object"}, "tool_choice": "required"}
    choice, schema = await forced(form, '[{"name": "clock", "parameters": {}}]')
    assert (choice["finish_reason"], schema["type"]) == ("tool_calls", "array")


async def test_one_required_call_at_a_time_is_a_matter_of_grammar_too() -> None:
    _, schema = await forced({"tool_choice": "required", "parallel_tool_calls": False}, "[]")
    assert schema["maxItems"] == 1


async def test_a_named_call_is_its_arguments_by_grammar() -> None:
    named = {"type": "function", "function": {"name": "weather"}}
    choice, schema = await forced({"tool_choice": named}, '{"city": "Bern"}')
    (call,) = choice["message"]["tool_calls"]
    assert call["function"] == {"name": "weather", "arguments": '{"city": "Bern"}'}
    assert schema == PARAMETERS | {"additionalProperties": False}
    assert choice["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("said", "is_closed"), [({}, True), ({"strict": True}, True), ({"strict": False}, False)]
)
async def test_arguments_are_only_those_a_tool_names_unless_it_says_it_is_not_strict(
    said: dict[str, Any], is_closed: bool
) -> None:
    """LangChain's and instructor's tools say nothing, and their models need every argument to be a field."""
    tools = [{"type": "function", "function": {"name": "weather", "parameters": PARAMETERS} | said}]
    _, schema = await forced({"tool_choice": "required", "tools": tools}, "[]")
    (call,) = schema["items"]["anyOf"]
    assert ("additionalProperties" in call["properties"]["parameters"]) == is_closed


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"json_object": True}}, "tool_choice"),
        ({"guided_regex": "a"}, "tool_choice"),
        (
            {"tools": [*FORCED, {"type": "function", "function": {"name": "x", "parameters": {"not": {}}}}]},
            "tools",
        ),
        (
            {
                "tools": [
                    *FORCED,
                    {
                        "type": "function",
                        "function": {"name": "x", "parameters": {"$defs": {"City": {"type": "null"}}}},
                    },
                ]
            },
            "tools[2].function.parameters.$defs",
        ),
    ],
)
async def test_what_no_grammar_can_hold_to_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    dispatcher = FakeDispatcher(script=(EOS,))
    body = CHAT | {"tools": FORCED, "tool_choice": "required"} | fields
    response = await post(dispatcher, "/v1/chat/completions", body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert dispatcher.requests == []


@pytest.mark.parametrize("key", ["$defs", "definitions"])
@pytest.mark.parametrize("value", [None, [], 5])
async def test_definitions_that_are_none_are_refused_by_name(key: str, value: Any) -> None:
    tool = {"type": "function", "function": {"name": "x", "parameters": {key: value}}}
    body = CHAT | {"tools": [tool], "tool_choice": "required"}
    response = await post(FakeDispatcher(script=(EOS,)), "/v1/chat/completions", body)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == f"tools[0].function.parameters.{key}"


async def test_calls_can_be_sent_back_with_their_answers_as_the_openai_client_does() -> None:
    """Its messages of calls have null for content, which SmolLM2's template adds to a string."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    said = [
        *CHAT["messages"],
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "noon"},
    ]
    dispatcher = FakeDispatcher(script=(*ids_of("It is noon."), EOS))
    response = await post(dispatcher, "/v1/chat/completions", {"messages": said})
    assert response.status_code == 200, response.text
    assert response.json()["choices"][0]["message"]["content"] == "It is noon."


@pytest.mark.parametrize("depth", [480, 960, 5000])
async def test_tools_nested_deeper_than_a_template_can_follow_are_refused(depth: int) -> None:
    """What shows them to the model, and what repeats them, calls itself for every level."""
    parameters = '{"items":' * depth + "{}" + "}" * depth
    function = {"name": "f", "parameters": "DEEP"}
    bodies = {
        "/v1/chat/completions": CHAT | {"tools": [{"type": "function", "function": function}]},
        "/v1/responses": {"input": "x", "tools": [{"type": "function", **function}]},
    }
    async with client(answering("x"), answer_format=HERMES) as http:
        for path, body in bodies.items():
            answer = await http.post(path, content=json.dumps(body).replace('"DEEP"', parameters))
            assert answer.json()["error"]["code"] == "invalid_json"
        in_text = {**ASKED, "tools": None, "structured_outputs": {"json": parameters}}
        answer = await http.post("/v1/chat/completions", json=in_text)
        assert answer.json()["error"]["param"] == "structured_outputs.json"
