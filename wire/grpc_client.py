"""Opens channels to nodes over gRPC and asks them for their status.

Owns one connection per address and the tasks that read from open channels. Must never know what the
channels are used for.
"""

import asyncio
from types import TracebackType
from typing import Any, Self

import grpc

from wire.channel import Channel, ChannelClosed
from wire.convert import pack_to_node, pack_to_prefill, unpack_from_node, unpack_to_decode
from wire.gen import node_pb2, node_pb2_grpc, transfer_pb2_grpc
from wire.grpc_channel import GrpcChannel, Stream, describe
from wire.grpc_options import CLIENT_OPTIONS
from wire.security import Trust


class GrpcConnector:
    """A Connector over gRPC. Use as an async context manager: leaving it closes every channel."""

    def __init__(
        self, trust: Trust | None = None, *, connect_timeout_s: float = 5.0, send_timeout_s: float = 10.0
    ) -> None:
        self._trust = trust or Trust()
        self._connect_timeout_s = connect_timeout_s
        self._send_timeout_s = send_timeout_s
        self._connections: dict[str, grpc.aio.Channel] = {}
        self._pumps = asyncio.TaskGroup()
        self._open: set[GrpcChannel] = set()

    async def __aenter__(self) -> Self:
        await self._pumps.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for channel in list(self._open):
            await channel.close()
        await self._pumps.__aexit__(kind, error, trace)
        for connection in self._connections.values():
            await connection.close(None)
        self._connections.clear()

    async def work(self, address: str) -> Channel:
        connection = await self._ready(address)
        call = node_pb2_grpc.NodeStub(connection).Work(metadata=self._trust.metadata)  # type: ignore[call-arg]  # stubs miss the default
        return self._channel(call, address, pack=pack_to_node, unpack=unpack_from_node)

    async def session(self, address: str) -> Channel:
        connection = await self._ready(address)
        call = transfer_pb2_grpc.TransferStub(connection).Session(metadata=self._trust.metadata)  # type: ignore[call-arg]  # stubs miss the default
        return self._channel(call, address, pack=pack_to_prefill, unpack=unpack_to_decode)

    async def status(self, address: str) -> node_pb2.StatusResponse:
        """What the node says of itself. Raises ChannelClosed when it cannot be asked."""
        stub = node_pb2_grpc.NodeStub(await self._ready(address))
        try:
            return await stub.Status(
                node_pb2.StatusRequest(), timeout=self._connect_timeout_s, metadata=self._trust.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise ChannelClosed(f"{address}: {describe(error)}") from None

    async def drain(self, address: str) -> None:
        """Tell the node to stop admitting. Raises ChannelClosed when it cannot be told."""
        stub = node_pb2_grpc.NodeStub(await self._ready(address))
        try:
            await stub.Drain(
                node_pb2.DrainRequest(), timeout=self._connect_timeout_s, metadata=self._trust.metadata
            )
        except grpc.aio.AioRpcError as error:
            raise ChannelClosed(f"{address}: {describe(error)}") from None

    async def _ready(self, address: str) -> grpc.aio.Channel:
        connection = self._connections.get(address)
        if connection is None:
            connection = self._trust.channel(address, CLIENT_OPTIONS)
            self._connections[address] = connection
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connection.channel_ready()
        except (TimeoutError, grpc.aio.UsageError):
            await self._forget(address, connection)
            raise ChannelClosed(f"{address} cannot be reached") from None
        return connection

    async def _forget(self, address: str, connection: grpc.aio.Channel) -> None:
        # Nodes come and go on ports of their own: a dead address must not cost a connection for ever.
        if self._connections.get(address) is connection:
            del self._connections[address]
            await connection.close(None)

    def _channel(self, call: Any, address: str, *, pack: Any, unpack: Any) -> GrpcChannel:
        stream = Stream(read=call.read, write=call.write, cancel=call.cancel, pack=pack, unpack=unpack)
        channel = GrpcChannel(stream, peer=address, send_timeout_s=self._send_timeout_s)
        self._pumps.create_task(self._pump(channel))
        return channel

    async def _pump(self, channel: GrpcChannel) -> None:
        self._open.add(channel)
        try:
            await channel.pump()
        finally:
            self._open.discard(channel)
