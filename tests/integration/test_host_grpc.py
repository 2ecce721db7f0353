import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from engine.page_hash import CacheChanges, PageHash
from engine.thread import StepThread
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Reserve
from tests.fakes_host import LAYOUT, FakeCore
from tests.valkey import running_valkey
from wire.grpc_client import GrpcConnector
from wire.grpc_server import GrpcServer
from wire.host import HostConfig, NodeHost
from wire.host_events import (
    Drain,
    Link,
    LinkMessage,
    Output,
    PagesChanged,
    PeerClosed,
    PeerHello,
    PeerMessage,
    ToLink,
    ToPeer,
)
from wire.kv_events import KvSubscribe
from wire.peering import PeerSearch
from wire.records import NodeRecord
from wire.registry import RedisRegistry
from wire.registry_view import RegistryView
from wire.security import Trust
from wire.work import Accepted, Cancel, WorkHello

TID = TransferId("r", 1)
PATIENCE_S = 60.0


@dataclass(frozen=True, kw_only=True)
class RealNode:
    core: FakeCore
    thread: StepThread[FakeCore]
    host: NodeHost
    address: str

    async def says(self, output: Output) -> None:
        """On the thread that takes the outputs."""
        await self.thread.call(lambda core: core.outputs.append(output))

    async def is_paired_with(self, other: "RealNode") -> None:
        """Until its host has heard what its core says to the other's hello."""
        while (await self.host.status()).peers != {other.core.incarnation: "ready"}:  # noqa: ASYNC110  as in `until`
            await asyncio.sleep(0.01)

    async def has(self, kind: type, count: int = 1) -> None:
        await until(lambda: sum(isinstance(event, kind) for event in self.core.events) >= count)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  another thread has no event to wait on
            await asyncio.sleep(0.01)


def fail(error: BaseException) -> None:
    raise AssertionError("the core must not crash") from error


@asynccontextmanager
async def real_node(
    role: str, registry: RedisRegistry, trust: Trust | None = None
) -> AsyncIterator[RealNode]:
    core = FakeCore(incarnation=Incarnation(f"{role}-1"))
    thread = StepThread(core, on_crash=fail)
    server = GrpcServer("127.0.0.1:0", trust)
    address = f"127.0.0.1:{server.port}"
    record = NodeRecord(
        role=role,
        address=address,
        incarnation=core.incarnation,
        model="m",
        layout=LAYOUT.fingerprint,
        page_size=4,
        max_model_len=64,
        vocab_size=10,
        transports=("grpc",),
    )
    async with GrpcConnector(trust) as connector:
        view = RegistryView(registry, interval_s=0.05)
        search = PeerSearch(connector=connector, view=view, wants=lambda one: one.role == "prefill")
        host = NodeHost(
            record=record,
            driver=thread,
            registry=registry,
            search=search if role == "decode" else None,
            config=HostConfig(
                publish_interval_s=0.1, heartbeat_s=0.1, peer_timeout_s=PATIENCE_S, ttl_s=PATIENCE_S
            ),
        )
        thread.start()
        try:
            await server.start(host)
            async with asyncio.TaskGroup() as group:
                group.create_task(host.run())
                yield RealNode(core=core, thread=thread, host=host, address=address)
                await host.stop()
        finally:
            await server.stop(1.0)
            await thread.stop()


async def test_a_pair_of_hosts_works_over_grpc_redis_and_engine_threads() -> None:
    async with AsyncExitStack() as stack:
        valkey = await stack.enter_async_context(running_valkey())
        registry = await stack.enter_async_context(RedisRegistry(valkey.url, timeout_s=PATIENCE_S))
        prefill = await stack.enter_async_context(real_node("prefill", registry))
        async with real_node("decode", registry) as decode:
            await decode.has(PeerHello)
            await prefill.has(PeerHello)
            await decode.is_paired_with(prefill)
            reserve = Reserve(tid=TID, page_ids=(1,), skip_tokens=0, deadline_s=1.0)
            await decode.says(ToPeer(peer=prefill.core.incarnation, message=reserve))
            await prefill.has(PeerMessage)
            async with GrpcConnector(connect_timeout_s=PATIENCE_S) as router:
                link = await router.work(decode.address)
                await link.send(WorkHello(incarnation=Incarnation("router"), role="router"))
                ours = WorkHello(incarnation=Incarnation("decode-1"), role="decode", has_kv_events=True)
                assert await link.receive() == ours
                await link.send(Cancel(tid=TID))
                await decode.has(LinkMessage)
                accepted = Accepted(tid=TID, queued_behind=0)
                await decode.says(ToLink(link=Link(1), event=accepted))
                assert (await link.receive()).events == (accepted,)
                hashing = PageHash(fingerprint="f", page_size=4)
                changes = CacheChanges(stored=(b"x" * 16,), hashing=hashing)
                await decode.says(PagesChanged(changes=changes))
                await link.send(KvSubscribe())
                update = await link.receive()
                assert (update.stored, update.hashing) == (changes.stored, hashing)
                await router.drain(decode.address)
                await decode.has(Drain)
                assert (await router.status(decode.address)).is_draining
        await prefill.has(PeerClosed)
        assert [record.role for record in await registry.snapshot()] == ["prefill"]
