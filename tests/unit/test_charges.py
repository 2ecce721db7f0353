"""What a request costs: its key's tokens per minute, and its tenant's place in the queue."""

import asyncio
from contextlib import ExitStack, suppress
from typing import Any

import httpx
import pytest

from router.api_keys import ApiKeys, Bill, KeyEntry, User, digest
from router.errors import NodeFailed, NodesBusy, RateLimited
from tests.fakes_dispatch import FakeDispatcher
from tests.fakes_nodes import Cluster, a_request, cluster, reading, settle, virtual
from tests.unit.test_admission import ONE_AT_A_TIME
from tests.unit.test_http import client
from tests.unit.test_router_grpc import channel, stub
from wire.gen import generate_pb2 as pb
from wire.work import Finished, PromptInfo, Tokens

HEADERS = {"authorization": "Bearer k"}
PROMPTS = [[5, 6, 7], [8, 9]]


def a_key() -> ApiKeys:
    return ApiKeys([KeyEntry(name="k", sha256=digest("k"), tokens_per_minute=1)], clock=lambda: 0.0)


def cost(keys: ApiKeys) -> int:
    """Tokens that were charged so far; each is a minute to wait, as the key has one at the start."""
    try:
        keys.user("Bearer k").start()
    except RateLimited as error:
        return round((error.retry_after_s or 0.0) / 60)
    return 0


def answering(num_tokens: int = 4, **options: Any) -> FakeDispatcher:
    return FakeDispatcher(script=[5] * (num_tokens - 1) + [2], **options)


BODIES = [
    ("/v1/completions", {"prompt": PROMPTS[0]}, 3 + 4),
    ("/v1/completions", {"prompt": PROMPTS[0], "n": 3}, 3 + 3 * 4),
    ("/v1/completions", {"prompt": PROMPTS, "n": 3}, 5 + 6 * 4),
    ("/v1/completions", {"prompt": PROMPTS[0], "max_tokens": 0, "echo": True}, 3),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "n": 2}, 31 + 2 * 4),
    ("/v1/responses", {"input": "hi"}, 31 + 4),
]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(("path", "body", "total"), BODIES)
async def test_a_key_is_charged_what_usage_says(
    path: str, body: dict[str, Any], total: int, is_stream: bool
) -> None:
    """Every prompt once, whatever n."""
    keys = a_key()
    async with client(answering(), keys=keys) as http:
        response = await http.post(path, json=body | {"stream": is_stream}, headers=HEADERS)
    assert response.status_code == 200, response.text
    assert is_stream or response.json()["usage"]["total_tokens"] == total
    assert cost(keys) == total


async def test_grpc_charges_the_same() -> None:
    keys = a_key()
    async with channel(answering(), keys) as opened:
        request = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), n=3)
        _ = [one async for one in stub(opened).Generate(request, metadata=tuple(HEADERS.items()))]
    assert cost(keys) == 3 + 3 * 4


@pytest.mark.parametrize(("stall_after", "total"), [(0, 5), (2, 5 + 4 * 2)])
async def test_who_leaves_pays_for_the_prompts_and_what_came(stall_after: int, total: int) -> None:
    keys, dispatcher = a_key(), answering(stall_after=stall_after)
    async with client(dispatcher, keys=keys) as http:
        body = {"prompt": PROMPTS, "n": 2}
        asking = asyncio.ensure_future(http.post("/v1/completions", json=body, headers=HEADERS))
        await dispatcher.until_stalled(4)
        asking.cancel()
        with suppress(asyncio.CancelledError):
            await asking
        await dispatcher.until_idle()
    assert cost(keys) == total


async def test_prompts_are_charged_when_they_are_sent_on_so_that_many_at_once_are_held_to_the_limit() -> None:
    keys, dispatcher = a_key(), answering(stall_after=0)
    async with client(dispatcher, keys=keys) as http:
        body = {"prompt": PROMPTS[0]}
        first = asyncio.ensure_future(http.post("/v1/completions", json=body, headers=HEADERS))
        await dispatcher.until_stalled(1)
        second = await http.post("/v1/completions", json=body, headers=HEADERS)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
    assert (second.status_code, second.headers["retry-after"]) == (429, str(3 * 60))


@pytest.mark.parametrize(
    ("error", "fail_after", "total"),
    [(NodesBusy("full", retry_after_s=1), 0, 0), (NodeFailed("x"), 0, 0), (NodeFailed("x"), 2, 5 + 4 * 2)],
)
@pytest.mark.parametrize("is_stream", [False, True])
async def test_a_request_that_fails_before_its_first_token_costs_nothing(
    error: Any, fail_after: int, total: int, is_stream: bool
) -> None:
    keys = a_key()
    async with client(answering(error=error, fail_after=fail_after), keys=keys) as http:
        body = {"prompt": PROMPTS, "n": 2, "stream": is_stream}
        await http.post("/v1/completions", json=body, headers=HEADERS)
    assert cost(keys) == total


async def test_what_is_refused_before_it_is_sent_on_costs_nothing() -> None:
    keys = a_key()
    async with client(answering(), keys=keys) as http:
        refused: httpx.Response = await http.post("/v1/completions", json={"prompt": []}, headers=HEADERS)
    assert (refused.status_code, cost(keys)) == (400, 0)


@pytest.mark.parametrize(
    ("ending", "num_output", "total"),
    [(None, 4, 14), (None, None, 10), (NodeFailed("x"), None, 0), (NodeFailed("x"), 1, 11)],
)
def test_a_bill_gives_prompts_back_where_nothing_came_of_them(
    ending: Exception | None, num_output: int | None, total: int
) -> None:
    keys = a_key()
    user: User = keys.user("Bearer k")
    bill = Bill(user, 10)
    with ExitStack() as stack:
        if ending is not None:
            stack.enter_context(suppress(NodeFailed))
        stack.enter_context(bill)
        assert cost(keys) == 10
        if num_output is not None:
            bill.spend(num_output)
        if ending is not None:
            raise ending
    assert cost(keys) == total


# Where requests wait: what the nodes had to compute.

LONG = tuple(range(100))
MIDDLE = tuple(range(200, 250))


async def served(made: Cluster, number: int, *, cached_tokens: int) -> None:
    """P does all of request number `number`, counted by arrival, which has one token."""
    tid = made["p1"].submits[number].tid
    made["p1"].emit(
        PromptInfo(tid=tid, cached_tokens=cached_tokens),
        Tokens(tid=tid, first_index=0, ids=(1,)),
        Finished(tid=tid, reason="length"),
    )
    await settle()


def asks(tenant: str, prompt: tuple[int, ...]) -> Any:
    return a_request(*prompt, max_tokens=1, tenant=tenant)


@virtual
@pytest.mark.parametrize(("cached_tokens", "tenants"), [(96, "aba"), (0, "abb")])
async def test_a_tenant_is_charged_what_the_prefix_cache_did_not_have(
    cached_tokens: int, tenants: str
) -> None:
    """So n choices pay for their prompt once, where only the first computes it."""
    async with (
        cluster(dispatch=ONE_AT_A_TIME) as made,
        reading(made, asks("a", LONG)),
        reading(made, asks("b", MIDDLE)),
        reading(made, asks("a", LONG)),
        reading(made, asks("b", MIDDLE)),
    ):
        await served(made, 0, cached_tokens=cached_tokens)
        await served(made, 1, cached_tokens=0)
        started = ["a" if submit.prompt_ids == LONG else "b" for submit in made["p1"].submits]
        assert "".join(started) == tenants


@virtual
@pytest.mark.parametrize(("told", "tenants"), [(None, "abb"), (96, "aba")])
async def test_a_tenant_that_leaves_before_the_first_token_is_charged_its_prompt(
    told: int | None, tenants: str
) -> None:
    async with cluster(dispatch=ONE_AT_A_TIME) as made:
        async with reading(made, asks("a", LONG)) as first:
            async with (
                reading(made, asks("b", MIDDLE)),
                reading(made, asks("a", LONG)),
                reading(made, asks("b", MIDDLE)),
            ):
                if told is not None:
                    made["p1"].emit(PromptInfo(tid=made["p1"].submits[0].tid, cached_tokens=told))
                    await settle()
                assert first.task is not None
                first.task.cancel()
                await settle()
                await served(made, 1, cached_tokens=0)
                started = ["a" if submit.prompt_ids == LONG else "b" for submit in made["p1"].submits]
                assert "".join(started) == tenants
