"""What the HTTP front end tells without any node: tokens of a text, the document, nodes and settings."""

from typing import Any

import pytest

from tests.fakes_dispatch import MAX_MODEL_LEN, FakeDispatcher, one_key
from tests.smollm2_text import smollm2_text
from tests.unit.test_http import TEXT, client, ids_of, post

MESSAGES = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well"}]


async def reply(path: str, **body: Any) -> Any:
    dispatcher = FakeDispatcher()
    response = await post(dispatcher, path, body)
    assert dispatcher.requests == []
    return response.json()


async def test_a_prompt_is_tokenised_as_it_would_be_for_an_answer() -> None:
    told = await reply("/tokenize", prompt=TEXT, return_token_strs=True)
    ids = ids_of(TEXT)
    tokens = [smollm2_text().tokenizer.token_text(i) for i in ids]
    assert told == {"count": len(ids), "max_model_len": MAX_MODEL_LEN, "tokens": ids, "token_strs": tokens}
    assert (await reply("/tokenize", prompt=""))["tokens"] == []


@pytest.mark.parametrize(
    ("options", "ending"),
    [
        ({}, "Well<|im_end|>\n<|im_start|>assistant\n"),
        ({"add_generation_prompt": False}, "Well<|im_end|>\n"),
        ({"continue_final_message": True}, "Well"),
    ],
)
async def test_a_conversation_is_tokenised_through_the_template_and_back(
    options: dict[str, Any], ending: str
) -> None:
    told = await reply("/tokenize", messages=MESSAGES, **options)
    assert told["token_strs"] is None
    text = (await reply("/detokenize", tokens=told["tokens"]))["prompt"]
    assert text.endswith(f"<|im_start|>assistant\n{ending}")
    assert (await reply("/tokenize", prompt=text))["tokens"] == told["tokens"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": 5}, "prompt"),
        ("/tokenize", {"prompt": "x", "messages": MESSAGES}, "messages"),
        ("/tokenize", {"messages": []}, "messages"),
        ("/tokenize", {"prompt": "x", "model": "other"}, "model"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": ["x"]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": [49152]}, "tokens"),
        ("/detokenize", {"tokens": [2**70]}, "tokens"),
    ],
)
async def test_bad_requests_are_refused_by_field(path: str, body: dict[str, Any], param: str) -> None:
    assert (await reply(path, **body))["error"]["param"] == param


async def test_operators_see_nodes_settings_and_the_document() -> None:
    async with client(FakeDispatcher(), keys=one_key("secret")) as http:
        for path in ("/server_info", "/workers"):
            assert (await http.get(path)).status_code == 401
        assert (await http.get("/openapi.json")).json()["openapi"] == "3.1.0"
        headers = {"authorization": "Bearer secret"}
        info = (await http.get("/server_info", headers=headers)).json()
        workers = (await http.get("/workers", headers=headers)).json()
    assert info == {
        "version": "1.2.3",
        "model": "smol",
        "max_model_len": MAX_MODEL_LEN,
        "vocab_size": 49152,
        "settings": {"policy": "least_load"},
    }
    assert workers == {"ready": True, "pairs": [], "nodes": []}
