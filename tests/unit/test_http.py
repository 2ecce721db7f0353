import asyncio
import json
import math
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from starlette.types import Message
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE

from router.api_keys import ApiKeys, KeyEntry, digest
from router.errors import NodeFailed, NodesBusy, NoReadyPair, RouterError
from router.text.model_text import ModelText
from router.text.tokenizer import Tokenizer
from tests.fakes_dispatch import MAX_MODEL_LEN, FakeDispatcher, FakeOperations, http_app, one_key
from tests.fakes_nodes import virtual
from tests.smollm2_text import smollm2_text

CHAT: dict[str, Any] = {"model": "smol", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION: dict[str, Any] = {"model": "smol", "prompt": "hi"}
TEXT = "Hello world, this is a flag: 🇰🇷 and a family: 👩‍👩‍👧. END of it"
EOS = 2


def ids_of(text: str) -> list[int]:
    return list(smollm2_text().tokenizer.encode(text, add_special_tokens=False))


def answering(text: str = TEXT, **options: Any) -> FakeDispatcher:
    return FakeDispatcher(script=(*ids_of(text), EOS), **options)


@asynccontextmanager
async def client(dispatcher: FakeDispatcher, **options: Any) -> AsyncGenerator[httpx.AsyncClient]:
    app = http_app(dispatcher, smollm2_text(), **options)
    transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as opened:
        yield opened


async def post(dispatcher: FakeDispatcher, path: str, body: Any, **options: Any) -> httpx.Response:
    headers = options.pop("headers", {})
    async with client(dispatcher, **options) as http:
        return await http.post(path, json=body, headers=headers)


def events(response: httpx.Response) -> list[Any]:
    """Data of the events; the last must be [DONE]."""
    assert response.headers["content-type"] == "text/event-stream"
    frames = response.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") for frame in frames)
    data = [frame.removeprefix("data: ") for frame in frames]
    assert data.pop() == "[DONE]"
    return [json.loads(entry) for entry in data]


async def test_a_form_that_cannot_be_is_refused_before_any_node_hears_of_it() -> None:
    dispatcher = answering()
    schema = {"type": "string", "not": {"const": "a"}}
    body = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}}
    for path, base in (("/v1/chat/completions", CHAT), ("/v1/completions", COMPLETION)):
        response = await post(dispatcher, path, {**base, **body})
        assert response.status_code == 400
        assert response.json()["error"]["param"] == "response_format.json_schema.schema"
        assert "must not use 'not'" in response.json()["error"]["message"]
    assert dispatcher.requests == []


async def test_a_form_goes_along_with_every_choice() -> None:
    dispatcher = answering()
    body = {**CHAT, "n": 2, "ignore_eos": True, "response_format": {"type": "json_object"}}
    assert (await post(dispatcher, "/v1/chat/completions", body)).status_code == 200
    assert [request.constraint.field for request in dispatcher.requests if request.constraint] == [
        "response_format",
        "response_format",
    ]
    assert all(EOS in request.sampling.stop_token_ids for request in dispatcher.requests)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", CHAT | {"n": 2}),
        ("/v1/completions", COMPLETION),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_bad_words_go_to_the_nodes_in_tokens_as_they_stand_at_the_beginning_and_after_a_blank(
    path: str, body: dict[str, Any]
) -> None:
    dispatcher = answering()
    words = [
        "flag",
        " world",
        "Zürich ist schön",
        *(str(i) for i in range(100)),
    ]  # more than one does at once
    assert (await post(dispatcher, path, body | {"bad_words": words})).status_code == 200
    for request in dispatcher.requests:
        found = request.sampling.banned_sequences
        assert found[:6] == tuple(
            tuple(ids_of(text))
            for text in ("flag", " flag", "world", " world", "Zürich ist schön", " Zürich ist schön")
        )
        assert len(found) == len(set(found))


async def test_bad_words_that_the_tokenizer_leaves_nothing_of_are_refused_by_name() -> None:
    backend = Backend(BPE(vocab={"h": 0, "i": 1, " ": 2}, merges=[]))
    text = ModelText(Tokenizer(backend, special_tokens={}, eos_token_ids=()), template=None)
    transport = httpx.ASGITransport(app=http_app(answering(), text))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        found = await http.post("/v1/completions", json=COMPLETION | {"bad_words": ["hi", "?"]})
    assert (found.status_code, found.json()["error"]["param"]) == (400, "bad_words")


async def test_a_chat_answer_has_text_reason_usage_and_where_it_came_from() -> None:
    response = await post(answering(rounds=(1, 3)), "/v1/chat/completions", CHAT)
    body = response.json()
    assert response.status_code == 200
    assert body["id"].startswith("chatcmpl-")
    assert (body["object"], body["created"], body["model"]) == ("chat.completion", 1700000000, "smol")
    assert body["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": TEXT, "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
        }
    ]
    num_tokens = len(ids_of(TEXT)) + 1
    assert body["usage"] == {
        "prompt_tokens": 31,
        "completion_tokens": num_tokens,
        "total_tokens": 31 + num_tokens,
        "prompt_tokens_details": {"cached_tokens": 3},
        "completion_tokens_details": {"accepted_prediction_tokens": 23, "rejected_prediction_tokens": 23},
    }
    assert body["paceline"] == {
        "ttft_s": 0.0,
        "kv_bytes": 4096,
        "transport": "memory",
        "prefill": "p:1",
        "decode": "d:1",
        "attempts": 1,
    }


async def test_speculation_is_counted_over_rounds_with_drafts() -> None:
    """AIPerf throws the report away unless it has the names that vLLM gives."""
    response = await post(answering("a b c d e f", rounds=(1, 3, 2)), "/v1/completions", COMPLETION)
    assert response.json()["usage"]["completion_tokens"] == 7
    assert response.json()["metrics"] == {
        "speculative_decoding": {
            "num_spec_steps": 2,
            "num_drafted": 6,
            "num_accepted": 3,
            "num_draft_tokens": 6,
            "num_accepted_draft_tokens": 3,
            "draft_acceptance_rate": 0.5,
            "mean_acceptance_length": 2.5,
            "acceptance_histogram": [0, 1, 1],
        }
    }


@pytest.mark.parametrize("rounds", [(1,), (1, 3), (64,)])
@pytest.mark.parametrize("wants_usage", [False, True])
@pytest.mark.parametrize("ending", ["eos", "cap", "stop"])
async def test_a_chat_stream_has_the_shape_strict_clients_accept(
    rounds: tuple[int, ...], wants_usage: bool, ending: str
) -> None:
    endings: dict[str, dict[str, Any]] = {"eos": {}, "cap": {"max_tokens": 9}, "stop": {"stop": ["END"]}}
    body = CHAT | endings[ending]
    whole = (await post(answering(rounds=rounds), "/v1/chat/completions", body)).json()
    options: dict[str, Any] = {"stream": True}
    if wants_usage:
        options["stream_options"] = {"include_usage": True}
    chunks = events(await post(answering(rounds=rounds), "/v1/chat/completions", body | options))
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    if wants_usage:
        last = chunks.pop()
        assert (last["choices"], last["usage"]) == ([], whole["usage"])
        assert all(chunk["usage"] is None for chunk in chunks)
    else:
        last = chunks[-1]
        assert not any("usage" in chunk for chunk in chunks)
    assert last["metrics"] == whole["metrics"]
    assert last["paceline"] == whole["paceline"]
    choices = [chunk["choices"][0] for chunk in chunks]
    assert choices[0]["delta"] == {"role": "assistant", "content": ""}
    assert choices[-1]["delta"] == {}
    expected = {"eos": "stop", "cap": "length", "stop": "stop"}[ending]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + [expected]
    text = "".join(choice["delta"].get("content", "") for choice in choices)
    assert text == whole["choices"][0]["message"]["content"]
    assert all(choice["delta"]["content"] for choice in choices[1:-1])


async def test_no_line_end_of_unicode_stands_inside_an_event() -> None:
    text = "a\u2028b\u2029c\u0085d\x0be"
    for path, body in (("/v1/completions", COMPLETION), ("/v1/responses", {"input": "hi"})):
        response = await post(answering(text), path, body | {"stream": True})
        lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
        assert all(json.loads(line.removeprefix("data: ")) for line in lines)
        assert response.text.splitlines() == response.text.split("\n")[:-1]
    chunks = events(await post(answering(text), "/v1/completions", COMPLETION | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


async def test_a_completion_stream_equals_the_whole_answer() -> None:
    body = COMPLETION | {"logprobs": 2, "return_token_ids": True, "stop": ["END"]}
    whole = (await post(answering(rounds=(1, 5)), "/v1/completions", body)).json()["choices"][0]
    stream = await post(answering(rounds=(1, 5)), "/v1/completions", body | {"stream": True})
    choices = [chunk["choices"][0] for chunk in events(stream)]
    assert "".join(choice["text"] for choice in choices) == whole["text"] == TEXT[: TEXT.index("END")]
    assert [i for choice in choices for i in choice.get("token_ids", [])] == whole["token_ids"]
    assert whole["token_ids"] == ids_of(TEXT)[: len(ids_of(TEXT)) - len(ids_of(" of it"))]
    for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset"):
        joined = [entry for choice in choices if choice["logprobs"] for entry in choice["logprobs"][name]]
        assert joined == whole["logprobs"][name]
        assert len(joined) == len(whole["token_ids"])


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("rounds", [(1,), (8,)])
async def test_ids_logprobs_and_usage_end_with_the_token_that_completes_a_stop(
    is_stream: bool, rounds: tuple[int, ...]
) -> None:
    ids = ids_of(TEXT)
    tokenizer = smollm2_text().tokenizer
    for j in range(len(ids) - 1):
        stop = tokenizer.decode(ids[j : j + 2])
        if "\ufffd" in stop or TEXT.find(stop) != len(tokenizer.decode(ids[:j])):
            continue
        dispatcher = answering(rounds=rounds)
        body = COMPLETION | {"stop": [stop], "logprobs": 1, "return_token_ids": True, "stream": is_stream}
        if is_stream:
            body["stream_options"] = {"include_usage": True}
        response = await post(dispatcher, "/v1/completions", body)
        answers = events(response) if is_stream else [response.json()]
        choices = [answer["choices"][0] for answer in answers if answer["choices"]]
        assert "".join(choice["text"] for choice in choices) == TEXT[: TEXT.index(stop)]
        assert [i for choice in choices for i in choice.get("token_ids", [])] == ids[: j + 2]
        tokens = [token for choice in choices if choice["logprobs"] for token in choice["logprobs"]["tokens"]]
        assert tokens == [tokenizer.token_text(i) for i in ids[: j + 2]]
        assert answers[-1]["usage"]["completion_tokens"] == j + 2
        assert choices[-1]["finish_reason"] == "stop"
        assert (dispatcher.num_open, dispatcher.num_closed_early) == (0, 1)
        assert dispatcher.num_produced <= j + 1 + max(rounds)


async def test_a_stop_that_nearly_matches_at_the_cap_is_given_out() -> None:
    body = COMPLETION | {"stop": ["c d e f", "c d x"], "max_tokens": 4}
    choice = (await post(answering("a b c d e f"), "/v1/completions", body)).json()["choices"][0]
    assert (choice["text"], choice["finish_reason"]) == ("a b c d", "length")


async def test_a_stop_token_first_gives_an_empty_answer() -> None:
    body = CHAT | {"stop_token_ids": [ids_of(TEXT)[0]], "return_token_ids": True}
    answer = (await post(answering(), "/v1/chat/completions", body)).json()
    choice = answer["choices"][0]
    assert (choice["message"]["content"], choice["finish_reason"]) == ("", "stop")
    assert (choice["token_ids"], answer["usage"]["completion_tokens"]) == ([ids_of(TEXT)[0]], 1)


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
async def test_small_caps_give_exactly_that_many_tokens(max_tokens: int) -> None:
    body = CHAT | {"max_tokens": max_tokens, "return_token_ids": True}
    answer = (await post(answering(), "/v1/chat/completions", body)).json()
    assert answer["choices"][0]["token_ids"] == ids_of(TEXT)[:max_tokens]
    assert answer["choices"][0]["finish_reason"] == "length"


async def test_an_answer_that_ends_inside_a_character_says_so() -> None:
    num_tokens = len(ids_of("🇰🇷")) - 1
    body = COMPLETION | {"max_tokens": num_tokens}
    whole = (await post(answering("🇰🇷"), "/v1/completions", body)).json()["choices"][0]["text"]
    assert whole == smollm2_text().tokenizer.decode(ids_of("🇰🇷")[:-1])
    assert whole.endswith("\ufffd")
    chunks = events(await post(answering("🇰🇷"), "/v1/completions", body | {"stream": True}))
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole


@pytest.mark.parametrize("is_stream", [False, True])
async def test_choices_of_many_prompts_come_under_their_own_index(is_stream: bool) -> None:
    """Index = prompt * n + i; prompt tokens count once for each prompt."""

    def script(request: Any) -> list[int]:
        return [*request.prompt_ids, *ids_of(f" s{request.sampling.seed}"), EOS]

    prompts = [f"word{i}" for i in range(33)]
    body = {"prompt": prompts, "n": 3, "seed": 7, "stream": is_stream}
    response = await post(FakeDispatcher(script_for=script), "/v1/completions", body)
    texts: dict[int, str] = {}
    for answer in events(response) if is_stream else [response.json()]:
        for choice in answer["choices"]:
            texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
    assert texts == {p * 3 + i: f"{prompt} s{7 + i}" for p, prompt in enumerate(prompts) for i in range(3)}
    if not is_stream:
        assert response.json()["usage"]["prompt_tokens"] == sum(len(ids_of(prompt)) for prompt in prompts)


async def test_without_a_seed_every_choice_gets_one_of_its_own() -> None:
    dispatcher = answering()
    await post(dispatcher, "/v1/completions", COMPLETION | {"n": 3})
    assert [request.sampling.seed for request in dispatcher.requests] == [1000, 1001, 1002]


async def test_a_negative_or_overflowing_seed_stays_within_64_bits() -> None:
    dispatcher = answering()
    await post(dispatcher, "/v1/completions", COMPLETION | {"seed": -1, "n": 2})
    assert [request.sampling.seed for request in dispatcher.requests] == [2**64 - 1, 0]


async def test_the_nodes_get_the_models_stop_ids_unless_they_are_to_be_ignored() -> None:
    dispatcher = answering()
    await post(dispatcher, "/v1/completions", COMPLETION | {"stop_token_ids": [9, 2]})
    await post(dispatcher, "/v1/completions", COMPLETION | {"stop_token_ids": [9], "ignore_eos": True})
    assert [request.sampling.stop_token_ids for request in dispatcher.requests] == [(9, 2), (9,)]


async def test_what_labels_a_request_reaches_the_dispatcher() -> None:
    dispatcher = answering()
    headers = {"x-request-id": "mine", "traceparent": "00-ab-cd-01"}
    body = COMPLETION | {"priority": 3, "cache_salt": "s"}
    response = await post(dispatcher, "/v1/completions", body, headers=headers)
    (request,) = dispatcher.requests
    assert response.headers["x-request-id"] == "mine"
    assert (request.label, request.trace_context) == ("mine", "00-ab-cd-01")
    assert (request.priority, request.cache_salt, request.model) == (3, "s", "smol")
    assert request.sampling.max_tokens == MAX_MODEL_LEN - len(request.prompt_ids)


@pytest.mark.parametrize(("tenant_header", "tenant"), [("X-Team", "blue"), ("", "")])
async def test_whose_a_request_is_comes_from_the_configured_header_only(
    tenant_header: str, tenant: str
) -> None:
    dispatcher = answering()
    headers = {"x-team": "blue"}
    await post(dispatcher, "/v1/completions", COMPLETION, headers=headers, tenant_header=tenant_header)
    assert [request.tenant for request in dispatcher.requests] == [tenant]


async def test_chat_logprobs_have_an_entry_with_bytes_for_every_token() -> None:
    body = CHAT | {"logprobs": True, "top_logprobs": 2, "max_tokens": 1}
    answer = (await post(answering("Hello"), "/v1/chat/completions", body)).json()
    (entry,) = answer["choices"][0]["logprobs"]["content"]
    assert (entry["token"], entry["logprob"], entry["bytes"]) == ("Hello", -0.5, list(b"Hello"))
    assert [other["logprob"] for other in entry["top_logprobs"]] == [-0.5, -1.5]
    plain = (await post(answering("Hello"), "/v1/chat/completions", CHAT | {"logprobs": True})).json()
    assert plain["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


async def test_chunks_tell_accepted_drafts_only_when_asked() -> None:
    body = CHAT | {"stream": True}
    asked = await post(
        answering("a b c d", rounds=(1, 3)), "/v1/chat/completions", body, headers={"x-paceline-debug": "1"}
    )
    told = [chunk.get("paceline") for chunk in events(asked)[1:-1]]
    assert told == [
        {"accepted": 0, "accepted_chars": 0, "ids": 1},
        {"accepted": 2, "accepted_chars": 4, "ids": 3},
        {"accepted": 0, "accepted_chars": 0, "ids": 1},
    ]
    plain = events(await post(answering("a b c d", rounds=(1, 3)), "/v1/chat/completions", body))
    assert not any("paceline" in chunk for chunk in plain[:-1])


@pytest.mark.parametrize(
    ("body", "status", "param", "code"),
    [
        (CHAT | {"model": "other"}, 404, "model", "model_not_found"),
        (CHAT | {"messages": []}, 400, "messages", "invalid_value"),
        (CHAT | {"temperature": 3}, 400, "temperature", "invalid_value"),
        (CHAT | {"top_p": 0}, 400, "top_p", "invalid_value"),
        (CHAT | {"top_k": 2**32}, 400, "top_k", "invalid_value"),
        (CHAT | {"repetition_penalty": 0}, 400, "repetition_penalty", "invalid_value"),
        (CHAT | {"min_tokens": 5, "max_tokens": 4}, 400, "min_tokens", "invalid_value"),
        (CHAT | {"logit_bias": {"99999999": -100}}, 400, "logit_bias", "invalid_value"),
        (CHAT | {"logit_bias": {"5": 101}}, 400, "logit_bias", "invalid_value"),
        (CHAT | {"stop_token_ids": [49152]}, 400, "stop_token_ids", "invalid_value"),
        (CHAT | {"allowed_token_ids": [49152]}, 400, "allowed_token_ids", "invalid_value"),
        (CHAT | {"allowed_token_ids": []}, 400, "allowed_token_ids", "invalid_value"),
        (CHAT | {"bad_words": "x"}, 400, "bad_words", "invalid_value"),
        (CHAT | {"bad_words": ["x", " "]}, 400, "bad_words", "invalid_value"),
        (CHAT | {"bad_words": ["x" * 1025]}, 400, "bad_words", "invalid_value"),
        (CHAT | {"bad_words": [str(i) for i in range(257)]}, 400, "bad_words", "invalid_value"),
        (CHAT | {"bad_words": ["x"] * 257}, 400, "bad_words", "invalid_value"),
        (CHAT | {"stop": ["x"] * 17}, 400, "stop", "invalid_value"),
        (CHAT | {"stop": [""]}, 400, "stop", "invalid_value"),
        (CHAT | {"stop": list("abcdefghijklmnopq")}, 400, "stop", "invalid_value"),
        (CHAT | {"max_tokens": 500}, 400, "max_tokens", "context_length_exceeded"),
        (CHAT | {"tools": [{}]}, 400, "tools[0]", "invalid_value"),
        (CHAT | {"chat_template_kwargs": {"tools": 1}}, 400, "chat_template_kwargs", "invalid_value"),
        (
            CHAT | {"messages": [{"role": "user", "content": "word " * 600}]},
            400,
            "messages",
            "context_length_exceeded",
        ),
    ],
)
async def test_a_bad_chat_is_refused_and_the_next_good_one_answered(
    body: Any, status: int, param: str, code: str
) -> None:
    dispatcher = answering()
    async with client(dispatcher) as http:
        for stream in (False, True):
            response = await http.post("/v1/chat/completions", json=body | {"stream": stream})
            error = response.json()["error"]
            assert response.status_code == status
            assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, code)
            assert param in error["message"]
            assert dispatcher.requests == []
        assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200


@pytest.mark.parametrize(
    ("prompt", "param"),
    [
        ("", "prompt"),
        ([49152], "prompt"),
        ([[1], [-1]], "prompt[1]"),
        (["a", ""], "prompt[1]"),
        ([[]], "prompt[0]"),
    ],
)
async def test_a_prompt_no_node_could_take_is_refused(prompt: Any, param: str) -> None:
    dispatcher = answering()
    response = await post(dispatcher, "/v1/completions", {"prompt": prompt})
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)
    assert dispatcher.requests == []


async def test_a_prompt_over_the_limit_is_told_both_numbers() -> None:
    response = await post(answering(), "/v1/completions", {"prompt": [5] * 500, "max_tokens": 13})
    assert response.json()["error"]["message"] == (
        "max_tokens must be at most 12, got 13: prompt has 500 tokens and this model takes at most 512 "
        "of prompt and completion together"
    )
    assert (
        await post(answering(), "/v1/completions", {"prompt": [5] * 500, "max_tokens": 12})
    ).status_code == 200


@pytest.mark.parametrize(
    ("content", "headers", "status", "code"),
    [
        (b"{", {"content-type": "application/json"}, 400, "invalid_json"),
        (b"", {"content-type": "application/json"}, 400, "invalid_json"),
        (b"[]", {}, 400, "invalid_json"),
        (b"{}", {"content-type": "text/plain"}, 415, "unsupported_media_type"),
        (b"a=b", {"content-type": "application/x-www-form-urlencoded"}, 415, "unsupported_media_type"),
        (b'"' + b"x" * 100_001, {"content-type": "application/json"}, 413, "body_too_large"),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
async def test_bodies_that_are_no_request_are_refused(
    path: str, content: bytes, headers: dict[str, str], status: int, code: str
) -> None:
    dispatcher = answering()
    async with client(dispatcher) as http:
        response = await http.post(path, content=content, headers=headers)
    assert (response.status_code, response.json()["error"]["code"]) == (status, code)
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert dispatcher.requests == []


async def test_a_body_too_large_is_not_read_to_its_end() -> None:
    chunks = iter([b"x" * 60_000] * 10)

    async def body() -> AsyncGenerator[bytes]:
        for chunk in chunks:
            yield chunk

    async with client(answering()) as http:
        response = await http.post("/v1/completions", content=body())
    assert response.status_code == 413
    assert len(list(chunks)) == 8


async def test_unknown_paths_and_methods_have_the_same_error_shape() -> None:
    async with client(answering()) as http:
        unknown = await http.get("/v1/nope")
        wrong = await http.get("/v1/completions")
        slash = await http.post("/v1/completions/", json=COMPLETION)
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert slash.status_code == 404


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("error", "status", "retry_after"),
    [
        (NodesBusy("full", retry_after_s=0.2), 429, "1"),
        (NoReadyPair("none", retry_after_s=2.5), 503, "3"),
        (NodeFailed("broke"), 500, None),
    ],
)
async def test_a_failure_before_the_first_token_has_its_own_status(
    error: RouterError, status: int, retry_after: str | None, is_stream: bool
) -> None:
    response = await post(answering(error=error), "/v1/chat/completions", CHAT | {"stream": is_stream})
    assert response.status_code == status
    assert response.headers.get("retry-after") == retry_after
    assert response.headers["x-paceline-reason"] == error.code
    assert response.json()["error"]["code"] == error.code


async def test_a_failure_in_a_stream_is_an_event_and_no_done_follows() -> None:
    dispatcher = answering(error=NodeFailed("decode node d:1 broke"), fail_after=3)
    response = await post(dispatcher, "/v1/chat/completions", CHAT | {"stream": True})
    frames = response.text.strip().split("\n\n")
    assert json.loads(frames[-1].removeprefix("data: ")) == {
        "error": {
            "message": "decode node d:1 broke",
            "type": "server_error",
            "param": None,
            "code": "node_failed",
        }
    }
    assert "[DONE]" not in response.text
    assert all(
        json.loads(f.removeprefix("data: "))["choices"][0]["finish_reason"] is None for f in frames[:-1]
    )


async def test_a_failure_of_one_choice_ends_the_others() -> None:
    def script(request: Any) -> list[int]:
        return [5] * 100

    dispatcher = FakeDispatcher(script_for=script, error=NodeFailed("broke"), fail_after=20)
    response = await post(dispatcher, "/v1/completions", {"prompt": ["a", "b"], "n": 2})
    assert response.status_code == 500
    assert dispatcher.num_open == 0


async def test_a_fault_of_ours_shows_nothing_of_our_insides(caplog: pytest.LogCaptureFixture) -> None:
    def script(request: Any) -> list[int]:
        raise KeyError("secret")

    for is_stream in (False, True):
        response = await post(
            FakeDispatcher(script_for=script), "/v1/completions", COMPLETION | {"stream": is_stream}
        )
        assert response.status_code == 500
        assert response.json()["error"]["message"] == "internal error"
        assert response.headers["x-request-id"].startswith("req")
    assert "a stream failed" in caplog.text


def scope(path: str) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.4"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "headers": [(b"content-type", b"application/json")],
        "client": ("c", 1),
        "server": ("s", 1),
    }


def staying(body: bytes, leave: asyncio.Event) -> Callable[[], Awaitable[Message]]:
    """The receiving side of a client that sends `body` and stays until `leave`."""
    incoming: Iterator[Message] = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def receive() -> Message:
        for message in incoming:
            return message
        await leave.wait()
        return {"type": "http.disconnect"}

    return receive


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("stall_after", [0, 3])
@pytest.mark.parametrize("n", [1, 3])
async def test_a_client_that_leaves_cancels_its_generations_at_once(
    is_stream: bool, stall_after: int, n: int
) -> None:
    dispatcher = answering(stall_after=stall_after)
    app = http_app(dispatcher, smollm2_text())
    body = json.dumps(CHAT | {"stream": is_stream, "n": n}).encode()
    leave = asyncio.Event()

    async def send(message: Message) -> None:
        sent.append(message)

    sent: list[Message] = []
    serving = asyncio.ensure_future(app(scope("/v1/chat/completions"), staying(body, leave), send))
    await asyncio.wait_for(dispatcher.until_stalled(n), timeout=60)
    leave.set()
    await asyncio.wait_for(serving, timeout=60)
    assert (dispatcher.num_open, dispatcher.num_closed_early) == (0, n)


@virtual
@pytest.mark.parametrize("pause_s", [59.0, 61.0])
async def test_a_body_may_come_slowly_but_not_stop(pause_s: float) -> None:
    pieces = [b'{"prompt"', b": [5]", b', "max_tokens": 1}']
    sent: list[Message] = []

    async def receive() -> Message:
        await asyncio.sleep(pause_s)
        if not pieces:
            await asyncio.Event().wait()
        return {"type": "http.request", "body": pieces.pop(0), "more_body": bool(pieces)}

    async def send(message: Message) -> None:
        sent.append(message)

    await http_app(answering(), smollm2_text())(scope("/v1/completions"), receive, send)
    start, answer = sent[0], json.loads(sent[1]["body"])
    if pause_s < 60:
        assert (start["status"], len(answer["choices"])) == (200, 1)
        return
    assert (start["status"], answer["error"]["code"]) == (408, "body_timeout")
    assert (b"connection", b"close") in start["headers"]


@virtual
@pytest.mark.parametrize("pause_s", [59.0, 1000.0])
async def test_a_client_that_takes_nothing_for_minutes_is_gone_but_not_one_that_is_slow(
    pause_s: float,
) -> None:
    """Its socket takes two events at once and is then full for so long before each. The nodes have told all
    to those who are slow, and not yet all to those who go."""
    is_gone = pause_s > 60
    dispatcher = answering(stall_after=8 if is_gone else None)
    app = http_app(dispatcher, smollm2_text())
    body = json.dumps({"prompt": [5], "stream": True}).encode()
    sent: list[bytes] = []

    async def send(message: Message) -> None:
        if message["type"] == "http.response.body":
            if len(sent) >= 2:
                await asyncio.sleep(pause_s)
            sent.append(message["body"])

    started = asyncio.get_running_loop().time()
    await app(scope("/v1/completions"), staying(body, asyncio.Event()), send)
    assert (dispatcher.num_open, dispatcher.num_closed_early) == (0, is_gone)
    assert (asyncio.get_running_loop().time() - started <= 120) is is_gone
    assert (b"[DONE]" in b"".join(sent)) is not is_gone


async def test_operators_can_ask_how_the_router_is() -> None:
    operations = FakeOperations()
    async with client(answering(), operations=operations) as http:
        for path in ("/ready", "/readyz", "/health", "/healthz", "/live", "/livez", "/version", "/metrics"):
            assert (await http.get(path)).status_code == 200
        assert (await http.get("/version")).json() == {"version": "1.2.3"}
        assert (await http.get("/ready")).json() == {"ready": True, "pairs": [], "nodes": []}
        assert (await http.get("/metrics")).text == "paceline_router_requests_total 1.0\n"
        operations.is_ready = False
        statuses = {path: (await http.get(path)).status_code for path in ("/ready", "/health", "/live")}
    assert statuses == {"/ready": 503, "/health": 503, "/live": 200}


async def test_the_served_model_is_listed_and_no_other_found() -> None:
    async with client(answering()) as http:
        listed = (await http.get("/v1/models")).json()
        found = await http.get("/v1/models/smol")
        missing = await http.get("/v1/models/org/other")
    assert listed == {"object": "list", "data": [found.json()]}
    assert found.json()["id"] == "smol"
    assert found.json()["max_model_len"] == MAX_MODEL_LEN
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


async def test_an_api_key_is_asked_of_users_but_not_of_probes() -> None:
    async with client(answering(), keys=one_key("secret")) as http:
        assert (await http.get("/live")).status_code == 200
        for headers in ({}, {"authorization": "Bearer wrong"}, {"authorization": "secret"}):
            response = await http.post("/v1/chat/completions", json=CHAT, headers=headers)
            assert (response.status_code, response.json()["error"]["code"]) == (401, "invalid_api_key")
        good = {"authorization": "Bearer secret"}
        assert (await http.post("/v1/chat/completions", json=CHAT, headers=good)).status_code == 200
        assert (await http.get("/v1/models", headers=good)).status_code == 200


async def test_a_request_bears_the_name_of_its_key() -> None:
    dispatcher = answering()
    async with client(dispatcher, keys=one_key("secret")) as http:
        await http.post("/v1/chat/completions", json=CHAT, headers={"authorization": "Bearer secret"})
    assert [request.tenant for request in dispatcher.requests] == ["default"]


async def test_a_key_s_limits_are_told_with_the_time_to_wait_and_are_its_own() -> None:
    entries = [
        KeyEntry(name="a", sha256=digest("a"), requests_per_minute=1),
        KeyEntry(name="b", sha256=digest("b"), tokens_per_minute=40),
    ]
    dispatcher = answering()
    async with client(dispatcher, keys=ApiKeys(entries, clock=lambda: 0.0)) as http:

        async def ask(key: str, *, stream: bool = False) -> httpx.Response:
            headers = {"authorization": f"Bearer {key}"}
            return await http.post("/v1/chat/completions", json=CHAT | {"stream": stream}, headers=headers)

        assert (await ask("a")).status_code == 200
        refused = await ask("a", stream=True)
        assert (refused.status_code, refused.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert refused.headers["retry-after"] == "60"
        assert (await ask("b", stream=True)).status_code == 200
        num_tokens = 31 + len(ids_of(TEXT)) + 1
        assert (await ask("b")).headers["retry-after"] == str(math.ceil((num_tokens - 39) * 60 / 40))
    assert len(dispatcher.requests) == 2


async def test_a_request_id_that_is_no_label_is_replaced() -> None:
    for given in ("x" * 129, "", "tab\there"):
        response = await post(answering(), "/v1/completions", COMPLETION, headers={"x-request-id": given})
        assert response.headers["x-request-id"].startswith("req")
