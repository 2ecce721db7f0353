"""The engine thread: the only place where a core is called in production.

Owns the thread, its inbox and the way results get back to the asyncio loop. Must never know what an
event or an output means, nor who sends them.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from queue import Empty, SimpleQueue
from typing import Any, Generic, Protocol, TypeVar

MAX_WAIT_S = 3600.0


class Core(Protocol):
    """What the thread needs of a node's core. All of it is called on the engine thread only."""

    def handle(self, event: Any, now: float) -> None: ...

    def step(self, now: float) -> bool: ...

    def take_outputs(self) -> list[Any]: ...

    @property
    def idle_wait_s(self) -> float: ...


CoreT = TypeVar("CoreT", bound=Core)
ResultT = TypeVar("ResultT")
Job = Callable[[], None]


class StepThread(Generic[CoreT]):
    """Steps `core` for ever. Create and use it on the asyncio loop that is to get the outputs.

    Between two steps every posted event is handled, in order. When a step found nothing to do the
    thread sleeps until something is posted, at most `core.idle_wait_s`. A core that raises is dead:
    the thread ends and `on_crash` is called once, on the loop.
    """

    def __init__(
        self,
        core: CoreT,
        *,
        on_crash: Callable[[BaseException], None],
        clock: Callable[[], float] = time.monotonic,
        name: str = "engine",
    ) -> None:
        self._core = core
        self._on_crash = on_crash
        self._clock = clock
        self._loop = asyncio.get_running_loop()
        self._inbox: SimpleQueue[Job | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._output_handler: Callable[[list[Any]], None] = _drop
        self._calls: set[asyncio.Future[Any]] = set()
        self._ended = asyncio.Event()

    def set_output_handler(self, handler: Callable[[list[Any]], None]) -> None:
        """Called on the loop with all outputs of one step. Set it before `start`."""
        self._output_handler = handler

    def start(self) -> None:
        self._thread.start()

    def post(self, event: Any) -> None:
        """Hand one event to the core. From any thread, never blocks."""
        self._inbox.put(lambda: self._core.handle(event, self._clock()))

    async def call(self, function: Callable[[CoreT], ResultT]) -> ResultT:
        """Run `function` on the engine thread between two steps. Raises RuntimeError when it has ended."""
        if self._ended.is_set():
            raise RuntimeError("the engine thread has ended")
        future: asyncio.Future[ResultT] = self._loop.create_future()
        self._calls.add(future)
        future.add_done_callback(self._calls.discard)
        self._inbox.put(lambda: self._answer(function, future))
        return await future

    async def stop(self) -> None:
        """Let the current step and what was posted before finish, deliver their outputs, end the thread."""
        if self._thread.is_alive():
            self._inbox.put(None)
            await self._ended.wait()
            self._thread.join()

    def _run(self) -> None:
        crash: BaseException | None = None
        try:
            self._step_until_stopped()
        except BaseException as error:  # noqa: BLE001  the thread's boundary: reported to on_crash
            crash = error
        self._to_loop(self._end, crash)

    def _step_until_stopped(self) -> None:
        wait_s = 0.0
        while self._handle_posted(wait_s):
            is_busy = self._core.step(self._clock())
            outputs = self._core.take_outputs()
            if outputs:
                self._to_loop(self._output_handler, outputs)
            wait_s = 0.0 if is_busy else min(max(self._core.idle_wait_s, 0.0), MAX_WAIT_S)

    def _handle_posted(self, wait_s: float) -> bool:
        """Take everything from the inbox, waiting for the first item. False when told to stop."""
        try:
            job = self._inbox.get(timeout=wait_s) if wait_s > 0.0 else self._inbox.get_nowait()
            while job is not None:
                job()
                job = self._inbox.get_nowait()
        except Empty:
            return True
        outputs = self._core.take_outputs()
        if outputs:
            self._to_loop(self._output_handler, outputs)
        return False

    def _answer(self, function: Callable[[CoreT], ResultT], future: asyncio.Future[ResultT]) -> None:
        try:
            result = function(self._core)
        except Exception as error:  # noqa: BLE001  handed to the caller
            self._to_loop(_set_exception, future, error)
        else:
            self._to_loop(_set_result, future, result)

    def _to_loop(self, callback: Callable[..., None], *arguments: Any) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(callback, *arguments)

    def _end(self, crash: BaseException | None) -> None:
        self._ended.set()
        for future in list(self._calls):
            _set_exception(future, RuntimeError("the engine thread has ended"))
        if crash is not None:
            self._on_crash(crash)


async def in_passing_thread(function: Callable[[], ResultT]) -> ResultT:
    """Run blocking work on a thread that is gone afterwards.

    OpenMP keeps a team for every living thread that ever computed, and once there are more of them than
    cores its waits no longer spin: every step of the engine thread would pay for the loading of weights.
    """
    with ThreadPoolExecutor(max_workers=1) as pool:
        return await asyncio.get_running_loop().run_in_executor(pool, function)


def _drop(outputs: list[Any]) -> None:
    raise RuntimeError(f"set_output_handler was not called, {len(outputs)} outputs have nowhere to go")


def _set_result(future: asyncio.Future[Any], result: Any) -> None:
    if not future.done():
        future.set_result(result)


def _set_exception(future: asyncio.Future[Any], error: BaseException) -> None:
    if not future.done():
        future.set_exception(error)
