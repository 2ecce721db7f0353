"""The bytes on the `grpc` transport's stream. Owns packing and parsing only.

Little endian. D to P, one greeting and then one acknowledgement per frame:
  greeting  4s magic "PGP1", then D's incarnation (utf-8)
  ack       u64 write, u32 first page (of the request), then the reason of a refusal (utf-8, empty: written)
P to D, one frame per message:
  frame     u64 write, u32 attempt, u32 start, u32 stop (of the whole write), u32 first page of this frame,
            u32 num_pages, u16 request id length, request id (utf-8), u32 page id at D * num_pages,
            then the pages back to back, or so many leading bytes of each as were agreed
`write` numbers a write of P; page positions are those of the request.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from kv_transfer.ids import Incarnation, TransferId

MAGIC = b"PGP1"
_ACK = struct.Struct("<QI")
_FRAME = struct.Struct("<QIIIIIH")


class FrameError(ValueError):
    """A message that is not one of ours; the stream it came on is useless."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrameHead:
    write: int
    tid: TransferId
    start: int
    stop: int
    first: int
    page_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Ack:
    write: int
    first: int
    error: str


def pack_greeting(incarnation: Incarnation) -> bytes:
    return MAGIC + incarnation.encode()


def parse_greeting(message: bytes) -> Incarnation:
    if message[:4] != MAGIC:
        raise FrameError(f"greeting: version {MAGIC!r} here, {message[:4]!r} there")
    return Incarnation(message[4:].decode(errors="replace"))


def pack_ack(ack: Ack) -> bytes:
    return _ACK.pack(ack.write, ack.first) + ack.error.encode()


def parse_ack(message: bytes) -> Ack:
    if len(message) < _ACK.size:
        raise FrameError(f"ack: at least {_ACK.size} bytes expected, got {len(message)}")
    write, first = _ACK.unpack_from(message)
    return Ack(write=write, first=first, error=message[_ACK.size :].decode(errors="replace"))


def pack_frame(head: FrameHead, pages: Sequence[memoryview]) -> bytes:
    """One copy of the page bytes, into the message."""
    request_id = head.tid.request_id.encode()
    fixed = _FRAME.pack(
        head.write, head.tid.attempt, head.start, head.stop, head.first, len(head.page_ids), len(request_id)
    )
    page_ids = struct.pack(f"<{len(head.page_ids)}I", *head.page_ids)
    return b"".join((fixed, request_id, page_ids, *pages))


def parse_frame(message: bytes, copy_bytes: int) -> tuple[FrameHead, memoryview]:
    """The head, and the pages back to back (no copy). Raises FrameError."""
    if len(message) < _FRAME.size:
        raise FrameError(f"frame: at least {_FRAME.size} bytes expected, got {len(message)}")
    write, attempt, start, stop, first, num_pages, id_len = _FRAME.unpack_from(message)
    ids_at = _FRAME.size + id_len
    data_at = ids_at + 4 * num_pages
    if len(message) != data_at + num_pages * copy_bytes:
        raise FrameError(
            f"frame: {num_pages} pages of {copy_bytes} bytes make {data_at + num_pages * copy_bytes}, "
            f"got {len(message)}"
        )
    if not start <= first < first + num_pages <= stop:
        raise FrameError(f"frame: pages [{first}, {first + num_pages}) outside of [{start}, {stop})")
    head = FrameHead(
        write=write,
        tid=TransferId(message[_FRAME.size : ids_at].decode(errors="replace"), attempt),
        start=start,
        stop=stop,
        first=first,
        page_ids=struct.unpack_from(f"<{num_pages}I", message, ids_at),
    )
    return head, memoryview(message)[data_at:]
