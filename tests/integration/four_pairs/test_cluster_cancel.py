"""Whoever leaves, and in whatever phase, takes the work on both nodes along and disturbs nobody."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import grpc
import pytest

from tests.integration.cluster import Json, eventually
from tests.integration.four_pairs.conftest import NUM_LONG_TOKENS, FourPairs
from tests.integration.reference import COUNTING, Reference, long_prompt, tokenizer
from wire.gen import generate_pb2, generate_pb2_grpc

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(600)]

PHASE_S = 60.0
ENDLESS: Json = {"max_tokens": 2000, "temperature": 0, "ignore_eos": True}
LONG = 3000


async def total(pairs: FourPairs, role: str, fact: str) -> float:
    """A counter, or the number of running or waiting requests, over all nodes of a role."""
    nodes = [node for node in pairs.cluster.nodes.values() if node.role == role]
    found = [await node.status() for node in nodes]
    loads = {"running": [s.running for s in found], "waiting": [s.waiting for s in found]}
    return sum(loads.get(fact, [s.counters[fact] for s in found]))


async def grown(pairs: FourPairs, role: str, fact: str, by: float) -> Callable[[], Awaitable[str]]:
    """A wait for a counter to have grown from what it is now."""
    start = await total(pairs, role, fact)

    async def missing() -> str:
        now = await total(pairs, role, fact) - start
        return "" if now >= by else f"{role} {fact}: {now} of {by}"

    return missing


async def reads(pairs: FourPairs, body: Json, *, is_stream: bool) -> None:
    """A client that would read to the end."""
    if not is_stream:
        await pairs.router.complete(**body)
    else:
        async for _ in pairs.router.chunks(**body):
            pass


@asynccontextmanager
async def client(pairs: FourPairs, *, is_stream: bool, **body: object) -> AsyncIterator[None]:
    """A client that drops its connection when the context is left."""
    reading = asyncio.ensure_future(reads(pairs, {**ENDLESS, **body}, is_stream=is_stream))
    try:
        yield
        assert not reading.done(), reading
    finally:
        reading.cancel()
        await asyncio.wait([reading])


@pytest.mark.parametrize("is_stream", [True, False])
@pytest.mark.parametrize(
    ("role", "fact", "by"),
    [
        pytest.param("prefill", "running", 1, id="prefill"),
        pytest.param("prefill", "prompt_tokens", 640, id="transfer"),
    ],
)
async def test_leaving_before_the_first_token_frees_both_nodes(
    four_pairs: FourPairs, role: str, fact: str, by: int, *, is_stream: bool
) -> None:
    arrived = await grown(four_pairs, role, fact, by)
    before = await total(four_pairs, "prefill", "prompt_tokens")
    prompt = long_prompt(LONG, seed=1000 + 2 * by + is_stream)
    async with client(four_pairs, is_stream=is_stream, prompt=prompt):
        await eventually(arrived, within_s=PHASE_S)
    await four_pairs.settle()
    assert await total(four_pairs, "prefill", "prompt_tokens") - before < LONG


@pytest.mark.parametrize("is_stream", [True, False])
async def test_leaving_while_it_decodes_frees_both_nodes(four_pairs: FourPairs, *, is_stream: bool) -> None:
    arrived = await grown(four_pairs, "decode", "output_tokens", 3)
    async with client(four_pairs, is_stream=is_stream, prompt=COUNTING):
        await eventually(arrived, within_s=PHASE_S)
    await four_pairs.settle()


async def test_leaving_the_queue_frees_both_nodes(four_pairs: FourPairs) -> None:
    queued = await grown(four_pairs, "prefill", "waiting", 2)
    async with (
        client(four_pairs, is_stream=True, n=4, prompt=long_prompt(LONG, seed=3)),
        client(four_pairs, is_stream=True, prompt=long_prompt(LONG, seed=4)),
        client(four_pairs, is_stream=False, prompt=long_prompt(LONG, seed=5)),
    ):
        await eventually(queued, within_s=PHASE_S)
    await four_pairs.settle()


async def test_those_who_stay_get_their_text(four_pairs: FourPairs, reference: Reference) -> None:
    """Four who stay, one on each pair, while clients come and go in every phase."""
    staying = asyncio.ensure_future(
        four_pairs.router.complete(
            prompt=COUNTING,
            n=4,
            return_token_ids=True,
            **{**ENDLESS, "max_tokens": NUM_LONG_TOKENS},
        )
    )
    for role, fact, by in (
        ("prefill", "prompt_tokens", 64),
        ("prefill", "prompt_tokens", 640),
        ("decode", "output_tokens", 20),
    ):
        arrived = await grown(four_pairs, role, fact, by)
        prompt = long_prompt(1000, seed=by)  # alone reaches any of these counts: copies may be cached
        async with client(four_pairs, is_stream=True, n=4, prompt=prompt):
            await eventually(arrived, within_s=PHASE_S)
    answer = await staying
    expected = reference.ids(tokenizer()(COUNTING).input_ids, NUM_LONG_TOKENS)
    assert [choice["token_ids"] for choice in answer["choices"]] == [expected] * 4
    await four_pairs.settle()


Generation = grpc.aio.UnaryStreamCall[generate_pb2.GenerateRequest, generate_pb2.GenerateResponse]


async def to_the_end(call: "Generation") -> None:
    """Read what is left: a call does not end before all of its messages have been taken."""
    while await call.read() is not grpc.aio.EOF:  # type: ignore[attr-defined]  # stubs miss it
        pass


async def test_abort_and_cancelling_a_call_free_both_nodes(four_pairs: FourPairs) -> None:
    request = generate_pb2.GenerateRequest(
        request_id="mine",
        text=COUNTING,
        sampling=generate_pb2.Sampling(max_tokens=2000, temperature=0, ignore_eos=True),
    )
    async with grpc.aio.insecure_channel(four_pairs.router.grpc_address) as channel:
        stub = generate_pb2_grpc.GenerationStub(channel)
        aborted, cancelled = stub.Generate(request), stub.Generate(request)
        await aborted.read()
        await cancelled.read()
        cancelled.cancel()
        assert (await stub.Abort(generate_pb2.AbortRequest(request_id="mine"))).found
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await to_the_end(aborted)
        assert ended.value.code() is grpc.StatusCode.CANCELLED
        await four_pairs.settle()
        assert not (await stub.Abort(generate_pb2.AbortRequest(request_id="mine"))).found
