"""Whatever is sent by gRPC ends well or with a status that blames the caller, never with INTERNAL."""

import asyncio
from typing import Any

import grpc
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.test_router_grpc import answering, channel, stub, trailing
from wire.gen import generate_pb2 as pb

BLAME = {grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND}

uint32 = st.sampled_from([0, 1, 2, 3, 16, 128, 129, 49151, 49152, 2**31, 2**32 - 1])
floats = st.sampled_from([-1.0, 0.0, 0.5, 1.0, 2.0, 2.5, 100.5]) | st.floats(width=32)
texts = st.sampled_from(["", "a", "hi", "user", "smol", "END", "\x00", "🇰🇷", "word " * 600]) | st.text(
    max_size=4
)
flags = st.booleans()


def messages(kind: type[Any], **fields: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """Of a type, with some of these fields set."""
    return st.fixed_dictionaries({}, optional=fields).map(lambda given: kind(**given))


sampling = messages(
    pb.Sampling,
    max_tokens=uint32,
    temperature=floats,
    top_p=floats,
    top_k=uint32,
    min_p=floats,
    presence_penalty=floats,
    frequency_penalty=floats,
    repetition_penalty=floats,
    seed=st.integers(0, 2**64 - 1),
    min_tokens=uint32,
    logprobs=uint32,
    stop=st.lists(texts, max_size=18),
    stop_token_ids=st.lists(uint32, max_size=3),
    ignore_eos=flags,
    logit_bias=st.dictionaries(uint32, floats, max_size=3),
    prompt_logprobs=uint32,
    allowed_token_ids=st.lists(uint32, max_size=3),
    bad_words=st.lists(st.sampled_from(["a", " b", "", "no way"]), max_size=3),
    include_stop_str_in_output=flags,
    skip_special_tokens=flags,
)
chat = messages(
    pb.ChatMessages,
    messages=st.lists(messages(pb.ChatMessage, role=texts, content=texts), max_size=3),
    add_generation_prompt=flags,
    continue_final_message=flags,
)
grammar = messages(
    pb.Grammar,
    regex=texts,
    ebnf=texts,
    json_object=flags,
    choice=messages(pb.Choice, texts=st.lists(texts, max_size=3)),
)
prompts: st.SearchStrategy[dict[str, Any]] = (
    texts.map(lambda text: {"text": text})
    | chat.map(lambda value: {"chat": value})
    | st.lists(uint32, max_size=5).map(lambda ids: {"token_ids": pb.TokenIds(ids=ids)})
    | st.just({})
)
options = st.fixed_dictionaries(
    {},
    optional={
        "request_id": texts,
        "model": texts,
        "sampling": sampling,
        "cache_salt": texts,
        "priority": st.integers(-(2**31), 2**31 - 1),
        "n": st.integers(0, 5),
        "add_special_tokens": flags,
        "truncate_prompt_tokens": st.integers(-3, 9),
        "grammar": grammar,
    },
)
requests = st.tuples(prompts, options).map(lambda drawn: pb.GenerateRequest(**drawn[0], **drawn[1]))


async def ask_one(
    opened: grpc.aio.Channel, request: pb.GenerateRequest
) -> tuple[list[pb.GenerateResponse], grpc.aio.AioRpcError | None]:
    answers = []
    try:
        async for one in stub(opened).Generate(request, timeout=60):
            answers.append(one)  # noqa: PERF401  they count also when the call fails
    except grpc.aio.AioRpcError as error:
        return answers, error
    return answers, None


async def ask_all(asked: list[pb.GenerateRequest]) -> None:
    dispatcher = answering("a b c END d")
    async with channel(dispatcher) as opened:
        for request in asked:
            answers, error = await ask_one(opened, request)
            if error is not None:
                assert error.code() in BLAME, (request, error)
                assert trailing(error)["paceline-code"]
                assert error.details()
                continue
            n = request.n if request.HasField("n") else 1
            assert sorted(one.index for one in answers if one.finish_reason) == list(range(n))
            assert answers[-1].HasField("usage")
        assert dispatcher.num_open == 0


@settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck), print_blob=True)
@given(asked=st.lists(requests, min_size=4, max_size=12))
def test_every_message_is_answered_or_refused(asked: list[pb.GenerateRequest]) -> None:
    asyncio.run(ask_all(asked))
