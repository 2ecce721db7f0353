"""/v1/responses: the official client reads what it gets, and a strict reader finds nothing missing."""

import json
from typing import Any

import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from router.errors import NodeFailed, NodesBusy
from tests.fakes_dispatch import FakeDispatcher
from tests.smollm2_text import smollm2_text
from tests.unit.test_http import TEXT, answering, client, ids_of, post
from tests.unit.test_openai_client import client as ai_client

PATH = "/v1/responses"
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)


async def streamed(dispatcher: FakeDispatcher, **body: Any) -> list[dict[str, Any]]:
    """Data of the events, each under the name of its type."""
    response = await post(dispatcher, PATH, {"input": "hi", "stream": True, **body})
    assert response.headers["content-type"] == "text/event-stream", response.text
    found = []
    *frames, rest = response.text.split("\n\n")
    assert rest == ""
    for frame in frames:
        name, data = frame.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    assert [event["sequence_number"] for event in found] == list(range(len(found)))
    return found


async def prompt_of(**body: Any) -> str:
    dispatcher = answering()
    response = await post(dispatcher, PATH, body)
    assert response.status_code == 200, response.text
    return smollm2_text().tokenizer.decode(dispatcher.requests[0].prompt_ids, shows_special=True)


async def test_a_response_is_one_message_with_usage() -> None:
    body = {"input": "hi", "instructions": "be brief", "metadata": {"a": "b"}, "temperature": 0.5}
    answer = (await post(answering(rounds=(1, 3)), PATH, body)).json()
    Response.model_validate(answer, strict=True)
    assert answer["id"].startswith("resp-")
    assert (answer["status"], answer["error"], answer["incomplete_details"]) == ("completed", None, None)
    (message,) = answer["output"]
    assert (message["role"], message["status"]) == ("assistant", "completed")
    assert [part["text"] for part in message["content"]] == [TEXT]
    usage = answer["usage"]
    assert usage["output_tokens"] == len(ids_of(TEXT)) + 1
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert usage["input_tokens_details"]["cached_tokens"] == 3
    assert (answer["instructions"], answer["metadata"], answer["store"]) == ("be brief", {"a": "b"}, False)
    assert (answer["temperature"], answer["top_p"], answer["previous_response_id"]) == (0.5, 1.0, None)
    assert answer["paceline"]["decode"] == "d:1"


async def test_a_response_cut_by_its_cap_is_incomplete() -> None:
    answer = (await post(answering(), PATH, {"input": "hi", "max_output_tokens": 2})).json()
    Response.model_validate(answer, strict=True)
    assert (answer["status"], answer["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})
    assert (answer["output"][0]["status"], answer["usage"]["output_tokens"]) == ("incomplete", 2)
    events = await streamed(answering(), max_output_tokens=2)
    assert events[-1]["type"] == "response.incomplete"


@pytest.mark.parametrize("rounds", [(1,), (1, 5), (64,)])
async def test_a_stream_has_every_typed_event_in_order_and_the_text_of_the_whole(
    rounds: tuple[int, ...],
) -> None:
    body = {"stop": ["END"], "include": ["message.output_text.logprobs"], "top_logprobs": 1}
    whole = (await post(answering(rounds=rounds), PATH, {"input": "hi", **body})).json()
    events = await streamed(answering(rounds=rounds), **body)
    for event in events:
        EVENT.validate_python(event)
    kinds = [event["type"].removeprefix("response.") for event in events]
    opening = ["created", "in_progress", "output_item.added", "content_part.added"]
    closing = ["output_text.done", "content_part.done", "output_item.done", "completed"]
    assert kinds == opening + ["output_text.delta"] * (len(kinds) - 8) + closing
    text = "".join(event["delta"] for event in events[4:-4])
    assert text == events[-4]["text"] == whole["output"][0]["content"][0]["text"] == TEXT[: TEXT.index("END")]
    logprobs = [entry for event in events[4:-4] for entry in event["logprobs"]]
    assert logprobs == whole["output"][0]["content"][0]["logprobs"] == events[-4]["logprobs"]
    assert len(logprobs) == whole["usage"]["output_tokens"]
    changing = {"id", "created_at", "completed_at", "output"}
    last = events[-1]["response"]
    assert {k: v for k, v in last.items() if k not in changing} == {
        k: v for k, v in whole.items() if k not in changing
    }
    assert last["output"][0] == events[-2]["item"]
    assert events[0]["response"]["status"] == "in_progress"
    assert {event["item_id"] for event in events if "item_id" in event} == {last["output"][0]["id"]}


async def test_input_is_a_string_or_messages_and_earlier_output() -> None:
    plain = await prompt_of(input="hi")
    assert "user\nhi<|im_end|>" in plain
    earlier: list[Any] = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}]},
        {
            "type": "message",
            "id": "msg-1",
            "status": "completed",
            "role": "assistant",
            "content": [{"type": "output_text", "text": "b", "annotations": [], "logprobs": []}],
        },
        {"type": "message", "role": "user", "content": "c"},
    ]
    turns = (
        "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\nb<|im_end|>\n<|im_start|>user\nc<|im_end|>\n"
    )
    told = await prompt_of(input=earlier, instructions="be brief")
    assert told == f"<|im_start|>system\nbe brief<|im_end|>\n{turns}<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"input": []}, "input"),
        ({"input": None}, "input"),
        ({"input": 5}, "input"),
        ({"input": ["x"]}, "input[0]"),
        ({"input": [{"role": "king", "content": "x"}]}, "input[0].role"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content[0].type"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0].type"),
        ({"input": [{"type": ["message"]}]}, "input[0].type"),
        ({"input": [{"role": "tool", "content": "x"}]}, "input[0].role"),
        ({"input": "word " * 600}, "input"),
        ({"previous_response_id": "resp-1"}, "previous_response_id"),
        ({"store": True}, "store"),
        ({"background": True}, "background"),
        ({"conversation": "c"}, "conversation"),
        ({"truncation": "auto"}, "truncation"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_output_tokens": 5000}, "max_output_tokens"),
        ({"text": {"format": {"type": "nonsense"}}}, "text.format.type"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"include": ["x"]}, "include"),
        ({"temperature": 3}, "temperature"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        (
            {"stream": True, "stream_options": {"include_obfuscation": True}},
            "stream_options.include_obfuscation",
        ),
        ({"model": "other"}, "model"),
    ],
)
async def test_what_cannot_be_done_is_refused_by_name(changes: dict[str, Any], param: str) -> None:
    dispatcher = answering()
    async with client(dispatcher) as http:
        refused = await http.post(PATH, json={"input": "hi", **changes})
        assert refused.status_code == (404 if param == "model" else 400)
        error = refused.json()["error"]
        assert (error["param"], error["type"]) == (param, "invalid_request_error")
        assert param in error["message"]
        assert dispatcher.requests == []
        assert (await http.post(PATH, json={"input": "hi"})).status_code == 200


async def test_a_failure_has_its_status_before_the_stream_and_its_event_in_it() -> None:
    busy = answering(error=NodesBusy("full", retry_after_s=2))
    early = await post(busy, PATH, {"input": "hi", "stream": True})
    assert (early.status_code, early.headers["retry-after"]) == (429, "2")
    events = await streamed(answering(error=NodeFailed("node broke"), fail_after=2))
    EVENT.validate_python(events[-1])
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["status"] == "failed"
    assert events[-1]["response"]["error"]["message"] == "node broke"
    assert events[-1]["response"]["error"]["code"] == "server_error"


async def test_the_official_client_reads_responses() -> None:
    async with ai_client(answering()) as ai:
        whole = await ai.responses.create(model="smol", input="hi", instructions="x", store=False)
        async with ai.responses.stream(model="smol", input=[{"role": "user", "content": "hi"}]) as stream:
            kinds = [event.type async for event in stream]
            final = await stream.get_final_response()
        with pytest.raises(openai.BadRequestError, match="keeps no responses"):
            await ai.responses.create(model="smol", input="hi", previous_response_id="resp-1")
    assert whole.output_text == final.output_text == TEXT
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
