"""`wire.records.NodeRecord` and the node status to protobuf and back.

Owns what a registry entry and a Status answer look like in bytes. Must never know where they are kept.
"""

from google.protobuf.message import DecodeError

from kv_transfer.ids import Incarnation
from wire.convert_fields import require, unpack_incarnation
from wire.gen import node_pb2, registry_pb2
from wire.host_events import NodeStatus
from wire.records import Load, NodeRecord


def pack_record(record: NodeRecord) -> bytes:
    load = record.load
    message = registry_pb2.NodeRecord(
        role=record.role,
        address=record.address,
        incarnation=record.incarnation,
        model=record.model,
        layout=record.layout,
        page_size=record.page_size,
        max_model_len=record.max_model_len,
        vocab_size=record.vocab_size,
        transports=record.transports,
        eos_token_ids=record.eos_token_ids,
        started_at=record.started_at,
        is_draining=record.is_draining,
        metrics_address=record.metrics_address,
        load=registry_pb2.Load(
            free_pages=load.free_pages,
            total_pages=load.total_pages,
            running=load.running,
            waiting=load.waiting,
            queued_tokens=load.queued_tokens,
        ),
    )
    return message.SerializeToString()


def unpack_record(data: bytes) -> NodeRecord:
    """Raises ValueError for bytes that are no node record."""
    try:
        record = registry_pb2.NodeRecord.FromString(data)
    except DecodeError as error:
        raise ValueError(f"record must be a serialized NodeRecord: {error}") from None
    require("record.role", record.role, holds=bool(record.role), rule="set")
    require("record.address", record.address, holds=bool(record.address), rule="set")
    return NodeRecord(
        role=record.role,
        address=record.address,
        incarnation=unpack_incarnation(record.incarnation, "record.incarnation"),
        model=record.model,
        layout=record.layout,
        page_size=record.page_size,
        max_model_len=record.max_model_len,
        vocab_size=record.vocab_size,
        transports=tuple(record.transports),
        eos_token_ids=tuple(record.eos_token_ids),
        started_at=record.started_at,
        is_draining=record.is_draining,
        load=_unpack_load(record.load),
        metrics_address=record.metrics_address,
    )


def _unpack_load(load: registry_pb2.Load | node_pb2.StatusResponse) -> Load:
    return Load(
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
    )


def pack_status(
    status: NodeStatus, *, role: str, address: str, incarnation: Incarnation
) -> node_pb2.StatusResponse:
    load = status.load
    return node_pb2.StatusResponse(
        role=role,
        address=address,
        incarnation=incarnation,
        engine_step=status.step,
        free_pages=load.free_pages,
        total_pages=load.total_pages,
        running=load.running,
        waiting=load.waiting,
        queued_tokens=load.queued_tokens,
        quarantined_pages=status.quarantined_pages,
        is_draining=status.is_draining,
        is_idle=status.is_idle,
        integrity=status.integrity,
        counters=status.counters,
        peers=status.peers,
    )


def unpack_status(status: node_pb2.StatusResponse) -> NodeStatus:
    return NodeStatus(
        step=status.engine_step,
        load=_unpack_load(status),
        quarantined_pages=status.quarantined_pages,
        is_draining=status.is_draining,
        is_idle=status.is_idle,
        integrity=status.integrity,
        counters=dict(status.counters),
        peers=dict(status.peers),
    )
