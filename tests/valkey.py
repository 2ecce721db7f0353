"""A real registry server for tests: the embedded one on a free port."""

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError

from deploy.local import registry_command
from deploy.ports import free_port
from deploy.processes import Child

START_TIMEOUT_S = 90.0


@dataclass(slots=True, kw_only=True)
class Valkey:
    """One server that may be stopped and started again on the same port. It keeps nothing on disk."""

    port: int
    folder: Path
    process: Child | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        self.process = await Child.start(
            registry_command(self.port, self.folder), log=self.folder / "registry.log"
        )
        async with asyncio.timeout(START_TIMEOUT_S), redis.Redis.from_url(self.url) as client:
            while not await _answers(client):  # noqa: ASYNC110  another process
                await asyncio.sleep(0.02)
        assert self.process.is_running, self.process.tail()  # not another server's answer

    async def stop(self) -> None:
        if self.process is not None:
            await self.process.stop(grace_s=0)
            self.process = None


@asynccontextmanager
async def running_valkey() -> AsyncIterator[Valkey]:
    with tempfile.TemporaryDirectory() as folder:
        server = Valkey(port=free_port(), folder=Path(folder))
        try:
            await server.start()
            yield server
        finally:
            await server.stop()


async def _answers(client: redis.Redis) -> bool:
    try:
        return bool(await client.ping())
    except (RedisConnectionError, OSError):
        return False
