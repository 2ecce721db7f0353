"""The clock of the simulation, before anything is built on it."""

import asyncio

import pytest

from tests.simulation.virtual_loop import NothingWillHappen, run_virtual


def test_time_jumps_to_the_next_timer_and_no_further() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        seen = [loop.time()]
        for seconds in (0.25, 3000.0, 0.0):
            await asyncio.sleep(seconds)
            seen.append(loop.time())
        return seen

    assert run_virtual(main()) == [0.0, 0.25, 3000.25, 3000.25]


def test_timers_fire_in_the_order_of_their_times_whatever_the_order_they_were_set_in() -> None:
    async def main() -> list[float]:
        fired: list[float] = []

        async def fire(at: float) -> None:
            await asyncio.sleep(at)
            fired.append(at)

        await asyncio.gather(*(fire(at) for at in (0.3, 0.1, 0.2)))
        return fired

    assert run_virtual(main()) == [0.1, 0.2, 0.3]


def test_a_run_in_which_nothing_will_ever_happen_says_who_waits() -> None:
    async def waits_for_godot() -> None:
        await asyncio.Event().wait()

    with pytest.raises(NothingWillHappen, match=r"at 0 s: 1 tasks wait \(.*waits_for_godot\) and no timer"):
        run_virtual(waits_for_godot())


def test_a_run_that_never_ends_is_stopped_at_the_limit() -> None:
    async def polls_for_ever() -> None:
        while True:  # noqa: ASYNC110  that is the point
            await asyncio.sleep(1.0)

    with pytest.raises(NothingWillHappen, match=r"10 s have passed: 1 tasks wait \(.*polls_for_ever\)"):
        run_virtual(polls_for_ever(), limit_s=10.0)


def test_a_group_cancels_its_tasks_in_the_order_they_were_made_in() -> None:
    async def main() -> list[int]:
        cancelled: list[int] = []

        async def wait(number: int) -> None:
            try:
                await asyncio.sleep(1.0)
            finally:
                cancelled.append(number)

        async def all_at_once() -> None:
            async with asyncio.TaskGroup() as group:
                for number in range(50):
                    group.create_task(wait(number))

        task = asyncio.create_task(all_at_once())
        await asyncio.sleep(0.5)
        task.cancel()
        await asyncio.wait([task])
        return cancelled

    assert run_virtual(main()) == list(range(50))
