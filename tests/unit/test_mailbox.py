"""Where events wait: none is lost, whenever it comes, and a reader whose time is up still gets what waits."""

import asyncio
import random

import pytest

from router.errors import ConsumerTooSlow, DeadlineExceeded
from router.mailbox import Arrival, LinkLost, Mailbox


def arrival(number: int) -> Arrival:
    return Arrival("decode", LinkLost(reason=f"{number}"))


async def take(mailbox: Mailbox) -> list[Arrival]:
    await mailbox.news()
    return mailbox.take()


@pytest.mark.parametrize("seed", range(20))
async def test_every_event_is_read_once_in_order_however_the_writer_and_the_reader_take_turns(
    seed: int,
) -> None:
    print(f"seed {seed}")
    rng, mailbox = random.Random(seed), Mailbox(capacity=1000)
    read: list[Arrival] = []

    async def write() -> None:
        for number in range(200):
            mailbox.put(arrival(number))
            for _ in range(rng.choice([0, 0, 1, 2, 5])):
                await asyncio.sleep(0)
        mailbox.expire()

    async def read_on() -> None:
        while True:
            reading = asyncio.create_task(take(mailbox))
            for _ in range(rng.choice([0, 1, 3])):
                await asyncio.sleep(0)
            if rng.random() < 0.3:
                reading.cancel()  # it waits, or has been woken a moment ago, or is done
            await asyncio.wait((reading,), timeout=60)
            if not reading.cancelled():
                read.extend(reading.result())
            for _ in range(rng.choice([0, 0, 2])):
                await asyncio.sleep(0)

    writing = asyncio.create_task(write())
    with pytest.raises(DeadlineExceeded):
        await read_on()
    await writing
    assert read == [arrival(number) for number in range(200)]


async def test_time_that_is_up_is_told_after_what_waits_and_again() -> None:
    mailbox = Mailbox(capacity=2)
    mailbox.put(arrival(0))
    mailbox.expire()
    assert await asyncio.wait_for(take(mailbox), timeout=60) == [arrival(0)]
    for _ in range(2):
        with pytest.raises(DeadlineExceeded):
            await asyncio.wait_for(take(mailbox), timeout=60)


async def test_one_event_too_many_is_told_in_place_of_all() -> None:
    mailbox = Mailbox(capacity=2)
    for number in range(3):
        mailbox.put(arrival(number))
    for _ in range(2):
        with pytest.raises(ConsumerTooSlow, match="2 events are waiting"):
            await asyncio.wait_for(take(mailbox), timeout=60)
