"""`wire.kv_events` values to protobuf and back. Raises ValueError naming the field for anything malformed."""

from wire.convert_fields import require
from wire.gen import node_pb2 as pb
from wire.kv_events import DIGEST_BYTES, KvUpdate, PageHash


def pack_kv_update(update: KvUpdate) -> pb.KvUpdate:
    hashing = update.hashing
    return pb.KvUpdate(
        previous=update.previous,
        sequence=update.sequence,
        stored=b"".join(update.stored),
        removed=b"".join(update.removed),
        hashing=None
        if hashing is None
        else pb.PageHash(
            fingerprint=hashing.fingerprint, page_size=hashing.page_size, lookahead=hashing.lookahead
        ),
    )


def unpack_kv_update(update: pb.KvUpdate) -> KvUpdate:
    return KvUpdate(
        previous=update.previous,
        sequence=update.sequence,
        stored=_digests(update.stored, "kv_update.stored"),
        removed=_digests(update.removed, "kv_update.removed"),
        hashing=_hashing(update.hashing) if update.HasField("hashing") else None,
    )


def _hashing(hashing: pb.PageHash) -> PageHash:
    size = hashing.page_size
    require("kv_update.hashing.page_size", size, holds=size >= 1, rule="at least 1")
    return PageHash(fingerprint=hashing.fingerprint, page_size=size, lookahead=hashing.lookahead)


def _digests(packed: bytes, field: str) -> tuple[bytes, ...]:
    rule = f"a multiple of {DIGEST_BYTES} bytes long"
    require(field, len(packed), holds=len(packed) % DIGEST_BYTES == 0, rule=rule)
    return tuple(packed[start : start + DIGEST_BYTES] for start in range(0, len(packed), DIGEST_BYTES))
