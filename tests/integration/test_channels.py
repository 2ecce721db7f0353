import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deploy.ports import free_port
from engine.params import SamplingParams
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Drained, Refused, Renew
from wire.channel import Accept, Channel, ChannelClosed, Connector
from wire.convert import unpack_status
from wire.gen import node_pb2, node_pb2_grpc
from wire.grpc_client import GrpcConnector
from wire.grpc_server import GrpcServer
from wire.host_events import NodeStatus
from wire.memory_channel import MemoryNetwork
from wire.records import Load, NodeRecord
from wire.work import Cancel, Failed, Frame, Submit, Tokens, Unreadable, WorkHello

RECORD = NodeRecord(
    role="prefill",
    address="p:1",
    incarnation=Incarnation("p-1"),
    model="m",
    layout="l",
    page_size=4,
    max_model_len=64,
    vocab_size=10,
    transports=("grpc",),
)
STATUS = NodeStatus(
    step=7,
    load=Load(free_pages=3, total_pages=4, running=1),
    quarantined_pages=0,
    is_draining=False,
    is_idle=False,
    integrity="",
    counters={"steps": 7.0},
    peers={"d-1": "ready"},
)
TID = TransferId("r", 1)
PATIENCE_S = 60.0


async def hold(channel: Channel) -> None:
    """Read until the other side ends the channel."""
    while True:
        await channel.receive()


async def echo(channel: Channel) -> None:
    """Answer every Cancel with a frame that fails its tid, every Renew with a Drained per tid."""
    while True:
        message = await channel.receive()
        if isinstance(message, Cancel):
            event = Failed(tid=message.tid, code="cancelled", retryable=False, reason="")
            await channel.send(Frame(step=1, events=(event,)))
        if isinstance(message, Renew):
            for tid in message.tids:
                await channel.send(Drained(tid=tid))


@dataclass(kw_only=True)
class FakeNode:
    work: Accept = hold
    session: Accept = hold
    num_drains: int = 0
    ended: list[str] = field(default_factory=list)

    @property
    def record(self) -> NodeRecord:
        return RECORD

    async def accept_work(self, channel: Channel) -> None:
        try:
            await self.work(channel)
        finally:
            self.ended.append("work")

    async def accept_session(self, channel: Channel) -> None:
        try:
            await self.session(channel)
        finally:
            self.ended.append("session")

    async def status(self) -> NodeStatus:
        return STATUS

    def drain(self) -> None:
        self.num_drains += 1


@asynccontextmanager
async def serving(
    node: FakeNode, address: str = "127.0.0.1:0", *, send_timeout_s: float = PATIENCE_S
) -> AsyncIterator[str]:
    """The address at which the node is served for the length of the block."""
    server = GrpcServer(address, send_timeout_s=send_timeout_s)
    try:
        await server.start(node)
        yield f"127.0.0.1:{server.port}"
    finally:
        await server.stop(0.0)


def patient(*, send_timeout_s: float = PATIENCE_S) -> GrpcConnector:
    return GrpcConnector(connect_timeout_s=PATIENCE_S, send_timeout_s=send_timeout_s)


@asynccontextmanager
async def grpc_pair(node: FakeNode, send_timeout_s: float) -> AsyncIterator[tuple[Connector, str]]:
    async with (
        serving(node, send_timeout_s=send_timeout_s) as address,
        patient(send_timeout_s=send_timeout_s) as connector,
    ):
        yield connector, address


@asynccontextmanager
async def memory_pair(node: FakeNode, send_timeout_s: float) -> AsyncIterator[tuple[Connector, str]]:
    network = MemoryNetwork(capacity=4, send_timeout_s=send_timeout_s)
    async with network.serve("p:1", work=node.accept_work, session=node.accept_session):
        yield network.connector("d:1"), "p:1"


class Connect(Protocol):
    async def __call__(
        self, node: FakeNode, *, send_timeout_s: float = PATIENCE_S
    ) -> tuple[Connector, str]: ...


@pytest.fixture(params=["memory", "grpc"])
async def connect(request: pytest.FixtureRequest) -> AsyncIterator[Connect]:
    pair = {"memory": memory_pair, "grpc": grpc_pair}[request.param]
    async with AsyncExitStack() as stack:

        async def start(node: FakeNode, *, send_timeout_s: float = PATIENCE_S) -> tuple[Connector, str]:
            return await stack.enter_async_context(pair(node, send_timeout_s))

        yield start


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not condition():  # noqa: ASYNC110  the far side has no event to wait on
            await asyncio.sleep(0.005)


async def test_work_messages_pass_both_ways_in_order(connect: Connect) -> None:
    connector, address = await connect(FakeNode(work=echo))
    channel = await connector.work(address)
    tids = [TransferId("r", attempt) for attempt in range(100)]

    async def send_all() -> None:
        for tid in tids:
            await channel.send(Cancel(tid=tid))

    async with asyncio.TaskGroup() as group:
        group.create_task(send_all())
        received = [(await channel.receive()).events[0].tid for _ in tids]
    assert received == tids
    await channel.close()


async def test_session_messages_pass_both_ways(connect: Connect) -> None:
    connector, address = await connect(FakeNode(session=echo))
    channel = await connector.session(address)
    await channel.send(Renew(tids=(TID, TransferId("s", 2))))
    assert await channel.receive() == Drained(tid=TID)
    assert await channel.receive() == Drained(tid=TransferId("s", 2))
    await channel.close()


async def test_what_an_acceptor_sent_before_it_closed_still_arrives(connect: Connect) -> None:
    refused = Refused(field="dtype", ours="bfloat16", theirs="float32")

    async def refuse(channel: Channel) -> None:
        await channel.send(refused)
        await channel.close()

    connector, address = await connect(FakeNode(session=refuse))
    channel = await connector.session(address)
    assert await channel.receive() == refused
    with pytest.raises(ChannelClosed):
        await channel.receive()
    with pytest.raises(ChannelClosed):
        await channel.send(Renew(tids=()))


async def test_closing_ends_a_pending_receive_on_both_sides(connect: Connect) -> None:
    node = FakeNode()
    connector, address = await connect(node)
    channel = await connector.work(address)
    await channel.send(WorkHello(incarnation=Incarnation("r"), role="router"))

    async def receive_nothing() -> str:
        with pytest.raises(ChannelClosed):
            await channel.receive()
        return "ended"

    async with asyncio.TaskGroup() as group:
        pending = group.create_task(receive_nothing())
        await asyncio.sleep(0.05)
        await channel.close()
    assert pending.result() == "ended"
    await channel.close()
    await until(lambda: node.ended == ["work"])


async def test_cancelling_a_receive_loses_no_message(connect: Connect) -> None:
    connector, address = await connect(FakeNode(work=echo))
    channel = await connector.work(address)
    for _ in range(3):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.02):
                await channel.receive()
    await channel.send(Cancel(tid=TID))
    frame = await channel.receive()
    assert frame.events[0].tid == TID


async def test_an_acceptor_that_raises_ends_only_its_channel(
    connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    async def fail_on_cancel(channel: Channel) -> None:
        message = await channel.receive()
        if message == Cancel(tid=TID):
            raise RuntimeError("scripted")
        await channel.send(WorkHello(incarnation=Incarnation("p-1"), role="prefill"))
        await hold(channel)

    connector, address = await connect(FakeNode(work=fail_on_cancel))
    bad, good = await connector.work(address), await connector.work(address)
    await bad.send(Cancel(tid=TID))
    with pytest.raises(ChannelClosed):
        await bad.receive()
    assert "scripted" in caplog.text
    await good.send(WorkHello(incarnation=Incarnation("r"), role="router"))
    assert await good.receive() == WorkHello(incarnation=Incarnation("p-1"), role="prefill")


async def test_a_peer_that_stops_reading_is_dropped(connect: Connect) -> None:
    ids = tuple(range(1000))
    outcome: list[str] = []

    async def flood(channel: Channel) -> None:
        try:
            for step in range(100_000):
                await channel.send(Frame(step=step, events=(Tokens(tid=TID, first_index=0, ids=ids),) * 50))
        except ChannelClosed as closed:
            outcome.append(str(closed))

    connector, address = await connect(FakeNode(work=flood), send_timeout_s=0.3)
    channel = await connector.work(address)
    await until(lambda: bool(outcome))
    assert "stopped reading" in outcome[0]
    await channel.close()


async def test_an_address_nobody_serves_cannot_be_opened() -> None:
    async with GrpcConnector(connect_timeout_s=0.1) as over_grpc:
        for connector in (over_grpc, MemoryNetwork().connector("d:1")):
            with pytest.raises(ChannelClosed, match=r"127.0.0.1:1 cannot be reached"):
                await connector.session("127.0.0.1:1")


async def test_a_restarted_node_is_reached_at_once_at_its_old_address() -> None:
    address = (
        f"127.0.0.1:{free_port()}"  # not one that a connection of somebody else's may be given meanwhile
    )
    async with patient() as connector:
        async with serving(FakeNode(work=echo), address):
            channel = await connector.work(address)
        with pytest.raises(ChannelClosed):
            await channel.receive()
        async with serving(FakeNode(work=echo), address):
            channel = await connector.work(address)
            await channel.send(Cancel(tid=TID))
            assert (await channel.receive()).step == 1


async def test_a_connection_lives_as_long_as_somebody_uses_it() -> None:
    async with serving(FakeNode()) as address, patient() as connector:
        work, session = await connector.work(address), await connector.session(address)
        await connector.status(address)
        assert connector.num_connections == 1
        await work.close()
        await connector.drain(address)
        assert connector.num_connections == 1
        await session.close()
        await until(lambda: connector.num_connections == 0)
        await connector.status(address)
        assert connector.num_connections == 0
    async with GrpcConnector(connect_timeout_s=0.1) as connector:
        with pytest.raises(ChannelClosed):
            await connector.work("127.0.0.1:1")
        assert connector.num_connections == 0


async def test_a_malformed_message_ends_its_stream_and_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    node = FakeNode()
    async with serving(node) as address, grpc.aio.insecure_channel(address) as connection:
        call = node_pb2_grpc.NodeStub(connection).Work()  # type: ignore[call-arg]  # stubs miss the default
        await call.write(node_pb2.ToNode())
        assert await call.read() is grpc.aio.EOF  # type: ignore[attr-defined]  # stubs miss it
    assert node.ended == ["work"]
    assert "to_node.message must be set" in caplog.text


async def test_a_submit_that_cannot_be_unpacked_leaves_its_stream_open() -> None:
    received: list[object] = []

    async def take(channel: Channel) -> None:
        while True:
            received.append(await channel.receive())

    tid = node_pb2.Tid(request_id="r", attempt=1)
    async with (
        serving(FakeNode(work=take)) as address,
        grpc.aio.insecure_channel(address) as connection,
    ):
        call = node_pb2_grpc.NodeStub(connection).Work()  # type: ignore[call-arg]  # stubs miss the default
        await call.write(node_pb2.ToNode(submit=node_pb2.Submit(tid=tid)))
        await call.write(node_pb2.ToNode(cancel=node_pb2.Cancel(tid=tid)))
        await until(lambda: len(received) == 2)
    reason = "submit.sampling must be set, got None"
    assert received == [Unreadable(tid=TID, reason=reason), Cancel(tid=TID)]


async def test_two_servers_cannot_share_a_port() -> None:
    async with serving(FakeNode()) as address:
        with pytest.raises(OSError, match="cannot listen on"):
            GrpcServer(address)


async def test_status_drain_health_and_reflection_answer() -> None:
    node = FakeNode()
    async with (
        serving(node) as address,
        patient() as connector,
        grpc.aio.insecure_channel(address) as connection,
    ):
        status = await connector.status(address)
        assert (status.role, status.address, status.incarnation) == ("prefill", "p:1", "p-1")
        assert unpack_status(status) == STATUS
        health = health_pb2_grpc.HealthStub(connection)
        ask = health_pb2.HealthCheckRequest(service="paceline.node.v1.Node")
        assert (await health.Check(ask)).status == health_pb2.HealthCheckResponse.SERVING
        await connector.drain(address)
        assert node.num_drains == 1
        assert (await health.Check(ask)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        call = reflection_pb2_grpc.ServerReflectionStub(connection).ServerReflectionInfo()
        await call.write(reflection_pb2.ServerReflectionRequest(list_services=""))
        names = [service.name for service in (await call.read()).list_services_response.service]
        await call.done_writing()
    assert "paceline.node.v1.Node" in names
    assert "paceline.transfer.v1.Transfer" in names


async def test_prompts_of_two_million_tokens_pass() -> None:
    received: list[Submit] = []

    async def take(channel: Channel) -> None:
        received.append(await channel.receive())

    submit = Submit(
        tid=TID,
        prompt_ids=tuple(range(2_000_000)),
        num_prompt_tokens=2_000_000,
        sampling=SamplingParams(seed=1, max_tokens=1),
        peer=None,
        deadline_s=1.0,
    )
    async with serving(FakeNode(work=take)) as address, patient() as connector:
        channel = await connector.work(address)
        await channel.send(submit)
        await until(lambda: bool(received))
    assert received == [submit]


async def test_cut_breaks_every_channel_of_an_address_and_new_ones_open() -> None:
    network = MemoryNetwork()
    node = FakeNode(work=echo)
    async with network.serve("p:1", work=node.accept_work, session=node.accept_session):
        connector = network.connector("router:1")
        first = await connector.work("p:1")
        network.cut("router:1")
        with pytest.raises(ChannelClosed, match="cut"):
            await first.receive()
        second = await connector.work("p:1")
        await second.send(Cancel(tid=TID))
        assert (await second.receive()).step == 1
        network.isolate("p:1")
        with pytest.raises(ChannelClosed, match="cannot be reached"):
            await connector.work("p:1")
        network.rejoin("p:1")
        await (await connector.work("p:1")).close()


async def test_cut_between_two_addresses_spares_the_others() -> None:
    network = MemoryNetwork()
    node = FakeNode(work=echo)
    async with network.serve("p:1", work=node.accept_work, session=node.accept_session):
        broken = await network.connector("d:1").work("p:1")
        spared = await network.connector("d:2").work("p:1")
        network.cut("p:1", "d:1")
        with pytest.raises(ChannelClosed, match="connection between d:1 and p:1 was cut"):
            await broken.receive()
        await spared.send(Cancel(tid=TID))
        assert (await spared.receive()).step == 1


async def test_delayed_messages_arrive_late_and_in_order() -> None:
    delays = iter([0.0, 0.05, 0.0, *[0.0] * 8])
    network = MemoryNetwork(delay_s=lambda: next(delays))
    received: list[float] = []
    loop = asyncio.get_running_loop()

    async def note(channel: Channel) -> None:
        for _ in range(2):
            assert isinstance(await channel.receive(), Cancel)
            received.append(loop.time())

    async with network.serve("p:1", work=note, session=hold):
        channel = await network.connector("r").work("p:1")
        sent = loop.time()
        await channel.send(Cancel(tid=TID))
        await channel.send(Cancel(tid=TID))
        await until(lambda: len(received) == 2)
    assert received[0] - sent >= 0.05
    assert received[1] >= received[0]
