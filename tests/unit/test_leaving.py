"""Work that stops when nobody waits for it: what comes out, and what is left running."""

import asyncio
from typing import Never

import pytest

from router.leaving import until_left


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
