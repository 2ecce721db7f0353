"""Who is let in, over real gRPC servers and real certificates."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from kv_transfer.ids import Incarnation
from kv_transfer.transports.grpc import METHOD, SERVICE
from kv_transfer.transports.registry import Setup, build
from wire.channel import Channel, ChannelClosed
from wire.grpc_client import GrpcConnector
from wire.grpc_options import CLIENT_OPTIONS
from wire.grpc_server import GrpcServer
from wire.host_events import NodeStatus
from wire.records import NodeRecord
from wire.security import ClusterSecurity, Trust

TOKEN = "a token of this cluster"
OTHER = "a token of another cluster"
PATIENCE_S = 60.0


class IdleNode:
    """Accepts every stream and ends it."""

    def __init__(self, address: str) -> None:
        self.num_accepted = 0
        self.is_draining = False
        self.record = NodeRecord(
            role="decode",
            address=address,
            incarnation=Incarnation("d-1"),
            model="m",
            layout="x",
            page_size=4,
            max_model_len=64,
            vocab_size=10,
            transports=("grpc",),
        )

    async def accept_work(self, channel: Channel) -> None:
        self.num_accepted += 1

    async def accept_session(self, channel: Channel) -> None:
        self.num_accepted += 1

    async def status(self) -> NodeStatus:
        raise AssertionError("nobody may ask")

    def drain(self) -> None:
        self.is_draining = True


@asynccontextmanager
async def serving(trust: Trust) -> AsyncIterator[tuple[IdleNode, str]]:
    server = GrpcServer("127.0.0.1:0", trust)
    address = f"127.0.0.1:{server.port}"
    built = build("grpc", Setup(incarnation=Incarnation("d-1"), address=address, may_write=None))
    server.add_handlers(built.rpc_handlers)  # type: ignore[arg-type]  # opaque in the registry
    node = IdleNode(address)
    await server.start(node)
    try:
        yield node, address
    finally:
        await server.stop(0.0)


def with_token(token: str = TOKEN) -> Trust:
    return Trust(ClusterSecurity(cluster_token=token))


async def end_of_stream(
    trust: Trust, address: str, kind: str, *, connect_timeout_s: float = PATIENCE_S
) -> str:
    async with GrpcConnector(trust, connect_timeout_s=connect_timeout_s) as connector:
        try:
            channel = await (connector.work(address) if kind == "work" else connector.session(address))
            await channel.receive()
        except ChannelClosed as closed:
            return str(closed)
        raise AssertionError("the node sent something")


async def pages_status(trust: Trust, address: str) -> grpc.StatusCode:
    """How the data plane answers a greeting that says nothing."""
    code = grpc.StatusCode.INTERNAL
    async with trust.channel(address, CLIENT_OPTIONS) as channel:
        stream: Any = channel.stream_stream
        while (
            code is grpc.StatusCode.INTERNAL
        ):  # the client's own word for an answer that came amid its write
            call = stream(f"/{SERVICE}/{METHOD}")(metadata=trust.metadata)
            with suppress(grpc.aio.AioRpcError):  # the refusal may be there first
                await call.write(b"")
            code = await call.code()
        return code


@pytest.mark.parametrize("kind", ["work", "session"])
async def test_without_the_token_no_stream_reaches_the_node(kind: str) -> None:
    trust = with_token()
    async with serving(trust) as (node, address):
        for stranger in (Trust(), with_token(OTHER)):
            assert "UNAUTHENTICATED" in await end_of_stream(stranger, address, kind)
        assert node.num_accepted == 0
        assert trust.num_refused == 2
        assert "UNAUTHENTICATED" not in await end_of_stream(with_token(), address, kind)
        assert node.num_accepted == 1


async def test_without_the_token_nobody_asks_or_drains_a_node() -> None:
    async with (
        serving(with_token()) as (node, address),
        GrpcConnector(connect_timeout_s=PATIENCE_S) as stranger,
    ):
        with pytest.raises(ChannelClosed, match="UNAUTHENTICATED"):
            await stranger.status(address)
        with pytest.raises(ChannelClosed, match="UNAUTHENTICATED"):
            await stranger.drain(address)
        assert not node.is_draining
        async with GrpcConnector(with_token(), connect_timeout_s=PATIENCE_S) as friend:
            await friend.drain(address)
        assert node.is_draining


async def test_without_the_token_no_pages_flow() -> None:
    async with serving(with_token()) as (_, address):
        assert await pages_status(Trust(), address) is grpc.StatusCode.UNAUTHENTICATED
        assert await pages_status(with_token(), address) is grpc.StatusCode.INVALID_ARGUMENT


async def test_probes_of_health_need_no_token() -> None:
    async with serving(with_token()) as (_, address), grpc.aio.insecure_channel(address) as channel:
        answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


class Authority:
    """Issues certificates as files."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self._ca = trustme.CA()
        self._ca.cert_pem.write_to_path(f"{folder / 'ca.pem'}")

    def security(self, name: str, **changes: str) -> ClusterSecurity:
        issued = self._ca.issue_cert(name)
        issued.private_key_pem.write_to_path(f"{self._folder / name}.key")
        issued.cert_chain_pems[0].write_to_path(f"{self._folder / name}.crt")
        values = {
            "cluster_cert_file": f"{self._folder / name}.crt",
            "cluster_key_file": f"{self._folder / name}.key",
            "cluster_ca_file": f"{self._folder / 'ca.pem'}",
        }
        return ClusterSecurity(**values | changes)


async def test_mutual_tls_lets_in_who_has_a_certificate_of_the_authority(tmp_path: Path) -> None:
    ours, theirs = Authority(tmp_path / "ours"), Authority(tmp_path / "theirs")
    async with serving(Trust(ours.security("127.0.0.1"))) as (node, address):
        for stranger in (Trust(), Trust(theirs.security("127.0.0.1"))):
            assert "cannot be reached" in await end_of_stream(
                stranger, address, "work", connect_timeout_s=2.0
            )
        assert node.num_accepted == 0
        friend = Trust(ours.security("127.0.0.1"))
        assert "cannot be reached" not in await end_of_stream(friend, address, "work")
        assert await pages_status(friend, address) is grpc.StatusCode.INVALID_ARGUMENT
        assert node.num_accepted == 1


async def test_one_name_may_stand_in_all_certificates_of_a_cluster(tmp_path: Path) -> None:
    ours = Authority(tmp_path / "ours")
    named = Trust(ours.security("cluster.internal", cluster_tls_name="cluster.internal"))
    async with serving(named) as (node, address):
        nameless = Trust(ours.security("cluster.internal"))
        assert "cannot be reached" in await end_of_stream(nameless, address, "work", connect_timeout_s=2.0)
        assert "cannot be reached" not in await end_of_stream(named, address, "work")
        assert node.num_accepted == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"cluster_cert_file": "x"}, "cluster_key_file must be set too"),
        ({"cluster_tls_name": "x"}, "cluster_tls_name must be empty without certificates, got 'x'"),
        ({"cluster_token": "x" * 16, "cluster_token_file": "f"}, "cluster_token_file must be empty"),
    ],
)
def test_settings_that_do_not_go_together_are_refused(settings: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ClusterSecurity(**settings)


def test_secrets_come_from_files_and_are_never_shown(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    assert Trust(ClusterSecurity(cluster_token_file=f"{file}")).metadata == with_token().metadata
    assert TOKEN not in repr(ClusterSecurity(cluster_token=TOKEN))
    file.write_text("short")
    with pytest.raises(ValueError, match="cluster_token_file must hold at least 16") as error:
        Trust(ClusterSecurity(cluster_token_file=f"{file}"))
    assert "short" not in str(error.value)
    with pytest.raises(ValueError, match="cluster_token_file must be a readable file, got 'nowhere'"):
        Trust(ClusterSecurity(cluster_token_file="nowhere"))
