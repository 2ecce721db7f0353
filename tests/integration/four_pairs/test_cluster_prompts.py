"""Many prompts at once, and what their own tokens score, through real processes."""

from typing import Any

import grpc
import openai
import pytest

from tests.integration.cluster import Json, Router
from tests.integration.four_pairs.conftest import NUM_TOKENS, FourPairs
from tests.integration.reference import Reference, prompt_of, text_of, tokenizer
from wire.gen import generate_pb2, generate_pb2_grpc

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(600)]

_WORDS = (
    "red blue green one two three four five six seven eight nine ten sun moon star rain snow wind road hill"
    " lake fish bird horse apple bread milk salt fire stone wood iron"
)
WORDS = _WORDS.split()
A_FEW_EACH: Json = {"prompt": WORDS, "n": 3, "temperature": 0, "max_tokens": 2}


async def test_lists_of_prompts_keep_their_places_and_count_once(four_pairs: FourPairs) -> None:
    """R01 of the reports from the field."""
    assert len(WORDS) == 33
    whole = await four_pairs.router.complete(**A_FEW_EACH)
    texts = {choice["index"]: choice["text"] for choice in whole["choices"]}
    assert sorted(texts) == list(range(99))
    for place in range(33):
        assert len({texts[3 * place + i] for i in range(3)}) == 1
    assert len(set(texts.values())) > 10
    assert whole["usage"]["prompt_tokens"] == sum(len(tokenizer()(word).input_ids) for word in WORDS)
    assert whole["usage"]["completion_tokens"] <= 99 * 2
    for place in (0, 16, 32):
        alone = await four_pairs.router.complete(prompt=WORDS[place], temperature=0, max_tokens=2)
        assert alone["choices"][0]["text"] == texts[3 * place]
    streamed: dict[int, str] = {}
    async for chunk in four_pairs.router.chunks(**A_FEW_EACH):
        for choice in chunk["choices"]:
            streamed[choice["index"]] = streamed.get(choice["index"], "") + choice["text"]
    assert streamed == texts
    await four_pairs.settle()


async def test_leaving_a_list_of_prompts_halfway_leaves_nothing_behind(four_pairs: FourPairs) -> None:
    body = {**A_FEW_EACH, "max_tokens": 400, "ignore_eos": True, "stream": True}
    async with four_pairs.router.http.stream("POST", "/v1/completions", json=body) as response:
        assert response.status_code == 200
        lines = response.aiter_lines()
        for _ in range(20):
            await anext(lines)
    await four_pairs.settle()


async def scored(router: Router, prompt: tuple[int, ...], **body: Any) -> Json:
    """As lm-eval-harness asks how likely a text is."""
    answer = await router.complete(
        prompt=list(prompt), echo=True, logprobs=1, temperature=0, seed=1234, **body
    )
    choice: Json = answer["choices"][0]
    return {"text": choice["text"], "usage": answer["usage"], **choice["logprobs"]}


@pytest.mark.parametrize("length", [17, 129])
async def test_a_prompt_scores_what_its_tokens_scored_when_they_were_drawn(
    four_pairs: FourPairs, reference: Reference, length: int
) -> None:
    prompt, drawn = prompt_of(length), tuple(reference.ids(prompt_of(length), NUM_TOKENS))
    answer = await four_pairs.router.complete(
        prompt=list(prompt), temperature=0, max_tokens=NUM_TOKENS, logprobs=1, ignore_eos=True
    )
    when_drawn = answer["choices"][0]["logprobs"]["token_logprobs"]
    for router, max_tokens in ((four_pairs.router, 0), (four_pairs.router, 1), (four_pairs.colocated, 0)):
        told = await scored(router, (*prompt, *drawn), max_tokens=max_tokens)
        assert told["text"].startswith(text_of([*prompt, *drawn]))
        num_prompt = length + NUM_TOKENS
        assert len(told["token_logprobs"]) == num_prompt + max_tokens
        assert told["token_logprobs"][0] is None
        continuation = told["token_logprobs"][length:num_prompt]
        assert continuation == pytest.approx(when_drawn, abs=1e-3)
        tops = told["top_logprobs"][length:num_prompt]
        is_greedy = [score == max(top.values()) for score, top in zip(continuation, tops, strict=True)]
        assert all(is_greedy)
        assert (told["usage"]["prompt_tokens"], told["usage"]["completion_tokens"]) == (
            num_prompt,
            max_tokens,
        )
        assert told["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    await four_pairs.settle()


async def test_grpc_and_responses_say_the_same(four_pairs: FourPairs, reference: Reference) -> None:
    prompt = prompt_of(33)
    expected = await scored(four_pairs.router, prompt, max_tokens=0)
    request = generate_pb2.GenerateRequest(
        token_ids=generate_pb2.TokenIds(ids=prompt),
        n=2,
        sampling=generate_pb2.Sampling(
            prompt_logprobs=1, max_tokens=NUM_TOKENS, temperature=0, ignore_eos=True
        ),
    )
    async with grpc.aio.insecure_channel(four_pairs.router.grpc_address) as channel:
        call = generate_pb2_grpc.GenerationStub(channel).Generate(request, timeout=120)
        messages = [message async for message in call]
    for index in range(2):
        of_choice = [message for message in messages if message.index == index]
        told = [entry.logprob for entry in of_choice[0].prompt_logprobs]
        assert told == pytest.approx(expected["token_logprobs"][1:], abs=1e-3)
        drawn = [token for message in of_choice for token in message.token_ids]
        assert drawn == reference.ids(prompt, NUM_TOKENS)
    base_url = f"{four_pairs.router.http.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        question, chat = "What is the capital of Italy?", {"temperature": 0, "max_output_tokens": NUM_TOKENS}
        (model,) = [model.id async for model in client.models.list()]
        whole = await client.responses.create(model=model, input=question, extra_body=chat)
        stream = await client.responses.create(model=model, input=question, stream=True, extra_body=chat)
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
    assert "".join(deltas) == whole.output_text != ""
    await four_pairs.settle()
