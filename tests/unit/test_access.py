"""TLS towards users, over real servers and real certificates."""

import ssl
from pathlib import Path

import grpc
import httpx
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc

from router.access import Access
from router.config import RouterConfig
from router.grpc_server import RouterGrpcServer
from router.grpc_service import GenerationService
from router.node import shown_settings
from router.waiting import Waiting
from tests.fakes_dispatch import (
    FakeDispatcher,
    chat_format,
    front_door,
    http_app,
    listening,
    open_to_all,
)
from tests.smollm2_text import smollm2_text
from wire.security import ClusterSecurity


def access(folder: Path, ca: trustme.CA) -> Access:
    issued = ca.issue_cert("127.0.0.1")
    issued.private_key_pem.write_to_path(f"{folder / 'key.pem'}")
    issued.cert_chain_pems[0].write_to_path(f"{folder / 'cert.pem'}")
    return Access(tls_cert_file=f"{folder / 'cert.pem'}", tls_key_file=f"{folder / 'key.pem'}")


async def test_http_is_served_over_tls_only(tmp_path: Path) -> None:
    ca = trustme.CA()
    trusting = ssl.create_default_context()
    ca.configure_trust(trusting)
    app = http_app(FakeDispatcher(), smollm2_text())
    async with (
        listening(app, access(tmp_path, ca)) as address,
        httpx.AsyncClient(verify=trusting, timeout=60) as http,
    ):
        assert (await http.get(f"https://{address}/live")).json() == {"status": "ok"}
        with pytest.raises(httpx.TransportError):
            await http.get(f"http://{address}/live")


async def test_grpc_is_served_over_tls_only(tmp_path: Path) -> None:
    ca = trustme.CA()
    service = GenerationService(
        front_door(FakeDispatcher(), smollm2_text()),
        new_id=lambda: "x",
        keys=open_to_all(),
        chat_format=chat_format(smollm2_text()),
    )
    server = RouterGrpcServer(service, "127.0.0.1:0", credentials=access(tmp_path, ca).grpc_credentials())
    await server.start()
    address = f"127.0.0.1:{server.port}"
    trusting = grpc.ssl_channel_credentials(ca.cert_pem.bytes())
    try:
        async with grpc.aio.secure_channel(address, trusting) as channel:
            answer = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        async with grpc.aio.insecure_channel(address) as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
    finally:
        await server.stop(0.0)


def test_a_certificate_and_its_key_go_together(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="tls_key_file must be set too"):
        Access(tls_cert_file="x")
    with pytest.raises(ValueError, match="tls_cert_file must be set too"):
        Access(tls_key_file="x")
    with pytest.raises(ValueError, match="must be a certificate and its key, got 'nowhere' and 'nowhere'"):
        Access(tls_cert_file="nowhere", tls_key_file="nowhere").check_certificate()
    good, other = access(tmp_path, trustme.CA()), tmp_path / "other"
    good.check_certificate()
    other.mkdir()
    mixed = Access(tls_cert_file=good.tls_cert_file, tls_key_file=access(other, trustme.CA()).tls_key_file)
    with pytest.raises(ValueError, match="must be a certificate and its key"):
        mixed.check_certificate()


def test_an_api_key_is_not_shown() -> None:
    assert "secret" not in repr(Access(api_key="secret"))


def test_users_are_shown_no_credential_no_address_and_no_other_user() -> None:
    config = RouterConfig(
        model="/secret/model",
        registry="redis://:secret@h/0",
        access=Access(api_key="secret"),
        security=ClusterSecurity(cluster_token="secret" * 3),
        waiting=Waiting(tenant_header="x-secret", tenant_weights="secret=2", max_queue=7),
    )
    shown = shown_settings(config)
    assert "secret" not in str(shown)
    assert shown["waiting"]["max_queue"] == 7
