"""Whatever is posted, there is an answer: a valid one or an OpenAI error, never a 500 and never silence."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes_dispatch import FakeDispatcher, http_app
from tests.smollm2_text import smollm2_text
from tests.unit.test_http import answering
from tests.unit.test_openai_tables import ENDPOINTS

REFUSALS = {400, 404, 413, 415}
BASES: dict[str, dict[str, Any]] = {
    **{path: body for path, (_, _, body) in ENDPOINTS.items()},
    "/v1/completions": {"prompt": "hi", "max_tokens": 3},
}

numbers = st.sampled_from(
    [-1, 0, 1, 2, 3, 5, 16, 128, 2**31, 2**63, 2**64, -(2**63), 10**30, 0.0, 0.5, 2.5, 1e308]
)
texts = st.sampled_from(
    ["", "a", "hi", "END", "smol", "auto", "none", "required", "\x00", "\ud55c", "🇰🇷", "5", "-1", "text"]
)
scalars = st.none() | st.booleans() | numbers | texts | st.text(max_size=5)
keys = st.sampled_from(
    [
        "type",
        "text",
        "role",
        "content",
        "name",
        "function",
        "parameters",
        "include_usage",
        "format",
        "5",
        "49152",
    ]
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(keys | texts, inner, max_size=4),
    max_leaves=12,
)
roles = st.sampled_from(["system", "developer", "user", "assistant", "tool", "function"])
content = texts | st.lists(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "input_text", "output_text"]), "text": texts}),
    max_size=3,
)
messages = st.lists(
    st.fixed_dictionaries(
        {"role": roles, "content": content}, optional={"tool_calls": values, "tool_call_id": texts}
    ),
    max_size=4,
)
items = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning"])},
    optional={
        "role": roles,
        "content": content,
        "call_id": texts,
        "name": texts,
        "arguments": st.sampled_from(["{}", '{"a": 1}', "", "["]) | values,
        "output": content,
        "summary": content,
    },
)
tools = st.fixed_dictionaries(
    {"type": st.just("function")},
    optional={"name": texts, "parameters": values, "function": st.fixed_dictionaries({"name": texts})},
)
likely = {
    "prompt": texts
    | st.lists(texts, max_size=3)
    | st.lists(st.lists(st.integers(-1, 49200), max_size=3), max_size=3),
    "tokens": st.lists(st.integers(-1, 49200), max_size=5),
    "messages": messages,
    "input": texts | messages | st.lists(items, max_size=4),
    "tools": st.lists(tools, max_size=3),
}


@st.composite
def bodies(draw: st.DrawFn, path: str) -> dict[str, Any]:
    """A good request with some fields replaced by whatever."""
    table = ENDPOINTS[path][0]
    names = sorted({*table.reads, *table.refuses, *table.labels})
    chosen = draw(st.lists(st.sampled_from(names), max_size=6, unique=True))
    return {**BASES[path], **{name: draw(likely.get(name, values) | values) for name in chosen}}


def documents(path: str) -> st.SearchStrategy[bytes]:
    """What comes over the wire: mostly JSON objects, some cut or spoilt."""
    good = bodies(path).map(lambda body: json.dumps(body).encode())
    cut = st.tuples(good, st.integers(0, 60)).map(lambda drawn: drawn[0][: drawn[1]])
    other = values.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=20)
    return good | good | good | cut | other


def assert_answered(response: httpx.Response) -> None:
    if response.status_code == 200:
        if response.headers["content-type"] == "text/event-stream":
            *frames, rest = response.text.split("\n\n")
            assert rest == ""
            assert frames
            for frame in frames[:-1]:
                json.loads(frame[frame.index("data: ") + 6 :])
            assert frames[-1] == "data: [DONE]" or frames[-1].startswith("event: response.")
        else:
            response.json()
        return
    assert response.status_code in REFUSALS, response.text
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert error["param"] is None or error["param"].partition(".")[0].partition("[")[0] in error["message"]


async def ask(dispatcher: FakeDispatcher, path: str, body: bytes, media_type: str) -> None:
    # A fault of ours is raised here, with its stack, and not turned into a 500.
    transport = httpx.ASGITransport(app=http_app(dispatcher, smollm2_text()))
    async with httpx.AsyncClient(transport=transport, base_url="http://router") as http:
        sent = http.post(path, content=body, headers={"content-type": media_type})
        assert_answered(await asyncio.wait_for(sent, timeout=30))
        assert dispatcher.num_open == 0
        sent = http.post(path, json=BASES[path])
        assert (await asyncio.wait_for(sent, timeout=30)).status_code == 200


@pytest.mark.parametrize("path", ENDPOINTS)
def test_every_body_is_answered_and_the_next_good_one_too(path: str) -> None:
    @settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
    @given(body=documents(path), media_type=st.sampled_from(["application/json"] * 9 + ["text/plain"]))
    def check(body: bytes, media_type: str) -> None:
        asyncio.run(ask(answering("a b c END d"), path, body, media_type))

    check()
