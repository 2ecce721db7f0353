"""Opens channels to nodes over gRPC and asks them for their status.

Owns one connection per address and the tasks that read from open channels. Must never know what the
channels are used for.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Self

import grpc

from wire.channel import Channel, ChannelClosed
from wire.convert import pack_to_node, pack_to_prefill, unpack_from_node, unpack_to_decode
from wire.gen import node_pb2, node_pb2_grpc, transfer_pb2_grpc
from wire.grpc_channel import GrpcChannel, Stream, describe
from wire.grpc_options import CLIENT_OPTIONS
from wire.security import Trust


@dataclass(slots=True, eq=False)
class _Connection:
    """`num_users`: channels and calls on it."""

    channel: grpc.aio.Channel
    num_users: int = 0


class GrpcConnector:
    """A Connector over gRPC. Use as an async context manager: leaving it closes every channel.

    Nodes come and go on ports of their own, so a connection lives no longer than somebody uses it.
    """

    def __init__(
        self, trust: Trust | None = None, *, connect_timeout_s: float = 5.0, send_timeout_s: float = 10.0
    ) -> None:
        self._trust = trust or Trust()
        self._connect_timeout_s = connect_timeout_s
        self._send_timeout_s = send_timeout_s
        self._connections: dict[str, _Connection] = {}
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
        try:
            await self._pumps.__aexit__(kind, error, trace)
        finally:
            for connection in self._connections.values():
                await connection.channel.close(None)
            self._connections.clear()

    @property
    def num_connections(self) -> int:
        return len(self._connections)

    async def work(self, address: str) -> Channel:
        connection = await self._ready(address)
        call = node_pb2_grpc.NodeStub(connection.channel).Work(metadata=self._trust.metadata)  # type: ignore[call-arg]  # stubs miss the default
        stream = Stream(
            read=call.read, write=call.write, cancel=call.cancel, pack=pack_to_node, unpack=unpack_from_node
        )
        return self._open_channel(stream, address, connection)

    async def session(self, address: str) -> Channel:
        connection = await self._ready(address)
        call = transfer_pb2_grpc.TransferStub(connection.channel).Session(metadata=self._trust.metadata)  # type: ignore[call-arg]  # stubs miss the default
        stream = Stream(
            read=call.read,
            write=call.write,
            cancel=call.cancel,
            pack=pack_to_prefill,
            unpack=unpack_to_decode,
        )
        return self._open_channel(stream, address, connection)

    async def status(self, address: str) -> node_pb2.StatusResponse:
        """What the node says of itself. Raises ChannelClosed when it cannot be asked."""
        async with self._calling(address) as stub:
            return await stub.Status(
                node_pb2.StatusRequest(), timeout=self._connect_timeout_s, metadata=self._trust.metadata
            )

    async def drain(self, address: str) -> None:
        """Tell the node to stop admitting. Raises ChannelClosed when it cannot be told."""
        async with self._calling(address) as stub:
            await stub.Drain(
                node_pb2.DrainRequest(), timeout=self._connect_timeout_s, metadata=self._trust.metadata
            )

    @asynccontextmanager
    async def _calling(self, address: str) -> "AsyncIterator[node_pb2_grpc.NodeAsyncStub]":
        connection = await self._ready(address)
        try:
            yield node_pb2_grpc.NodeStub(connection.channel)
        except grpc.aio.AioRpcError as error:
            raise ChannelClosed(f"{address}: {describe(error)}") from None
        finally:
            await self._leave(address, connection)

    async def _ready(self, address: str) -> _Connection:
        """A connection with one more user, who must `_leave` it."""
        connection = self._connections.get(address)
        if connection is None:
            connection = _Connection(self._trust.channel(address, CLIENT_OPTIONS))
            self._connections[address] = connection
        connection.num_users += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                await connection.channel.channel_ready()
        except (TimeoutError, grpc.aio.UsageError):
            connection.num_users = 0  # it is of no use to the others either
            await self._leave(address, connection)
            raise ChannelClosed(f"{address} cannot be reached") from None
        except BaseException:
            await self._leave(address, connection)
            raise
        return connection

    async def _leave(self, address: str, connection: _Connection) -> None:
        connection.num_users -= 1
        if connection.num_users <= 0 and self._connections.get(address) is connection:
            del self._connections[address]
            await connection.channel.close(None)

    def _open_channel(self, stream: Stream, address: str, connection: _Connection) -> GrpcChannel:
        channel = GrpcChannel(stream, peer=address, send_timeout_s=self._send_timeout_s)
        self._open.add(channel)
        self._pumps.create_task(self._pump(channel, address, connection))
        return channel

    async def _pump(self, channel: GrpcChannel, address: str, connection: _Connection) -> None:
        try:
            await channel.pump()
        finally:
            self._open.discard(channel)
            await self._leave(address, connection)
