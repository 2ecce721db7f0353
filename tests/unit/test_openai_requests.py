import json
from typing import Any

import pytest

from router.errors import BadRequest
from router.openai.fields import decode_object
from router.openai.requests import read_chat, read_completion

CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "smol", "prompt": "hi"}


def chat_error(**changes: Any) -> tuple[str | None, str]:
    with pytest.raises(BadRequest) as caught:
        read_chat(CHAT | changes)
    return caught.value.param, caught.value.message


def completion_error(**changes: Any) -> tuple[str | None, str]:
    with pytest.raises(BadRequest) as caught:
        read_completion(COMPLETION | changes)
    return caught.value.param, caught.value.message


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "the body must be valid JSON"),
        (b"", "the body must be valid JSON"),
        (b"[]", "the body must be a JSON object, got a list"),
        (b"null", "the body must be a JSON object, got null"),
        (b'{"a":1e999}', "the body must be valid JSON"),
        (b'{"a":NaN}', "the body must be valid JSON"),
        (b'{"a":"\xff"}', "the body must be valid JSON"),
        (b'{"a":"\\ud800"}', "the body must be valid JSON"),
        (b"[" * 100_000, "the body must be valid JSON"),
        (b'{"a":' * 257 + b"1" + b"}" * 257, "the body must be valid JSON: nested deeper than 256 levels"),
    ],
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes, message: str) -> None:
    with pytest.raises(BadRequest, match=message) as caught:
        decode_object(body)
    assert caught.value.code == "invalid_json"


def test_a_body_may_be_nested_as_deep_as_is_said() -> None:
    deep = b'{"a":' * 256 + b"1" + b"}" * 256
    assert decode_object(deep)["a"]["a"]
    wide: dict[str, Any] = {"a": [{}] * 5000}
    assert decode_object(json.dumps(wide).encode()) == wide


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("max_tokens", "abc", 'max_tokens must be an integer, got "abc"'),
        ("max_tokens", -1, "max_tokens must be at least 1, got -1"),
        ("max_tokens", 0, "max_tokens must be at least 1, got 0"),
        ("max_tokens", 2.0, "max_tokens must be an integer, got 2.0"),
        ("max_tokens", True, "max_tokens must be an integer, got true"),
        ("max_completion_tokens", -5, "max_completion_tokens must be at least 1, got -5"),
        ("temperature", "hot", 'temperature must be a number, got "hot"'),
        ("n", 0, "n must be at least 1, got 0"),
        ("n", 1000, "n must be at most 128, got 1000"),
        ("stream", "yes", 'stream must be true or false, got "yes"'),
        ("stop", [1], "stop must be a string or a list of strings, got [1]"),
        ("stop_token_ids", [1, "2"], 'stop_token_ids must be a list of integers, got [1,"2"]'),
        ("logit_bias", {"abc": 1}, 'logit_bias must be an object whose keys are token ids, got {"abc":1}'),
        ("logit_bias", {"1": "x"}, 'logit_bias must be a number, got "x"'),
        ("logit_bias", [1], "logit_bias must be an object, got [1]"),
        ("seed", 2**64, f"seed must be at most {2**64 - 1}, got {2**64}"),
        ("top_k", -2, "top_k must be at least -1, got -2"),
        ("model", 5, "model must be a string, got 5"),
        ("ignore_eos", 1, "ignore_eos must be true or false, got 1"),
        ("user", {}, None),
    ],
)
def test_a_bad_value_is_named_with_its_field(field: str, value: Any, message: str | None) -> None:
    if message is None:
        read_chat(CHAT | {field: value})
        return
    assert chat_error(**{field: value}) == (field, message)
    assert completion_error(**{field: value}) == (field, message)


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([], "messages", "messages must be a non-empty list of messages, got []"),
        (None, "messages", "messages must be a non-empty list of messages, got null"),
        ("x", "messages", 'messages must be a non-empty list of messages, got "x"'),
        (["x"], "messages[0]", 'messages[0] must be an object with role and content, got "x"'),
        ([{}], "messages[0].role", "messages[0].role must be one of"),
        (
            [{"role": "user", "content": None}],
            "messages[0].content",
            "messages[0].content must be a string or a list of text parts, got null",
        ),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0].type",
            'messages[0].content[0].type must be "text" (other parts are not supported), got "image_url"',
        ),
        (
            [{"role": "tool", "content": "x"}],
            "messages[0].tool_call_id",
            "messages[0].tool_call_id must be a string, got null",
        ),
        (
            [{"role": "assistant", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls[0].function",
            "messages[0].tool_calls[0].function must be an object with name and arguments, got null",
        ),
        (
            [{"role": "assistant", "tool_calls": [{"id": "c", "function": {"name": "f", "arguments": "["}}]}],
            "messages[0].tool_calls[0].function.arguments",
            "messages[0].tool_calls[0].function.arguments must be a JSON object, written as a string",
        ),
        (
            [{"role": "user", "content": "x", "tool_calls": [{}]}],
            "messages[0].tool_calls",
            "messages[0].tool_calls must be left out unless the role is assistant",
        ),
    ],
)
def test_bad_messages_are_named_by_their_place(messages: Any, param: str, message: str) -> None:
    found_param, found_message = chat_error(messages=messages)
    assert (found_param, found_message[: len(message)]) == (param, message)


FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "web_search"}]}, "tools[0]"),
        ({"tools": {"type": "function"}}, "tools"),
        ({"tools": [FUNCTION, {"type": "function", "function": {"name": "a b"}}]}, "tools[1].function.name"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "parameters": []}}]},
            "tools[0].function.parameters",
        ),
        ({"tools": [FUNCTION] * 129}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": "any"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": {"type": "function"}}, "tool_choice"),
        (
            {"tools": [FUNCTION], "tool_choice": {"type": "function", "function": {"name": "g"}}},
            "tool_choice.function.name",
        ),
        ({"tools": [FUNCTION], "parallel_tool_calls": "yes"}, "parallel_tool_calls"),
    ],
)
def test_bad_tools_are_named_by_their_place(fields: dict[str, Any], param: str) -> None:
    assert chat_error(**fields)[0] == param


def test_a_choice_of_none_shows_the_template_no_tools() -> None:
    assert read_chat(CHAT | {"tools": [FUNCTION]}).template.tools == (FUNCTION,)
    assert read_chat(CHAT | {"tools": [FUNCTION], "tool_choice": "none"}).template.tools == ()


def test_calls_and_their_results_reach_the_template() -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"a": [1]}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "reasoning": "hm", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    ]
    shown = call | {"function": {"name": "f", "arguments": {"a": [1]}}}
    assert read_chat({"messages": messages}).messages == (
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "reasoning_content": "hm", "tool_calls": [shown]},
        {"role": "tool", "tool_call_id": "c1", "content": "42"},
    )


def test_missing_messages_and_prompts_are_named() -> None:
    with pytest.raises(BadRequest, match="messages must be"):
        read_chat({"model": "smol"})
    with pytest.raises(BadRequest, match="prompt must be"):
        read_completion({"model": "smol"})


def test_messages_reach_the_template_as_plain_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": parts, "name": "Ann", "refusal": None},
    ]
    assert read_chat({"messages": messages}).messages == (
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "a\nb", "name": "Ann"},
    )


@pytest.mark.parametrize(
    "said",
    [
        {"content": None, "refusal": "I will not."},
        {"refusal": "I will not."},
        {"content": [{"type": "refusal", "refusal": "I will not."}]},
    ],
)
def test_what_the_assistant_refused_is_what_it_said(said: dict[str, Any]) -> None:
    messages = [{"role": "assistant", **said}, {"role": "user", "content": "x"}]
    assert read_chat({"messages": messages}).messages[0] == {"role": "assistant", "content": "I will not."}
    assert chat_error(messages=[{"role": "user", **said}])[0] in (
        "messages[0].content",
        "messages[0].content[0].type",
    )


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("functions", [{}]),
        ("modalities", ["audio"]),
        ("reasoning_effort", "high"),
        ("echo", True),
    ],
)
def test_what_is_not_served_is_refused_by_name(field: str, value: Any) -> None:
    assert chat_error(**{field: value}) == (field, f"{field} is not supported")


@pytest.mark.parametrize("field", ["suffix", "use_beam_search"])
def test_completions_refuse_what_they_do_not_serve(field: str) -> None:
    assert completion_error(**{field: 7}) == (field, f"{field} is not supported")


def test_fields_that_ask_for_nothing_are_taken() -> None:
    harmless = {"tools": None, "response_format": {"type": "text"}, "tool_choice": "auto", "store": True}
    assert read_chat(CHAT | harmless).wishes.n == 1
    assert read_completion(COMPLETION | {"echo": False, "suffix": None, "best_of": 1}).wishes.n == 1


def test_null_is_absent() -> None:
    names = ("max_tokens", "temperature", "top_p", "seed", "stop", "logit_bias", "n", "stream", "logprobs")
    options = ("stream_options", "user", "stop_token_ids", "top_logprobs", "presence_penalty", "model")
    assert (
        read_chat(CHAT | dict.fromkeys((*names, *options))).wishes.options == read_chat(CHAT).wishes.options
    )


@pytest.mark.parametrize(
    ("prompt", "prompts", "is_list"),
    [
        ("a", ("a",), False),
        (["a", "b"], ("a", "b"), True),
        ([1, 2], ((1, 2),), False),
        ([[1], [2, 3]], ((1,), (2, 3)), True),
    ],
)
def test_prompts_come_in_four_forms(prompt: Any, prompts: tuple[Any, ...], is_list: bool) -> None:
    request = read_completion(COMPLETION | {"prompt": prompt})
    assert (request.prompts, request.is_list) == (prompts, is_list)


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        (None, "prompt"),
        ([], "prompt"),
        (5, "prompt"),
        ([[1], "x"], "prompt[1]"),
        ([1, True], "prompt[1]"),
        ([1, 2.5], "prompt[1]"),
    ],
)
def test_other_prompts_are_refused(prompt: Any, param: str) -> None:
    assert completion_error(prompt=prompt)[0] == param


def test_choices_are_bounded_over_all_prompts() -> None:
    assert completion_error(prompt=["a"] * 65, n=2)[0] == "n"


def test_the_newer_name_of_max_tokens_wins() -> None:
    options = read_chat(CHAT | {"max_tokens": 5, "max_completion_tokens": 7}).wishes.options
    assert (options.max_tokens, options.max_tokens_field) == (7, "max_completion_tokens")


def test_logprobs_differ_between_the_endpoints() -> None:
    assert read_chat(CHAT | {"logprobs": True}).wishes.options.logprobs == 0
    assert read_chat(CHAT | {"logprobs": True, "top_logprobs": 3}).wishes.options.logprobs == 3
    assert read_chat(CHAT).wishes.options.logprobs is None
    assert read_completion(COMPLETION | {"logprobs": 0}).wishes.options.logprobs == 0
    assert chat_error(top_logprobs=3)[0] == "top_logprobs"
    assert chat_error(logprobs=3)[0] == "logprobs"
    assert completion_error(logprobs=21)[0] == "logprobs"


def test_sampling_fields_are_all_read() -> None:
    body = {
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": -1,
        "min_p": 0.1,
        "presence_penalty": 0.2,
        "frequency_penalty": 0.3,
        "repetition_penalty": 1.1,
        "seed": -1,
        "min_tokens": 2,
        "stop": ["a", "b", "a"],
        "stop_token_ids": [7],
        "ignore_eos": True,
        "allowed_token_ids": [7, 8, 7],
        "bad_words": ["x", " y", "x"],
        "logit_bias": {"5": -100, "6": 1.5},
    }
    options = read_completion(COMPLETION | body).wishes.options
    assert (options.temperature, options.top_p, options.top_k, options.min_p) == (0.5, 0.9, 0, 0.1)
    assert (options.presence_penalty, options.frequency_penalty, options.repetition_penalty) == (
        0.2,
        0.3,
        1.1,
    )
    assert (options.seed, options.min_tokens, options.stop) == (-1, 2, ("a", "b", "a"))
    assert (options.stop_token_ids, options.ignore_eos) == ((7,), True)
    assert options.logit_bias == ((5, -100.0), (6, 1.5))
    assert options.allowed_token_ids == (7, 8)
    assert options.bad_words == ("x", " y", "x")


def test_stream_options_need_a_stream() -> None:
    assert chat_error(stream_options={"include_usage": True})[0] == "stream_options"
    assert read_chat(CHAT | {"stream": True, "stream_options": {"include_usage": True}}).wishes.wants_usage
    padded = {"stream": True, "stream_options": {"include_obfuscation": True}}
    assert chat_error(**padded)[0] == completion_error(**padded)[0] == "stream_options.include_obfuscation"
