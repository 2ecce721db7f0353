"""A node's core, its driver and a clock, all scripted: what the host tests stand on."""

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self, TypeVar

from engine.layout import PoolSpec, build_layout
from kv_transfer.ids import Incarnation
from kv_transfer.messages import Hello, Refused, SemanticIdentity
from kv_transfer.transport import TransportError
from wire.channel import Channel
from wire.host import HostConfig, NodeHost
from wire.host_events import (
    Drain,
    HostEvent,
    NodeCore,
    NodeStatus,
    Output,
    PeerAccepted,
    PeerHello,
    PeerRefused,
)
from wire.memory_channel import MemoryNetwork
from wire.peering import PeerSearch
from wire.records import Load, NodeRecord
from wire.registry import MemoryRegistry
from wire.registry_view import RegistryView
from wire.work import WorkHello

ResultT = TypeVar("ResultT")
LAYOUT = build_layout(
    page_size=4, dtype="float32", pools=[PoolSpec(pool="target", num_layers=1, num_kv_heads=1, head_dim=16)]
)
IDENTITY = SemanticIdentity(model="m", revision="", weights="w", dtype="float32", tokenizer="t")


@dataclass(kw_only=True)
class FakeCore:
    """Notes every event; accepts every peer but those in `refuses`; is idle when `is_idle` says so."""

    incarnation: Incarnation
    refuses: dict[Incarnation, Refused] = field(default_factory=dict)
    says_on_hello: tuple[Output, ...] = ()
    events: list[HostEvent] = field(default_factory=list)
    is_idle: bool = True
    is_draining: bool = False
    num_steps: int = 0
    outputs: list[Output] = field(default_factory=list)
    idle_wait_s: float = 60.0
    num_failing_hellos: int = 0

    def hello(self) -> Hello:
        if self.num_failing_hellos:
            self.num_failing_hellos -= 1
            raise TransportError("memory: no more connections")
        return Hello(incarnation=self.incarnation, identity=IDENTITY, layout=LAYOUT, offers=())

    def handle(self, event: HostEvent, now: float) -> None:
        self.events.append(event)
        if isinstance(event, Drain):
            self.is_draining = True
        if isinstance(event, PeerHello):
            peer = event.hello.incarnation
            if peer in self.refuses:
                self.outputs.append(PeerRefused(peer=peer, refused=self.refuses[peer]))
            else:
                self.outputs.append(PeerAccepted(peer=peer, reply=self.hello()))
                self.outputs += self.says_on_hello

    def step(self, now: float) -> bool:
        self.num_steps += 1
        return False

    def take_outputs(self) -> list[Output]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def status(self) -> NodeStatus:
        return NodeStatus(
            step=self.num_steps,
            load=Load(free_pages=4, total_pages=8),
            quarantined_pages=0,
            is_draining=self.is_draining,
            is_idle=self.is_idle,
            integrity="",
            counters={},
            peers={},
        )

    def problems(self) -> list[str]:
        return []


class DirectDriver:
    """Steps the core on the loop itself, once per turn of the loop in which something was posted."""

    def __init__(self, core: FakeCore) -> None:
        self._core = core
        self._handler: Callable[[list[Output]], None] | None = None
        self._is_scheduled = False

    def set_output_handler(self, handler: Callable[[list[Output]], None]) -> None:
        self._handler = handler

    def post(self, event: HostEvent) -> None:
        self._core.handle(event, asyncio.get_running_loop().time())
        self._schedule()

    async def call(self, function: Callable[[NodeCore], ResultT]) -> ResultT:
        return function(self._core)

    def emit(self, *outputs: Output) -> None:
        """Make the next step say all of `outputs`."""
        self._core.outputs += outputs
        self._schedule()

    def _schedule(self) -> None:
        if not self._is_scheduled:
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._step)

    def _step(self) -> None:
        self._is_scheduled = False
        self._core.step(asyncio.get_running_loop().time())
        outputs = self._core.take_outputs()
        if outputs and self._handler is not None:
            self._handler(outputs)


@dataclass(kw_only=True)
class Cluster:
    """What the nodes of one test share."""

    network: MemoryNetwork = field(default_factory=MemoryNetwork)
    registry: MemoryRegistry = field(default_factory=MemoryRegistry)
    config: HostConfig = field(default_factory=HostConfig)


class FakeNode:
    """A host around a FakeCore, served on the network while the block runs; leaving it is a crash.

    A node of role "decode" opens sessions to every prefill node of its model.
    """

    def __init__(
        self, cluster: Cluster, role: str, address: str, incarnation: str, *, model: str = "m"
    ) -> None:
        self._cluster = cluster
        self.address = address
        self.core = FakeCore(incarnation=Incarnation(incarnation))
        self.driver = DirectDriver(self.core)
        record = NodeRecord(
            role=role,
            address=address,
            incarnation=self.core.incarnation,
            model=model,
            layout=LAYOUT.fingerprint,
            page_size=4,
            max_model_len=64,
            vocab_size=10,
            transports=("memory",),
        )
        search = PeerSearch(
            connector=cluster.network.connector(address),
            view=RegistryView(cluster.registry),
            wants=lambda other: other.role == "prefill" and other.model == model,
        )
        self.host = NodeHost(
            record=record,
            driver=self.driver,
            registry=cluster.registry,
            search=search if role == "decode" else None,
            config=cluster.config,
        )
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        serving = self._cluster.network.serve(
            self.address, work=self.host.accept_work, session=self.host.accept_session
        )
        group = asyncio.TaskGroup()
        await self._stack.enter_async_context(group)
        await self._stack.enter_async_context(serving)
        self.running = group.create_task(self.host.run())
        self._stack.callback(self.running.cancel)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    def seen(self, *kinds: type) -> list[HostEvent]:
        """The events of these kinds, in the order in which the core got them."""
        return [event for event in self.core.events if isinstance(event, kinds)]


async def open_link(cluster: Cluster, address: str, router: str = "router") -> Channel:
    """A router's greeted Work stream."""
    channel = await cluster.network.connector(router).work(address)
    await channel.send(WorkHello(incarnation=Incarnation(router), role="router"))
    reply = await channel.receive()
    assert isinstance(reply, WorkHello)
    return channel
