"""The whole cluster under what may happen to it: every text is the one a single engine would write."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from functools import cache

import pytest

from engine.request import Request
from kv_transfer.transport import WriteHandle
from kv_transfer.transports.memory import Fault
from router.dispatch import DispatchConfig
from router.errors import NoReadyPair
from router.pairs import PairConfig
from router.requests import GenerateRequest, SamplingParams
from tests.conformance.test_loop import LENGTHS, prompt_of, reference
from tests.engines import make_engine, run, tokens_of
from tests.simulation.cluster import SimCluster, SimConfig, Stream, running_cluster
from tests.simulation.virtual_loop import run_virtual

SMALL_CHUNKS = {"P": {"chunk_tokens": 16}}
PATIENT = DispatchConfig(max_attempts=20)


def simulate(config: SimConfig, scenario: Callable[[SimCluster], Awaitable[None]], *, num_pairs: int) -> None:
    """Run a scenario on a cluster that is ready, and see it come to rest."""

    async def main() -> None:
        async with running_cluster(config) as cluster:
            await cluster.until_ready(num_pairs)
            await scenario(cluster)
            await cluster.at_rest()

    run_virtual(main())


def stream(length: int, *, variant: int = 0, is_sampled: bool = False, max_tokens: int = 12) -> Stream:
    """Few ids to draw from, since a coin may fall between two of them: then the last bit of a logit, which
    depends on what else is in the batch, decides."""
    sampling = (
        SamplingParams(seed=variant, max_tokens=max_tokens, temperature=0.9, top_k=4)
        if is_sampled
        else SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0)
    )
    return Stream(
        request=GenerateRequest(prompt_ids=tuple(prompt_of(length, seed=variant)), sampling=sampling)
    )


def mixed(lengths: Iterable[int], *, max_tokens: int = 12) -> list[Stream]:
    """Greedy and sampled in turn, every prompt another."""
    return [
        stream(length, variant=number, is_sampled=number % 2 == 1, max_tokens=max_tokens)
        for number, length in enumerate(lengths)
    ]


@cache
def truth(prompt: tuple[int, ...], sampling: SamplingParams) -> tuple[int, ...]:
    """What one engine that does it all alone writes."""
    request = Request(key="r", prompt_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)
    return tuple(tokens_of(run(make_engine(), [request])["r"]))


def assert_whole(streams: Iterable[Stream]) -> None:
    for each in streams:
        assert each.outcome is not None
        assert tuple(each.ids) == truth(each.request.prompt_ids, each.request.sampling)


def assert_beginning(each: Stream) -> None:
    whole = truth(each.request.prompt_ids, each.request.sampling)
    assert tuple(each.ids) == whole[: len(each.ids)]


async def consume_all(cluster: SimCluster, streams: Iterable[Stream], *, within_s: float = 0.0) -> None:
    """Start every stream at a random time within `within_s`; return when the last one is over.

    Who is told at once that no pair is ready comes back a second later, as clients do.
    """

    async def consume(each: Stream, delay_s: float) -> None:
        loop = asyncio.get_running_loop()
        await asyncio.sleep(delay_s)
        while each.outcome is None:
            started = loop.time()
            try:
                await cluster.generate(each)
            except NoReadyPair:
                if loop.time() > started:
                    raise
                await asyncio.sleep(1.0)

    async with asyncio.TaskGroup() as group:
        for each in streams:
            group.create_task(consume(each, cluster.rng.uniform(0.0, within_s)))


async def consume_during(
    cluster: SimCluster, streams: list[Stream], incident: Awaitable[None], *, within_s: float = 0.0
) -> None:
    """Consume, let the incident happen meanwhile, and compare the texts."""
    async with asyncio.TaskGroup() as group:
        group.create_task(consume_all(cluster, streams, within_s=within_s))
        await incident
    assert_whole(streams)


def attempts(streams: Iterable[Stream]) -> list[int]:
    return sorted(each.outcome.attempts for each in streams if each.outcome is not None)


def endings(cluster: SimCluster) -> dict[str, int]:
    """How the requests so far ended, by the router's own books."""
    prefix = "paceline_router_requests_total{outcome="
    series = cluster.stats.snapshot()
    return {name[len(prefix) : -1]: int(n) for name, n in series.items() if name.startswith(prefix)}


# all is well


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
@pytest.mark.parametrize("seed", range(2))
def test_prompts_of_every_border_length_at_once_equal_transformers(algorithm: str, seed: int) -> None:
    lengths = [*LENGTHS, 1, 16, 33, 64, 128]
    random.Random(seed).shuffle(lengths)

    async def scenario(cluster: SimCluster) -> None:
        streams = [stream(length) for length in lengths]
        await consume_all(cluster, streams, within_s=0.1)
        for each in streams:
            assert tuple(each.ids) == reference(each.request.prompt_ids, 12)
            assert each.outcome is not None
            assert (each.outcome.reason, each.outcome.attempts) == ("length", 1)
            assert (each.outcome.prefill_node, each.outcome.decode_node) == ("P0", "D0")

    engine = {"P": {"num_pages": 800}, "D": {"num_pages": 800}}
    simulate(SimConfig(seed=seed, algorithm=algorithm, engine=engine), scenario, num_pairs=1)


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
def test_sampling_with_a_seed_is_the_same_through_pairs_as_colocated(algorithm: str) -> None:
    texts: list[list[tuple[int, ...]]] = []

    async def scenario(cluster: SimCluster) -> None:
        streams = [stream(length, variant=length, is_sampled=True) for length in LENGTHS]
        await consume_all(cluster, streams, within_s=0.1)
        texts.append([tuple(each.ids) for each in streams])
        assert_whole(streams)

    engine = {"P": {"num_pages": 800}, "D": {"num_pages": 800}}
    simulate(
        SimConfig(algorithm=algorithm, engine=engine, num_prefill=2, num_decode=2), scenario, num_pairs=4
    )
    colocated = SimConfig(
        algorithm=algorithm,
        engine=engine,
        dispatch=DispatchConfig(colocated=True),
        pairs=PairConfig(with_prefill=False, with_local=True),
        num_prefill=0,
    )
    simulate(colocated, scenario, num_pairs=1)
    assert texts[0] == texts[1]


def test_a_request_of_one_token_needs_nothing_of_the_decode_node() -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = [stream(length, max_tokens=1) for length in LENGTHS]
        await consume_all(cluster, streams, within_s=0.1)
        assert_whole(streams)

    simulate(SimConfig(engine={"P": {"num_pages": 800}, "D": {"num_pages": 800}}), scenario, num_pairs=1)


def test_a_seed_repeats_a_run_exactly() -> None:
    ends: list[tuple[float, dict[str, float]]] = []

    async def scenario(cluster: SimCluster) -> None:
        streams = mixed((3, 40, 90, 17, 150), max_tokens=30)

        async def incident() -> None:
            await asyncio.sleep(0.2)
            await cluster.restart("D0")

        await consume_during(cluster, streams, incident(), within_s=0.1)
        ends.append((asyncio.get_running_loop().time(), cluster.stats.snapshot()))

    for _ in range(2):
        simulate(SimConfig(seed=3, num_decode=2, engine=SMALL_CHUNKS), scenario, num_pairs=2)
    assert ends[0] == ends[1]


# consumers leave


@pytest.mark.parametrize("seed", range(30))
def test_a_consumer_that_leaves_in_any_phase_takes_nothing_with_it(seed: int) -> None:
    rng = random.Random(seed)

    def faults(handle: WriteHandle) -> Fault:
        return Fault(delay_s=rng.uniform(0.0, 0.04), ignores_cancel=rng.random() < 0.3)

    async def scenario(cluster: SimCluster) -> None:
        doomed = [stream(rng.choice((20, 129, 300)), variant=9, max_tokens=30) for _ in range(2)]
        survivors = mixed((33, 64, 100, 16))

        async def incident() -> None:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(cluster.generate(each)) for each in doomed]
                for task in tasks:
                    await asyncio.sleep(rng.uniform(0.0, 0.4))
                    task.cancel()

        await consume_during(cluster, survivors, incident(), within_s=0.05)
        for each in doomed:
            assert_beginning(each)
        again = mixed((129, 20))
        await consume_all(cluster, again)
        assert_whole(again)

    config = SimConfig(seed=seed, faults=faults, engine={"P": {"chunk_tokens": 32}, "D": {"num_pages": 200}})
    simulate(config, scenario, num_pairs=1)


# nodes die


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
@pytest.mark.parametrize("seed", range(3))
def test_streams_of_a_decode_node_that_dies_go_on_exactly_at_another(algorithm: str, seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = mixed((5, 40, 17, 64, 33, 90, 1, 128), max_tokens=40)
        num_tokens = cluster.rng.randrange(1, 12)

        async def incident() -> None:
            await cluster.until(lambda: min(len(each.ids) for each in streams) >= num_tokens)
            await cluster.kill("D0")

        await consume_during(cluster, streams, incident())
        assert attempts(streams) == [1] * 4 + [2] * 4
        assert {each.outcome.decode_node for each in streams if each.outcome} == {"D1"}
        cluster.start("D0")
        await cluster.until_ready(2)
        again = mixed((4, 30, 17, 65, 33, 90, 2, 128, 9, 200))
        await consume_all(cluster, again)
        assert_whole(again)
        assert {each.outcome.decode_node for each in again if each.outcome} == {"D0", "D1"}

    config = SimConfig(seed=seed, algorithm=algorithm, num_decode=2)
    simulate(config, scenario, num_pairs=2)


@pytest.mark.parametrize("seed", range(4))
def test_prompts_of_a_prefill_node_that_dies_are_computed_by_another(seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = mixed((300, 128, 200, 129, 65, 250), max_tokens=20)

        async def incident() -> None:
            await asyncio.sleep(cluster.rng.uniform(0.01, 0.2))
            await cluster.kill("P0")

        await consume_during(cluster, streams, incident())
        assert attempts(streams)[-1] == 2
        cluster.start("P0")
        await cluster.until_ready(2)
        again = mixed((4, 30, 17, 65, 33, 90, 2, 128, 9, 200))
        await consume_all(cluster, again)
        assert_whole(again)
        assert {each.outcome.prefill_node for each in again if each.outcome} == {"P0", "P1"}

    config = SimConfig(seed=seed, num_prefill=2, engine={"P": {"chunk_tokens": 16}, "D": {"num_pages": 600}})
    simulate(config, scenario, num_pairs=2)


@pytest.mark.parametrize("address", ["P0", "D0"])
@pytest.mark.parametrize("seed", range(3))
def test_streams_wait_for_the_only_node_to_come_back(address: str, seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = mixed((5, 129, 33, 200), max_tokens=40)

        async def incident() -> None:
            await asyncio.sleep(cluster.rng.uniform(0.05, 0.5))
            await cluster.restart(address)

        await consume_during(cluster, streams, incident())
        await cluster.until_ready(1)
        again = mixed((4, 30, 17, 65, 33, 90, 2, 128, 9, 200))
        await consume_all(cluster, again)
        assert_whole(again)

    simulate(SimConfig(seed=seed, engine=SMALL_CHUNKS), scenario, num_pairs=1)


# connections break


@pytest.mark.parametrize("cut", ["control", "data", "both"])
def test_no_late_write_lands_in_a_page_that_has_moved_on(cut: str) -> None:
    num_discarded = 0
    for seed in range(4):
        rng = random.Random(seed)

        def faults(handle: WriteHandle, rng: random.Random = rng) -> Fault:
            is_late = rng.random() < 0.5
            return Fault(delay_s=rng.uniform(0.0, 0.3 if is_late else 0.01), ignores_cancel=is_late)

        async def scenario(cluster: SimCluster) -> None:
            nonlocal num_discarded
            streams = mixed((50, 129, 33, 100, 64, 200, 17, 80))

            async def incident() -> None:
                for _ in range(2):
                    await asyncio.sleep(cluster.rng.uniform(0.03, 0.3))
                    cluster.cut_session("P0", "D0", control=cut != "data", data=cut != "control")

            await consume_during(cluster, streams, incident())
            num_discarded += cluster.fabric.discarded_pages

        config = SimConfig(
            seed=seed,
            faults=faults,
            dispatch=PATIENT,
            engine={"P": {"chunk_tokens": 32}, "D": {"num_pages": 100}},
        )
        simulate(config, scenario, num_pairs=1)
    assert num_discarded > 0


# pairs that do not fit


def test_a_pair_that_differs_is_refused_by_name_and_not_used() -> None:
    async def scenario(cluster: SimCluster) -> None:
        states = {pair["decode"]: (pair["state"], pair["reason"]) for pair in cluster.pairs.report()["pairs"]}
        assert states["D0"] == ("ready", "")
        state, reason = states["D1"]
        assert state == "refused"
        assert reason == "P0: refused at handshake: page_size: '4' here, '8' there"
        assert cluster.pairs.is_ready
        streams = mixed((4, 30, 17, 65, 33, 90))
        await consume_all(cluster, streams)
        assert_whole(streams)
        assert {each.outcome.decode_node for each in streams if each.outcome} == {"D0"}
        status = await cluster.nodes["D1"].host.status()
        assert list(status.peers.values()) == ["refused: page_size: '8' here, '4' there"]
        await asyncio.sleep(60.0)
        assert cluster.pairs.report()["pairs"][1]["state"] == "refused"

    simulate(SimConfig(num_decode=2, engine={"D1": {"page_size": 8}}), scenario, num_pairs=1)


# nodes leave in good order


@pytest.mark.parametrize("address", ["D0", "P0"])
@pytest.mark.parametrize("seed", range(4))
def test_draining_one_of_two_fails_no_request(address: str, seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = mixed([*LENGTHS, 20, 40, 70, 99, 140], max_tokens=25)

        async def incident() -> None:
            await asyncio.sleep(cluster.rng.uniform(0.05, 0.6))
            await cluster.drain(address)

        await consume_during(cluster, streams, incident(), within_s=1.0)
        assert len(streams) == 20
        await cluster.until_ready(1)
        assert endings(cluster) == {"length": 20}

    config = SimConfig(
        seed=seed,
        num_prefill=2 if address == "P0" else 1,
        num_decode=2 if address == "D0" else 1,
        engine={"P": {"num_pages": 600}, "D": {"num_pages": 600}},
    )
    simulate(config, scenario, num_pairs=2)


# memory is short


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
@pytest.mark.parametrize("seed", range(3))
def test_requests_that_run_out_of_pages_go_on_where_there_are_some(algorithm: str, seed: int) -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = mixed((9, 17, 33, 5, 20, 31, 12, 26), max_tokens=40)
        await consume_all(cluster, streams, within_s=0.2)
        assert_whole(streams)
        counters = [node.status.counters["preemptions"] for node in cluster.nodes.values()]
        assert sum(counters) > 0
        assert cluster.stats.snapshot()["paceline_router_redispatches_total{cause=preempted}"] > 0

    config = SimConfig(
        seed=seed,
        algorithm=algorithm,
        num_decode=2,
        engine={"D": {"num_pages": 40, "reserve_tokens": 1}},
        dispatch=DispatchConfig(admits_by_pages=False),
    )
    simulate(config, scenario, num_pairs=2)


def test_a_router_that_waits_for_pages_lets_no_node_run_out_of_them() -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = mixed((9, 17, 33, 5, 20, 31, 12, 26), max_tokens=40)
        await consume_all(cluster, streams, within_s=0.2)
        assert_whole(streams)
        assert [node.status.counters["preemptions"] for node in cluster.nodes.values()] == [0, 0, 0]
        assert cluster.stats.snapshot()["paceline_router_queue_seconds_count"] > 0

    engine = {"D": {"num_pages": 40, "reserve_tokens": 1}}
    simulate(SimConfig(num_decode=2, engine=engine), scenario, num_pairs=2)


# prefixes


def cached_share(policy: str) -> float:
    """The share of prompt tokens that came from a cache, when 60 requests begin in one of 9 ways, of which
    any one prefill node's cache holds 3 and a bit."""
    shares: list[float] = []

    async def scenario(cluster: SimCluster) -> None:
        rng = random.Random(3)
        beginnings = [prompt_of(48, seed=100 + number) for number in range(9)]
        sampling = SamplingParams(seed=0, max_tokens=2, temperature=0.0)
        streams = [
            Stream(
                request=GenerateRequest(
                    prompt_ids=(*rng.choice(beginnings), *prompt_of(4, seed=number)), sampling=sampling
                )
            )
            for number in range(60)
        ]
        await consume_all(cluster, streams, within_s=40.0)
        outcomes = [each.outcome for each in streams if each.outcome is not None]
        num_prompt_tokens = sum(len(each.request.prompt_ids) for each in streams)
        shares.append(sum(outcome.cached_tokens for outcome in outcomes) / num_prompt_tokens)

    config = SimConfig(
        num_prefill=3,
        num_decode=1,
        algorithm="none",
        engine={"P": {"num_pages": 52}},
        dispatch=DispatchConfig(policy=policy),
    )
    simulate(config, scenario, num_pairs=3)
    return shares[0]


def test_the_prefix_policy_finds_more_in_the_caches_than_least_load() -> None:
    by_load, by_prefix = cached_share("least_load"), cached_share("prefix")
    print(f"cached: least_load {by_load:.3f}, prefix {by_prefix:.3f}")
    assert by_prefix > 2 * by_load
    assert by_prefix > 0.7


# everything at once


@pytest.mark.parametrize("seed", range(5))
def test_any_mix_of_incidents_leaves_every_text_right(seed: int) -> None:
    rng = random.Random(seed)

    def faults(handle: WriteHandle) -> Fault:
        delay_s = rng.choice((0.0, rng.uniform(0.0, 0.05)))
        return Fault(
            delay_s=delay_s,
            failure="made to fail" if rng.random() < 0.02 else "",
            num_duplicates=int(delay_s == 0.0),
            ignores_cancel=rng.random() < 0.5,
        )

    async def incident(cluster: SimCluster) -> None:
        prefill, decode = rng.choice(("P0", "P1")), rng.choice(("D0", "D1", "D2"))
        match rng.randrange(5):
            case 0:
                await cluster.restart(prefill)
            case 1:
                await cluster.restart(decode)
            case 2:
                cluster.cut_session(prefill, decode, data=rng.random() < 0.5)
            case 3:
                cluster.network.cut(rng.choice((prefill, decode)), "router")
            case 4:
                await cluster.drain(decode)
                cluster.start(decode)

    async def scenario(cluster: SimCluster) -> None:
        streams = mixed([rng.randrange(1, 200) for _ in range(24)], max_tokens=30)
        doomed = stream(150, variant=99, max_tokens=100)

        async def incidents() -> None:
            async with asyncio.TaskGroup() as group:
                leaving = group.create_task(cluster.generate(doomed))
                for _ in range(5):
                    await asyncio.sleep(rng.uniform(0.05, 0.5))
                    await incident(cluster)
                leaving.cancel()

        await consume_during(cluster, streams, incidents(), within_s=1.5)
        assert_beginning(doomed)
        await cluster.until_ready(6)

    config = SimConfig(
        seed=seed,
        num_prefill=2,
        num_decode=3,
        faults=faults,
        dispatch=PATIENT,
        engine={"P": {"chunk_tokens": 32}, "D": {"num_pages": 120, "reserve_tokens": 16}},
    )
    simulate(config, scenario, num_pairs=6)
