"""A whole cluster in one process: real cores, hosts, registry view, links, pairs and dispatcher.

Owns starting, killing and restarting nodes, and what must hold of all of them. All that is not the
product's own is the clock, the network and the tiny model.
"""

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from decode_node.loop import DecodeLoop
from kv_transfer.ids import Incarnation
from kv_transfer.transport import WriteHandle
from kv_transfer.transports.memory import Fault, MemoryFabric, no_faults
from prefill_node.loop import PrefillLoop
from router.dispatch import DispatchConfig, Dispatcher
from router.links import LinkConfig, NodeLinks
from router.pairs import PairBook, PairConfig
from router.prefix_index import PrefixIndex
from router.requests import Delta, GenerateRequest, Outcome
from router.stats import RouterStats
from speculative.proposer import Proposer
from tests.engines import VOCAB_SIZE
from tests.node_pair import make_decode, make_prefill
from tests.simulation.driver import SimDriver
from wire.host import HostConfig, NodeHost
from wire.host_events import NodeCore, NodeStatus
from wire.memory_channel import MemoryNetwork
from wire.peering import PeerSearch
from wire.records import NodeRecord
from wire.registry import MemoryRegistry
from wire.registry_view import RegistryView

MAX_MODEL_LEN = 512
_TICK_S = 0.001


@dataclass(frozen=True, kw_only=True)
class SimConfig:
    """`engine` holds options of tests.engines.make_engine by node address, or by "P" and "D" for all.

    `draft` makes what decode nodes draft with, in place of `algorithm` with its defaults: an algorithm that
    needs nothing of the prefill node.
    Every message takes up to `max_delay_s`, every step that works `step_s` give or take a half; one in
    `1 / stall_share` of them `stall_s`.
    """

    seed: int = 0
    num_prefill: int = 1
    num_decode: int = 1
    algorithm: str = "ngram"
    draft: Callable[[], Proposer] | None = None
    step_s: float = 0.01
    stall_s: float = 0.0
    stall_share: float = 0.0
    checksums: bool = True
    max_delay_s: float = 0.002
    faults: Callable[[WriteHandle], Fault] = no_faults
    engine: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    dispatch: DispatchConfig = field(default_factory=DispatchConfig)
    pairs: PairConfig = field(default_factory=PairConfig)
    host: HostConfig = field(default_factory=HostConfig)


class SimNode:
    """One incarnation of a node, from `run` until it is killed or has drained."""

    def __init__(self, cluster: "SimCluster", address: str, incarnation: Incarnation) -> None:
        self.address = address
        self.incarnation = incarnation
        self._cluster = cluster
        self.core = self._build_core()
        self.driver = SimDriver(self.core, step_s=cluster.draw_step_s, on_step=cluster.check_core)
        is_decode = address.startswith("D")
        search = PeerSearch(
            connector=cluster.network.connector(address),
            view=RegistryView(cluster.registry),
            wants=lambda record: record.role == "prefill",
        )
        self.host = NodeHost(
            record=self._record("decode" if is_decode else "prefill"),
            driver=self.driver,
            registry=cluster.registry,
            search=search if is_decode else None,
            config=cluster.config.host,
        )
        self._task: asyncio.Task[None] | None = None

    @property
    def status(self) -> NodeStatus:
        return self.core.status()

    def start(self, group: asyncio.TaskGroup) -> None:
        self._task = group.create_task(self._run())

    async def kill(self) -> None:
        """Die without a word: nothing is handled, said or written after this moment."""
        self.driver.stop()
        self._leave()
        self._cluster.network.cut(self.address)
        await self._end()

    async def drain(self) -> None:
        """What SIGTERM does."""
        await self.host.stop()
        self.driver.stop()
        self._leave()
        await self._end()

    async def _end(self) -> None:
        assert self._task is not None, "start it first"
        self._task.cancel()
        await asyncio.wait([self._task])

    def _leave(self) -> None:
        transport = self._cluster.fabric.member(self.incarnation)
        if transport is not None:
            self._cluster.fabric.leave(transport)

    async def _run(self) -> None:
        network = self._cluster.network
        async with (
            network.serve(self.address, work=self.host.accept_work, session=self.host.accept_session),
            asyncio.TaskGroup() as group,
        ):
            group.create_task(self.driver.run())
            group.create_task(self.host.run())

    def _build_core(self) -> PrefillLoop | DecodeLoop:
        config, fabric = self._cluster.config, self._cluster.fabric
        kind = self.address[0]
        options: dict[str, Any] = {**config.engine.get(kind, {}), **config.engine.get(self.address, {})}
        hello = {"checksums": config.checksums}
        if kind == "P":
            return make_prefill(self.incarnation, fabric, hello=hello, **options)
        proposer = None if config.draft is None else config.draft()
        return make_decode(
            self.incarnation,
            fabric,
            algorithm=config.algorithm,
            proposer=proposer,
            hello=hello,
            **options,
        )

    def _record(self, role: str) -> NodeRecord:
        layout = self.core.hello().layout
        return NodeRecord(
            role=role,
            address=self.address,
            incarnation=self.incarnation,
            model="tiny",
            layout=layout.fingerprint,
            page_size=layout.page_size,
            max_model_len=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            transports=("memory",),
            started_at=asyncio.get_running_loop().time(),
        )


@dataclass(kw_only=True)
class Stream:
    """What one consumer has got so far: `ids` in order, each index once, or `error`."""

    request: GenerateRequest
    ids: list[int] = field(default_factory=list)
    outcome: Outcome | None = None


class SimCluster:
    """Create it with `running_cluster`. Nodes are named by address: P0, P1, ..., D0, D1, ..."""

    def __init__(self, config: SimConfig, group: asyncio.TaskGroup) -> None:
        self.config = config
        self.rng = random.Random(config.seed)
        self.network = MemoryNetwork(delay_s=lambda: self.rng.uniform(0.0, config.max_delay_s))
        self.registry = MemoryRegistry()
        self.fabric = MemoryFabric(clock=asyncio.get_running_loop().time, faults=config.faults)
        self.nodes: dict[str, SimNode] = {}
        self._num_started = itertools.count(1)
        self._group = group
        self._request_ids = map("r{}".format, itertools.count(1))
        self.stats = RouterStats()
        self._view = RegistryView(self.registry)
        self._links = NodeLinks(
            self._view,
            connector=self.network.connector("router"),
            router=Incarnation("router"),
            stats=self.stats,
            config=LinkConfig(),
            index=PrefixIndex() if config.dispatch.policy == "prefix" else None,
        )
        self.pairs = PairBook(self._links, stats=self.stats, new_id=self._new_id, config=config.pairs)
        self.dispatcher = Dispatcher(
            self._links, self.pairs, stats=self.stats, config=config.dispatch, new_id=self._new_id
        )

    def _new_id(self) -> str:
        return next(self._request_ids)

    def draw_step_s(self) -> float:
        is_stalled = self.config.stall_share > 0 and self.rng.random() < self.config.stall_share
        return self.config.stall_s if is_stalled else self.config.step_s * self.rng.uniform(0.5, 1.5)

    # nodes

    def start_all(self) -> list[asyncio.Task[None]]:
        """Start every node and the router; the tasks to cancel at the end."""
        for kind, count in (("P", self.config.num_prefill), ("D", self.config.num_decode)):
            for index in range(count):
                self.start(f"{kind}{index}")
        return [self._group.create_task(each.run()) for each in (self._view, self._links, self.pairs)]

    def start(self, address: str) -> SimNode:
        """A new incarnation at an address where nothing runs."""
        assert address not in self.nodes, f"{address} runs already"
        node = SimNode(self, address, Incarnation(f"{address}-{next(self._num_started)}"))
        self.nodes[address] = node
        node.start(self._group)
        return node

    async def kill(self, address: str) -> None:
        await self.nodes.pop(address).kill()

    async def restart(self, address: str) -> None:
        await self.kill(address)
        self.start(address)

    async def drain(self, address: str) -> None:
        await self.nodes[address].drain()
        del self.nodes[address]

    def cut_session(self, one: str, other: str, *, control: bool = True, data: bool = True) -> None:
        """Break what connects two nodes that both live on."""
        if data:
            self.fabric.cut(self.nodes[one].incarnation, self.nodes[other].incarnation)
        if control:
            self.network.cut(one, other)

    # requests

    async def generate(self, stream: Stream) -> tuple[int, ...]:
        """Consume one generation; every index must come exactly once and in order."""

        def take(delta: Delta) -> bool:
            assert stream.outcome is None, "nothing may follow the outcome"
            assert delta.first_index == len(stream.ids), f"{stream.request.label}: index order"
            stream.ids += delta.ids
            return True

        stream.outcome = await self.dispatcher.generate(stream.request, take)
        return tuple(stream.ids)

    # what must hold

    async def until(self, condition: Callable[[], bool], *, within_s: float = 120.0) -> None:
        """Look every millisecond until it holds."""
        async with asyncio.timeout(within_s):
            while not condition():  # noqa: ASYNC110  most of what is waited for has no event
                await asyncio.sleep(_TICK_S)

    async def until_ready(self, num_pairs: int) -> None:
        await self.until(lambda: len(self.pairs.ready()) == num_pairs)

    def check_core(self, core: NodeCore) -> None:
        problems = core.problems()
        assert not problems, f"at {asyncio.get_running_loop().time():.4f} s: {problems}"

    def check(self) -> None:
        """Every page of every live node has exactly one owner."""
        for node in self.nodes.values():
            self.check_core(node.core)

    async def at_rest(self, *, within_s: float = 120.0) -> None:
        """Everything comes back: pages, quarantine, tids, requests in flight."""
        try:
            await self.until(lambda: not self.unrest(), within_s=within_s)
        except TimeoutError:
            raise AssertionError(f"does not come to rest: {self.unrest()}") from None
        self.check()

    def unrest(self) -> list[str]:
        """What is still held, and by whom."""
        found = [f"{self.dispatcher.num_in_flight} in flight"] * (self.dispatcher.num_in_flight > 0)
        for address, node in self.nodes.items():
            status = node.status
            if not status.is_idle:
                found.append(f"{address} holds tids")
            if status.load.free_pages != status.load.total_pages:
                found.append(f"{address} has {status.load.free_pages} of {status.load.total_pages} pages")
            if status.quarantined_pages:
                found.append(f"{address} has {status.quarantined_pages} pages in quarantine")
        return found


@asynccontextmanager
async def running_cluster(config: SimConfig) -> AsyncIterator[SimCluster]:
    """A cluster while the block runs. A node or router task that fails ends the block."""
    print(f"seed {config.seed}")
    async with asyncio.TaskGroup() as group:
        cluster = SimCluster(config, group)
        tasks = cluster.start_all()
        yield cluster
        cluster.check()
        for task in tasks:
            task.cancel()
        for address in list(cluster.nodes):
            await cluster.kill(address)
