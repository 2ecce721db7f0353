"""What waits for a reader: it comes in order, however it goes, and is bounded."""

import asyncio
import random
from typing import Never

import pytest

from router.errors import ConsumerTooSlow, NodeFailed
from router.leaving import until_left
from router.outlet import Outlet


async def _never() -> Never:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


@pytest.mark.parametrize("seed", range(20))
async def test_everything_is_sent_once_in_order_whoever_sends_it(seed: int) -> None:
    print(f"seed {seed}")
    rng, sent = random.Random(seed), list[int]()

    async def send(item: int) -> None:
        for _ in range(rng.choice([0, 0, 1, 5])):
            await asyncio.sleep(0)
        sent.append(item)

    def send_now(item: int) -> bool:
        if rng.random() < 0.3:
            return False
        sent.append(item)
        return True

    outlet = Outlet(send, send_now=send_now)

    async def work() -> None:
        for number in range(200):
            outlet.put(number)
            for _ in range(rng.choice([0, 0, 1, 2, 5])):
                await asyncio.sleep(0)

    await until_left(_never(), outlet.through(work()), outlet.pump())
    assert sent == list(range(200))
    assert not outlet.is_waiting


async def test_what_was_put_before_a_failure_is_sent_before_the_failure_comes_out() -> None:
    sent: list[int] = []

    async def send(item: int) -> None:
        await asyncio.sleep(0.01)
        sent.append(item)

    outlet = Outlet(send)

    async def work() -> None:
        outlet.put(1)
        outlet.put(2)
        raise NodeFailed("x")

    with pytest.raises(NodeFailed):
        await until_left(_never(), outlet.through(work()), outlet.pump())
    assert sent == [1, 2]


async def test_one_item_too_many_is_refused_and_the_others_stay() -> None:
    sent: list[int] = []
    reads = asyncio.Event()

    async def send(item: int) -> None:
        await reads.wait()
        sent.append(item)

    outlet = Outlet(send, capacity=2)

    async def work() -> None:
        outlet.put(1)
        await asyncio.sleep(0.01)  # on its way, and it counts
        outlet.put(2)
        for _ in range(2):
            with pytest.raises(ConsumerTooSlow, match="2 events are waiting"):
                outlet.put(3)
        reads.set()

    await until_left(_never(), outlet.through(work()), outlet.pump())
    assert (sent, outlet.num_sent) == ([1, 2], 2)
