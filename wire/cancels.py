"""Cancellations that a library may swallow. Owns how they are noticed."""

import asyncio
from collections.abc import Awaitable
from typing import TypeVar

ResultT = TypeVar("ResultT")


def num_cancels() -> int:
    """How often the running task has been cancelled and not yet gone on."""
    task = asyncio.current_task()
    return 0 if task is None else task.cancelling()


async def unforgotten(request: Awaitable[ResultT]) -> ResultT:
    """What `request` returns. Raises CancelledError when the task was cancelled meanwhile, even if hidden.

    Before Python 3.12 `asyncio.wait_for` returns as if nothing had happened when it is cancelled just as
    what it waits for is done (python/cpython issue 86296); libraries built on it cannot be cancelled then.
    """
    before = num_cancels()
    result = await request
    if num_cancels() > before:
        raise asyncio.CancelledError
    return result
