"""Every conversion between our value types and protobuf, under one name."""

from wire.convert_registry import pack_record, pack_status, unpack_record, unpack_status
from wire.convert_transfer import pack_to_decode, pack_to_prefill, unpack_to_decode, unpack_to_prefill
from wire.convert_work import pack_from_node, pack_to_node, unpack_from_node, unpack_to_node

__all__ = [
    "pack_from_node",
    "pack_record",
    "pack_status",
    "pack_to_decode",
    "pack_to_node",
    "pack_to_prefill",
    "unpack_from_node",
    "unpack_record",
    "unpack_status",
    "unpack_to_decode",
    "unpack_to_node",
    "unpack_to_prefill",
]
