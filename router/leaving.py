"""Work that stops when nobody waits for it any more. Must never know how one notices that."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Never, Protocol, TypeVar

T = TypeVar("T")

MAX_UNREAD_S = 60.0
"""Who takes nothing of a stream for so long, and holds a place that others wait for, is gone."""


class Sending(Protocol):
    """How many pieces of a stream the network took late, and whether one waits for it."""

    @property
    def num_sent(self) -> int: ...

    @property
    def is_waiting(self) -> bool: ...


async def left_or_unread(
    leaves: Callable[[], Awaitable[object]], sending: Sending, *, max_unread_s: float = MAX_UNREAD_S
) -> bool:
    """True once `leaves` is over, False when one piece has waited for so long, or up to twice that: a timer a
    piece would cost too much."""
    while True:
        num_sent, is_waiting = sending.num_sent, sending.is_waiting
        try:
            async with asyncio.timeout(max_unread_s):
                await leaves()
        except TimeoutError:
            if is_waiting and sending.num_sent == num_sent:
                return False
        else:
            return True


async def until_left(
    left: Coroutine[Any, Any, Never], work: Coroutine[Any, Any, T], *beside: Coroutine[Any, Any, Never]
) -> T:
    """The result of `work`. It is cancelled as soon as `left` raises, or what runs `beside` it, and that
    exception comes out instead.

    What `work` raises comes through as it is. It is a task of its own, so that what wakes it is not handed
    through everything the caller waits in.
    """
    done: list[T] = []

    async def run(group: asyncio.TaskGroup) -> None:
        others = [group.create_task(one) for one in (left, *beside)]
        working = group.create_task(_noted(work, done))
        await asyncio.wait((working,))  # a group takes its own cancelling of us back only in its body
        for other in others:
            other.cancel()

    await in_group(run)
    return done[0]


async def _noted(work: Coroutine[Any, Any, T], done: list[T]) -> None:
    done.append(await work)


async def in_group(
    run: Callable[[asyncio.TaskGroup], Awaitable[None]],
    *,
    comes_first: Callable[[BaseException], bool] | None = None,
) -> None:
    """Runs `run` and the tasks it creates. Raises one error instead of them all, and keeps nothing of what
    they held. `comes_first`: which kind is raised where there is one."""
    error: BaseException | None = None
    try:
        async with asyncio.TaskGroup() as group:
            await run(group)
    except BaseExceptionGroup as errors:
        preferred = None if comes_first is None else errors.subgroup(comes_first)
        error = _first_of(errors if preferred is None else preferred)
    except asyncio.CancelledError as cancelled:
        forget_frames(cancelled)
        raise
    try:
        if error is not None:
            raise error
    finally:
        # An error knows this frame, and whoever holds the error would hold all that the tasks held.
        del error, group


def _first_of(errors: BaseExceptionGroup[Any]) -> BaseException:
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
