"""Keeps a session open to every node the registry lists and the caller wants, before it is needed.

Owns reconnecting and the memory of refusals. Must never know what is said on a session.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kv_transfer.ids import Incarnation
from kv_transfer.messages import Hello, Refused
from kv_transfer.transport import TransportError
from wire.channel import ChannelClosed, Connector
from wire.records import NodeRecord
from wire.registry_view import RegistryView
from wire.sessions import Sessions

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSearch:
    """Where a node finds the peers it opens sessions to, and which of them it wants."""

    connector: Connector
    view: RegistryView
    wants: Callable[[NodeRecord], bool]


class Peering:
    """One task per wanted incarnation: connect, run the session, wait, again, while it is listed.

    An incarnation that refused, or was refused, is not tried again.
    """

    def __init__(
        self,
        *,
        search: PeerSearch,
        sessions: Sessions,
        hello: Callable[[], Awaitable[Hello]],
        min_backoff_s: float,
        max_backoff_s: float,
    ) -> None:
        self._search = search
        self._sessions = sessions
        self._hello = hello
        self._min_backoff_s = min_backoff_s
        self._max_backoff_s = max_backoff_s
        self._wanted: dict[Incarnation, NodeRecord] = {}
        self._kept: set[Incarnation] = set()
        self._refused: dict[Incarnation, Refused] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Follow the registry view for ever."""
        self._search.view.on_change(self._want)
        self._want(self._search.view.records)
        async with asyncio.TaskGroup() as group:
            while True:
                for incarnation in self._wanted:
                    if incarnation not in self._kept and incarnation not in self._refused:
                        self._kept.add(incarnation)
                        group.create_task(self._keep(incarnation))
                self._changed.clear()
                await self._changed.wait()

    @property
    def states(self) -> dict[str, str]:
        """Wanted incarnation -> "ready", "connecting" or the refusal."""
        ready = self._sessions.accepted
        states: dict[str, str] = {}
        for incarnation in self._wanted:
            if incarnation in self._refused:
                states[incarnation] = f"refused: {self._refused[incarnation]}"
            else:
                states[incarnation] = "ready" if incarnation in ready else "connecting"
        return states

    def _want(self, records: tuple[NodeRecord, ...]) -> None:
        self._wanted = {one.incarnation: one for one in records if self._search.wants(one)}
        self._refused = {one: refused for one, refused in self._refused.items() if one in self._wanted}
        self._changed.set()

    async def _keep(self, incarnation: Incarnation) -> None:
        backoff_s = self._min_backoff_s
        try:
            while (record := self._wanted.get(incarnation)) is not None:
                started = asyncio.get_running_loop().time()
                refused = await self._run_once(record)
                if refused is not None and not refused.is_transient:
                    logger.warning("no session with %s at %s: %s", incarnation, record.address, refused)
                    self._refused[incarnation] = refused
                    return
                if asyncio.get_running_loop().time() - started > self._max_backoff_s:
                    backoff_s = self._min_backoff_s
                await asyncio.sleep(backoff_s)
                backoff_s = min(2 * backoff_s, self._max_backoff_s)
        finally:
            self._kept.discard(incarnation)

    async def _run_once(self, record: NodeRecord) -> Refused | None:
        try:
            channel = await self._search.connector.session(record.address)
        except ChannelClosed as closed:
            logger.debug("no session with %s yet: %s", record.address, closed)
            return None
        try:
            return await self._sessions.open(channel, hello=await self._hello(), expected=record.incarnation)
        except (ChannelClosed, TransportError) as error:
            logger.info("session with %s ended: %s", record.address, error)
            return None
        finally:
            await channel.close()
