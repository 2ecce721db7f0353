"""What a user may send, by HTTP and by gRPC, good and bad, to a cluster of real processes."""

import asyncio
from typing import Any

import grpc
import openai
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from tests.integration.cluster import Json
from tests.integration.four_pairs.conftest import NUM_TOKENS, FourPairs
from tests.integration.reference import CHATS, TEXTS, Reference, chat_ids, text_of, tokenizer
from wire.gen import generate_pb2, generate_pb2_grpc

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(600)]

GOOD: Json = {"prompt": TEXTS[0], "max_tokens": 1, "temperature": 0}
USER = {"role": "user", "content": "hi"}
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


@pytest.mark.parametrize(
    ("path", "body", "status", "param"),
    [
        (COMPLETIONS, "{", 400, None),
        (COMPLETIONS, "", 400, None),
        (COMPLETIONS, "[]", 400, None),
        (COMPLETIONS, {**GOOD, "model": "gpt-4"}, 404, "model"),
        (COMPLETIONS, {"max_tokens": 1}, 400, "prompt"),
        (COMPLETIONS, {**GOOD, "prompt": ""}, 400, "prompt"),
        (COMPLETIONS, {**GOOD, "prompt": []}, 400, "prompt"),
        (COMPLETIONS, {**GOOD, "prompt": [49152]}, 400, "prompt"),
        (COMPLETIONS, {**GOOD, "prompt": [5] * 8192}, 400, "prompt"),
        (COMPLETIONS, {**GOOD, "max_tokens": 9000}, 400, "max_tokens"),
        (COMPLETIONS, {**GOOD, "max_tokens": "abc"}, 400, "max_tokens"),
        (COMPLETIONS, {**GOOD, "max_tokens": -1}, 400, "max_tokens"),
        (COMPLETIONS, {**GOOD, "temperature": 3}, 400, "temperature"),
        (COMPLETIONS, {**GOOD, "temperature": "hot"}, 400, "temperature"),
        (COMPLETIONS, {**GOOD, "top_p": 0}, 400, "top_p"),
        (COMPLETIONS, {**GOOD, "top_k": -2}, 400, "top_k"),
        (COMPLETIONS, {**GOOD, "min_p": 2}, 400, "min_p"),
        (COMPLETIONS, {**GOOD, "repetition_penalty": 0}, 400, "repetition_penalty"),
        (COMPLETIONS, {**GOOD, "presence_penalty": 9}, 400, "presence_penalty"),
        (COMPLETIONS, {**GOOD, "n": 0}, 400, "n"),
        (COMPLETIONS, {**GOOD, "seed": 0.5}, 400, "seed"),
        (COMPLETIONS, {**GOOD, "stop": [""]}, 400, "stop"),
        (COMPLETIONS, {**GOOD, "stop_token_ids": [-1]}, 400, "stop_token_ids"),
        (COMPLETIONS, {**GOOD, "logit_bias": {"99999999": -100}}, 400, "logit_bias"),
        (COMPLETIONS, {**GOOD, "logit_bias": {"abc": 1}}, 400, "logit_bias"),
        (COMPLETIONS, {**GOOD, "min_tokens": 5}, 400, "min_tokens"),
        (COMPLETIONS, {**GOOD, "logprobs": 99}, 400, "logprobs"),
        (CHAT, {"messages": []}, 400, "messages"),
        (CHAT, {}, 400, "messages"),
        (CHAT, {"messages": "x"}, 400, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": None}]}, 400, "messages[0].content"),
        (CHAT, {"messages": [{"role": "king", "content": "x"}]}, 400, "messages[0].role"),
        (CHAT, {"messages": [USER], "model": "gpt-4"}, 404, "model"),
        (CHAT, {"messages": [{"role": "user", "content": "word " * 9000}]}, 400, "messages"),
    ],
)
async def test_a_bad_request_is_refused_by_field_and_the_next_good_one_works(
    four_pairs: FourPairs, path: str, body: Json | str, status: int, param: str | None
) -> None:
    http = four_pairs.router.http
    prefill = four_pairs.cluster.nodes["prefill"]
    before = (await prefill.status()).counters["rejected"]
    raw = {"content": body, "headers": {"content-type": "application/json"}}
    refused = await http.post(path, **(raw if isinstance(body, str) else {"json": body}))
    error = refused.json()["error"]
    assert (refused.status_code, error["param"], error["type"]) == (status, param, "invalid_request_error")
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"].startswith(param or "the body")
    assert (await four_pairs.router.complete(**GOOD))["usage"]["completion_tokens"] == 1
    assert (await prefill.status()).counters["rejected"] == before  # it heard of the good one only


async def test_the_official_client_streams_a_chat(four_pairs: FourPairs, reference: Reference) -> None:
    base_url = f"{four_pairs.router.http.base_url}/v1"
    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", max_retries=0) as client:
        (model,) = [model async for model in client.models.list()]
        text, reasons, usage = "", [], None
        stream = await client.chat.completions.create(
            model=model.id,
            messages=[{"role": "user", "content": CHATS[0]}],
            max_completion_tokens=NUM_TOKENS,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
            extra_body={"ignore_eos": True},
        )
        async for chunk in stream:
            usage = chunk.usage or usage
            for choice in chunk.choices:
                text += choice.delta.content or ""
                reasons.append(choice.finish_reason)
        with pytest.raises(openai.NotFoundError):
            await client.completions.create(model="other", prompt="hi")
    assert text == text_of(reference.ids(chat_ids(CHATS[0]), NUM_TOKENS))
    assert reasons == [None] * (len(reasons) - 1) + ["length"]
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (len(chat_ids(CHATS[0])), NUM_TOKENS)


def generate_requests() -> dict[str, tuple[generate_pb2.GenerateRequest, tuple[int, ...]]]:
    """The three kinds of input, and the prompt each stands for."""
    ids = tuple(tokenizer()(TEXTS[1]).input_ids)
    message = generate_pb2.ChatMessage(role="user", content=CHATS[1])
    request = generate_pb2.GenerateRequest
    return {
        "text": (request(text=TEXTS[1]), ids),
        "token_ids": (request(token_ids=generate_pb2.TokenIds(ids=ids)), ids),
        "chat": (request(chat=generate_pb2.ChatMessages(messages=[message])), chat_ids(CHATS[1])),
    }


async def generate(
    pairs: FourPairs, request: generate_pb2.GenerateRequest, **sampling: Any
) -> list[generate_pb2.GenerateResponse]:
    fields: Json = {"max_tokens": NUM_TOKENS, "temperature": 0, "ignore_eos": True, **sampling}
    request.sampling.CopyFrom(generate_pb2.Sampling(**fields))
    async with grpc.aio.insecure_channel(pairs.router.grpc_address) as channel:
        return [message async for message in generate_pb2_grpc.GenerationStub(channel).Generate(request)]


@pytest.mark.parametrize("kind", ["text", "token_ids", "chat"])
async def test_grpc_generates_what_http_does(four_pairs: FourPairs, reference: Reference, kind: str) -> None:
    request, prompt = generate_requests()[kind]
    answers = await asyncio.gather(*(generate(four_pairs, request, logprobs=2) for _ in range(4)))
    expected = reference.ids(prompt, NUM_TOKENS)
    for messages in answers:
        assert [token for message in messages for token in message.token_ids] == expected
        assert "".join(message.text for message in messages) == text_of(expected)
        logprobs = [entry for message in messages for entry in message.logprobs]
        assert [entry.top_ids[0] for entry in logprobs] == expected
        assert all(entry.top_logprobs[0] == entry.logprob <= 0 for entry in logprobs)
        last = messages[-1]
        assert [message.finish_reason for message in messages] == [""] * (len(messages) - 1) + ["length"]
        assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (len(prompt), NUM_TOKENS)
    await four_pairs.settle()


async def test_grpc_stops_at_strings_and_tokens(four_pairs: FourPairs, reference: Reference) -> None:
    request, prompt = generate_requests()["text"]
    ids = reference.ids(prompt, NUM_TOKENS)
    at = next(at for at in range(1, NUM_TOKENS) if text_of(ids[at : at + 1]) not in text_of(ids[:at]))
    by_text = await generate(four_pairs, request, stop=[text_of(ids[at : at + 1])])
    assert "".join(message.text for message in by_text) == text_of(ids[:at])
    by_token = await generate(four_pairs, request, stop_token_ids=[ids[at]])
    for messages in (by_text, by_token):
        assert [token for message in messages for token in message.token_ids] == ids[: at + 1]
        assert (messages[-1].finish_reason, messages[-1].usage.completion_tokens) == ("stop", at + 1)
    await four_pairs.settle()


@pytest.mark.parametrize(
    ("request_fields", "sampling", "code", "param"),
    [
        ({}, {}, grpc.StatusCode.INVALID_ARGUMENT, "input"),
        ({"text": "hi", "model": "gpt-4"}, {}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"text": "hi"}, {"temperature": -1}, grpc.StatusCode.INVALID_ARGUMENT, "temperature"),
        ({"text": "hi"}, {"max_tokens": 0}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"text": ""}, {}, grpc.StatusCode.INVALID_ARGUMENT, "text"),
    ],
)
async def test_grpc_refuses_by_field(
    four_pairs: FourPairs, request_fields: Json, sampling: Json, code: grpc.StatusCode, param: str
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await generate(four_pairs, generate_pb2.GenerateRequest(**request_fields), **sampling)
    assert caught.value.code() is code
    metadata: Any = caught.value.trailing_metadata()
    assert dict(metadata)["paceline-param"] == param
    assert len(await generate(four_pairs, generate_pb2.GenerateRequest(text="hi"), max_tokens=1)) == 2


async def test_health_and_reflection_answer_on_every_process(four_pairs: FourPairs) -> None:
    addresses = {node.address: "paceline.node.v1.Node" for node in four_pairs.cluster.nodes.values()}
    addresses[four_pairs.router.grpc_address] = "paceline.v1.Generation"
    for address, service in addresses.items():
        async with grpc.aio.insecure_channel(address) as channel:
            health = await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=service)
            )
            assert health.status == health_pb2.HealthCheckResponse.SERVING
            asked = reflection_pb2.ServerReflectionRequest(list_services="")
            stub = reflection_pb2_grpc.ServerReflectionStub(channel)
            (answer,) = [reply async for reply in stub.ServerReflectionInfo(iter([asked]))]
            assert service in {found.name for found in answer.list_services_response.service}
