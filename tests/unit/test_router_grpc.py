import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from router.api_keys import ApiKeys, KeyEntry, digest
from router.errors import NodesBusy
from router.grpc_server import SERVICE, RouterGrpcServer
from router.grpc_service import GenerationService
from router.text.parsers.catalogue import PLAIN, AnswerFormat
from tests.fakes_dispatch import (
    MAX_MODEL_LEN,
    FakeDispatcher,
    chat_format,
    front_door,
    one_key,
    open_to_all,
)
from tests.smollm2_text import smollm2_text
from wire.gen import generate_pb2 as pb
from wire.gen import generate_pb2_grpc

TEXT = "Hello world, a flag: 🇰🇷. END of it"
EOS = 2


def ids_of(text: str) -> list[int]:
    return list(smollm2_text().tokenizer.encode(text, add_special_tokens=False))


def answering(text: str = TEXT, **options: Any) -> FakeDispatcher:
    return FakeDispatcher(script=(*ids_of(text), EOS), **options)


@asynccontextmanager
async def channel(
    dispatcher: FakeDispatcher,
    keys: ApiKeys | None = None,
    *,
    tenant_header: str = "",
    answer_format: AnswerFormat = PLAIN,
    channel_options: tuple[tuple[str, int], ...] = (),
    **options: Any,
) -> AsyncGenerator[grpc.aio.Channel]:
    labels = iter(range(100))
    service = GenerationService(
        front_door(dispatcher, smollm2_text()),
        new_id=lambda: f"id{next(labels)}",
        keys=keys or open_to_all(),
        chat_format=chat_format(smollm2_text(), answer_format),
        tenant_header=tenant_header,
        **options,
    )
    server = RouterGrpcServer(service, "127.0.0.1:0")
    await server.start()
    try:
        address = f"127.0.0.1:{server.port}"
        async with grpc.aio.insecure_channel(address, options=channel_options) as opened:
            yield opened
    finally:
        await server.stop(0)


def stub(opened: grpc.aio.Channel) -> "generate_pb2_grpc.GenerationAsyncStub":
    return generate_pb2_grpc.GenerationStub(opened)


def trailing(error: grpc.aio.AioRpcError) -> dict[str, str]:
    metadata: Any = error.trailing_metadata()
    return dict(metadata or ())


async def ask(dispatcher: FakeDispatcher, request: pb.GenerateRequest) -> list[pb.GenerateResponse]:
    async with channel(dispatcher) as opened:
        return [response async for response in stub(opened).Generate(request)]


@pytest.mark.parametrize(
    ("grammar", "field", "text"),
    [
        ({"regex": "a+"}, "grammar.regex", '{"kind": "regex", "value": "a+"}'),
        ({"ebnf": "root ::= x"}, "grammar.ebnf", '{"kind": "ebnf", "value": "root ::= x"}'),
        ({"json_object": True}, "grammar.json_object", '{"kind": "json_object"}'),
        ({"choice": {"texts": ["a"]}}, "grammar.choice", '{"kind": "choice", "value": ["a"]}'),
        (
            {"json_schema": {"schema": "{}", "strict": True}},
            "grammar.json_schema",
            '{"kind": "json_schema", "value": "{}", "strict": true}',
        ),
    ],
)
async def test_a_grammar_goes_to_the_nodes_and_ignore_eos_cannot_outlive_it(
    grammar: dict[str, Any], field: str, text: str
) -> None:
    dispatcher = answering()
    request = pb.GenerateRequest(
        text="hi", grammar=pb.Grammar(**grammar), sampling=pb.Sampling(ignore_eos=True)
    )
    await ask(dispatcher, request)
    (sent,) = dispatcher.requests
    assert sent.constraint is not None
    assert (sent.constraint.field, sent.constraint.spec.to_text()) == (field, text)
    assert EOS in sent.sampling.stop_token_ids


@pytest.mark.parametrize(
    ("grammar", "param"),
    [
        ({"regex": ""}, "grammar.regex"),
        ({"json_object": False}, "grammar.json_object"),
        ({"json_schema": {"schema": "[]"}}, "grammar.json_schema"),
    ],
)
async def test_a_grammar_that_cannot_be_is_an_invalid_argument(grammar: dict[str, Any], param: str) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(answering(), pb.GenerateRequest(text="hi", grammar=pb.Grammar(**grammar)))
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert trailing(caught.value)["paceline-param"] == param


async def test_a_caller_that_does_not_read_gives_its_place_away() -> None:
    """The first messages fill what lies between it and the router; the rest would wait for ever."""
    dispatcher = FakeDispatcher(script=[ids_of(" word")[0]] * 450, stall_after=449)
    sampling = pb.Sampling(max_tokens=450, logprobs=20)
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5]), n=8, sampling=sampling)
    narrow = (("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 65536))
    async with channel(dispatcher, max_unread_s=0.2, channel_options=narrow) as opened:
        responses = stub(opened).Generate(asked)
        await asyncio.wait_for(dispatcher.until_idle(), timeout=60)
        assert dispatcher.num_closed_early == 8
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in responses]
    assert caught.value.code() is grpc.StatusCode.ABORTED
    assert trailing(caught.value)["paceline-code"] == "consumer_too_slow"


async def test_text_comes_in_deltas_and_the_last_message_ends_it() -> None:
    request = pb.GenerateRequest(request_id="mine", model="smol", text="hi")
    *deltas, last = await ask(answering(rounds=(1, 3)), request)
    assert "".join(delta.text for delta in deltas) == TEXT
    assert [i for delta in deltas for i in delta.token_ids] == [*ids_of(TEXT), EOS]
    assert [delta.finish_reason for delta in deltas] == [""] * len(deltas)
    assert {response.request_id for response in (*deltas, last)} == {"mine"}
    assert (last.finish_reason, last.text, list(last.token_ids)) == ("stop", "", [])
    assert last.usage == pb.Usage(prompt_tokens=1, completion_tokens=len(ids_of(TEXT)) + 1, cached_tokens=3)
    assert deltas[1].accepted_draft_tokens == 2
    steps = [delta for delta in deltas if delta.accepted_draft_tokens]  # 2 of 4 drafts stood in each
    assert last.speculation == pb.Speculation(
        num_steps=len(steps), num_drafted=4 * len(steps), num_accepted=2 * len(steps)
    )


@pytest.mark.parametrize("rounds", [(1,), (8,)])
async def test_stop_strings_cut_text_and_tokens_as_over_http(rounds: tuple[int, ...]) -> None:
    dispatcher = answering(rounds=rounds)
    sampling = pb.Sampling(stop=["END", "EN"], logprobs=1)
    *deltas, last = await ask(dispatcher, pb.GenerateRequest(text="hi", sampling=sampling))
    num_tokens = len(ids_of(TEXT)) - len(ids_of(" of it"))
    assert "".join(delta.text for delta in deltas) == TEXT[: TEXT.index("END")]
    assert sum(len(delta.token_ids) for delta in deltas) == num_tokens
    assert sum(len(delta.logprobs) for delta in deltas) == num_tokens
    assert (last.finish_reason, last.usage.completion_tokens) == ("stop", num_tokens)
    assert dispatcher.num_closed_early == 1


async def test_every_sampling_field_reaches_the_nodes_as_it_was_written() -> None:
    dispatcher = answering()
    sampling = pb.Sampling(
        max_tokens=9,
        temperature=0.7,
        top_p=0.9,
        top_k=40,
        min_p=0.05,
        presence_penalty=0.1,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        seed=2**64 - 1,
        min_tokens=1,
        logprobs=0,
        stop_token_ids=[7],
        ignore_eos=True,
        logit_bias={5: -1.3},
        allowed_token_ids=[7, 9, 7],
        bad_words=["Hello"],
    )
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[4, 5]), sampling=sampling, priority=2, cache_salt="s"
    )
    await ask(dispatcher, request)
    (sent,) = dispatcher.requests
    got = sent.sampling
    assert sent.prompt_ids == (4, 5)
    assert (sent.priority, sent.cache_salt, sent.label) == (2, "s", "id0")
    assert (got.max_tokens, got.temperature, got.top_p, got.top_k, got.min_p) == (9, 0.7, 0.9, 40, 0.05)
    assert (got.presence_penalty, got.frequency_penalty, got.repetition_penalty) == (0.1, -0.3, 1.1)
    assert (got.seed, got.min_tokens, got.logprobs, got.stop_token_ids) == (2**64 - 1, 1, 0, (7,))
    assert (got.logit_bias, got.allowed_token_ids) == (((5, -1.3),), (7, 9))
    assert got.banned_sequences == (tuple(ids_of("Hello")), tuple(ids_of(" Hello")))


async def test_defaults_are_those_of_http() -> None:
    dispatcher = answering()
    await ask(dispatcher, pb.GenerateRequest(token_ids=pb.TokenIds(ids=[4])))
    sampling = dispatcher.requests[0].sampling
    assert (sampling.temperature, sampling.top_p, sampling.logprobs) == (1.0, 1.0, None)
    assert (sampling.max_tokens, sampling.stop_token_ids, sampling.seed) == (MAX_MODEL_LEN - 1, (EOS,), 1000)


async def test_chat_goes_through_the_template() -> None:
    dispatcher = answering()
    chat = pb.ChatMessages(messages=[pb.ChatMessage(role="user", content="hi")])
    await ask(dispatcher, pb.GenerateRequest(chat=chat))
    expected = await smollm2_text().encode_chat([{"role": "user", "content": "hi"}])
    assert dispatcher.requests[0].prompt_ids == expected


@pytest.mark.parametrize(
    ("request_", "status", "param"),
    [
        (pb.GenerateRequest(), "INVALID_ARGUMENT", "input"),
        (pb.GenerateRequest(text="x", model="other"), "NOT_FOUND", "model"),
        (
            pb.GenerateRequest(text="x", sampling=pb.Sampling(temperature=3)),
            "INVALID_ARGUMENT",
            "temperature",
        ),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(max_tokens=0)), "INVALID_ARGUMENT", "max_tokens"),
        (pb.GenerateRequest(text="x", sampling=pb.Sampling(stop=[""])), "INVALID_ARGUMENT", "stop"),
        (pb.GenerateRequest(token_ids=pb.TokenIds(ids=[49152])), "INVALID_ARGUMENT", "token_ids"),
        (pb.GenerateRequest(chat=pb.ChatMessages()), "INVALID_ARGUMENT", "messages"),
    ],
)
async def test_bad_requests_name_the_field(request_: pb.GenerateRequest, status: str, param: str) -> None:
    dispatcher = answering()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(dispatcher, request_)
    assert caught.value.code() is grpc.StatusCode[status]
    assert trailing(caught.value)["paceline-param"] == param
    assert dispatcher.requests == []


async def test_a_full_cluster_is_resource_exhausted_with_a_time_to_wait() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(answering(error=NodesBusy("full", retry_after_s=2)), pb.GenerateRequest(text="x"))
    assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    metadata = trailing(caught.value)
    assert (metadata["paceline-code"], metadata["retry-after"]) == ("nodes_busy", "2")


def details_of(error: grpc.aio.AioRpcError) -> dict[str, Message]:
    """As the official library finds them, by type."""
    failed: Any = error  # has what the function needs of a call
    status = rpc_status.from_call(failed)
    assert status is not None
    found: dict[str, Message] = {}
    for packed in status.details:
        kind = packed.TypeName().removeprefix("google.rpc.")
        found[kind] = getattr(error_details_pb2, kind)()
        assert packed.Unpack(found[kind])
    return found


async def test_the_details_of_a_failed_call_are_those_that_libraries_read() -> None:
    busy = answering(error=NodesBusy("full", retry_after_s=1.2))
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(busy, pb.GenerateRequest(text="x"))
    delay = Duration(seconds=2)
    assert details_of(caught.value) == {
        "ErrorInfo": error_details_pb2.ErrorInfo(reason="NODES_BUSY", domain="paceline"),
        "RetryInfo": error_details_pb2.RetryInfo(retry_delay=delay),
    }
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(busy, pb.GenerateRequest(text="x", n=0))
    violation = {"field": "n", "description": "n must be in [1, 128], got 0"}
    assert details_of(caught.value) == {
        "ErrorInfo": error_details_pb2.ErrorInfo(reason="INVALID_VALUE", domain="paceline"),
        "BadRequest": error_details_pb2.BadRequest(field_violations=[violation]),
    }


@pytest.mark.parametrize("char", ["x", "é", "\n", "🇰"])
async def test_an_error_that_repeats_much_of_the_request_still_arrives(char: str) -> None:
    """A client takes 8 KiB of trailers in all, and sees another status where there are more."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(answering(), pb.GenerateRequest(text="x", model=char * 20_000))
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND
    assert details_of(caught.value).keys() == {"ErrorInfo", "BadRequest"}
    assert (caught.value.details() or "").startswith("model must be 'smol'")


async def test_a_tenant_is_named_by_the_configured_metadata() -> None:
    dispatcher = answering()
    async with channel(dispatcher, tenant_header="X-Team") as opened:
        call = stub(opened).Generate(pb.GenerateRequest(text="x"), metadata=(("x-team", "blue"),))
        _ = [response async for response in call]
    assert [request.tenant for request in dispatcher.requests] == ["blue"]


@pytest.mark.parametrize("stall_after", [0, 2])
async def test_abort_stops_every_request_with_the_label_and_no_other(stall_after: int) -> None:
    dispatcher = answering(stall_after=stall_after)
    async with channel(dispatcher) as opened, asyncio.TaskGroup() as group:

        async def outcome(label: str) -> grpc.StatusCode:
            try:
                async for _ in stub(opened).Generate(pb.GenerateRequest(request_id=label, text="x")):
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
            return grpc.StatusCode.OK

        runs = [group.create_task(outcome(label)) for label in ("a", "a", "b")]
        await dispatcher.until_stalled(3)
        assert (await stub(opened).Abort(pb.AbortRequest(request_id="nobody"))).found is False
        assert (await stub(opened).Abort(pb.AbortRequest(request_id="a"))).found is True
        assert [await run for run in runs[:2]] == [grpc.StatusCode.CANCELLED] * 2
        assert dispatcher.num_open == 1
        await stub(opened).Abort(pb.AbortRequest(request_id="b"))
    assert dispatcher.num_open == 0


async def test_a_cancelled_call_closes_its_generation() -> None:
    dispatcher = answering(stall_after=1)
    async with channel(dispatcher) as opened:
        call = stub(opened).Generate(pb.GenerateRequest(text="x"))
        await dispatcher.until_stalled(1)
        call.cancel()
        await asyncio.wait_for(dispatcher.until_idle(), timeout=60)
    assert dispatcher.num_closed_early == 1


async def test_nobody_aborts_another_user_s_request() -> None:
    keys = ApiKeys([KeyEntry(name=name, sha256=digest(name)) for name in "ab"], clock=lambda: 0.0)
    dispatcher = answering(stall_after=1)
    async with channel(dispatcher, keys) as opened:
        ours, theirs = ((("authorization", f"Bearer {name}"),) for name in "ab")
        call = stub(opened).Generate(pb.GenerateRequest(text="x", request_id="r"), metadata=ours)
        await dispatcher.until_stalled(1)
        ask = pb.AbortRequest(request_id="r")
        assert (await stub(opened).Abort(ask, metadata=theirs)).found is False
        assert dispatcher.num_open == 1
        assert (await stub(opened).Abort(ask, metadata=ours)).found is True
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            _ = [response async for response in call]
    assert caught.value.code() is grpc.StatusCode.CANCELLED


async def test_an_api_key_is_asked_of_every_call() -> None:
    async with channel(answering(), one_key("secret")) as opened:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await stub(opened).Abort(pb.AbortRequest(request_id="x"))
        assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
        metadata = (("authorization", "Bearer secret"),)
        call = stub(opened).Generate(pb.GenerateRequest(text="x"), metadata=metadata)
        assert [response.finish_reason async for response in call][-1] == "stop"


async def test_a_call_bears_the_name_of_its_key_and_the_caller_s_trace() -> None:
    dispatcher = answering()
    async with channel(dispatcher, one_key("secret")) as opened:
        metadata = (("authorization", "Bearer secret"), ("traceparent", "00-ab-cd-01"))
        async for _ in stub(opened).Generate(pb.GenerateRequest(text="x"), metadata=metadata):
            pass
    [request] = dispatcher.requests
    assert (request.tenant, request.trace_context) == ("default", "00-ab-cd-01")


async def test_health_and_reflection_are_served() -> None:
    async with channel(answering()) as opened:
        health = health_pb2_grpc.HealthStub(opened)
        response = await health.Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert response.status == health_pb2.HealthCheckResponse.SERVING
        listing = reflection_pb2.ServerReflectionRequest(list_services="")
        call = reflection_pb2_grpc.ServerReflectionStub(opened).ServerReflectionInfo(iter([listing]))
        async for answer in call:
            assert SERVICE in {service.name for service in answer.list_services_response.service}
            break
