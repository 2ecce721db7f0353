"""The asyncio side of a node, the same for both roles: streams, peers, registry, start and stop.

Owns what is between the core and the outside. It never looks into a transfer or a request, and runs
unchanged on a virtual-time loop with in-memory channels.
"""

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from kv_transfer.messages import Hello
from wire.channel import Channel, ChannelClosed
from wire.host_events import Drain, HostEvent, LinkMessage, NodeCore, NodeStatus, Output, PagesChanged, ToLink
from wire.kv_board import KvBoard
from wire.links import Links
from wire.node_spans import NodeSpans
from wire.peering import Peering, PeerSearch
from wire.records import NodeRecord
from wire.registry import Registry, RegistryUnavailable
from wire.sessions import Sessions
from wire.work import WorkHello

logger = logging.getLogger(__name__)

ResultT = TypeVar("ResultT")


class Driver(Protocol):
    """Whoever calls the core: `engine.thread.StepThread`, or the simulation."""

    def post(self, event: HostEvent) -> None:
        """Hand one event to the core. Never blocks."""
        ...

    def set_output_handler(self, handler: Callable[[list[Output]], None]) -> None:
        """Called on the loop with all outputs of one step."""
        ...

    async def call(self, function: Callable[[NodeCore], ResultT]) -> ResultT:
        """Run `function` between two steps. Raises RuntimeError when the core is dead."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class HostConfig:
    """Intervals and bounds. A record lives `ttl_s`, several `publish_interval_s`."""

    max_link_backlog: int = 8192  # events
    max_peer_backlog: int = 8192  # messages
    handshake_timeout_s: float = 30.0
    heartbeat_s: float = 2.0
    peer_timeout_s: float = 15.0
    publish_interval_s: float = 2.0
    ttl_s: float = 10.0
    min_backoff_s: float = 0.1
    max_backoff_s: float = 2.0
    drain_timeout_s: float = 30.0
    idle_poll_s: float = 0.05


class NodeHost:
    """Call `run` once driver and server are up; `stop` makes it return."""

    def __init__(
        self,
        *,
        record: NodeRecord,
        driver: Driver,
        registry: Registry,
        search: PeerSearch | None = None,
        config: HostConfig | None = None,
        spans: NodeSpans | None = None,
    ) -> None:
        """`spans` None: nothing is traced."""
        self._config = config = HostConfig() if config is None else config
        self._record = record
        self._driver = driver
        self._registry = registry
        self._search = search
        self._spans = spans
        self._status: NodeStatus | None = None
        self._is_draining = False
        self._is_removed = False
        self._publish_now = asyncio.Event()
        self._publishing = asyncio.Lock()
        self._is_registry_away = False
        self._num_registry_failures = 0
        self._stopped = asyncio.Event()
        self._kv = KvBoard()
        self._links = Links(
            hello=WorkHello(incarnation=record.incarnation, role=record.role, has_kv_events=True),
            post=self._post,
            kv=self._kv,
            max_backlog=config.max_link_backlog,
            handshake_timeout_s=config.handshake_timeout_s,
        )
        self._sessions = Sessions(
            post=driver.post,
            engine_step=self._engine_step,
            max_backlog=config.max_peer_backlog,
            handshake_timeout_s=config.handshake_timeout_s,
            heartbeat_s=config.heartbeat_s,
            peer_timeout_s=config.peer_timeout_s,
        )
        self._peering = None if search is None else self._build_peering(search)
        driver.set_output_handler(self._deliver)

    @property
    def record(self) -> NodeRecord:
        """What the registry says of this node, with the load of the last heartbeat."""
        load = self._record.load if self._status is None else self._status.load
        return dataclasses.replace(self._record, is_draining=self._is_draining, load=load)

    @property
    def last_status(self) -> NodeStatus | None:
        """The core's status as of the last heartbeat; None before the first."""
        return self._status

    async def accept_work(self, channel: Channel) -> None:
        """Serve a router's stream."""
        await self._links.serve(channel)

    async def accept_session(self, channel: Channel) -> None:
        """Serve a session that a peer opened. A node that opens sessions itself accepts none."""
        if self._search is not None:
            raise ChannelClosed(f"{self._record.role} nodes accept no sessions")
        await self._sessions.serve(channel)

    async def status(self) -> NodeStatus:
        """The core's status, with what the host knows of peers, links and the registry."""
        status = await self._driver.call(_status)
        self._status = status
        counters = {
            "links_open": float(self._links.num_open),
            "links_dropped": float(self._links.num_dropped),
            "sessions_open": float(len(self._sessions.accepted)),
            "registry_failures": float(self._num_registry_failures),
        }
        peers = {} if self._peering is None else self._peering.states
        return dataclasses.replace(status, counters=status.counters | counters, peers=peers | status.peers)

    def drain(self) -> None:
        """Stop admitting and say so in the registry; what runs goes on. Idempotent."""
        if not self._is_draining:
            self._is_draining = True
            self._driver.post(Drain())
            self._publish_now.set()

    async def run(self) -> None:
        """Keep the registry record and the sessions alive until `stop` is through."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(loop) for loop in self._loops()]
            await self._stopped.wait()
            for task in tasks:
                task.cancel()

    async def stop(self) -> None:
        """Drain, wait until the core is idle and everything is sent (bounded), unregister, close."""
        self.drain()
        try:
            async with asyncio.timeout(self._config.drain_timeout_s):
                await self._until_idle()
        except TimeoutError:
            logger.warning("still busy %g s after draining began", self._config.drain_timeout_s)
        await self._unregister()
        self._links.close("the node stops")
        self._sessions.close("the node stops")
        self._stopped.set()

    def _build_peering(self, search: PeerSearch) -> Peering:
        return Peering(
            search=search,
            sessions=self._sessions,
            hello=self._hello,
            min_backoff_s=self._config.min_backoff_s,
            max_backoff_s=self._config.max_backoff_s,
        )

    def _loops(self) -> list[Coroutine[Any, Any, None]]:
        loops = [self._keep_published()]
        if self._search is not None and self._peering is not None:
            loops += [self._search.view.run(), self._peering.run()]
        return loops

    def _post(self, event: HostEvent) -> None:
        if self._spans is not None and isinstance(event, LinkMessage):
            self._spans.heard(event.message)
        self._driver.post(event)

    def _deliver(self, outputs: list[Output]) -> None:
        said = [output for output in outputs if isinstance(output, ToLink)]
        self._links.deliver(said)
        if self._spans is not None:
            for told in said:
                self._spans.said(told.event)
        for output in outputs:
            if isinstance(output, PagesChanged):
                self._kv.take(output.changes)
            elif not isinstance(output, ToLink):
                self._sessions.deliver(output)

    async def _hello(self) -> Hello:
        return await self._driver.call(_hello)

    def _engine_step(self) -> int:
        return 0 if self._status is None else self._status.step

    async def _keep_published(self) -> None:
        while True:
            await self._publish()
            try:
                async with asyncio.timeout(self._config.publish_interval_s):
                    await self._publish_now.wait()
                self._publish_now.clear()
            except TimeoutError:
                pass  # time for the next heartbeat

    async def _publish(self) -> None:
        try:
            async with asyncio.timeout(self._config.publish_interval_s):
                self._status = await self._driver.call(_status)
        except TimeoutError:
            # One long step: the node lives, its load is as last seen.
            logger.info("engine busy for %g s", self._config.publish_interval_s)
        async with self._publishing:
            if self._status is not None and not self._is_removed:
                await self._ask_registry(self._registry.publish(self.record, ttl_s=self._config.ttl_s))

    async def _unregister(self) -> None:
        async with self._publishing:
            self._is_removed = True
            await self._ask_registry(self._registry.remove(self._record.incarnation))

    async def _ask_registry(self, request: Coroutine[Any, Any, None]) -> None:
        try:
            await request
        except RegistryUnavailable as error:
            self._num_registry_failures += 1
            if not self._is_registry_away:
                logger.warning("registry is away: %s", error)
            self._is_registry_away = True
        else:
            self._is_registry_away = False

    async def _until_idle(self) -> None:
        while True:
            status = await self._driver.call(_status)
            if status.is_idle and self._links.is_flushed and self._sessions.is_flushed:
                return
            await asyncio.sleep(self._config.idle_poll_s)


def _status(core: NodeCore) -> NodeStatus:
    return core.status()


def _hello(core: NodeCore) -> Hello:
    return core.hello()
