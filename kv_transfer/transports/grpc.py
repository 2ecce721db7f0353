"""The `grpc` transport: pages as acknowledged frames over one gRPC stream per pair. Works everywhere.

The receiver opens the stream to the address in the sender's offer; frames flow down it, acknowledgements
up. Owns the peers and both ends of their streams; the I/O runs on the event loop given to `attach`, all else
on the engine thread. Must never know protobuf: messages are the bytes of `grpc_frames`, passed through as
they are, under their own service name (register `rpc_handlers()` on the node's server).

Teardown: the receiver's own code copies every byte, under a lock that `close_peer` takes. When `close_peer`
returns, no frame of that connection is being copied or will be; later ones are dropped and counted.
A frame for pages that `may_write` does not confirm is refused before any byte is copied.
"""

import asyncio
import queue
import struct
from collections.abc import Callable
from typing import Any

import grpc
import grpc.aio

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import TransportOffer
from kv_transfer.transport import PoolMemory, Ready, TransportError, TransportEvent, WriteHandle
from kv_transfer.transports.grpc_frames import FrameError, pack_ack, pack_greeting, parse_ack, parse_greeting
from kv_transfer.transports.grpc_streams import IncomingPages, MayWrite, OutgoingPages
from kv_transfer.transports.outbox import CANCELLED, PEER_CLOSED, PEER_UNKNOWN, Outbox
from kv_transfer.transports.registry import Built, Setup

NAME = "grpc"
SERVICE = "paceline.transfer.v1.Pages"
METHOD = "Stream"
FRAME_BYTES = 2 << 20
CREDIT_BYTES = 16 << 20

# A connection of its own, so that pages never queue before control messages.
_CHANNEL_OPTIONS = (
    ("grpc.max_receive_message_length", -1),
    ("grpc.use_local_subchannel_pool", 1),
    ("grpc.http2.lookahead_bytes", CREDIT_BYTES),
)

_OFFER = struct.Struct("<4sQQ")  # magic, page_bytes, num_pages; then the address
_OFFER_MAGIC = b"PGO1"


class _StreamEnded(Exception):
    """The peer ended the stream, or we closed it."""


class GrpcTransport:
    """A prefill node gives `may_write` None: it never receives and opens no stream."""

    def __init__(
        self, setup: Setup, *, frame_bytes: int = FRAME_BYTES, credit_bytes: int = CREDIT_BYTES
    ) -> None:
        self.incarnation = setup.incarnation
        self._address = setup.address
        self._may_write: MayWrite | None = setup.may_write
        self._dial = setup.dial
        self._metadata = setup.metadata
        self._frame_bytes = frame_bytes
        self._credit_bytes = credit_bytes
        self._outbox = Outbox()
        self._events: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()  # from both threads
        self._outgoing: dict[Incarnation, OutgoingPages] = {}
        self._incoming: dict[Incarnation, IncomingPages] = {}
        self._wakeups: dict[Incarnation, asyncio.Event] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._memory: PoolMemory | None = None

    @property
    def name(self) -> str:
        return NAME

    @property
    def memory(self) -> PoolMemory:
        if self._memory is None:
            raise TransportError("memory: not registered")
        return self._memory

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        if self._loop is None:
            raise TransportError("loop: not attached")
        return self._loop

    def attach(self, loop: asyncio.AbstractEventLoop) -> None:
        """Where the I/O runs. Before the first `connect`."""
        self._loop = loop

    def rpc_handlers(self) -> "tuple[grpc.GenericRpcHandler[bytes, bytes], ...]":
        """What the node's grpc.aio server must serve (`server.add_generic_rpc_handlers`)."""
        handler = grpc.stream_stream_rpc_method_handler(self.serve)
        return (grpc.method_handlers_generic_handler(SERVICE, {METHOD: handler}),)

    def register(self, memory: PoolMemory) -> None:
        self._memory = memory

    def offer(self) -> TransportOffer:
        head = _OFFER.pack(_OFFER_MAGIC, self.memory.page_bytes, self.memory.num_pages)
        return TransportOffer(name=NAME, blob=head + self._address.encode())

    def connect(self, peer: Incarnation, offer: TransportOffer, *, copy_bytes: int | None = None) -> None:
        page_bytes, address = self._check_offer(offer)
        num_bytes = self.memory.check_copy(copy_bytes, page_bytes)
        if peer in self._outgoing:
            raise TransportError(f"peer: {peer} is connected already, close it first")
        loop = self.loop
        wakeup = asyncio.Event()
        self._wakeups[peer] = wakeup
        self._outgoing[peer] = OutgoingPages(
            peer,
            self.memory,
            num_bytes,
            self._events.put,
            lambda: _call(loop, wakeup.set),
            self._frame_bytes,
            self._credit_bytes,
        )
        if self._may_write is not None:
            incoming = IncomingPages(peer, self.memory, num_bytes, self._events.put, self._may_write, address)
            self._incoming[peer] = incoming
            _call(loop, lambda: self._start_receiving(incoming))

    def write(self, peer: Incarnation, tid: TransferId, pages: Ready) -> WriteHandle:
        if not self.memory.holds(pages.local_pages):
            raise ValueError(f"local_pages must be pages of the pool, got {pages.local_pages}")
        handle = self._outbox.open(peer, tid, pages)
        if peer not in self._outgoing:
            self._outbox.fail(handle, PEER_UNKNOWN)
        elif pages.event.is_complete():
            self._submit(handle, pages)
        else:
            self._outbox.park(handle, pages)
        return handle

    def poll(self) -> list[TransportEvent]:
        for handle, pages in self._outbox.take_complete():
            self._submit(handle, pages)
        self._collect()
        return self._outbox.drain()

    def cancel(self, handle: WriteHandle) -> None:
        if not self._outbox.withdraw(handle, CANCELLED) and handle.peer in self._outgoing:
            self._outgoing[handle.peer].cancel(handle)

    def close_peer(self, peer: Incarnation) -> None:
        incoming = self._incoming.pop(peer, None)
        if incoming is not None:
            incoming.close()
            _call(self.loop, lambda: _stop_receiving(incoming))
        outgoing = self._outgoing.pop(peer, None)
        if outgoing is not None:
            self._outbox.withdraw_peer(peer, PEER_CLOSED)
            outgoing.close(PEER_CLOSED, is_lost=False)
            del self._wakeups[peer]
        self._collect()
        self._outbox.forget(peer)

    def close(self) -> None:
        for peer in list(self._outgoing):
            self.close_peer(peer)

    async def serve(
        self,
        _requests: Any,
        context: Any,  # grpc.aio.ServicerContext[bytes, bytes]; the stubs do not type read and write
    ) -> None:
        """The sending half of one stream, from the peer's greeting until either side ends it."""
        message = await context.read()
        try:
            peer = parse_greeting(message if isinstance(message, bytes) else b"")
        except FrameError as error:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, str(error))
            return
        outgoing = self._outgoing.get(peer)
        wakeup = self._wakeups.get(peer)
        if outgoing is None or wakeup is None or outgoing.has_stream:
            await context.abort(grpc.StatusCode.FAILED_PRECONDITION, f"peer {peer} is not waited for")
            return
        outgoing.has_stream = True
        reason = "stream ended"
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(_read_acks(context, outgoing))
                tasks.create_task(_send_frames(context, outgoing, wakeup))
        except* (_StreamEnded, FrameError, grpc.RpcError, grpc.aio.BaseError) as errors:
            reason = str(errors.exceptions[0]) or reason
        finally:
            outgoing.close(reason, is_lost=True)

    def _collect(self) -> None:
        """Take over what the streams have told so far; those we closed tell nothing more."""
        while not self._events.empty():
            self._outbox.emit(self._events.get_nowait())

    def _submit(self, handle: WriteHandle, pages: Ready) -> None:
        outgoing = self._outgoing.get(handle.peer)
        if outgoing is None or not outgoing.submit(handle, pages):
            self._outbox.fail(handle, PEER_UNKNOWN)

    def _check_offer(self, offer: TransportOffer) -> tuple[int, str]:
        """The page size and the address in it. Raises TransportError naming the field that does not fit."""
        if offer.name != NAME:
            raise TransportError(f"offer.name: {NAME!r} here, {offer.name!r} there")
        if len(offer.blob) < _OFFER.size:
            raise TransportError(f"offer.blob: {len(offer.blob)} bytes, at least {_OFFER.size} expected")
        magic, page_bytes, _ = _OFFER.unpack_from(offer.blob)
        if magic != _OFFER_MAGIC:
            raise TransportError(f"offer.blob: version {_OFFER_MAGIC!r} here, {magic!r} there")
        address = offer.blob[_OFFER.size :].decode(errors="replace")
        if self._may_write is not None and ":" not in address:
            raise TransportError(f"offer.address: host:port expected, got {address!r}")
        return page_bytes, address

    def _start_receiving(self, incoming: IncomingPages) -> None:
        if incoming.is_closed:
            return
        incoming.task = self.loop.create_task(self._receive(incoming))
        incoming.task.add_done_callback(lambda task: _report(task, incoming))

    async def _receive(self, incoming: IncomingPages) -> None:
        """The receiving half of one stream. Ends with `lost`, which is silent if we closed it."""
        async with self._dial(incoming.address, _CHANNEL_OPTIONS) as channel:
            stream: Any = channel.stream_stream  # the stubs want serializers; without them bytes stay bytes
            call = stream(f"/{SERVICE}/{METHOD}")(metadata=self._metadata)
            await call.write(pack_greeting(self.incarnation))
            while isinstance(message := await call.read(), bytes):
                ack = incoming.take(message)
                if ack is None:
                    return
                await call.write(pack_ack(ack))


async def _read_acks(context: Any, outgoing: OutgoingPages) -> None:
    while isinstance(message := await context.read(), bytes):
        outgoing.acknowledged(parse_ack(message))
    raise _StreamEnded("stream ended by the receiver")


async def _send_frames(context: Any, outgoing: OutgoingPages, wakeup: asyncio.Event) -> None:
    while not outgoing.is_closed:
        wakeup.clear()
        frame = outgoing.take_frame()
        if frame is None:
            await wakeup.wait()
        else:
            await context.write(frame)
    raise _StreamEnded(PEER_CLOSED)


def _stop_receiving(incoming: IncomingPages) -> None:
    if incoming.task is not None:
        incoming.task.cancel()


def _report(task: "asyncio.Task[None]", incoming: IncomingPages) -> None:
    """The task boundary of a receiving stream: whatever ended it is the reason the peer is gone."""
    error = None if task.cancelled() else task.exception()
    if error is None:
        incoming.lost("stream ended")
    elif isinstance(error, grpc.aio.AioRpcError):
        incoming.lost(f"{error.code().name}: {error.details()}")
    else:
        incoming.lost(repr(error))


def _call(loop: asyncio.AbstractEventLoop, function: Callable[[], Any]) -> None:
    """Run on the event loop; when that is closed, its streams are closed with it."""
    if not loop.is_closed():
        loop.call_soon_threadsafe(function)


def create(setup: Setup) -> Built:
    """The registry's entry."""
    transport = GrpcTransport(setup)
    return Built(transport=transport, attach=transport.attach, rpc_handlers=transport.rpc_handlers())
