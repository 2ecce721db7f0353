"""64 streams at once, a fifth of which hang up somewhere in the middle; processes show each other a token.

PACELINE_SOAK_S says for how long; the default is enough to see a leak of one page or socket a hang-up.
PACELINE_SOAK_SEED says which prompts: one in a hundred sets has two next tokens that rounding may swap.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path

import httpx
import msgspec
import pytest
import pytest_asyncio

from tests.integration.cluster import Cluster, Json, Router, chunks_of, eventually, running_cluster
from tests.integration.tiny_text import tiny_text_folder
from wire.security import ClusterSecurity

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]

SOAK_S = float(os.environ.get("PACELINE_SOAK_S", "8"))
SOAK_SEED = int(os.environ.get("PACELINE_SOAK_SEED", "6"))
NUM_STREAMS = 64
NUM_PROMPTS = 16
MAX_TOKENS = 64
LEAVING = 0.2
TOKEN = "the token of the soaked cluster"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster_and_router(
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[tuple[Cluster, Router]]:
    common: Json = {"dtype": "float32", "chunk_tokens": 64, "num_pages": 1200, "cluster_token": TOKEN}
    async with running_cluster(
        tiny_text_folder(), tmp_path_factory.mktemp("soak"), security=ClusterSecurity(cluster_token=TOKEN)
    ) as cluster:
        await asyncio.gather(
            cluster.node("prefill", "prefill", **common),
            cluster.node("nixl", "decode", transport="nixl", max_running=32, **common),
            cluster.node("grpc", "decode", transport="grpc", max_running=32, checksums=True, **common),
        )
        router = await cluster.router(policy="round_robin", max_in_flight=128, cluster_token=TOKEN)
        await router.until_ready(num_pairs=2)
        yield cluster, router


class Soak:
    """Asks again and again; knows what each answer must be."""

    def __init__(self, http: httpx.AsyncClient, rng: random.Random) -> None:
        self._http = http
        self._rng = rng
        self._prompts = [[rng.randrange(256) for _ in range(rng.randint(1, 300))] for _ in range(NUM_PROMPTS)]
        self._solo: list[list[int]] = []
        self.num_read = 0
        self.num_left = 0

    def use(self, http: httpx.AsyncClient) -> None:
        self._http = http

    async def learn(self) -> None:
        """Each prompt alone, to its full length."""
        for prompt in self._prompts:
            self._solo.append(await self._read(prompt, MAX_TOKENS))

    async def stream(self, until: float) -> None:
        while time.monotonic() < until:
            index, count = self._rng.randrange(NUM_PROMPTS), self._rng.randint(1, MAX_TOKENS)
            expected = self._solo[index][:count]
            if self._rng.random() < LEAVING:
                await self._leave(self._prompts[index], count, after_s=self._rng.random() * 0.5)
                continue
            assert await self._read(self._prompts[index], count) == expected
            self.num_read += 1

    async def _leave(self, prompt: list[int], count: int, *, after_s: float) -> None:
        """Hang up. On a bare socket: httpx may lose one when it is cancelled while connecting."""
        url = self._http.base_url
        body = msgspec.json.encode({**asked(prompt, count), "stream": True})
        head = f"POST /v1/completions HTTP/1.1\r\nhost: {url.host}\r\ncontent-length: {len(body)}\r\n\r\n"
        _, writer = await asyncio.open_connection(url.host, url.port)
        async with closed_at_the_end(writer):
            writer.write(head.encode() + body)
            await asyncio.sleep(after_s)
        self.num_left += 1

    async def _read(self, prompt: list[int], count: int) -> list[int]:
        ids: list[int] = []
        async with aclosing(chunks_of(self._http, asked(prompt, count))) as chunks:
            async for chunk in chunks:
                ids += chunk["choices"][0].get("token_ids", [])
        return ids


def asked(prompt: list[int], count: int) -> Json:
    return {
        "prompt": prompt,
        "max_tokens": count,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }


@asynccontextmanager
async def closed_at_the_end(writer: asyncio.StreamWriter) -> AsyncIterator[None]:
    try:
        yield
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()


def num_sockets(cluster: Cluster) -> dict[str, int]:
    """Open sockets of every process of the cluster, but for those to the registry: its client opens a second
    one whenever two of its calls happen to meet, and keeps it."""
    port = int(cluster.registry.rpartition(":")[2].partition("/")[0])
    counts: dict[str, int] = {}
    for child in cluster.children:
        process = Path(f"/proc/{child.pid}")
        connections = [line.split() for line in (process / "net" / "tcp").read_text().splitlines()[1:]]
        to_registry = {f"socket:[{words[9]}]" for words in connections if words[2].endswith(f":{port:04X}")}
        targets = [_target(fd) for fd in (process / "fd").iterdir()]
        counts[child.log.name] = sum(
            target.startswith("socket:") and target not in to_registry for target in targets
        )
    return counts


def _target(fd: Path) -> str:
    try:
        return f"{fd.readlink()}"
    except FileNotFoundError:
        return ""  # closed since it was listed


async def test_who_stays_gets_its_solo_text_and_all_comes_to_rest(
    cluster_and_router: tuple[Cluster, Router],
) -> None:
    cluster, router = cluster_and_router
    print(f"seed {SOAK_SEED}")
    limits = httpx.Limits(max_connections=NUM_STREAMS)
    async with httpx.AsyncClient(base_url=router.http.base_url, timeout=120, limits=limits) as http:
        soak = Soak(http, random.Random(SOAK_SEED))
        await soak.learn()
        await cluster.settle()
    before = num_sockets(cluster)
    async with httpx.AsyncClient(base_url=router.http.base_url, timeout=120, limits=limits) as http:
        soak.use(http)
        until = time.monotonic() + SOAK_S
        async with asyncio.TaskGroup() as group:
            for _ in range(NUM_STREAMS):
                group.create_task(soak.stream(until))
    await cluster.settle()
    assert soak.num_read > NUM_STREAMS // 2
    assert soak.num_left > 0

    async def open_sockets() -> str:
        now = num_sockets(cluster)
        more = {name: count - before[name] for name, count in now.items() if count > before[name]}
        return f"sockets left open: {more}" if more else ""

    await eventually(open_sockets, within_s=60.0)
    print(f"{soak.num_read} answers equal their solo text, {soak.num_left} streams hung up")
