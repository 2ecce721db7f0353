import asyncio
import dataclasses
from collections.abc import AsyncIterator

import pytest
import redis.asyncio as redis

from deploy.ports import free_port
from kv_transfer.ids import Incarnation
from tests.valkey import Valkey, running_valkey
from wire.records import Load, NodeRecord
from wire.registry import MemoryRegistry, RedisRegistry, Registry, RegistryUnavailable
from wire.registry_view import RegistryView

LONG_S = 3600.0  # no test lasts as long
PATIENCE_S = 60.0


def node(
    incarnation: str, *, role: str = "prefill", address: str = "", started_at: float = 0.0
) -> NodeRecord:
    return NodeRecord(
        role=role,
        address=address or f"{incarnation}:1",
        incarnation=Incarnation(incarnation),
        model="m",
        layout="l",
        page_size=16,
        max_model_len=2048,
        vocab_size=100,
        transports=("nixl", "grpc"),
        eos_token_ids=(2,),
        started_at=started_at,
        load=Load(free_pages=5, total_pages=8, running=1, waiting=2, queued_tokens=3),
        metrics_address="h:9",
    )


@pytest.fixture
async def valkey() -> AsyncIterator[Valkey]:
    async with running_valkey() as server:
        yield server


@pytest.fixture(params=["memory", "redis"])
async def registry(request: pytest.FixtureRequest) -> AsyncIterator[Registry]:
    if request.param == "memory":
        yield MemoryRegistry()
        return
    async with running_valkey() as server, RedisRegistry(server.url, timeout_s=PATIENCE_S) as registry:
        yield registry


async def test_published_records_come_back_whole_and_ordered(registry: Registry) -> None:
    records = [node("d2", role="decode"), node("p1"), node("d1", role="decode")]
    for record in records:
        await registry.publish(record, ttl_s=LONG_S)
    assert await registry.snapshot() == [records[2], records[0], records[1]]


async def test_publishing_again_replaces_the_record(registry: Registry) -> None:
    await registry.publish(node("p1"), ttl_s=LONG_S)
    draining = dataclasses.replace(node("p1"), is_draining=True, load=Load())
    await registry.publish(draining, ttl_s=LONG_S)
    assert await registry.snapshot() == [draining]


async def test_a_record_not_renewed_expires(registry: Registry) -> None:
    for record in (node("p1"), node("p2")):
        await registry.publish(record, ttl_s=LONG_S)
    assert len(await registry.snapshot()) == 2
    await registry.publish(node("p1"), ttl_s=0.5)
    async with asyncio.timeout(PATIENCE_S):
        while len(found := await registry.snapshot()) == 2:  # noqa: ASYNC110  expiry has no event
            await asyncio.sleep(0.05)
    assert found == [node("p2")]


async def test_a_removed_record_is_gone_and_removing_twice_is_no_error(registry: Registry) -> None:
    await registry.publish(node("p1"), ttl_s=LONG_S)
    await registry.remove(Incarnation("p1"))
    await registry.remove(Incarnation("p1"))
    assert await registry.snapshot() == []


async def test_hundreds_of_nodes_are_all_found(valkey: Valkey) -> None:
    records = [node(f"p{number:04}") for number in range(1500)]
    async with RedisRegistry(valkey.url, timeout_s=PATIENCE_S) as registry:
        for record in records:
            await registry.publish(record, ttl_s=LONG_S)
        assert await registry.snapshot() == records


async def test_foreign_keys_and_malformed_records_are_ignored(
    valkey: Valkey, caplog: pytest.LogCaptureFixture
) -> None:
    async with (
        redis.Redis.from_url(valkey.url) as client,
        RedisRegistry(valkey.url, timeout_s=PATIENCE_S) as registry,
    ):
        await client.set("other", "x")
        await client.set("paceline:node:bad", b"\xff\xff")
        await registry.publish(node("p1"), ttl_s=LONG_S)
        assert await registry.snapshot() == [node("p1")]
    assert "ignoring a malformed node record" in caplog.text


async def test_a_registry_that_is_not_there_is_unavailable() -> None:
    async with RedisRegistry(f"redis://127.0.0.1:{free_port()}/0") as registry:
        with pytest.raises(RegistryUnavailable):
            await registry.publish(node("p1"), ttl_s=1.0)
        with pytest.raises(RegistryUnavailable):
            await registry.remove(Incarnation("p1"))
        with pytest.raises(RegistryUnavailable):
            await registry.snapshot()


async def test_the_registry_is_usable_again_after_its_server_restarts(valkey: Valkey) -> None:
    async with RedisRegistry(valkey.url, timeout_s=PATIENCE_S) as registry:
        await registry.publish(node("p1"), ttl_s=LONG_S)
        await valkey.stop()
        with pytest.raises(RegistryUnavailable):
            await registry.snapshot()
        await valkey.start()
        assert await registry.snapshot() == []
        await registry.publish(node("p1"), ttl_s=LONG_S)
        assert await registry.snapshot() == [node("p1")]


async def test_the_view_keeps_its_last_snapshot_while_the_registry_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    registry = MemoryRegistry()
    view = RegistryView(registry)
    await registry.publish(node("p1"), ttl_s=LONG_S)
    await view.refresh()
    registry.set_available(False)
    await view.refresh()
    await view.refresh()
    assert view.records == (node("p1"),)
    assert (view.is_stale, view.num_failures) == (True, 2)
    assert caplog.text.count("registry is away") == 1
    registry.set_available(True)
    await view.refresh()
    assert (view.is_stale, view.num_failures) == (False, 2)
    assert caplog.text.count("registry is back") == 1


async def test_a_registry_that_lost_its_memory_does_not_empty_the_view_within_the_grace() -> None:
    registry = MemoryRegistry()
    view = RegistryView(registry, grace_s=0.2)
    for one in ("p1", "p2"):
        await registry.publish(node(one), ttl_s=LONG_S)
    await view.refresh()
    registry.set_available(False)
    await view.refresh()
    registry.set_available(True)
    for one in ("p1", "p2"):
        await registry.remove(Incarnation(one))
    await view.refresh()
    assert [record.incarnation for record in view.records] == ["p1", "p2"]
    await registry.publish(node("p2"), ttl_s=LONG_S)
    await asyncio.sleep(0.25)
    await view.refresh()
    assert [record.incarnation for record in view.records] == ["p2"]


async def test_callbacks_hear_of_changes_only() -> None:
    registry = MemoryRegistry()
    view = RegistryView(registry)
    heard: list[tuple[NodeRecord, ...]] = []
    view.on_change(heard.append)
    await view.refresh()
    await registry.publish(node("p1"), ttl_s=LONG_S)
    await view.refresh()
    await view.refresh()
    busy = dataclasses.replace(node("p1"), load=Load(running=9))
    await registry.publish(busy, ttl_s=LONG_S)
    await view.refresh()
    await registry.remove(Incarnation("p1"))
    await view.refresh()
    assert heard == [(node("p1"),), (busy,), ()]


async def test_the_newest_incarnation_at_an_address_supersedes() -> None:
    registry = MemoryRegistry()
    view = RegistryView(registry)
    old, new = node("z-old", address="p:1", started_at=10.0), node("a-new", address="p:1", started_at=20.0)
    await registry.publish(new, ttl_s=LONG_S)
    await registry.publish(old, ttl_s=LONG_S)
    await view.refresh()
    assert view.records == (new,)


async def test_of_equally_old_incarnations_the_one_seen_last_supersedes() -> None:
    registry = MemoryRegistry()
    view = RegistryView(registry)
    await registry.publish(node("z-old", address="p:1"), ttl_s=LONG_S)
    await view.refresh()
    await registry.publish(node("a-new", address="p:1"), ttl_s=LONG_S)
    await view.refresh()
    assert view.records == (node("a-new", address="p:1"),)


async def test_the_view_polls_by_itself() -> None:
    registry = MemoryRegistry()
    view = RegistryView(registry, interval_s=0.01)
    changed = asyncio.Event()
    view.on_change(lambda _: changed.set())
    async with asyncio.timeout(PATIENCE_S), asyncio.TaskGroup() as group:
        polling = group.create_task(view.run())
        await registry.publish(node("p1"), ttl_s=LONG_S)
        await changed.wait()
        polling.cancel()
    assert view.records == (node("p1"),)


async def test_a_cancelled_poll_ends_at_whatever_moment_it_is_cancelled(valkey: Valkey) -> None:
    """The client forgets a cancellation that comes just as it has written a command (Python 3.11)."""
    async with RedisRegistry(valkey.url, timeout_s=PATIENCE_S) as registry:
        await registry.publish(node("p1"), ttl_s=LONG_S)
        turns = 0
        for stop_after in range(1, 60):
            polling = asyncio.ensure_future(poll_for_ever(registry))
            for _ in range(stop_after):
                await asyncio.sleep(0)
            polling.cancel()
            await asyncio.wait([polling], timeout=PATIENCE_S)
            assert polling.cancelled(), f"goes on when cancelled after {stop_after} turns of the loop"
            turns += 1
        assert turns == 59


async def poll_for_ever(registry: RedisRegistry) -> None:
    while True:
        await registry.snapshot()
