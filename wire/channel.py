"""The seam below every message stream: gRPC in production, memory in simulation.

A channel carries value messages in order, both ways, until either side closes it.
"""

from collections.abc import Awaitable, Callable
from typing import Any, Protocol


class ChannelClosed(ConnectionError):
    """The stream is over: the peer closed it, died, or refused it."""


class Channel(Protocol):
    """One bidirectional stream of value messages (wire.work or kv_transfer.messages)."""

    @property
    def peer(self) -> str:
        """Address of the other side, for messages and logs."""
        ...

    async def send(self, message: Any) -> None:
        """Queue one message; waits when the peer reads slower than we write. Raises ChannelClosed, also when
        the peer has read nothing for long, or ValueError for a message that the wire cannot carry: then
        nothing is sent and the stream goes on."""
        ...

    async def receive(self) -> Any:
        """Next message. Raises ChannelClosed at the end of the stream."""
        ...

    async def close(self) -> None:
        """End the stream; pending receives on both sides raise ChannelClosed. Idempotent."""
        ...


class Connector(Protocol):
    """Opens channels to nodes by address."""

    async def work(self, address: str) -> Channel:
        """A `Work` stream to a node. Raises ChannelClosed when it cannot be opened."""
        ...

    async def session(self, address: str) -> Channel:
        """A transfer session to a prefill node."""
        ...


Accept = Callable[[Channel], Awaitable[None]]
"""Serves one accepted channel; returning or raising closes it."""
