"""Nodes that come in any order, do not fit, die and come back: what clients see of it is only time."""

import asyncio
import os
import random
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from tests.integration.cluster import Cluster, Json, Node, Router, eventually, running_cluster
from tests.integration.tiny_text import greedy_reference, tiny_text_folder

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(600)]

NODE: Json = {"dtype": "float32", "num_pages": 1200, "chunk_tokens": 16, "checksums": True}
READY_S = 120.0
STORM_SEED = 5
DECODE: Json = {
    **NODE,
    "draft_options": "num_draft_tokens=2",
}  # an answer takes many rounds, so that something can happen amid it
NUM_PROMPT, NUM_OUTPUT = 1500, 400
NUM_KILLED_OUTPUT = 600  # it must last until the node is dead, even where that takes half a second
GREEDY: Json = {"temperature": 0, "ignore_eos": True, "return_token_ids": True}
# With this seed no coin falls so close to the border of two tokens that rounding could decide between them.
SEEDED: Json = {**GREEDY, "temperature": 1.0, "seed": 8}
ROLES: Json = {"p0": "prefill", "p1": "prefill", "d0": "decode", "d1": "decode"}


def prompt(length: int, *, seed: int = 0) -> list[int]:
    rng = random.Random(f"{length} {seed}")
    return [rng.randrange(256) for _ in range(length)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def shared(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[tuple[Cluster, Router]]:
    async with running_cluster(tiny_text_folder(), tmp_path_factory.mktemp("two-by-two")) as cluster:
        nodes = asyncio.gather(*(start(cluster, name) for name in ROLES))
        router, _ = await asyncio.gather(cluster.router(), nodes)
        yield cluster, router


@pytest_asyncio.fixture(loop_scope="module")
async def two_by_two(shared: tuple[Cluster, Router]) -> tuple[Cluster, Router]:
    """All four nodes are there, even where the test before failed when it had killed one."""
    cluster, router = shared
    await asyncio.gather(*(start(cluster, name) for name in ROLES.keys() - cluster.nodes.keys()))
    await router.until_ready(num_pairs=4)
    return shared


async def start(cluster: Cluster, name: str, **options: object) -> None:
    role = ROLES[name]
    await cluster.node(name, role, **options, **(DECODE if role == "decode" else NODE))


async def test_roles_start_in_any_order_and_a_pair_that_differs_is_named_and_never_used(
    tmp_path: Path,
) -> None:
    async with running_cluster(tiny_text_folder(), tmp_path) as cluster:
        router = await cluster.router()
        await says(router, 503, [])
        await cluster.node("d", "decode", **NODE)
        await says(router, 503, [])
        others: dict[str, tuple[Json, str]] = {
            "page_size": ({"page_size": 8}, "page_size: '8' here, '16' there"),
            "dtype": ({"dtype": "bfloat16"}, "dtype: 'bfloat16' here, 'float32' there"),
            "model": ({"served_model_name": "other"}, "model: 'other' here, 'tiny-0.1' there"),
        }
        differing = await asyncio.gather(
            *(cluster.node(name, "prefill", **NODE | options) for name, (options, _) in others.items())
        )
        pairs = await says(router, 503, ["refused"] * 3)
        assert {pair["prefill"]: pair["reason"] for pair in pairs} == {
            node.address: f"{node.address}: refused at handshake: {others[node.name][1]}"
            for node in differing
        }
        refused = await router.http.post("/v1/completions", json={"prompt": "hi", "max_tokens": 1})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_ready_pair")
        fitting = await cluster.node("p", "prefill", **NODE)
        await says(router, 200, ["ready", *["refused"] * 3])
        for seed in range(4):
            answer = await router.complete(prompt=prompt(20, seed=seed), max_tokens=3, **GREEDY)
            assert answer["paceline"]["prefill"] == fitting.address
        await cluster.settle()
        await asyncio.gather(*(cluster.end(node.name) for node in differing))
        await says(router, 200, ["ready"])


async def says(router: Router, status: int, states: list[str]) -> list[Json]:
    """What /ready comes to say: its status and the states of its pairs."""
    pairs: list[Json] = []

    async def missing() -> str:
        found, report = await router.report()
        pairs[:] = report.get("pairs", ())
        have = sorted(pair["state"] for pair in pairs)
        return "" if (found, have) == (status, states) else f"{status} {states}, not {found} {report}"

    await eventually(missing, within_s=READY_S)
    return pairs


async def test_a_prefill_node_killed_amid_a_prompt_costs_only_time(
    two_by_two: tuple[Cluster, Router],
) -> None:
    cluster, router = two_by_two
    long = prompt(6000)
    asked = asyncio.ensure_future(router.complete(prompt=long, max_tokens=8, **GREEDY))
    victim = await busy(cluster, "prefill", num_prompt_tokens=320)
    await cluster.kill(victim.name)
    answer = await asked
    unbroken = await router.complete(prompt=long, max_tokens=8, cache_salt="unbroken", **GREEDY)
    assert answer["choices"][0]["token_ids"] == unbroken["choices"][0]["token_ids"]
    assert answer["paceline"]["attempts"] == 2
    assert answer["paceline"]["prefill"] != victim.address
    await cluster.settle()
    await comes_back(cluster, router, victim)


@pytest.mark.parametrize("sampling", [GREEDY, SEEDED], ids=["greedy", "seeded"])
async def test_a_decode_node_killed_amid_a_stream_leaves_the_text_as_it_would_have_been(
    two_by_two: tuple[Cluster, Router], sampling: Json
) -> None:
    cluster, router = two_by_two
    body = {"prompt": prompt(NUM_PROMPT), "max_tokens": NUM_KILLED_OUTPUT, **sampling}
    whole = (await router.complete(**body))["choices"][0]
    if sampling is GREEDY:
        assert whole["token_ids"][:8] == greedy_reference(prompt(NUM_PROMPT), 8)
    story = await amid_decode(cluster, router, body, cluster.kill)
    assert (story.ids, story.text) == (whole["token_ids"], whole["text"])
    assert story.last["usage"]["completion_tokens"] == NUM_KILLED_OUTPUT
    assert story.last["usage"]["prompt_tokens"] == NUM_PROMPT
    assert story.last["paceline"]["attempts"] == 2
    assert story.last["paceline"]["decode"] != story.decode.address
    await cluster.settle()
    await comes_back(cluster, router, story.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Story:
    """A stream that something happened to: what came of it, and the decode node it happened on."""

    ids: list[int]
    text: str
    last: Json
    decode: Node


async def amid_decode(
    cluster: Cluster, router: Router, body: Json, act: Callable[[str], Awaitable[None]]
) -> Story:
    """Stream a completion whose prompt no cache holds; do something to its decode node amid the answer."""
    finding = asyncio.ensure_future(busy(cluster, "decode"))  # while the prompt is computed
    ids: list[int] = []
    text, last, decode = "", {}, None
    salt = f"amid {body['max_tokens']} {body.get('seed')}"  # of each test another one
    salted = {**body, "cache_salt": salt, "stream_options": {"include_usage": True}}
    async for chunk in router.chunks(**salted):
        for choice in chunk["choices"]:
            ids += choice.get("token_ids", [])
            text += choice["text"]
        if decode is None and len(ids) >= 5:
            decode = await finding
            await act(decode.name)
        last = chunk
    assert decode is not None
    return Story(ids=ids, text=text, last=last, decode=decode)


async def busy(cluster: Cluster, role: str, *, num_prompt_tokens: int = 0) -> Node:
    """The node of a role that has the one request there is, once it has computed so many tokens of it."""
    nodes = [node for node in cluster.nodes.values() if node.role == role]
    start = {node.name: (await node.status()).counters["prompt_tokens"] for node in nodes}
    found: list[Node] = []

    async def missing() -> str:
        for node in nodes:
            status = await node.status()
            has_work = status.running or status.waiting
            if has_work and status.counters["prompt_tokens"] - start[node.name] >= num_prompt_tokens:
                found.append(node)
        return "" if found else f"a {role} node at work"

    await eventually(missing, within_s=READY_S)
    return found[0]


async def comes_back(cluster: Cluster, router: Router, victim: Node) -> None:
    """Started again at the same address it is a full member, and nobody else needs to be restarted."""
    await start(cluster, victim.name, port=victim.address.rpartition(":")[2])
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
        probe = router.complete(prompt=prompt(50), max_tokens=12, **GREEDY)
        async with asyncio.TaskGroup() as group:
            answer = group.create_task(probe)
            for number in range(20):
                group.create_task(leaves(100 * turn + number, rng.uniform(0.0, 1.5)))
        assert answer.result()["choices"][0]["token_ids"] == greedy_reference(prompt(50), 12)
        await cluster.settle()


async def test_a_router_killed_amid_streams_leaves_nothing_on_the_nodes_and_another_goes_on(
    two_by_two: tuple[Cluster, Router],
) -> None:
    cluster, router = two_by_two
    doomed = await cluster.router("doomed")
    await doomed.until_ready(num_pairs=4)
    streams = [
        doomed.chunks(prompt=prompt(length), max_tokens=6000, **GREEDY) for length in (1, 33, 200, NUM_PROMPT)
    ]
    for stream in streams:
        await anext(stream)
    os.killpg(doomed.child.pid, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(httpx.TransportError):
            _ = [chunk async for chunk in stream]
    await cluster.settle()
    answer = await router.complete(prompt=prompt(33), max_tokens=8, **GREEDY)
    assert answer["choices"][0]["token_ids"] == greedy_reference(prompt(33), 8)
    await cluster.settle()


async def test_a_node_told_to_stop_finishes_what_it_runs(two_by_two: tuple[Cluster, Router]) -> None:
    cluster, router = two_by_two
    body = {"prompt": prompt(NUM_PROMPT), "max_tokens": NUM_OUTPUT, **GREEDY}
    async with asyncio.TaskGroup() as group:

        async def end(name: str) -> None:
            group.create_task(cluster.end(name))

        story = await amid_decode(cluster, router, body, end)
    whole = (await router.complete(**body))["choices"][0]
    assert (story.ids, story.text) == (whole["token_ids"], whole["text"])
    assert story.last["paceline"]["attempts"] == 1
    assert story.last["paceline"]["decode"] == story.decode.address
    await router.until_ready(num_pairs=2)
    after = await router.complete(**body)
    assert after["paceline"]["decode"] != story.decode.address
    await cluster.settle()
    await comes_back(cluster, router, story.decode)
