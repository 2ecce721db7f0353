"""Work that stops when nobody waits for it any more. Must never know how one notices that."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Never, TypeVar

T = TypeVar("T")


async def until_left(left: Coroutine[Any, Any, Never], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. It is cancelled as soon as `left` raises, and that exception comes out instead.

    What `work` raises comes through as it is. It is a task of its own, so that what wakes it is not handed
    through everything the caller waits in.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(left)
            working = group.create_task(work)
            working.add_done_callback(lambda _: watcher.cancel())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return working.result()
