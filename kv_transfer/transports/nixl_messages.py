"""The bytes that `nixl` transports exchange: the connection blob in an offer, and write notifications.

Owns packing and parsing; loads without NIXL. Little endian, versioned by the offer's magic.
"""

import struct
from dataclasses import dataclass

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import TransportOffer
from kv_transfer.transport import Landed, TransportError, WriteHandle

NAME = "nixl"
BIND = b"bind"
"""A peer's first notification to the gate it was offered."""

_OFFER = struct.Struct("<4sQQQII")  # magic, base, page_bytes, num_pages, lengths of gate name and metadata
_OFFER_MAGIC = b"PNX1"
_NOTICE = struct.Struct("<III")  # attempt, start, stop; then the request id


@dataclass(frozen=True, slots=True, kw_only=True)
class NixlOffer:
    """What `offer` packs: the pool's geometry and the gate's name and NIXL metadata."""

    address: int
    page_bytes: int
    num_pages: int
    gate: str
    metadata: bytes

    def pack(self) -> bytes:
        name = self.gate.encode()
        head = (self.address, self.page_bytes, self.num_pages, len(name), len(self.metadata))
        return _OFFER.pack(_OFFER_MAGIC, *head) + name + self.metadata


def unpack_offer(offer: TransportOffer) -> NixlOffer:
    """Raises TransportError naming the field that is malformed."""
    if offer.name != NAME:
        raise TransportError(f"offer.name: {NAME!r} here, {offer.name!r} there")
    if len(offer.blob) < _OFFER.size:
        raise TransportError(f"offer.blob: {len(offer.blob)} bytes, at least {_OFFER.size} expected")
    magic, address, page_bytes, num_pages, name_len, metadata_len = _OFFER.unpack_from(offer.blob)
    if magic != _OFFER_MAGIC:
        raise TransportError(f"offer.blob: version {_OFFER_MAGIC!r} here, {magic!r} there")
    body = offer.blob[_OFFER.size :]
    if len(body) != name_len + metadata_len:
        raise TransportError(f"offer.blob: {name_len + metadata_len} bytes of body expected, got {len(body)}")
    return NixlOffer(
        address=address,
        page_bytes=page_bytes,
        num_pages=num_pages,
        gate=body[:name_len].decode(errors="replace"),
        metadata=body[name_len:],
    )


def pack_notice(handle: WriteHandle) -> bytes:
    return _NOTICE.pack(handle.tid.attempt, handle.start, handle.stop) + handle.tid.request_id.encode()


def unpack_notice(peer: Incarnation, message: bytes) -> Landed | None:
    """None when it is not one of ours."""
    if len(message) < _NOTICE.size:
        return None
    attempt, start, stop = _NOTICE.unpack_from(message)
    try:
        request_id = message[_NOTICE.size :].decode()
    except UnicodeDecodeError:
        return None
    return Landed(peer=peer, tid=TransferId(request_id, attempt), start=start, stop=stop)
