"""What answers say of the prompt: echo, its log-probabilities, and how it was made."""

from typing import Any

import pytest

from tests.fakes_dispatch import MAX_MODEL_LEN, FakeDispatcher
from tests.smollm2_text import smollm2_text
from tests.unit.test_http import CHAT, EOS, TEXT, answering, events, ids_of, post

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"
PROMPT = "Once upon a 🇰🇷 time"


async def answer(dispatcher: FakeDispatcher, path: str, **body: Any) -> Any:
    response = await post(dispatcher, path, body)
    assert response.status_code == 200, response.text
    return response.json()


async def refusal(path: str, **body: Any) -> tuple[str, str]:
    dispatcher = answering()
    response = await post(dispatcher, path, body)
    assert response.status_code == 400
    assert dispatcher.requests == []
    return response.json()["error"]["param"], response.json()["error"]["message"]


@pytest.mark.parametrize("logprobs", [None, 0, 2])
@pytest.mark.parametrize("prompt", [PROMPT, ids_of(PROMPT)])
async def test_an_echo_begins_with_the_prompt_streamed_or_not(prompt: Any, logprobs: int | None) -> None:
    body = {"prompt": prompt, "echo": True, "logprobs": logprobs, "max_tokens": 3}
    (choice,) = (await answer(answering(rounds=(1, 2)), COMPLETIONS, **body))["choices"]
    completion = smollm2_text().tokenizer.decode(ids_of(TEXT)[:3])
    assert (choice["text"], choice["finish_reason"]) == (PROMPT + completion, "length")
    stream = events(await post(answering(rounds=(1, 2)), COMPLETIONS, body | {"stream": True}))
    choices = [chunk["choices"][0] for chunk in stream]
    assert "".join(part["text"] for part in choices) == choice["text"]
    assert choices[0]["text"] == PROMPT
    if logprobs is None:
        assert choice["logprobs"] is None
        return
    block = choice["logprobs"]
    tokens = [smollm2_text().tokenizer.token_text(i) for i in ids_of(PROMPT) + ids_of(TEXT)[:3]]
    assert block["tokens"] == tokens
    num_prompt = len(ids_of(PROMPT))
    assert block["token_logprobs"] == [None, *(-float(i) for i in range(1, num_prompt)), -0.5, -0.5, -0.5]
    assert block["top_logprobs"][0] is None
    assert all(1 <= len(top) <= max(1, logprobs) for top in block["top_logprobs"][1:])  # texts may coincide
    assert block["text_offset"] == [sum(map(len, tokens[:i])) for i in range(len(tokens))]
    for name in block:
        assert [entry for part in choices if part["logprobs"] for entry in part["logprobs"][name]] == block[
            name
        ]


@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_prompt_can_be_scored_without_an_answer(is_stream: bool) -> None:
    """What lm-eval-harness asks for; nodes draw one token, which nobody is shown."""
    dispatcher = answering()
    body = {"prompt": [[5, 6, 7], [8]], "echo": True, "max_tokens": 0, "logprobs": 1, "stream": is_stream}
    if is_stream:
        body["stream_options"] = {"include_usage": True}
    response = await post(dispatcher, COMPLETIONS, body)
    answers = events(response) if is_stream else [response.json()]
    decode = smollm2_text().tokenizer.decode
    for index, ids in enumerate(([5, 6, 7], [8])):
        choices = [choice for one in answers for choice in one["choices"] if choice["index"] == index]
        assert "".join(choice["text"] for choice in choices) == decode(ids)
        assert choices[0]["logprobs"]["token_logprobs"] == [None, -1.0, -2.0][: len(ids)]
        assert choices[-1]["finish_reason"] == "length"
    assert [request.sampling.max_tokens for request in dispatcher.requests] == [1, 1]
    usage = answers[-1]["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (4, 0)
    assert (dispatcher.num_open, dispatcher.num_closed_early) == (0, 0)


async def test_no_tokens_at_all_need_a_prompt_to_be_shown() -> None:
    assert await refusal(COMPLETIONS, prompt="x", max_tokens=0) == (
        "max_tokens",
        "max_tokens must be at least 1, got 0",
    )
    assert (await refusal(CHATS, **CHAT, max_completion_tokens=0))[0] == "max_completion_tokens"
    echoed = await answer(answering(), COMPLETIONS, prompt=PROMPT, echo=True, max_tokens=0)
    assert echoed["choices"][0]["text"] == PROMPT


async def test_prompt_logprobs_have_the_form_of_vllm() -> None:
    token_text = smollm2_text().tokenizer.token_text
    body = {"prompt": [5, 6, 7], "prompt_logprobs": 1, "max_tokens": 2}
    (choice,) = (await answer(answering(), COMPLETIONS, **body))["choices"]
    assert choice["prompt_logprobs"] == [
        None,
        {"6": {"logprob": -1.0, "rank": 1, "decoded_token": token_text(6)}},
        {"7": {"logprob": -2.0, "rank": 1, "decoded_token": token_text(7)}},
    ]
    assert choice["logprobs"] is None
    plain = await answer(answering(), COMPLETIONS, prompt=[5, 6], prompt_logprobs=0)
    assert plain["choices"][0]["prompt_logprobs"][1]["6"]["rank"] is None
    chat = await answer(answering(), CHATS, **CHAT, prompt_logprobs=2)
    assert len(chat["prompt_logprobs"]) == chat["usage"]["prompt_tokens"]
    assert [entry and len(entry) for entry in chat["prompt_logprobs"][:2]] == [None, 2]
    assert "prompt_logprobs" not in await answer(answering(), CHATS, **CHAT)
    assert (await refusal(CHATS, **CHAT, prompt_logprobs=1, stream=True))[0] == "prompt_logprobs"
    assert (await refusal(COMPLETIONS, prompt="x", prompt_logprobs=-1))[0] == "prompt_logprobs"


async def test_the_stop_is_shown_when_asked_for() -> None:
    shown = {"include_stop_str_in_output": True, "prompt": "x"}
    by_text = await answer(answering(), COMPLETIONS, **shown, stop=["END"])
    assert by_text["choices"][0]["text"] == TEXT[: TEXT.index("END") + 3]
    stop_id = ids_of(TEXT)[2]
    by_token = await answer(answering(), COMPLETIONS, **shown, stop_token_ids=[stop_id])
    assert by_token["choices"][0]["text"] == smollm2_text().tokenizer.decode(ids_of(TEXT)[:3])
    assert by_token["choices"][0]["finish_reason"] == "stop"


async def test_special_tokens_have_text_when_asked_for() -> None:
    dispatcher = FakeDispatcher(script=(*ids_of("a"), 1, *ids_of("b"), EOS))
    hidden = await answer(dispatcher, COMPLETIONS, prompt="x")
    shown = await answer(dispatcher, COMPLETIONS, prompt="x", skip_special_tokens=False)
    assert [one["choices"][0]["text"] for one in (hidden, shown)] == ["ab", "a<|im_start|>b"]


@pytest.mark.parametrize(("keeps", "expected"), [(3, [7, 8, 9]), (5, [5, 6, 7, 8, 9]), (99, [5, 6, 7, 8, 9])])
async def test_a_prompt_can_be_cut_to_its_last_tokens(keeps: int, expected: list[int]) -> None:
    dispatcher = answering()
    await answer(dispatcher, COMPLETIONS, prompt=[5, 6, 7, 8, 9], truncate_prompt_tokens=keeps)
    assert dispatcher.requests[0].prompt_ids == tuple(expected)


async def test_a_prompt_too_long_can_be_cut_to_the_models_size() -> None:
    dispatcher = answering()
    body = {"prompt": [5] * (2 * MAX_MODEL_LEN), "truncate_prompt_tokens": -1, "max_tokens": 4, "echo": True}
    echoed = await answer(dispatcher, COMPLETIONS, **body)
    assert len(dispatcher.requests[0].prompt_ids) == MAX_MODEL_LEN - 4
    assert echoed["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 4
    assert (await refusal(COMPLETIONS, prompt="x", truncate_prompt_tokens=0))[0] == "truncate_prompt_tokens"


async def test_the_last_message_of_a_chat_can_be_continued() -> None:
    dispatcher = answering()
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "Well, "}]
    await answer(dispatcher, CHATS, messages=messages, continue_final_message=True)
    await answer(dispatcher, CHATS, messages=messages, add_generation_prompt=False)
    continued, closed = (
        smollm2_text().tokenizer.decode(r.prompt_ids, shows_special=True) for r in dispatcher.requests
    )
    assert continued.endswith("<|im_start|>assistant\nWell, ")
    assert closed == continued + "<|im_end|>\n"
    both = {"continue_final_message": True, "add_generation_prompt": True}
    assert (await refusal(CHATS, messages=messages, **both))[0] == "continue_final_message"


async def test_best_of_may_only_repeat_n() -> None:
    assert len((await answer(answering(), COMPLETIONS, prompt="x", n=2, best_of=2))["choices"]) == 2
    assert (await refusal(COMPLETIONS, prompt="x", best_of=2))[0] == "best_of"
    assert (await refusal(COMPLETIONS, prompt="x", n=3, best_of=2))[0] == "best_of"
