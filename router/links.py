"""The streams to all nodes the registry knows: one per incarnation, opened and closed with its record.

Owns the links and the tasks that run them. Must never know requests' contents or readiness.
"""

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.link import Hear, Leg, Link, LinkConfig, LinkLost
from router.loads import SentBook
from router.prefix_index import PrefixIndex
from router.stats import RouterStats
from wire.channel import Connector
from wire.records import NodeRecord
from wire.work import Incarnation, Submit

__all__ = ["Leg", "LinkConfig", "LinkLost", "NodeLinks", "NodeSource"]


class NodeSource(Protocol):
    """The live view of the registry (wire.registry_view in production)."""

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        """The nodes as last heard of."""
        ...

    def on_change(self, callback: Callable[[tuple[NodeRecord, ...]], None]) -> None:
        """Call back, on the event loop, with the records whenever they changed, load included."""
        ...


class NodeLinks:
    """A record in the registry has exactly one link here, shortly after it appears."""

    def __init__(
        self,
        nodes: NodeSource,
        *,
        connector: Connector,
        router: Incarnation,
        stats: RouterStats,
        config: LinkConfig,
        index: PrefixIndex | None = None,
    ) -> None:
        self.sent = SentBook()
        self._nodes = nodes
        self._connector = connector
        self._router = router
        self._stats = stats
        self._config = config
        self.index = index
        self._links: dict[Incarnation, Link] = {}
        self._listeners: list[Callable[[], None]] = []
        self._registry_changed = asyncio.Event()
        nodes.on_change(self._note_records)

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back whenever a record or the state of a link changed."""
        self._listeners.append(callback)

    def records(self) -> list[NodeRecord]:
        """All nodes, open or not, in an order that does not change with heartbeats."""
        records = [link.record for link in self._links.values()]
        return sorted(records, key=lambda record: (record.role, record.address, record.incarnation))

    def is_open(self, node: Incarnation) -> bool:
        return node in self._links and self._links[node].is_open

    def reason(self, node: Incarnation) -> str:
        """Why a link is not open; "" when it is."""
        return self._links[node].reason if node in self._links else "gone from the registry"

    def submit(self, node: NodeRecord, submit: Submit, *, side: str, hear: Hear) -> Leg:
        """Send work to a node. One that is gone or down answers with LinkLost before this returns."""
        link = self._links.get(node.incarnation) or self._new_link(node)
        return link.submit(submit, side=side, hear=hear)

    async def run(self) -> None:
        """Follow the registry until cancelled; then close every stream."""
        async with asyncio.TaskGroup() as group:
            tasks: dict[Incarnation, asyncio.Task[None]] = {}
            while True:
                self._follow(group, tasks)
                await self._registry_changed.wait()
                self._registry_changed.clear()

    def _note_records(self, _records: tuple[NodeRecord, ...]) -> None:
        self._registry_changed.set()

    def _follow(self, group: asyncio.TaskGroup, tasks: dict[Incarnation, asyncio.Task[None]]) -> None:
        records = {record.incarnation: record for record in self._nodes.records}
        for gone in [incarnation for incarnation in self._links if incarnation not in records]:
            del self._links[gone]
            tasks.pop(gone).cancel()
        self.sent.retain(records.keys())
        for incarnation, record in records.items():
            if incarnation not in self._links:
                link = self._links[incarnation] = self._new_link(record)
                tasks[incarnation] = group.create_task(link.run())
            elif self._links[incarnation].record != record:
                self._links[incarnation].record = record
                self.sent.clear(incarnation)
        self._tell()

    def _new_link(self, record: NodeRecord) -> Link:
        return Link(
            record,
            connector=self._connector,
            router=self._router,
            config=self._config,
            on_change=self._tell,
            on_late=self._stats.late_event,
            index=self.index,
        )

    def _tell(self) -> None:
        for listener in self._listeners:
            listener()
