"""R03 and K07 of the reports from the field, at the gateway."""

import json
from typing import Any

import pytest

from tests.smollm2_text import smollm2_text
from tests.unit.test_http import CHAT, COMPLETION, EOS, TEXT, answering, client, events, ids_of, post

JSON = {"content-type": "application/json"}
CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
# Refused here. What only the compiler can refuse comes back from a node as a 400 (test_grammar_pair.py).
UNCOMPILABLE = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"not": {}}}}


def chat(**fields: Any) -> bytes:
    return json.dumps(CHAT | fields).encode()


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHATS, b"{", None),
        (CHATS, b"", None),
        (CHATS, b"[]", None),
        (CHATS, b"{}", "messages"),
        (CHATS, chat(messages=[]), "messages"),
        (CHATS, chat(messages="x"), "messages"),
        (CHATS, chat(messages=[{"role": "user", "content": None}]), "messages[0].content"),
        (CHATS, chat(max_tokens="abc"), "max_tokens"),
        (CHATS, chat(max_tokens=-1), "max_tokens"),
        (CHATS, chat(temperature=3), "temperature"),
        (CHATS, chat(n=0), "n"),
        (CHATS, chat(logit_bias={"99999999": -100}), "logit_bias"),
        (CHATS, chat(logit_bias={"abc": 1}), "logit_bias"),
        (CHATS, chat(response_format=UNCOMPILABLE), "response_format.json_schema.schema"),
        (COMPLETIONS, b"{}", "prompt"),
    ],
)
async def test_r03_a_bad_body_is_a_400_that_names_its_field_and_reaches_no_node(
    path: str, body: bytes, param: str | None
) -> None:
    dispatcher = answering()
    async with client(dispatcher) as http:
        response = await http.post(path, content=body, headers=JSON)
        error = response.json()["error"]
        assert response.status_code == 400, response.text
        assert set(error) == {"message", "type", "param", "code"}
        assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert "Traceback" not in error["message"]
        assert dispatcher.requests == []
        good = await http.post(path, json=CHAT if path == CHATS else COMPLETION)
        assert good.status_code == 200


async def test_r03_a_wrong_content_type_and_an_unknown_path_have_statuses_of_their_own() -> None:
    async with client(answering()) as http:
        plain = await http.post(CHATS, content=chat(), headers={"content-type": "text/plain"})
        unknown = await http.post("/v1/nothing", json=CHAT)
    assert (plain.status_code, plain.json()["error"]["code"]) == (415, "unsupported_media_type")
    assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "not_found")


FLAG = "🇰🇷 ok"


@pytest.mark.parametrize("rounds", [(1,), (1, 3)])
async def test_k07_a_first_token_that_is_half_a_character_waits_for_the_rest(rounds: tuple[int, ...]) -> None:
    ids = ids_of(FLAG)
    assert "\ufffd" in smollm2_text().tokenizer.token_text(ids[0])
    for count in range(1, len(ids) + 1):
        body = COMPLETION | {"max_tokens": count}
        whole = (await post(answering(FLAG, rounds=rounds), COMPLETIONS, body)).json()
        stream = events(await post(answering(FLAG, rounds=rounds), COMPLETIONS, body | {"stream": True}))
        expected = smollm2_text().tokenizer.decode(ids[:count])
        assert whole["choices"][0]["text"] == expected
        assert "".join(chunk["choices"][0]["text"] for chunk in stream) == expected
        assert whole["usage"]["completion_tokens"] == count
    assert expected == FLAG


async def test_k07_a_stop_at_the_first_token_is_an_empty_answer() -> None:
    first = ids_of(TEXT)[0]
    for stop in ({"stop_token_ids": [first]}, {"stop": [smollm2_text().tokenizer.token_text(first)]}):
        answer = (await post(answering(), COMPLETIONS, COMPLETION | stop)).json()
        choice = answer["choices"][0]
        assert (choice["text"], choice["finish_reason"]) == ("", "stop")
        assert answer["usage"]["completion_tokens"] == 1
    assert EOS not in ids_of(TEXT)
