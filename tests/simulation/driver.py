"""Steps a node's core on the event loop in virtual time: what the engine thread does in production.

Owns the inbox and how long a step takes. Must never know what an event or an output means.
"""

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from wire.host_events import HostEvent, NodeCore, Output

ResultT = TypeVar("ResultT")


class SimDriver:
    """A wire.host.Driver. As on the engine thread, events are handled between two steps only, and what
    a step says is heard when it is over: `step_s()` later when it worked, at once when it did not.

    `on_step` is called after every event and every step that worked.
    """

    def __init__(
        self, core: NodeCore, *, step_s: Callable[[], float], on_step: Callable[[NodeCore], None]
    ) -> None:
        self._core = core
        self._step_s = step_s
        self._on_step = on_step
        self._handler: Callable[[list[Output]], None] | None = None
        self._inbox: deque[Callable[[], None]] = deque()
        self._woken = asyncio.Event()
        self._is_stopped = False

    def set_output_handler(self, handler: Callable[[list[Output]], None]) -> None:
        self._handler = handler

    def post(self, event: HostEvent) -> None:
        self._put(lambda: self._core.handle(event, asyncio.get_running_loop().time()))

    async def call(self, function: Callable[[NodeCore], ResultT]) -> ResultT:
        if self._is_stopped:
            raise RuntimeError("the driver is stopped")
        future: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        self._put(lambda: _answer(future, function, self._core))
        return await future

    def stop(self) -> None:
        """Step no more, from this moment on: the process is dead, and who waits for it with it."""
        self._is_stopped = True
        self._inbox.clear()

    async def run(self) -> None:
        """Step until stopped."""
        loop = asyncio.get_running_loop()
        while not self._is_stopped:
            self._handle_posted()
            is_busy = self._core.step(loop.time())
            outputs = self._core.take_outputs()
            if is_busy:
                self._on_step(self._core)
                await asyncio.sleep(self._step_s())
            if outputs and self._handler is not None and not self._is_stopped:
                self._handler(outputs)
            await self._wait(0.0 if is_busy else self._core.idle_wait_s)

    def _put(self, job: Callable[[], None]) -> None:
        if not self._is_stopped:
            self._inbox.append(job)
            self._woken.set()

    def _handle_posted(self) -> None:
        self._woken.clear()
        while self._inbox:
            self._inbox.popleft()()
            self._on_step(self._core)

    async def _wait(self, timeout_s: float) -> None:
        if timeout_s <= 0.0:
            return
        try:
            async with asyncio.timeout(timeout_s):
                await self._woken.wait()
        except TimeoutError:
            pass  # the core wants to be stepped now


def _answer(future: asyncio.Future[ResultT], function: Callable[[NodeCore], ResultT], core: NodeCore) -> None:
    if not future.done():
        future.set_result(function(core))
