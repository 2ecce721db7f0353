"""A node's gRPC server: Work, Session, Status, Drain, health and reflection.

Owns the listening port. Must never know what a node does with the channels it is handed.
"""

# ruff: noqa: ARG002  gRPC fixes the arguments of every handler

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from wire.channel import Accept, Channel
from wire.convert import pack_from_node, pack_status, pack_to_decode, unpack_to_node, unpack_to_prefill
from wire.gen import node_pb2, node_pb2_grpc, transfer_pb2, transfer_pb2_grpc
from wire.grpc_channel import GrpcChannel, Stream
from wire.grpc_options import SERVER_OPTIONS
from wire.host_events import NodeStatus
from wire.records import NodeRecord
from wire.security import Trust
from wire.serving import serve_accepted

SERVICES = tuple(
    file.services_by_name[name].full_name
    for file, name in ((node_pb2.DESCRIPTOR, "Node"), (transfer_pb2.DESCRIPTOR, "Transfer"))
)


class ServedNode(Protocol):
    """What the server needs of a node; `wire.host.NodeHost` is one."""

    @property
    def record(self) -> NodeRecord: ...

    async def accept_work(self, channel: Channel) -> None: ...

    async def accept_session(self, channel: Channel) -> None: ...

    async def status(self) -> NodeStatus: ...

    def drain(self) -> None: ...


class GrpcServer:
    """Listens from construction on (in a running loop), serves from `start` on.

    `port` is the bound one, also when `address` says port 0. Raises OSError when it cannot bind.
    """

    def __init__(self, address: str, trust: Trust | None = None, *, send_timeout_s: float = 10.0) -> None:
        trust = trust or Trust()
        self._send_timeout_s = send_timeout_s
        self._server = trust.server(SERVER_OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # stubs miss it
        self.port = trust.listen(self._server, address)

    def add_handlers(self, handlers: "tuple[grpc.GenericRpcHandler[Any, Any], ...]") -> None:
        """Serve more services on this port, such as a transport's data plane. Before `start` only."""
        self._server.add_generic_rpc_handlers(handlers)

    async def start(self, node: ServedNode) -> None:
        """Serve `node` and report it healthy."""
        servicer = _NodeServicer(node, self._send_timeout_s, set_healthy=self.set_healthy)
        node_pb2_grpc.add_NodeServicer_to_server(servicer, self._server)
        transfer_pb2_grpc.add_TransferServicer_to_server(
            _TransferServicer(node, self._send_timeout_s), self._server
        )
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(
            (*SERVICES, health.SERVICE_NAME, reflection.SERVICE_NAME), self._server
        )
        await self._server.start()
        await self.set_healthy(True)

    async def set_healthy(self, is_healthy: bool) -> None:
        """What the gRPC health service answers from now on."""
        serving = health_pb2.HealthCheckResponse.SERVING
        status = serving if is_healthy else health_pb2.HealthCheckResponse.NOT_SERVING
        for service in ("", *SERVICES):
            await self._health.set(service, status)

    async def stop(self, grace_s: float = 1.0) -> None:
        """Stop listening; calls still open after `grace_s` are cancelled."""
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


class _NodeServicer(node_pb2_grpc.NodeServicer):
    def __init__(
        self, node: ServedNode, send_timeout_s: float, *, set_healthy: Callable[[bool], Awaitable[None]]
    ) -> None:
        self._node = node
        self._send_timeout_s = send_timeout_s
        self._set_healthy = set_healthy

    async def Work(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # reader/writer API
        stream = _stream(context, pack=pack_from_node, unpack=unpack_to_node)
        await _serve(self._node.accept_work, stream, context, send_timeout_s=self._send_timeout_s)

    async def Status(self, request: node_pb2.StatusRequest, context: Any) -> node_pb2.StatusResponse:
        record = self._node.record
        return pack_status(
            await self._node.status(),
            role=record.role,
            address=record.address,
            incarnation=record.incarnation,
        )

    async def Drain(self, request: node_pb2.DrainRequest, context: Any) -> node_pb2.DrainResponse:
        self._node.drain()
        await self._set_healthy(False)
        return node_pb2.DrainResponse()


class _TransferServicer(transfer_pb2_grpc.TransferServicer):
    def __init__(self, node: ServedNode, send_timeout_s: float) -> None:
        self._node = node
        self._send_timeout_s = send_timeout_s

    async def Session(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # reader/writer API
        stream = _stream(context, pack=pack_to_decode, unpack=unpack_to_prefill)
        await _serve(self._node.accept_session, stream, context, send_timeout_s=self._send_timeout_s)


def _stream(context: Any, *, pack: Callable[[Any], Any], unpack: Callable[[Any], Any]) -> Stream:
    # The call ends when its handler returns, so there is nothing to cancel.
    return Stream(read=context.read, write=context.write, cancel=lambda: None, pack=pack, unpack=unpack)


async def _serve(accept: Accept, stream: Stream, context: Any, *, send_timeout_s: float) -> None:
    channel = GrpcChannel(stream, peer=context.peer(), send_timeout_s=send_timeout_s)
    async with asyncio.TaskGroup() as tasks:
        pump = tasks.create_task(channel.pump())
        try:
            await serve_accepted(accept, channel)
        finally:
            pump.cancel()
