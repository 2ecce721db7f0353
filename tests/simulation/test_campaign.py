"""Everything drawn at random: cluster, work, faults, incidents. Every request ends once, with the right text.

`python -m tests.simulation.test_campaign FIRST LAST` runs as many seeds as one has time for.
"""

import asyncio
import random
import sys
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

import pytest

from kv_transfer.transport import WriteHandle
from kv_transfer.transports.memory import Fault
from router.dispatch import DispatchConfig
from router.errors import DeadlineExceeded, NoReadyPair
from router.pairs import PairConfig
from router.requests import GenerateRequest, SamplingParams
from tests.conformance.test_loop import prompt_of
from tests.engines import VOCAB_SIZE
from tests.simulation.cluster import SimCluster, SimConfig, Stream, running_cluster
from tests.simulation.test_cluster import assert_beginning, assert_whole
from tests.simulation.virtual_loop import run_virtual

# After every token another quarter of all tokens is forbidden.
BANS = tuple((one, other) for one in range(VOCAB_SIZE) for other in range(one % 4, VOCAB_SIZE, 4))


def faults_of(rng: random.Random) -> Callable[[WriteHandle], Fault]:
    """What goes wrong with writes on this cluster; some of it not at all, some often."""
    slowest_s = rng.choice((0.01, 0.05, 0.3))
    drop_share, failure_share = rng.choice((0.0, 0.0, 0.03)), rng.choice((0.0, 0.02, 0.1))
    late_share, notice_share = rng.choice((0.0, 0.5)), rng.choice((0.0, 0.3))
    outlive_share = rng.choice((0.0, 0.5))

    def faults(_handle: WriteHandle) -> Fault:
        delay_s = rng.choice((0.0, rng.uniform(0.0, slowest_s)))
        return Fault(
            delay_s=delay_s,
            notice_delay_s=rng.uniform(0.0, slowest_s) if rng.random() < notice_share else 0.0,
            failure="made to fail" if rng.random() < failure_share else "",
            is_dropped=rng.random() < drop_share,
            num_duplicates=int(delay_s == 0.0 and rng.random() < 0.5),
            ignores_cancel=rng.random() < late_share,
            outlives_peer=rng.random() < outlive_share,
        )

    return faults


def config_of(seed: int, rng: random.Random) -> SimConfig:
    return SimConfig(
        seed=seed,
        num_prefill=rng.randint(1, 3),
        num_decode=rng.randint(1, 3),
        algorithm=rng.choice(("none", "ngram")),
        checksums=rng.random() < 0.3,
        stall_s=rng.choice((0.3, 2.0, 6.0)),
        stall_share=rng.choice((0.0, 0.0, 0.01, 0.03)),
        max_delay_s=rng.choice((0.0005, 0.002, 0.02, 0.1)),
        faults=faults_of(rng),
        dispatch=DispatchConfig(
            max_attempts=30,
            max_preemptions=100,
            policy=rng.choice(("least_load", "prefix", "round_robin")),
            admits_by_pages=rng.random() < 0.5,
            local_prompt_tokens=rng.choice((0, 0, 20)),
        ),
        pairs=PairConfig(with_local=True),
        engine={
            "P": {
                "chunk_tokens": rng.choice((8, 16, 32, 64)),
                "num_pages": rng.choice((90, 140, 300)),
                "max_running": rng.choice((2, 4, 16)),
            },
            "D": {
                "num_pages": rng.choice((90, 120, 300)),
                "reserve_tokens": rng.choice((1, 16, 100)),
                "max_running": rng.choice((3, 16)),
            },
        },
    )


def stream_of(rng: random.Random, number: int) -> Stream:
    """Half of them begin like others; few tokens to draw from, for the reason that `stream` has."""
    length = rng.choice((1, 4, 5, 16, 17, rng.randint(1, 60), rng.randint(1, 280)))
    max_tokens, is_sampled = rng.choice((1, 2, 3, 12, 30, 60)), rng.random() < 0.4
    sampling = SamplingParams(
        seed=number,
        max_tokens=max_tokens,
        temperature=0.9 if is_sampled else 0.0,
        top_k=4 if is_sampled else 0,
        stop_token_ids=tuple(rng.sample(range(VOCAB_SIZE), 12)) if rng.random() < 0.2 else (),
        banned_sequences=BANS if number % 3 == 0 else (),
    )
    request = GenerateRequest(
        prompt_ids=tuple(prompt_of(length, seed=rng.choice((rng.randint(0, 3), 1000 + number)))),
        sampling=sampling,
        priority=rng.choice((0, 0, 1, -1)),
        tenant=rng.choice("ab"),
        deadline_s=rng.choice((None, None, None, None, 20.0, 1.0)),
    )
    return Stream(request=request)


@dataclass(kw_only=True)
class Campaign:
    """One seed's worth of trouble."""

    rng: random.Random
    cluster: SimCluster
    endings: Counter[str] = field(default_factory=Counter)

    @property
    def num_pairs(self) -> int:
        config = self.cluster.config
        return (config.num_prefill + 1) * config.num_decode

    async def run(self) -> None:
        rng = self.rng
        await self.cluster.until_ready(self.num_pairs)
        within_s = rng.choice((0.1, 1.0, 5.0))
        async with asyncio.TaskGroup() as group:
            for number in range(rng.randint(10, 30)):
                group.create_task(self.consume(stream_of(rng, number), rng.uniform(0.0, within_s)))
            for _ in range(rng.choice((0, 3, 8, 20))):
                await asyncio.sleep(rng.uniform(0.0, 0.6))
                await rng.choice(INCIDENTS)(self.cluster, rng)
        await self.cluster.until_ready(self.num_pairs)
        async with asyncio.TaskGroup() as group:
            for number in range(500, 506):
                group.create_task(self.consume(stream_of(rng, number), 0.0))
        await self.cluster.at_rest()

    async def consume(self, stream: Stream, delay_s: float) -> None:
        """To its end, or until the consumer has had enough; every other error is a failure of the test."""
        leave_after_s = self.rng.uniform(0.0, 2.0) if self.rng.random() < 0.2 else None
        await asyncio.sleep(delay_s)
        while stream.outcome is None:
            try:
                async with asyncio.timeout(leave_after_s):
                    await self.cluster.generate(stream)
            except TimeoutError:
                self.endings["left"] += 1
                return assert_beginning(stream)
            except DeadlineExceeded:
                assert stream.request.deadline_s is not None
                self.endings["deadline"] += 1
                return assert_beginning(stream)
            except NoReadyPair:
                assert_beginning(stream)
                if stream.ids:
                    self.endings["no pair"] += 1
                    return None
                await asyncio.sleep(1.0)
        self.endings[stream.outcome.reason] += 1
        return assert_whole([stream])


def any_node(cluster: SimCluster, rng: random.Random, kinds: str = "PD") -> str:
    return rng.choice([address for address in cluster.nodes if address[0] in kinds])


async def restart(cluster: SimCluster, rng: random.Random) -> None:
    address = any_node(cluster, rng)
    await cluster.kill(address)
    await asyncio.sleep(rng.choice((0.0, rng.uniform(0.0, 3.0))))
    cluster.start(address)


async def replace_drained(cluster: SimCluster, rng: random.Random) -> None:
    address = any_node(cluster, rng)
    await cluster.drain(address)
    cluster.start(address)


async def cut_session(cluster: SimCluster, rng: random.Random) -> None:
    has_data = rng.random() < 0.6
    has_control = not has_data or rng.random() < 0.6
    one, other = any_node(cluster, rng, "P"), any_node(cluster, rng, "D")
    cluster.cut_session(one, other, control=has_control, data=has_data)


async def cut_again_and_again(cluster: SimCluster, rng: random.Random) -> None:
    for _ in range(rng.randint(2, 12)):
        await cut_session(cluster, rng)
        await asyncio.sleep(rng.uniform(0.01, 0.5))


async def cut_router(cluster: SimCluster, rng: random.Random) -> None:
    cluster.network.cut(any_node(cluster, rng), "router")


async def isolate(cluster: SimCluster, rng: random.Random) -> None:
    address = any_node(cluster, rng)
    cluster.network.isolate(address)
    await asyncio.sleep(rng.uniform(0.1, 20.0))
    cluster.network.rejoin(address)


async def lose_registry(cluster: SimCluster, rng: random.Random) -> None:
    cluster.registry.set_available(False)
    await asyncio.sleep(rng.uniform(0.1, 15.0))
    cluster.registry.set_available(True)


async def forget_record(cluster: SimCluster, rng: random.Random) -> None:
    await cluster.registry.remove(cluster.nodes[any_node(cluster, rng)].incarnation)


INCIDENTS: tuple[Callable[[SimCluster, random.Random], Awaitable[None]], ...] = (
    restart,
    restart,
    replace_drained,
    cut_session,
    cut_again_and_again,
    cut_router,
    isolate,
    lose_registry,
    forget_record,
)


def campaign(seed: int) -> Counter[str]:
    """How the requests ended."""
    rng = random.Random(seed)
    config = config_of(seed, rng)
    endings: Counter[str] = Counter()

    async def main() -> None:
        async with running_cluster(config) as cluster:
            await Campaign(rng=rng, cluster=cluster, endings=endings).run()

    run_virtual(main())
    return endings


@pytest.mark.parametrize("seed", [3, 19, 22, 40, 707])
def test_whatever_happens_every_request_ends_once_with_its_text_and_every_page_comes_back(seed: int) -> None:
    assert campaign(seed)["length"] > 0


if __name__ == "__main__":
    for number in range(int(sys.argv[1]), int(sys.argv[2])):
        print(dict(campaign(number)), flush=True)
