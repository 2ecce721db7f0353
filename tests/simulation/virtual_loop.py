"""An asyncio loop on a virtual clock: while nothing can run, time jumps to the next timer.

Owns the clock. Must never know what runs on it. With no thread and no socket in play the order of
everything follows from the program alone, so a run with a seed can be repeated.
"""

import asyncio
import itertools
import selectors
from collections.abc import Coroutine
from types import CoroutineType
from typing import Any, TypeVar

ResultT = TypeVar("ResultT")


class NothingWillHappen(RuntimeError):
    """Every task waits and no timer is set, or the time a run may take has passed."""


class _JumpingSelector(selectors.SelectSelector):
    """Never waits: `now` passes by exactly what the loop wanted to wait."""

    def __init__(self, limit_s: float) -> None:
        super().__init__()
        self.now = 0.0
        self.limit_s = limit_s

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if ready:
            return ready
        if timeout is None:
            raise NothingWillHappen(f"at {self.now:g} s: {_waiting()} and no timer is set")
        self.now += max(timeout, 0.0)
        if self.now > self.limit_s:
            raise NothingWillHappen(f"{self.limit_s:g} s have passed: {_waiting()}")
        return ready


class _NumberedTask(asyncio.Task[Any]):
    """Hashes by its number: a TaskGroup cancels its tasks in the order of a set, which must not depend
    on where in memory they lie."""

    def __init__(self, number: int, coro: Coroutine[Any, Any, Any], **options: Any) -> None:
        self._number = number
        super().__init__(coro, **options)

    def __hash__(self) -> int:
        return self._number


class VirtualLoop(asyncio.SelectorEventLoop):
    """Time starts at 0; a run that takes longer than `limit_s` of it raises NothingWillHappen."""

    def __init__(self, limit_s: float = 3600.0) -> None:
        self._jumping = _JumpingSelector(limit_s)
        self._task_numbers = itertools.count()
        super().__init__(self._jumping)
        self.set_task_factory(
            lambda loop, coro, **options: _NumberedTask(next(self._task_numbers), coro, loop=loop, **options)
        )

    def time(self) -> float:
        return self._jumping.now

    def lift_limit(self) -> None:
        """What is cancelled after the limit passed may still need time to end."""
        self._jumping.limit_s = float("inf")


def run_virtual(main: Coroutine[Any, Any, ResultT], *, limit_s: float = 3600.0) -> ResultT:
    """Run `main` to its end in virtual time. Raises NothingWillHappen when it has none."""
    with asyncio.Runner(loop_factory=lambda: VirtualLoop(limit_s)) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, VirtualLoop)
        try:
            return runner.run(main)
        finally:
            loop.lift_limit()


def _waiting() -> str:
    coroutines = [task.get_coro() for task in asyncio.all_tasks(asyncio.get_running_loop())]
    names = sorted(one.__qualname__ for one in coroutines if isinstance(one, CoroutineType))
    return f"{len(names)} tasks wait ({', '.join(names)})"
