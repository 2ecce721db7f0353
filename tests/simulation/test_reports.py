"""Reports against other systems that need real nodes to be seen (shared/checks/reports.md: R15, K12)."""

import asyncio
from dataclasses import replace

import pytest

from router.requests import GenerateRequest, SamplingParams
from tests.conformance.test_loop import prompt_of
from tests.node_pair import NodePair
from tests.simulation.cluster import SimCluster, SimConfig, Stream
from tests.simulation.test_cluster import assert_whole, simulate, stream
from wire.work import Rejected


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingParams(seed=0, max_tokens=20, temperature=0.0),
        SamplingParams(seed=0, max_tokens=24, temperature=0.0, min_tokens=20),
        SamplingParams(seed=0, max_tokens=12, temperature=0.0, logprobs=2),
    ],
)
def test_r15_prefill_emits_one_token_and_hands_over_once_a_request(sampling: SamplingParams) -> None:
    async def scenario(cluster: SimCluster) -> None:
        before = dict(cluster.nodes["P0"].status.counters)
        streams = [
            Stream(request=GenerateRequest(prompt_ids=tuple(prompt_of(9, seed=one)), sampling=sampling))
            for one in range(3)
        ]
        for each in streams:
            await cluster.generate(each)
        assert_whole(streams)
        after = cluster.nodes["P0"].status.counters
        assert after["output_tokens"] - before["output_tokens"] == 3
        assert after["handed_over"] - before["handed_over"] == 3

    simulate(SimConfig(), scenario, num_pairs=1)


def test_k12_requests_with_one_label_each_get_their_own_text() -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = [stream(length, variant=length) for length in (9, 17, 30)]
        for each in streams:
            each.request = replace(each.request, label="same")
        doomed = stream(40, variant=7, max_tokens=60)
        doomed.request = replace(doomed.request, label="same")
        async with asyncio.TaskGroup() as group:
            leaving = group.create_task(cluster.generate(doomed))
            for each in streams:
                group.create_task(cluster.generate(each))
            await asyncio.sleep(0.05)
            leaving.cancel()
        assert_whole(streams)

    simulate(SimConfig(), scenario, num_pairs=1)


def test_k12_a_transfer_id_sent_twice_is_refused_and_the_first_goes_on() -> None:
    pair = NodePair()
    tid = pair.submit("r", prompt_of(9))
    pair.step()
    before = {name: len(events) for name, events in pair.events.items()}
    pair.submit("r", prompt_of(17))
    for name, events in pair.events.items():
        codes = [event.code for event in events[before[name] :] if isinstance(event, Rejected)]
        assert codes == ["duplicate"]
        del events[before[name] :]
    pair.run()
    assert len(pair.tokens(tid)) == 12
    assert pair.is_at_rest()
