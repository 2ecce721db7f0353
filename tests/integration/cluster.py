"""A real cluster under test: Valkey, nodes and routers, each a process that may be started and killed alone.

Owns processes, addresses and waiting. Must never know what a test claims.
"""

import asyncio
import os
import signal
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import msgspec

from deploy.ports import free_port
from deploy.processes import Child, Command
from deploy.threads import thread_environment
from tests.valkey import running_valkey
from wire.channel import ChannelClosed
from wire.gen.node_pb2 import StatusResponse
from wire.grpc_client import GrpcConnector
from wire.security import ClusterSecurity, Trust

Json = dict[str, Any]

POLL_S = 0.02
START_S = 180.0
SETTLE_S = 90.0
GRACE_S = 60.0
PATIENCE_S = 60.0  # a node may be slow to say how it is while others use its cores


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    name: str
    role: str
    address: str
    child: Child
    connector: GrpcConnector

    async def status(self) -> StatusResponse:
        return await self.connector.status(self.address)

    async def unrest(self) -> str:
        """What still holds this node back from being idle with every page accounted for and free."""
        status = await self.status()
        facts = {
            "running": status.running,
            "waiting": status.waiting,
            "busy": not status.is_idle,
            "pages in use": status.total_pages - status.free_pages,
            "quarantined": status.quarantined_pages,
            "integrity": status.integrity,
        }
        return ", ".join(f"{self.name} {fact}: {value}" for fact, value in facts.items() if value)


@dataclass(frozen=True, slots=True, kw_only=True)
class Router:
    name: str
    grpc_address: str
    child: Child
    http: httpx.AsyncClient

    async def report(self) -> tuple[int, Json]:
        """Status and body of /ready; 0 while nobody listens."""
        try:
            response = await self.http.get("/ready")
        except httpx.HTTPError:
            return 0, {}
        return response.status_code, response.json()

    async def until_ready(self, *, num_pairs: int = 1) -> None:
        async def missing() -> str:
            status, report = await self.report()
            num_ready = sum(pair["state"] == "ready" for pair in report.get("pairs", ()))
            return "" if status == 200 and num_ready == num_pairs else f"{self.name}: {status} {report}"

        await eventually(missing, within_s=START_S)

    async def complete(self, **body: Any) -> Json:
        return await self._post("/v1/completions", body)

    async def chat(self, **body: Any) -> Json:
        return await self._post("/v1/chat/completions", body)

    def chunks(self, **body: Any) -> AsyncIterator[Json]:
        """The events of a streamed completion; the stream must end with [DONE]."""
        return chunks_of(self.http, body)

    async def _post(self, path: str, body: Json) -> Json:
        response = await self.http.post(path, json=body)
        assert response.status_code == 200, response.text
        answer: Json = response.json()
        return answer


async def chunks_of(http: httpx.AsyncClient, body: Json) -> AsyncGenerator[Json]:
    """The events of a streamed completion; the stream must end with [DONE]."""
    async with http.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
        assert response.status_code == 200, await response.aread()
        last = ""
        async for line in response.aiter_lines():
            last = line or last
            if line.startswith("data: {"):
                yield msgspec.json.decode(line.removeprefix("data: "))
        assert last == "data: [DONE]"


class Cluster:
    """Processes around one registry. `nodes` are those that are expected to be alive."""

    def __init__(self, *, registry: str, model: Path, log_dir: Path, connector: GrpcConnector) -> None:
        self.registry = registry
        self.nodes: dict[str, Node] = {}
        self._model = model
        self._log_dir = log_dir
        self._connector = connector
        self.children: list[Child] = []
        self._clients = AsyncExitStack()

    async def node(self, name: str, role: str, **options: object) -> Node:
        """Start a node and wait until it answers."""
        port = options.pop("port", free_port())
        child = await self._start(name, role, port=port, threads=1, **options)
        node = Node(name=name, role=role, address=f"127.0.0.1:{port}", child=child, connector=self._connector)

        async def missing() -> str:
            assert child.is_running, child.tail()
            try:
                await node.status()
            except ChannelClosed as error:
                return str(error)
            return ""

        await eventually(missing, within_s=START_S)
        self.nodes[name] = node
        return node

    async def router(self, name: str = "router", **options: object) -> Router:
        """Start a router and wait until it listens."""
        port, grpc_port = free_port(), free_port()
        child = await self._start(name, "router", port=port, grpc_port=grpc_port, **options)
        http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=120, trust_env=False)
        await self._clients.enter_async_context(http)
        router = Router(name=name, grpc_address=f"127.0.0.1:{grpc_port}", child=child, http=http)

        async def missing() -> str:
            assert child.is_running, child.tail()
            return "" if (await router.report())[0] else f"{name} does not listen"

        await eventually(missing, within_s=START_S)
        return router

    async def kill(self, name: str) -> None:
        """SIGKILL: the process says goodbye to nobody."""
        child = self.nodes.pop(name).child
        os.killpg(child.pid, signal.SIGKILL)
        await child.stop(grace_s=GRACE_S)

    async def end(self, name: str) -> None:
        """SIGTERM: the process drains."""
        await self.nodes.pop(name).child.stop(grace_s=GRACE_S)

    async def settle(self, *, within_s: float = SETTLE_S) -> None:
        """Every node comes to rest: nothing runs, each page has one owner, all of them are free again."""

        async def missing() -> str:
            unrest = await asyncio.gather(*(node.unrest() for node in self.nodes.values()))
            return "; ".join(filter(None, unrest))

        await eventually(missing, within_s=within_s)

    async def close(self) -> None:
        """Stop everything. No process may have logged an exception."""
        try:
            await self._clients.aclose()
        finally:
            for role in ("router", "decode", "prefill"):
                chosen = [child for child in self.children if child.log.name.startswith(f"{role}.")]
                await asyncio.gather(*(child.stop(grace_s=GRACE_S) for child in chosen))
        for child in self.children:
            assert "Traceback" not in child.log.read_text(), child.tail()

    async def _start(self, name: str, command: str, **options: object) -> Child:
        settings = {"model": self._model, "registry": self.registry, **options}
        flags: list[str] = []
        for field, value in settings.items():
            flag = f"--{field.replace('_', '-')}"
            flags += [flag] if value is True else [flag, f"{value}"]
        child = await Child.start(
            Command(
                name=name,
                arguments=[sys.executable, "-m", "deploy.cli", command, *flags],
                environment={"PYTHONUNBUFFERED": "1", **thread_environment(1)},
            ),
            log=self._log_dir / f"{command}.{name}.log",
        )
        self.children.append(child)
        return child


@asynccontextmanager
async def running_cluster(
    model: Path, log_dir: Path, *, security: ClusterSecurity | None = None
) -> AsyncIterator[Cluster]:
    """A registry and no node yet; all processes end with the context. `security`: how the test asks nodes."""
    async with (
        running_valkey() as valkey,
        GrpcConnector(Trust(security), connect_timeout_s=PATIENCE_S) as connector,
    ):
        cluster = Cluster(registry=valkey.url, model=model, log_dir=log_dir, connector=connector)
        try:
            yield cluster
        finally:
            await cluster.close()


async def eventually(missing: Callable[[], Awaitable[str]], *, within_s: float) -> None:
    """Ask until nothing is missing."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + within_s
    while what := await missing():
        assert loop.time() < deadline, f"after {within_s} s still missing: {what}"
        await asyncio.sleep(POLL_S)
