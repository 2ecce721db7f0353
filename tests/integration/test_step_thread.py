import asyncio
import threading

import pytest

from engine.thread import StepThread


class CountingCore:
    """Echoes events as outputs; busy for `work` steps after each event; dies on the event "die"."""

    def __init__(self, *, idle_wait_s: float = 60.0) -> None:
        self.idle_wait_s = idle_wait_s
        self.threads: set[str] = set()
        self.num_steps = 0
        self._work = 0
        self._outputs: list[object] = []

    def handle(self, event: object, now: float) -> None:
        self.threads.add(threading.current_thread().name)
        if event == "die":
            raise ZeroDivisionError("scripted")
        self._outputs.append(event)
        self._work = 2

    def step(self, now: float) -> bool:
        self.threads.add(threading.current_thread().name)
        self.num_steps += 1
        self._work -= 1
        return self._work > 0

    def take_outputs(self) -> list[object]:
        outputs, self._outputs = self._outputs, []
        return outputs


class Inbox:
    """Collects what the thread delivers and lets a test wait for it."""

    def __init__(self) -> None:
        self.batches: list[list[object]] = []
        self.threads: set[str] = set()
        self._arrived = asyncio.Event()

    def take(self, outputs: list[object]) -> None:
        self.batches.append(outputs)
        self.threads.add(threading.current_thread().name)
        self._arrived.set()

    async def wait_for(self, count: int) -> None:
        async with asyncio.timeout(60.0):
            while sum(map(len, self.batches)) < count:
                self._arrived.clear()
                await self._arrived.wait()


def fail(error: BaseException) -> None:
    raise AssertionError("the core must not crash") from error


def started(core: CountingCore, inbox: Inbox) -> StepThread[CountingCore]:
    thread = StepThread(core, on_crash=fail)
    thread.set_output_handler(inbox.take)
    thread.start()
    return thread


async def test_events_are_handled_in_order_on_the_engine_thread_and_outputs_come_on_the_loop() -> None:
    core, inbox = CountingCore(), Inbox()
    thread = started(core, inbox)
    for number in range(1000):
        thread.post(number)
    await inbox.wait_for(1000)
    assert [one for batch in inbox.batches for one in batch] == list(range(1000))
    assert core.threads == {"engine"}
    assert inbox.threads == {threading.current_thread().name}
    await thread.stop()


async def test_events_posted_during_a_step_are_delivered_in_one_batch() -> None:
    core, inbox = CountingCore(), Inbox()
    thread = StepThread(core, on_crash=fail)
    thread.set_output_handler(inbox.take)
    for number in range(10):
        thread.post(number)
    thread.start()
    await inbox.wait_for(10)
    assert inbox.batches == [list(range(10))]
    await thread.stop()


async def test_an_idle_thread_sleeps_until_something_is_posted() -> None:
    core, inbox = CountingCore(), Inbox()
    thread = started(core, inbox)
    thread.post("a")
    await inbox.wait_for(1)
    await asyncio.sleep(0.1)
    # At most one step before the event; then one that worked and one that found nothing.
    assert core.num_steps <= 3
    thread.post("b")
    await inbox.wait_for(2)
    await thread.stop()


async def test_an_idle_thread_steps_again_after_the_idle_wait() -> None:
    core, inbox = CountingCore(idle_wait_s=0.01), Inbox()
    thread = started(core, inbox)
    async with asyncio.timeout(60.0):
        while await thread.call(lambda core: core.num_steps) < 5:  # noqa: ASYNC110  steps have no event
            await asyncio.sleep(0.01)
    await thread.stop()


async def test_a_call_runs_on_the_engine_thread_and_its_error_is_the_callers() -> None:
    core, inbox = CountingCore(), Inbox()
    thread = started(core, inbox)
    assert await thread.call(lambda _: threading.current_thread().name) == "engine"
    with pytest.raises(KeyError, match="mine"):
        await thread.call(lambda core: vars(core)["mine"])
    thread.post("still alive")
    await inbox.wait_for(1)
    await thread.stop()


async def test_a_crash_is_reported_once_and_fails_pending_and_later_calls() -> None:
    crashes: list[BaseException] = []
    thread = StepThread(CountingCore(), on_crash=crashes.append)
    thread.set_output_handler(Inbox().take)
    thread.post("die")
    thread.post("die")
    thread.start()
    with pytest.raises(RuntimeError, match="ended"):
        await thread.call(lambda core: core.num_steps)
    with pytest.raises(RuntimeError, match="ended"):
        await thread.call(lambda core: core.num_steps)
    await thread.stop()
    assert [repr(crash) for crash in crashes] == ["ZeroDivisionError('scripted')"]


async def test_stopping_delivers_what_was_posted_before() -> None:
    core, inbox = CountingCore(), Inbox()
    thread = started(core, inbox)
    thread.post("last")
    await thread.stop()
    assert [one for batch in inbox.batches for one in batch] == ["last"]
    await thread.stop()
