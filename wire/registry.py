"""The registry: which nodes there are, each record with a time to live. Redis protocol or memory.

Owns keys and expiry. Must never choose among nodes.
"""

import asyncio
import logging
from typing import Protocol, Self

import redis.asyncio as redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from kv_transfer.ids import Incarnation
from wire.cancels import unforgotten
from wire.convert import pack_record, unpack_record
from wire.records import NodeRecord

logger = logging.getLogger(__name__)

KEY_PREFIX = "paceline:node:"
SCAN_BATCH = 512


class RegistryUnavailable(ConnectionError):
    """The registry cannot be reached or cannot answer. Worth trying again."""


class Registry(Protocol):
    """Records of live nodes. Every method raises RegistryUnavailable when the registry is away."""

    async def publish(self, record: NodeRecord, *, ttl_s: float) -> None:
        """Write or renew the record of `record.incarnation`; it disappears after `ttl_s`."""
        ...

    async def remove(self, incarnation: Incarnation) -> None:
        """Forget a node at once. Unknown ones are not an error."""
        ...

    async def snapshot(self) -> list[NodeRecord]:
        """All records, ordered by role, address and incarnation."""
        ...


class RedisRegistry:
    """A Registry on any server that speaks the Redis protocol."""

    def __init__(self, url: str, *, timeout_s: float = 2.0) -> None:
        # One retry without waiting: a pooled connection may have died since it was last used.
        self._client: redis.Redis = redis.Redis.from_url(
            url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def publish(self, record: NodeRecord, *, ttl_s: float) -> None:
        try:
            await unforgotten(
                self._client.set(_key(record.incarnation), pack_record(record), px=round(ttl_s * 1000))
            )
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(str(error)) from error

    async def remove(self, incarnation: Incarnation) -> None:
        try:
            await unforgotten(self._client.delete(_key(incarnation)))
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(str(error)) from error

    async def snapshot(self) -> list[NodeRecord]:
        try:
            values = await unforgotten(self._values())
        except (RedisError, OSError) as error:
            raise RegistryUnavailable(str(error)) from error
        return _ordered([record for value in values if (record := _unpack(value)) is not None])

    async def close(self) -> None:
        await self._client.aclose()

    async def _values(self) -> list[bytes]:
        # SCAN may name a key twice.
        keys = {key async for key in self._client.scan_iter(match=f"{KEY_PREFIX}*", count=SCAN_BATCH)}
        if not keys:
            return []
        return [value for value in await self._client.mget(sorted(keys)) if isinstance(value, bytes)]


class MemoryRegistry:
    """A Registry in this process, with expiry in loop time."""

    def __init__(self) -> None:
        self._records: dict[Incarnation, tuple[float, NodeRecord]] = {}
        self._is_available = True

    def set_available(self, is_available: bool) -> None:
        """While it is not, every call raises RegistryUnavailable; records go on expiring."""
        self._is_available = is_available

    async def publish(self, record: NodeRecord, *, ttl_s: float) -> None:
        self._raise_if_away()
        self._records[record.incarnation] = (asyncio.get_running_loop().time() + ttl_s, record)

    async def remove(self, incarnation: Incarnation) -> None:
        self._raise_if_away()
        self._records.pop(incarnation, None)

    async def snapshot(self) -> list[NodeRecord]:
        self._raise_if_away()
        now = asyncio.get_running_loop().time()
        self._records = {key: one for key, one in self._records.items() if one[0] > now}
        return _ordered([record for _, record in self._records.values()])

    def _raise_if_away(self) -> None:
        if not self._is_available:
            raise RegistryUnavailable("made unavailable")


def _key(incarnation: Incarnation) -> str:
    return f"{KEY_PREFIX}{incarnation}"


def _unpack(value: bytes) -> NodeRecord | None:
    try:
        return unpack_record(value)
    except ValueError as error:
        logger.warning("ignoring a malformed node record: %s", error)
        return None


def _ordered(records: list[NodeRecord]) -> list[NodeRecord]:
    return sorted(records, key=lambda record: (record.role, record.address, record.incarnation))
