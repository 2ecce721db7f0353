"""Starts the servers a measurement needs and waits until they answer.

Owns ports, readiness and CPU time of processes. Must never know what is measured.
"""

import asyncio
import os
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import httpx

from deploy.errors import DeployError, NotReady
from deploy.local import registry_command
from deploy.ports import free_port
from deploy.processes import Child, Command

POLL_S = 0.1
GRACE_S = 5.0


class MeasurementFailed(DeployError):
    """A measuring process ended badly."""


@asynccontextmanager
async def running(command: Command, folder: Path) -> AsyncIterator[Child]:
    """One child for the length of a block. Raises ProcessDied when it cannot be started."""
    child = await Child.start(command, log=folder / f"{command.name}.log")
    try:
        yield child
    finally:
        await child.stop(grace_s=GRACE_S)


async def registry(stack: AsyncExitStack, folder: Path) -> str:
    """An embedded registry server for the life of `stack`; its URL."""
    port = free_port()
    await stack.enter_async_context(running(registry_command(port, folder), folder))
    return f"redis://127.0.0.1:{port}/0"


def module(name: str, *arguments: str, called: str = "") -> Command:
    """A Python module of ours as a process."""
    return Command(
        name=called or name,
        arguments=[sys.executable, "-m", name, *arguments],
        environment={"PYTHONUNBUFFERED": "1"},
    )


async def until_ok(url: str, children: Sequence[Child], *, timeout_s: float) -> None:
    """Until GET `url` answers 200. Raises ProcessDied or NotReady with the logs' tails."""
    deadline = time.monotonic() + timeout_s
    async with httpx.AsyncClient(timeout=5.0, trust_env=False) as client:
        while time.monotonic() < deadline:
            for child in children:
                if not child.is_running:
                    await child.watch()
            try:
                if (await client.get(url)).status_code == httpx.codes.OK:
                    return
            except httpx.HTTPError:
                pass  # not listening yet
            await asyncio.sleep(POLL_S)
    tails = "\n".join(child.tail(8) for child in children)
    raise NotReady(f"{url} not ready after {timeout_s:.0f} s\n{tails}")


async def output_of(command: Command, *, timeout_s: float = 300.0) -> str:
    """Standard output of a process that runs to its end. Raises MeasurementFailed, also when it is late."""
    process = await asyncio.create_subprocess_exec(
        *command.arguments,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={**os.environ, **command.environment},
    )
    try:
        output, errors = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        raise MeasurementFailed(f"{command.name} did not end within {timeout_s:.0f} s") from None
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode:
        raise MeasurementFailed(
            f"{command.name} ended with status {process.returncode}\n{errors.decode()[-2000:]}"
        )
    return output.decode()


def cpu_s(pid: int) -> float:
    """User and system time a process has used so far (Linux; 0.0 elsewhere)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
