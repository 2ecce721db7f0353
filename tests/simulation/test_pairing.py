"""How pairs of nodes find together again after what only lasts a while."""

import asyncio

import pytest

from tests.simulation.cluster import SimCluster, SimConfig, running_cluster
from tests.simulation.test_cluster import (
    assert_whole,
    attempts,
    consume_all,
    consume_during,
    mixed,
    simulate,
    stream,
)
from tests.simulation.virtual_loop import run_virtual


@pytest.mark.parametrize("address", ["P0", "D0"])
def test_a_pair_whose_data_plane_cannot_be_connected_yet_is_not_given_up(address: str) -> None:
    async def main() -> None:
        async with running_cluster(SimConfig()) as cluster:
            transport = cluster.fabric.member(cluster.nodes[address].incarnation)
            assert transport is not None
            cluster.fabric.leave(transport)
            await asyncio.sleep(10.0)
            assert sum(node.status.counters.get("peers_refused", 0) for node in cluster.nodes.values()) > 1
            assert [pair["state"] for pair in cluster.pairs.report()["pairs"]] != ["refused"]
            cluster.fabric.join(transport)
            await cluster.until_ready(1)
            streams = mixed((9, 40))
            await consume_all(cluster, streams)
            assert_whole(streams)
            await cluster.at_rest()

    run_virtual(main())


@pytest.mark.parametrize("checksums", [False, True])
def test_a_prefill_node_that_computes_slowly_is_waited_for(checksums: bool) -> None:
    """A large model on few cores: every chunk takes longer than pages may be under way."""

    async def scenario(cluster: SimCluster) -> None:
        slow = stream(100, max_tokens=3)
        await consume_all(cluster, [slow])
        assert_whole([slow])
        assert slow.outcome is not None
        assert slow.outcome.attempts == 1

    config = SimConfig(step_s=15.0, checksums=checksums, engine={"P": {"chunk_tokens": 16}})
    simulate(config, scenario, num_pairs=1)


def test_a_node_that_comes_back_is_put_to_use_while_others_have_minutes_of_work() -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = [stream(160, variant=number, max_tokens=2) for number in range(12)]

        async def incident() -> None:
            await asyncio.sleep(5.0)
            cluster.start("D1")
            await cluster.until_ready(2)
            assert asyncio.get_running_loop().time() < 30.0

        await consume_during(cluster, streams, incident())

    engine = {"P": {"chunk_tokens": 16, "num_pages": 600}, "D": {"num_pages": 600, "reserve_tokens": 2}}
    simulate(SimConfig(step_s=1.0, engine=engine), scenario, num_pairs=1)


def test_prompts_that_wait_long_for_their_turn_on_the_prefill_node_are_waited_for() -> None:
    """Decode has pages for all of them at once, prefill computes one after the other for minutes."""

    async def scenario(cluster: SimCluster) -> None:
        streams = [stream(160, variant=number, max_tokens=2) for number in range(12)]
        await consume_all(cluster, streams)
        assert_whole(streams)
        assert asyncio.get_running_loop().time() > 100.0
        assert attempts(streams) == [1] * 12

    engine = {"P": {"chunk_tokens": 16, "num_pages": 600}, "D": {"num_pages": 600, "reserve_tokens": 2}}
    simulate(SimConfig(step_s=1.0, engine=engine), scenario, num_pairs=1)


def test_a_pair_that_lost_sight_of_each_other_is_left_alone_until_it_is_back() -> None:
    """The router reaches both nodes all the while, so only their own word tells."""

    async def scenario(cluster: SimCluster) -> None:
        cluster.network.part("P0", "D0")
        cluster.fabric.cut(cluster.nodes["P0"].incarnation, cluster.nodes["D0"].incarnation)
        slowest_s = []
        for _ in range(6):
            streams = [stream(20, variant=number, max_tokens=3) for number in range(4)]
            await consume_all(cluster, streams, within_s=1.0)
            assert_whole(streams)
            slowest_s.append(max(each.outcome.timings.total_s for each in streams if each.outcome))
            await asyncio.sleep(10.0)
        assert max(slowest_s) < 15.0
        assert slowest_s[-1] < 1.0
        assert len(cluster.pairs.ready()) == 3
        cluster.network.rejoin("P0")
        await cluster.until_ready(4)

    simulate(SimConfig(num_prefill=2, num_decode=2), scenario, num_pairs=4)
