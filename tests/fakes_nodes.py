"""Scripted nodes at the router's seams, and a clock that waits for nobody.

A FakeNode records what it was sent and says only what a test tells it to, over a channel in memory.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import wraps
from itertools import count
from typing import Any

from router.dispatch import DispatchConfig, Dispatcher
from router.link import LinkConfig
from router.links import NodeLinks
from router.pairs import PairBook, PairConfig
from router.prefix_index import PrefixIndex
from router.requests import Delta, GenerateRequest, Outcome
from router.stats import RouterStats
from tests.simulation.virtual_loop import run_virtual
from wire.channel import Channel, ChannelClosed
from wire.convert import pack_to_node
from wire.kv_events import KvSubscribe
from wire.records import Load, NodeRecord
from wire.work import (
    Accepted,
    Cancel,
    Event,
    Finished,
    Frame,
    Incarnation,
    SamplingParams,
    Submit,
    Tokens,
    TransferId,
    WorkHello,
)

ROUTER = Incarnation("router-1")


def virtual(test: Callable[..., Coroutine[Any, Any, None]]) -> Callable[..., None]:
    """Runs an async test in virtual time."""

    @wraps(test)
    def run(*args: Any, **kwargs: Any) -> None:
        run_virtual(test(*args, **kwargs))

    return run


class FakeChannel:
    """The router's end of a stream to a FakeNode."""

    def __init__(self, node: "FakeNode") -> None:
        self.is_closed = False
        self._node = node
        self._frames: deque[Any] = deque()
        self._news = asyncio.Event()

    @property
    def peer(self) -> str:
        return self._node.record.address

    async def send(self, message: Any) -> None:
        if self.is_closed:
            raise ChannelClosed("closed")
        pack_to_node(message)  # raises ValueError for what the wire cannot carry, as gRPC's channel does
        self._node.receive(message)

    async def receive(self) -> Any:
        while not self._frames:
            if self.is_closed:
                raise ChannelClosed("stream reset")
            self._news.clear()
            await self._news.wait()
        return self._frames.popleft()

    async def close(self) -> None:
        self.break_off()

    def put(self, message: Any) -> None:
        self._frames.append(message)
        self._news.set()

    def break_off(self) -> None:
        self.is_closed = True
        self._news.set()


class FakeNode:
    """Answers canaries by itself (unless `on_canary` says otherwise); users' requests are the test's."""

    def __init__(self, record: NodeRecord) -> None:
        self.record = record
        self.is_up = True
        self.hello = WorkHello(incarnation=record.incarnation, role=record.role, has_kv_events=True)
        self.num_subscribes = 0
        self.submits: list[Submit] = []
        self.cancels: list[TransferId] = []
        self.canaries: list[Submit] = []
        self.channels: list[FakeChannel] = []
        self.on_canary: Callable[[Submit], tuple[Event, ...]] = self._pass_canary

    def open(self) -> Channel:
        if not self.is_up:
            raise ChannelClosed("connection refused")
        self.channels.append(FakeChannel(self))
        return self.channels[-1]

    def receive(self, message: Any) -> None:
        match message:
            case WorkHello(incarnation=incarnation, role=role):
                assert (incarnation, role) == (ROUTER, "router")
                self.channels[-1].put(self.hello)
            case Submit(tid=tid) if tid.request_id.startswith("canary-"):
                self.canaries.append(message)
                self.emit(*self.on_canary(message))
            case Submit():
                self.submits.append(message)
            case KvSubscribe():
                self.num_subscribes += 1
            case Cancel(tid=tid):
                if not tid.request_id.startswith("canary-"):
                    self.cancels.append(tid)

    def emit(self, *events: Event) -> None:
        """One frame."""
        if events:
            self.channels[-1].put(Frame(step=1, events=events))

    def tokens(self, first_index: int, *ids: int, attempt: int = 1, **more: Any) -> None:
        """One frame with one report for the test's first request."""
        self.emit(Tokens(tid=TransferId("r1", attempt), first_index=first_index, ids=ids, **more))

    def finish(self, reason: str, *, attempt: int = 1, **more: Any) -> None:
        self.emit(Finished(tid=TransferId("r1", attempt), reason=reason, **more))

    def break_off(self) -> None:
        self.channels[-1].break_off()

    def die(self) -> None:
        self.is_up = False
        self.break_off()

    def _pass_canary(self, submit: Submit) -> tuple[Event, ...]:
        tid = submit.tid
        accepted = Accepted(tid=tid, queued_behind=0)
        if self.record.role == "prefill":
            first = Tokens(tid=tid, first_index=0, ids=(7,))
            return accepted, first, Finished(tid=tid, reason="handed_over")
        start = 0 if submit.peer is None else 1
        rest = Tokens(tid=tid, first_index=start, ids=(7, 8)[start:])
        return accepted, rest, Finished(tid=tid, reason="length")


class FakeRegistry:
    """A NodeSource and the Connector to the nodes in it."""

    def __init__(self) -> None:
        self._nodes: dict[str, FakeNode] = {}
        self._callbacks: list[Callable[[tuple[NodeRecord, ...]], None]] = []

    @property
    def records(self) -> tuple[NodeRecord, ...]:
        return tuple(node.record for node in self._nodes.values())

    def on_change(self, callback: Callable[[tuple[NodeRecord, ...]], None]) -> None:
        self._callbacks.append(callback)

    async def work(self, address: str) -> Channel:
        await asyncio.sleep(0)
        return self._nodes[address].open()

    async def session(self, address: str) -> Channel:
        raise AssertionError("a router opens no sessions")

    def add(self, name: str, *, incarnation: str = "", load: Load | None = None, **fields: Any) -> FakeNode:
        """A node named p... prefills, one named d... decodes; its address is its name."""
        record = NodeRecord(
            role="prefill" if name.startswith("p") else "decode",
            address=name,
            incarnation=Incarnation(incarnation or f"{name}-inc"),
            model=fields.pop("model", "m"),
            layout="layout",
            page_size=16,
            max_model_len=4096,
            vocab_size=100,
            transports=("memory",),
            load=load or Load(free_pages=1000, total_pages=1000),
            **fields,
        )
        self._nodes[name] = FakeNode(record)
        self._tell()
        return self._nodes[name]

    def update(self, name: str, **changes: Any) -> None:
        """A heartbeat with something new in it."""
        node = self._nodes[name]
        node.record = replace(node.record, **changes)
        self._tell()

    def remove(self, name: str) -> None:
        del self._nodes[name]
        self._tell()

    def _tell(self) -> None:
        for callback in self._callbacks:
            callback(self.records)


class Cluster:
    """A router's dispatch side wired to fake nodes; request ids are r1, r2, ... and canary-c1, ..."""

    def __init__(
        self,
        names: str,
        *,
        dispatch: DispatchConfig,
        pairs: PairConfig,
        link: LinkConfig,
        loads: Mapping[str, Load],
        has_index: bool = False,
    ) -> None:
        self.registry = FakeRegistry()
        self.nodes = {name: self.registry.add(name, load=loads.get(name)) for name in names.split()}
        self.stats = RouterStats()
        self.links = NodeLinks(
            self.registry,
            connector=self.registry,
            router=ROUTER,
            stats=self.stats,
            config=link,
            index=PrefixIndex(on_size=self.stats.prefix_pages) if has_index else None,
        )
        self.pairs = PairBook(self.links, stats=self.stats, new_id=_ids("c"), config=pairs)
        self.dispatcher = Dispatcher(
            self.links, self.pairs, stats=self.stats, config=dispatch, new_id=_ids("r")
        )

    def __getitem__(self, name: str) -> FakeNode:
        return self.nodes[name]

    def counted(self, name: str) -> float:
        """A series without its prefix; 0 when it was never touched."""
        return self.stats.snapshot().get(f"paceline_router_{name}", 0.0)

    def states(self) -> dict[tuple[str | None, str], str]:
        return {(pair["prefill"], pair["decode"]): pair["state"] for pair in self.pairs.report()["pairs"]}


@asynccontextmanager
async def cluster(
    names: str = "p1 d1",
    *,
    dispatch: DispatchConfig | None = None,
    pairs: PairConfig | None = None,
    link: LinkConfig | None = None,
    loads: Mapping[str, Load] | None = None,
    has_index: bool = False,
) -> AsyncIterator[Cluster]:
    """A cluster whose links are open and whose canaries have run."""
    made = Cluster(
        names,
        dispatch=dispatch or DispatchConfig(),
        pairs=pairs or PairConfig(),
        link=link or LinkConfig(),
        loads=loads or {},
        has_index=has_index,
    )
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(made.links.run()), group.create_task(made.pairs.run())]
        await settle()
        yield made
        for task in tasks:
            task.cancel()


class Reader:
    """A consumer in its own task: `items` is what it has got, `error` what it was told instead."""

    def __init__(self, dispatcher: Dispatcher, request: GenerateRequest) -> None:
        self.items: list[Delta | Outcome] = []
        self.error: Exception | None = None
        self._dispatcher = dispatcher
        self._request = request
        self.task: asyncio.Task[None] | None = None

    @property
    def tokens(self) -> list[tuple[int, tuple[int, ...]]]:
        return [(item.first_index, item.ids) for item in self.items if isinstance(item, Delta)]

    @property
    def outcome(self) -> Outcome:
        last = self.items[-1]
        assert isinstance(last, Outcome)
        return last

    async def run(self) -> None:
        try:
            outcome = await self._dispatcher.generate(self._request, self._take)
            assert outcome is not None
            self.items.append(outcome)
        except Exception as error:  # noqa: BLE001  a test looks at it
            self.error = error

    def _take(self, delta: Delta) -> bool:
        self.items.append(delta)
        return True


@asynccontextmanager
async def reading(made: Cluster, request: GenerateRequest) -> AsyncIterator[Reader]:
    """Starts a consumer; leaving the block stops it, as a client that goes away does."""
    reader = Reader(made.dispatcher, request)
    async with asyncio.TaskGroup() as group:
        reader.task = group.create_task(reader.run())
        await settle()
        yield reader
        reader.task.cancel()


def a_request(*prompt_ids: int, max_tokens: int = 4, **fields: Any) -> GenerateRequest:
    sampling = SamplingParams(
        seed=fields.pop("seed", 5),
        max_tokens=max_tokens,
        min_tokens=fields.pop("min_tokens", 0),
        stop_token_ids=fields.pop("stop_token_ids", ()),
        prompt_logprobs=fields.pop("prompt_logprobs", None),
        allowed_token_ids=fields.pop("allowed_token_ids", ()),
        banned_sequences=fields.pop("banned_sequences", ()),
    )
    return GenerateRequest(prompt_ids=prompt_ids or (1, 2, 3), sampling=sampling, **fields)


async def settle() -> None:
    """Let everything happen that needs no time to pass."""
    for _ in range(50):
        await asyncio.sleep(0)


def _ids(prefix: str) -> Callable[[], str]:
    numbers = count(1)
    return lambda: f"{prefix}{next(numbers)}"
