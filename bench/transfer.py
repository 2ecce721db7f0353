"""How fast pages move between two processes on this host, next to one contiguous NIXL write of as many bytes.

Owns the measurement of one transport by name; the command line is wired elsewhere. The receiver is this
module run as a process of its own. Both numbers come from the same pair of processes, turn by turn. How fast
scattered pages are is to some part a matter of the pair, for as long as it lives, so there are several.
"""

import argparse
import asyncio
import ctypes
import functools
import json
import logging
import random
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from operator import truediv
from typing import Any

import grpc.aio

from kv_transfer.ids import Incarnation, TransferId, new_incarnation
from kv_transfer.messages import TransportOffer
from kv_transfer.transport import PoolMemory, Ready, Transport, WriteDone, WriteFailed
from kv_transfer.transports import registry

SMOLLM2_PAGE_BYTES = 30 * 2 * 16 * 3 * 64 * 2  # layers, K and V, tokens, heads, head_dim, bfloat16
NUM_PAGES = (64, 256)
NUM_PAIRS = 7
NUM_ROUNDS = 11
POLL_S = 0.0002
TIMEOUT_S = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TransferSpeed:
    """Medians over the pairs of processes of their medians over the rounds, of the ratio too.

    `raw` is one contiguous NIXL write; None without NIXL. `transfer_over_raw_range`: of the slowest and the
    fastest pair.
    """

    transport: str
    num_pages: int
    page_bytes: int
    gb_per_s: float
    raw_gb_per_s: float | None
    transfer_over_raw: float | None
    transfer_over_raw_range: tuple[float, float] | None


def measure(
    transport_name: str,
    *,
    num_pages: int = NUM_PAGES[0],
    page_bytes: int = SMOLLM2_PAGE_BYTES,
    num_pairs: int = NUM_PAIRS,
    num_rounds: int = NUM_ROUNDS,
    seed: int = 0,
) -> TransferSpeed:
    """Write `num_pages` scattered pages and a raw block in turn, `num_rounds` times after one warm-up.

    All that between `num_pairs` pairs of processes, one pair after the other.
    """
    rng = random.Random(seed)
    transfers: list[float] = []
    raws: list[float] = []
    ratios: list[float] = []
    for _ in range(num_pairs):
        of_pages, of_raw = _measure_pair(
            transport_name, num_pages, page_bytes, num_rounds=num_rounds, rng=rng
        )
        transfers.append(statistics.median(of_pages))
        if of_raw:
            raws.append(statistics.median(of_raw))
            ratios.append(statistics.median(map(truediv, of_raw, of_pages)))
    gigabytes = num_pages * page_bytes / 1e9
    return TransferSpeed(
        transport=transport_name,
        num_pages=num_pages,
        page_bytes=page_bytes,
        gb_per_s=gigabytes / statistics.median(transfers),
        raw_gb_per_s=gigabytes / statistics.median(raws) if raws else None,
        transfer_over_raw=statistics.median(ratios) if ratios else None,
        transfer_over_raw_range=(min(ratios), max(ratios)) if ratios else None,
    )


def _measure_pair(
    transport_name: str, num_pages: int, page_bytes: int, *, num_rounds: int, rng: random.Random
) -> tuple[list[float], list[float]]:
    """Seconds of every round but the first: of the pages, and of the raw block, which there may not be."""
    tid = TransferId("bench", 1)
    transfers: list[float] = []
    raws: list[float] = []
    with _pair(transport_name, num_pages, page_bytes) as (transport, peer, raw_write):
        for _ in range(1 + num_rounds):
            pages = Ready(
                tid=tid,
                start=0,
                local_pages=tuple(rng.sample(range(2 * num_pages), num_pages)),
                remote_pages=tuple(rng.sample(range(2 * num_pages), num_pages)),
            )
            write = functools.partial(_write, transport, peer, pages)
            contenders: list[tuple[list[float], Callable[[], None]]] = [(transfers, write)]
            if raw_write is not None:
                contenders.append((raws, raw_write))
            for times, action in rng.sample(contenders, len(contenders)):
                times.append(_timed(action))
    return transfers[1:], raws[1:]


def _timed(action: Callable[[], None]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _write(transport: Transport, peer: Incarnation, pages: Ready) -> None:
    """One write, until the peer has the bytes."""
    transport.write(peer, pages.tid, pages)
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        for event in transport.poll():
            if isinstance(event, WriteDone):
                return
            if isinstance(event, WriteFailed):
                raise RuntimeError(f"write failed: {event.reason}")
        time.sleep(POLL_S)
    raise TimeoutError(f"write not done after {TIMEOUT_S} s")


class _Node:
    """A transport with its pool and what its asyncio side needs."""

    def __init__(self, transport_name: str, *, num_pages: int, page_bytes: int, receives: bool) -> None:
        self.incarnation = new_incarnation()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="transfer-io")
        self._thread.start()
        self._server: grpc.aio.Server = self._run(_make_server())
        port = self._server.add_insecure_port("127.0.0.1:0")
        built = registry.build(
            transport_name,
            registry.Setup(
                incarnation=self.incarnation,
                address=f"127.0.0.1:{port}",
                may_write=(lambda _peer, _tid, _pages: True) if receives else None,
            ),
        )
        built.attach(self._loop)
        self.transport = built.transport
        self.pool = _make_pool(num_pages=num_pages, page_bytes=page_bytes)
        self.transport.register(self.pool)
        self._run(_start(self._server, built.rpc_handlers))

    def close(self) -> None:
        self.transport.close()
        self._run(self._server.stop(0))
        self._run(_finish_tasks())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _run(self, coroutine: Any) -> Any:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)


async def _make_server() -> grpc.aio.Server:
    return grpc.aio.server()


async def _start(server: grpc.aio.Server, handlers: tuple[Any, ...]) -> None:
    server.add_generic_rpc_handlers(handlers)
    await server.start()


async def _finish_tasks() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    if others:
        await asyncio.wait(others, timeout=5)


def _make_pool(*, num_pages: int, page_bytes: int) -> PoolMemory:
    data = bytearray(b"\x01") * (num_pages * page_bytes)  # touched, so that no round pays for page faults
    address = ctypes.addressof(ctypes.c_char.from_buffer(data))
    return PoolMemory(address=address, page_bytes=page_bytes, num_pages=num_pages, buffer=memoryview(data))


@contextmanager
def _pair(
    transport_name: str, num_pages: int, page_bytes: int
) -> Iterator[tuple[Transport, Incarnation, Callable[[], None] | None]]:
    """This process as the writer, a child as the receiver, with twice the pages on both sides."""
    arguments = [transport_name, str(2 * num_pages), str(page_bytes)]
    command = [sys.executable, "-m", "bench.transfer", *arguments]
    node = _Node(transport_name, num_pages=2 * num_pages, page_bytes=page_bytes, receives=False)
    child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        theirs = _read_line(child)
        peer = Incarnation(theirs["incarnation"])
        offer = TransportOffer(name=transport_name, blob=bytes.fromhex(theirs["blob"]))
        node.transport.connect(peer, offer)
        ours = {"incarnation": node.incarnation, "blob": node.transport.offer().blob.hex()}
        if child.stdin is None:
            raise RuntimeError("the receiver has no standard input")
        child.stdin.write(json.dumps(ours) + "\n")
        child.stdin.flush()
        _read_line(child)
        raw = _raw_writer(node.pool, theirs, num_pages * page_bytes) if theirs["raw"] else None
        yield node.transport, peer, raw
    finally:
        child.kill()
        child.communicate()
        node.close()


def _read_line(child: "subprocess.Popen[str]") -> dict[str, Any]:
    line = child.stdout.readline() if child.stdout is not None else ""
    if not line:
        raise RuntimeError("the receiving process ended before it was ready")
    message: dict[str, Any] = json.loads(line)
    return message


def _raw_agent(name: str, pool: PoolMemory) -> Any:
    """A bare NIXL agent over the whole pool, set up as the transport sets up its own."""
    from kv_transfer.transports.nixl_agent import default_ucx_options, make_agent

    logging.getLogger("nixl").setLevel(logging.WARNING)  # its news would go to our standard output
    return make_agent(name, pool, default_ucx_options())[0]


def _raw_writer(pool: PoolMemory, theirs: dict[str, Any], num_bytes: int) -> Callable[[], None]:
    """A function that writes `num_bytes` as one descriptor, from anywhere in our pool to anywhere in theirs.

    Not always the same bytes: those would be in the caches, where scattered pages seldom are.
    """
    rng = random.Random(0)
    offsets = range(0, pool.buffer.nbytes - num_bytes + 1, pool.page_bytes)
    agent = _raw_agent("raw-writer", pool)
    loaded = agent.add_remote_agent(bytes.fromhex(theirs["raw"]))
    name = loaded.decode() if isinstance(loaded, bytes) else str(loaded)

    def write() -> None:
        here, there = pool.address + rng.choice(offsets), theirs["address"] + rng.choice(offsets)
        local = agent.get_xfer_descs([(here, num_bytes, 0)], "DRAM")
        remote = agent.get_xfer_descs([(there, num_bytes, 0)], "DRAM")
        handle = agent.initialize_xfer("WRITE", local, remote, name, b"raw")
        state = agent.transfer(handle)
        while state == "PROC":
            time.sleep(POLL_S)
            state = agent.check_xfer_state(handle)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            raise RuntimeError(f"raw write ended in state {state}")

    return write


def _receive(transport_name: str, num_pages: int, page_bytes: int) -> None:
    """The receiver's process: print what the writer needs, connect to it, then poll until killed."""
    node = _Node(transport_name, num_pages=num_pages, page_bytes=page_bytes, receives=True)
    raw = None if registry.unusable("nixl") else _raw_agent("raw-receiver", node.pool)
    hello = {
        "incarnation": node.incarnation,
        "blob": node.transport.offer().blob.hex(),
        "raw": raw.get_agent_metadata().hex() if raw else "",
        "address": node.pool.address,
    }
    print(json.dumps(hello), flush=True)
    theirs = json.loads(sys.stdin.readline())
    offer = TransportOffer(name=transport_name, blob=bytes.fromhex(theirs["blob"]))
    node.transport.connect(Incarnation(theirs["incarnation"]), offer)
    print("{}", flush=True)
    while True:
        node.transport.poll()
        if raw:
            raw.get_new_notifs()
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser(description="The receiving process of a transfer measurement.")
    parser.add_argument("transport")
    parser.add_argument("num_pages", type=int)
    parser.add_argument("page_bytes", type=int)
    arguments = parser.parse_args()
    _receive(arguments.transport, arguments.num_pages, arguments.page_bytes)


if __name__ == "__main__":
    main()
