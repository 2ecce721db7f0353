"""Work that stops when nobody waits for it: what comes out, and what is left running."""

import asyncio
import gc
import json
import weakref
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any, Never

import grpc
import pytest
from starlette.types import Message

from router.errors import NodeFailed, NodesBusy
from router.generation import Generation
from router.leaving import until_left
from tests.fakes_dispatch import FakeDispatcher, http_app
from tests.smollm2_text import smollm2_text
from tests.unit.test_http import scope, staying
from tests.unit.test_router_grpc import channel, stub
from wire.gen import generate_pb2 as pb


class Gone(Exception):
    pass


async def _never() -> Never:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def _leaves() -> Never:
    raise Gone


def _others() -> set["asyncio.Task[object]"]:
    return asyncio.all_tasks() - {asyncio.current_task()}


async def test_the_result_of_the_work_comes_out_and_nobody_watches_any_more() -> None:
    async def work() -> int:
        return 7

    assert await until_left(_never(), work()) == 7
    assert _others() == set()


async def test_what_the_work_raises_comes_out_as_it_is() -> None:
    async def work() -> None:
        raise KeyError("broken")

    with pytest.raises(KeyError, match="broken"):
        await until_left(_never(), work())
    assert _others() == set()


async def test_work_that_is_left_ends_before_the_exception_comes_out() -> None:
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("cleaned up")

    with pytest.raises(Gone):
        await until_left(_leaves(), work())
    assert ended == ["cleaned up"]
    assert _others() == set()


async def test_a_caller_that_is_cancelled_takes_the_work_with_it() -> None:
    started, ended = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        started.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    caller = asyncio.create_task(until_left(_never(), work()))
    await started.wait()
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended.is_set()
    assert _others() == set()


class Held:
    pass


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Only what nothing refers to goes away; what there is from now on is all that is young."""
    gc.collect(0)
    gc.disable()
    yield
    gc.enable()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("how", ["fails", "is left", "is cancelled"])
async def test_nothing_is_kept_of_work_that_fails_or_is_left(how: str) -> None:
    """Neither what it held, for the garbage collector comes late, nor a cancelling of the caller."""
    held = Held()
    kept = weakref.ref(held)
    current = asyncio.current_task()
    assert current is not None

    async def leaves() -> Never:
        await asyncio.sleep(0)
        if how == "is left":
            raise Gone
        await _never()

    async def work(_: Held) -> None:
        await asyncio.sleep(0)
        if how == "fails":
            raise Gone
        if how == "is cancelled":
            current.cancel()
        await _never()

    with pytest.raises((Gone, asyncio.CancelledError)) as caught:
        await until_left(leaves(), work(held))
    assert (caught.type is Gone) is (how != "is cancelled")
    del caught, held
    assert kept() is None
    assert current.cancelling() == (how == "is cancelled")
    current.uncancel()


def failing(case: str) -> FakeDispatcher:
    """Errors know the frames they were raised in, so each case has its own."""
    options: dict[str, dict[str, Any]] = {
        "served": {},
        "refused": {"error": NodesBusy("full", retry_after_s=1)},
        "failed": {"error": NodeFailed("x"), "fail_after": 2},
        "left": {"stall_after": 2},
        "left before the first token": {"stall_after": 0},
    }
    return FakeDispatcher(script=[5, 5, 5, 5, 2], **options[case])


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("case", ["served", "refused", "failed", "left", "left before the first token"])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": [5, 6, 7]}),
        ("/v1/completions", {"prompt": [5, 6, 7], "n": 2}),
        ("/v1/responses", {"input": "hi"}),
    ],
)
async def test_a_request_that_is_over_is_gone_at_once_with_its_prompt(
    path: str, asked: dict[str, Any], is_stream: bool, case: str
) -> None:
    dispatcher = failing(case)
    app = http_app(dispatcher, smollm2_text())
    body = json.dumps(asked | {"stream": is_stream}).encode()
    leave = asyncio.Event()

    async def send(_: Message) -> None:
        pass

    serving = asyncio.ensure_future(app(scope(path), staying(body, leave), send))
    if case.startswith("left"):
        await asyncio.wait_for(dispatcher.until_stalled(asked.get("n", 1)), timeout=60)
        assert _generations()
        leave.set()
    await asyncio.wait_for(serving, timeout=60)
    dispatcher.error = None
    assert dispatcher.requests
    assert _generations() == []


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("num_choices", [1, 2])
@pytest.mark.parametrize("case", ["served", "refused", "failed"])
async def test_a_call_that_is_over_is_gone_at_once(case: str, num_choices: int) -> None:
    dispatcher = failing(case)
    asked = pb.GenerateRequest(token_ids=pb.TokenIds(ids=[5, 6, 7]), n=num_choices)
    async with channel(dispatcher) as opened:
        with nullcontext() if case == "served" else pytest.raises(grpc.aio.AioRpcError):
            _ = [one async for one in stub(opened).Generate(asked)]
        dispatcher.error = None
        assert dispatcher.requests
        assert _generations() == []


def _generations() -> list[object]:
    return [one for one in gc.get_objects(generation=0) if type(one) is Generation]
