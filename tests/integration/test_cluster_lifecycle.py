"""Nodes that come in any order, do not fit, die and come back: what clients see of it is only time."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from tests.integration.cluster import Cluster, Json, Node, Router, eventually, running_cluster
from tests.integration.tiny_text import greedy_reference, tiny_text_folder

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(180)]

NODE: Json = {"dtype": "float32", "num_pages": 1200, "chunk_tokens": 16, "checksums": True}
READY_S = 60.0
STORM_SEED = 5
NUM_PROMPT, NUM_OUTPUT = 40, 200
GREEDY: Json = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
SEEDED: Json = {**GREEDY, "temperature": 1.0, "seed": 12345}


def prompt(length: int, *, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(256) for _ in range(length)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def two_by_two(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Cluster, Router]]:
    async with running_cluster(tiny_text_folder(), tmp_path_factory.mktemp("two-by-two")) as cluster:
        router, *_ = await asyncio.gather(
            cluster.router(),
            cluster.node("p0", "prefill", **NODE),
            cluster.node("p1", "prefill", **NODE),
            cluster.node("d0", "decode", **NODE),
            cluster.node("d1", "decode", **NODE),
        )
        await router.until_ready(num_pairs=4)
        yield cluster, router


async def test_roles_start_in_any_order_and_a_pair_that_differs_is_named_and_never_used(
    tmp_path: Path,
) -> None:
    async with running_cluster(tiny_text_folder(), tmp_path) as cluster:
        router = await cluster.router()
        await says(router, 503, [])
        await cluster.node("d", "decode", **NODE)
        await says(router, 503, [])
        await cluster.node("small-pages", "prefill", page_size=8, **NODE)
        (pair,) = await says(router, 503, ["refused"])
        assert "page_size: '8'" in pair["reason"]
        assert "'16'" in pair["reason"]
        refused = await router.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_pair")
        fitting = await cluster.node("p", "prefill", **NODE)
        await says(router, 200, ["ready", "refused"])
        for seed in range(4):
            answer = await router.complete(prompt=prompt(20, seed=seed), max_tokens=3, **GREEDY)
            assert answer["paceline"]["prefill"] == fitting.address
        await cluster.settle()
        await cluster.end("small-pages")
        await says(router, 200, ["ready"])


async def says(router: Router, status: int, states: list[str]) -> list[Json]:
    """What /ready comes to say: its status and the states of its pairs."""

    async def missing() -> str:
        found, report = await router.report()
        have = sorted(pair["state"] for pair in report.get("pairs", ()))
        return "" if (found, have) == (status, states) else f"{status} {states}, not {found} {report}"

    await eventually(missing, within_s=READY_S)
    pairs: list[Json] = (await router.report())[1]["pairs"]
    return pairs


async def test_a_prefill_node_killed_amid_a_prompt_costs_only_time(
    two_by_two: tuple[Cluster, Router],
) -> None:
    cluster, router = two_by_two
    long = prompt(6000)
    asked = asyncio.ensure_future(router.complete(prompt=long, max_tokens=8, **GREEDY))
    victim = await busy(cluster, "prefill", "prompt_tokens", 320)
    await cluster.kill(victim.name)
    answer = await asked
    assert answer["choices"][0]["token_ids"] == greedy_reference(long, 8)
    assert answer["paceline"]["attempts"] == 2
    assert answer["paceline"]["prefill"] != victim.address
    await cluster.settle()
    await comes_back(cluster, router, victim)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_decode_node_killed_amid_a_stream_leaves_the_text_as_it_would_have_been(
    two_by_two: tuple[Cluster, Router], sampling: Json
) -> None:
    cluster, router = two_by_two
    body = {"prompt": prompt(NUM_PROMPT), "max_tokens": NUM_OUTPUT, **sampling}
    whole = (await router.complete(**body))["choices"][0]
    if sampling is GREEDY:
        assert whole["token_ids"] == greedy_reference(prompt(NUM_PROMPT), NUM_OUTPUT)
    victim: Node | None = None
    ids: list[int] = []
    text = ""
    last: Json = {}
    async for chunk in router.chunks(**body, stream_options={"include_usage": True}):
        for choice in chunk["choices"]:
            ids += choice.get("token_ids", [])
            text += choice["text"]
        if victim is None and len(ids) >= 5:
            victim = await busy(cluster, "decode", "output_tokens", 1)
            await cluster.kill(victim.name)
        last = chunk
    assert victim is not None
    assert (ids, text) == (whole["token_ids"], whole["text"])
    assert last["usage"]["completion_tokens"] == NUM_OUTPUT
    assert last["usage"]["prompt_tokens"] == NUM_PROMPT
    assert (last["paceline"]["attempts"], last["paceline"]["decode"] != victim.address) == (2, True)
    await cluster.settle()
    await comes_back(cluster, router, victim)


async def busy(cluster: Cluster, role: str, fact: str, by: int) -> Node:
    """The node of a role that runs the one request there is, once a counter of it has grown by so much."""
    nodes = [node for node in cluster.nodes.values() if node.role == role]
    start = {node.name: (await node.status()).counters[fact] for node in nodes}
    found: list[Node] = []

    async def missing() -> str:
        for node in nodes:
            status = await node.status()
            if status.running and status.counters[fact] - start[node.name] >= by:
                found.append(node)
        return "" if found else f"a {role} node at work"

    await eventually(missing, within_s=READY_S)
    return found[0]


async def comes_back(cluster: Cluster, router: Router, victim: Node) -> None:
    """Started again at the same address it is a full member, and nobody else needs to be restarted."""
    port = victim.address.rpartition(":")[2]
    await cluster.node(victim.name, victim.role, port=port, **NODE)
    await router.until_ready(num_pairs=4)
    answers = await asyncio.gather(
        *(router.complete(prompt=prompt(30, seed=seed), max_tokens=6, **GREEDY) for seed in range(12))
    )
    assert {answer["paceline"]["attempts"] for answer in answers} == {1}
    assert victim.address in {answer["paceline"][victim.role] for answer in answers}
    await cluster.settle()


async def test_a_storm_of_clients_that_leave_at_any_moment_leaks_nothing(
    two_by_two: tuple[Cluster, Router],
) -> None:
    """They all use one request id, which must not mix them up either."""
    cluster, router = two_by_two
    print("storm seed", STORM_SEED)
    rng = random.Random(STORM_SEED)

    async def leaves(number: int, after_s: float) -> None:
        body: Json = {"prompt": prompt(rng.randrange(1, 1500), seed=number), "max_tokens": 400, **GREEDY}
        sending = router.http.post("/v1/completions", json=body, headers={"x-request-id": "storm"})
        try:
            async with asyncio.timeout(after_s):
                await sending
        except TimeoutError:
            pass

    for turn in range(3):
        probe = router.complete(prompt=prompt(50), max_tokens=20, **GREEDY)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(probe)
            for number in range(20):
                group.create_task(leaves(100 * turn + number, rng.uniform(0.0, 1.5)))
        assert answer.result()["choices"][0]["token_ids"] == greedy_reference(prompt(50), 20)
        await cluster.settle()


async def test_a_node_told_to_stop_finishes_what_it_runs(two_by_two: tuple[Cluster, Router]) -> None:
    cluster, router = two_by_two
    body = {"prompt": prompt(NUM_PROMPT), "max_tokens": NUM_OUTPUT, **GREEDY}
    asked = asyncio.ensure_future(router.complete(**body))
    leaving = await busy(cluster, "decode", "output_tokens", 1)
    ending = asyncio.ensure_future(cluster.end(leaving.name))
    answer = await asked
    assert answer["choices"][0]["token_ids"] == greedy_reference(prompt(NUM_PROMPT), NUM_OUTPUT)
    assert answer["paceline"]["attempts"] == 1
    await ending
    after = await router.complete(**body)
    assert after["paceline"]["decode"] != leaving.address
    await cluster.settle()
    await comes_back(cluster, router, leaving)
