"""The clusters that several modules share; each is started once."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import dataclass

import pytest
import pytest_asyncio

from deploy.models import bundled
from tests.integration.cluster import SETTLE_S, Cluster, Router, running_cluster
from tests.integration.collector import Collector, running_collector
from tests.integration.reference import (
    CHATS,
    COUNTING,
    LENGTHS,
    TEXTS,
    Reference,
    chat_ids,
    prompt_of,
    tokenizer,
)

NUM_TOKENS = 8
NUM_LONG_TOKENS = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class FourPairs:
    """One prefill node and four decode nodes: each transport with and without drafting.

    `router` goes round them, so four requests in turn, or one with n = 4, reach all of them; `colocated`
    lets the same decode nodes compute the prompts themselves.
    """

    cluster: Cluster
    router: Router
    colocated: Router
    collector: Collector

    async def settle(self, *, within_s: float = SETTLE_S) -> None:
        await self.cluster.settle(within_s=within_s)


@pytest.fixture(scope="session")
def reference() -> Reference:
    known = Reference()
    texts = [tuple(tokenizer()(text).input_ids) for text in TEXTS]
    prompts = [*map(prompt_of, LENGTHS), *texts, *map(chat_ids, CHATS)]
    counting = tuple(tokenizer()(COUNTING).input_ids)
    known.need({**dict.fromkeys(prompts, NUM_TOKENS), counting: NUM_LONG_TOKENS})
    return known


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def four_pairs(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[FourPairs]:
    folder = tmp_path_factory.mktemp("four-pairs")
    async with running_collector() as collector, running_cluster(bundled(), folder) as cluster:
        watched = {"otlp_endpoint": collector.endpoint, "log_format": "json"}
        common = {"dtype": "float32", "chunk_tokens": 64, "num_pages": 700, **watched}
        await asyncio.gather(
            cluster.node("prefill", "prefill", max_running=4, **common),
            *(
                cluster.node(
                    f"{algorithm}-{transport}",
                    "decode",
                    algorithm=algorithm,
                    transport=transport,
                    checksums=True,
                    **common,
                )
                for algorithm in ("ngram", "none")
                for transport in ("nixl", "grpc")
            ),
        )
        router, colocated = await asyncio.gather(
            cluster.router(policy="round_robin", **watched),
            cluster.router("colocated", policy="round_robin", colocated=True),
        )
        await router.until_ready(num_pairs=4)
        await colocated.until_ready(num_pairs=4)
        await cluster.settle()
        yield FourPairs(cluster=cluster, router=router, colocated=colocated, collector=collector)
