"""Work that stops when nobody waits for it any more. Must never know how one notices that."""

import asyncio
from collections.abc import Coroutine
from typing import Any, Never, TypeVar

T = TypeVar("T")


async def until_left(left: Coroutine[Any, Any, Never], work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. It is cancelled as soon as `left` raises, and that exception comes out instead.

    What `work` raises comes through as it is.
    """
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(left)
            try:
                return await work
            finally:
                watcher.cancel()
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
