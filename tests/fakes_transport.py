"""Nodes reduced to a pool and a transport, for the transport conformance suite.

A `TransportNode` is one end; a `Bench` makes ends of one kind that can reach one another, and drives them.
`python -m tests.fakes_transport KIND ROLE` is one end in a process of its own, to be killed or stopped.
"""

import asyncio
import ctypes
import functools
import itertools
import json
import os
import random
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import grpc.aio

from deploy.ports import free_port
from kv_transfer.ids import Incarnation, TransferId, new_incarnation
from kv_transfer.messages import TransportOffer
from kv_transfer.transport import (
    PoolMemory,
    Ready,
    Transport,
    TransportEvent,
    WriteDone,
    WriteFailed,
    WriteHandle,
)
from kv_transfer.transports import registry
from kv_transfer.transports.memory import Fault, MemoryFabric, MemoryTransport, no_faults

PAGE_BYTES = 1 << 16
NUM_PAGES = 64
PATIENCE_S = 60.0  # for what a busy machine may take long over; nothing waits so long that goes well

Kind = TypeVar("Kind")


def make_pool(fill: int = 0, *, page_bytes: int = PAGE_BYTES, num_pages: int = NUM_PAGES) -> PoolMemory:
    """A pool every byte of which is `fill`."""
    data = bytearray([fill]) * (page_bytes * num_pages)
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    return PoolMemory(address=address, page_bytes=page_bytes, num_pages=num_pages, buffer=memoryview(data))


@dataclass(slots=True)
class OpenLater:
    """A completion event that the test completes."""

    is_open: bool = False

    def is_complete(self) -> bool:
        return self.is_open


@dataclass(slots=True)
class ManualClock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(slots=True)
class Leases:
    """Answers `may_write`: every page, until `allowed` is set."""

    allowed: set[int] | None = None

    def __call__(self, peer: Incarnation, tid: TransferId, page_ids: tuple[int, ...]) -> bool:
        return self.allowed is None or self.allowed.issuperset(page_ids)


@dataclass(slots=True)
class TransportNode:
    incarnation: Incarnation
    transport: Transport
    pool: PoolMemory
    leases: Leases
    address: str = ""
    events: list[TransportEvent] = field(default_factory=list)

    def page(self, page_id: int) -> bytes:
        return bytes(self.pool.page(page_id))

    def scribble(self, rng: random.Random) -> None:
        """Make every page different from every other."""
        self.pool.buffer[:] = rng.randbytes(self.pool.buffer.nbytes)

    def of_type(self, kind: type[Kind]) -> list[Kind]:
        return [event for event in self.events if isinstance(event, kind)]

    def is_settled(self, handle: WriteHandle) -> bool:
        return any(isinstance(e, WriteDone | WriteFailed) and e.handle == handle for e in self.events)

    def poll(self) -> None:
        self.events.extend(self.transport.poll())


class Bench(Protocol):
    """Makes nodes of one transport kind."""

    kind: str

    def node(
        self,
        *,
        pool: PoolMemory | None = None,
        address: str = "",
        receives: bool = True,
        incarnation: Incarnation | None = None,
    ) -> TransportNode:
        """A registered node; one that does not receive only writes, as a prefill node does."""
        ...

    def tick(self) -> None:
        """Let a little time pass between two polls."""
        ...

    def stop(self, node: TransportNode) -> None:
        """End a node as its process's end would."""
        ...

    def close(self) -> None: ...


class MemoryBench:
    """Nodes on one fabric, on a clock that only `tick` moves."""

    kind = "memory"

    def __init__(self, faults: Callable[[WriteHandle], Fault] = no_faults) -> None:
        self.clock = ManualClock()
        self.fabric = MemoryFabric(clock=self.clock, faults=faults)

    def node(
        self,
        *,
        pool: PoolMemory | None = None,
        address: str = "",
        receives: bool = True,
        incarnation: Incarnation | None = None,
    ) -> TransportNode:
        incarnation = incarnation or new_incarnation()
        transport = MemoryTransport(incarnation, self.fabric)
        pool = pool or make_pool()
        transport.register(pool)
        return TransportNode(incarnation, transport, pool, Leases(), address)

    def tick(self) -> None:
        self.clock.now += 0.01

    def stop(self, node: TransportNode) -> None:
        node.transport.close()

    def close(self) -> None:
        return


class ProcessBench:
    """Nodes with real transports; an event loop in a thread of its own serves those that need one."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transport-io")
        self._thread.start()
        self._nodes: list[tuple[TransportNode, grpc.aio.Server]] = []

    def node(
        self,
        *,
        pool: PoolMemory | None = None,
        address: str = "",
        receives: bool = True,
        incarnation: Incarnation | None = None,
    ) -> TransportNode:
        incarnation = incarnation or new_incarnation()
        leases = Leases()
        pool = pool or make_pool()
        server, port = self._run(self._serve(address or f"127.0.0.1:{free_port()}"))
        address = f"127.0.0.1:{port}"
        built = registry.build(
            self.kind,
            registry.Setup(incarnation=incarnation, address=address, may_write=leases if receives else None),
        )
        built.attach(self._loop)
        built.transport.register(pool)
        self._run(self._start(server, built.rpc_handlers))
        node = TransportNode(incarnation, built.transport, pool, leases, address)
        self._nodes.append((node, server))
        return node

    def tick(self) -> None:
        time.sleep(0.0005)

    def stop(self, node: TransportNode) -> None:
        for entry in [entry for entry in self._nodes if entry[0] is node]:
            self._nodes.remove(entry)
            node.transport.close()
            self._run(entry[1].stop(0))

    def close(self) -> None:
        try:
            for node, _ in list(self._nodes):
                self.stop(node)
            self._run(_finish_tasks())
        finally:
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()

    def _run(self, coroutine: Coroutine[Any, Any, Kind]) -> Kind:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(PATIENCE_S)

    async def _serve(self, address: str) -> tuple[grpc.aio.Server, int]:
        server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
        return server, server.add_insecure_port(address)

    async def _start(self, server: grpc.aio.Server, handlers: tuple[Any, ...]) -> None:
        server.add_generic_rpc_handlers(handlers)
        await server.start()


async def _finish_tasks() -> None:
    """Wait for what the stopped streams still have to do."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.wait(others, timeout=PATIENCE_S / 2) if others else None


def make_bench(kind: str) -> Bench:
    return MemoryBench() if kind == "memory" else ProcessBench(kind)


def pair(writer: TransportNode, receiver: TransportNode, *, copy_bytes: int | None = None) -> None:
    """Connect as after a Hello: the receiver offers first, the writer connects first."""
    offer = receiver.transport.offer()
    writer.transport.connect(receiver.incarnation, offer, copy_bytes=copy_bytes)
    receiver.transport.connect(writer.incarnation, writer.transport.offer(), copy_bytes=copy_bytes)


def pump(
    bench: Bench, nodes: Iterable[TransportNode], until: Callable[[], bool], timeout_s: float = PATIENCE_S
) -> None:
    """Poll the nodes until the claim holds; fails with the events seen when it never does."""
    nodes = list(nodes)
    deadline = time.monotonic() + timeout_s
    while True:
        for node in nodes:
            node.poll()
        if until():
            return
        assert time.monotonic() < deadline, f"never came true; events {[node.events for node in nodes]}"
        bench.tick()


def idle(bench: Bench, nodes: Iterable[TransportNode], seconds: float = 0.3) -> None:
    """Poll for a while in which something would show if it were wrong."""
    nodes = list(nodes)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        for node in nodes:
            node.poll()
        bench.tick()


def run_peer(kind: str, role: str) -> None:
    """One end in its own process: prints its offer, reads the other's from stdin, works until that dies."""
    parent = os.getppid()
    bench = make_bench(kind)
    node = bench.node(pool=make_pool(0xEE), receives=role == "receiver")
    offer = node.transport.offer()
    print(json.dumps({"incarnation": node.incarnation, "blob": offer.blob.hex()}), flush=True)
    theirs = json.loads(sys.stdin.readline())
    peer = Incarnation(theirs["incarnation"])
    node.transport.connect(peer, TransportOffer(name=kind, blob=bytes.fromhex(theirs["blob"])))
    print("connected", flush=True)
    pages = tuple(range(NUM_PAGES))
    for attempt in itertools.count():
        if os.getppid() != parent:
            return
        if role == "writer":
            ready = Ready(tid=TransferId("endless", attempt), start=0, local_pages=pages, remote_pages=pages)
            handle = node.transport.write(peer, ready.tid, ready)
            pump(bench, [node], functools.partial(node.is_settled, handle), 600.0)
        node.poll()
        node.events.clear()
        bench.tick()


if __name__ == "__main__":
    run_peer(sys.argv[1], sys.argv[2])
