"""A live copy of the registry for one process: the last snapshot, whether or not the registry is there.

Owns polling, which incarnation of an address counts, and what is kept through an outage. Must never
choose among nodes.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable

from kv_transfer.ids import Incarnation
from wire.records import NodeRecord
from wire.registry import Registry, RegistryUnavailable

logger = logging.getLogger(__name__)

OnChange = Callable[[tuple[NodeRecord, ...]], None]


class RegistryView:
    """At most one record per address: the newest incarnation supersedes older ones still unexpired.

    After an outage records that are missing are kept for `grace_s`: a registry that lost its memory
    gets every live node back within a heartbeat.
    """

    def __init__(self, registry: Registry, *, interval_s: float = 1.0, grace_s: float = 10.0) -> None:
        self._registry = registry
        self._interval_s = interval_s
        self._grace_s = grace_s
        self._records: tuple[NodeRecord, ...] = ()
        self._first_seen: dict[Incarnation, int] = {}
        self._num_seen = 0
        self._kept_until = 0.0
        self._callbacks: list[OnChange] = []
        self.num_failures = 0
        self.is_stale = False

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        return self._records

    def on_change(self, callback: OnChange) -> None:
        """Call `callback` with the records after each poll that found them changed, load included."""
        self._callbacks.append(callback)

    async def run(self) -> None:
        """Poll for ever."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._interval_s)

    async def refresh(self) -> None:
        """Poll once. When the registry is away the last snapshot stays."""
        try:
            found = await self._registry.snapshot()
        except RegistryUnavailable as error:
            self._note_failure(error)
            return
        now = asyncio.get_running_loop().time()
        if self.is_stale:
            logger.warning("registry is back")
            self.is_stale = False
            self._kept_until = now + self._grace_s
        missing = self._missing(found) if now < self._kept_until else []
        self._replace(self._newest([*missing, *found]))

    def _note_failure(self, error: RegistryUnavailable) -> None:
        self.num_failures += 1
        if not self.is_stale:
            logger.warning("registry is away, going on with %d known nodes: %s", len(self._records), error)
        self.is_stale = True

    def _missing(self, found: Iterable[NodeRecord]) -> list[NodeRecord]:
        incarnations = {record.incarnation for record in found}
        return [record for record in self._records if record.incarnation not in incarnations]

    def _newest(self, found: list[NodeRecord]) -> tuple[NodeRecord, ...]:
        for record in found:
            if record.incarnation not in self._first_seen:
                self._num_seen += 1
                self._first_seen[record.incarnation] = self._num_seen
        present = {record.incarnation for record in found}
        self._first_seen = {one: seen for one, seen in self._first_seen.items() if one in present}
        newest: dict[str, NodeRecord] = {}
        for record in sorted(found, key=lambda one: (one.started_at, self._first_seen[one.incarnation])):
            newest[record.address] = record
        return tuple(sorted(newest.values(), key=lambda one: (one.role, one.address)))

    def _replace(self, records: tuple[NodeRecord, ...]) -> None:
        if records == self._records:
            return
        self._records = records
        for callback in self._callbacks:
            callback(records)
