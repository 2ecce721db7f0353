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
    error: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            watcher = group.create_task(left)
            working = group.create_task(work)
            await asyncio.wait((working,))  # a group takes its own cancelling of us back only in its body
            watcher.cancel()
    except BaseExceptionGroup as errors:
        error = first_of(errors)
    except asyncio.CancelledError as cancelled:
        forget_frames(cancelled)
        raise
    try:
        if error is not None:
            raise error
        return working.result()
    finally:
        # An error knows this frame, and whoever holds the error would hold all that the work held.
        del error, group, watcher, working


def first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
    """The first error in a group of groups, by itself."""
    error: BaseException = errors
    while isinstance(error, BaseExceptionGroup):
        forget_frames(error)
        error = error.exceptions[0]
    return error


def forget_frames(error: BaseException) -> None:
    """For what its own frames know, as a task group knows what it raises, and a call of gRPC what ended it:
    otherwise everything those frames held would wait for the garbage collector."""
    error.__traceback__ = None
