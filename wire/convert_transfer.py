"""`kv_transfer.messages` values to protobuf and back.

Owns the mapping of every message on a session. `unpack_*` raises ValueError naming the field for
anything malformed. Must never know who sends or receives.
"""

import math
from typing import assert_never

from engine.layout import DTYPE_BYTES
from engine.params import TokenLogprob
from kv_transfer.ids import TransferId
from kv_transfer.messages import (
    CancelTransfer,
    Drained,
    Final,
    Handoff,
    Heartbeat,
    Hello,
    NamedTensor,
    Planned,
    Refused,
    Renew,
    Reserve,
    ToDecode,
    ToPrefill,
    TransferFailed,
)
from wire.convert_fields import malformed, require, unpack_logprob, unpack_tid
from wire.convert_hello import pack_hello, unpack_hello
from wire.gen import transfer_pb2 as pb

TENSOR_DTYPE_BYTES = DTYPE_BYTES | {
    "float64": 8,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "bool": 1,
}


def pack_to_prefill(message: ToPrefill) -> pb.ToPrefill:
    match message:
        case Hello():
            return pb.ToPrefill(hello=pack_hello(message))
        case Reserve():
            return pb.ToPrefill(reserve=_pack_reserve(message))
        case Renew():
            return pb.ToPrefill(renew=pb.Renew(tids=[_pack_tid(tid) for tid in message.tids]))
        case CancelTransfer():
            return pb.ToPrefill(cancel=pb.CancelTransfer(tid=_pack_tid(message.tid)))
        case _:
            assert_never(message)


def unpack_to_prefill(message: pb.ToPrefill) -> ToPrefill:
    match message.WhichOneof("message"):
        case "hello":
            return unpack_hello(message.hello)
        case "reserve":
            return _unpack_reserve(message.reserve)
        case "renew":
            return Renew(tids=tuple(unpack_tid(tid, "renew.tids") for tid in message.renew.tids))
        case "cancel":
            return CancelTransfer(tid=unpack_tid(message.cancel.tid, "cancel.tid"))
        case None:
            malformed("to_prefill.message", None, "set")


def pack_to_decode(message: ToDecode) -> pb.ToDecode:
    match message:
        case Hello():
            return pb.ToDecode(hello=pack_hello(message))
        case Refused():
            refused = pb.Refused(
                field=message.field,
                ours=message.ours,
                theirs=message.theirs,
                is_transient=message.is_transient,
            )
            return pb.ToDecode(refused=refused)
        case Planned():
            planned = pb.Planned(tid=_pack_tid(message.tid), num_tokens=message.num_tokens)
            return pb.ToDecode(planned=planned)
        case Final():
            return pb.ToDecode(final=_pack_final(message))
        case TransferFailed():
            failed = pb.TransferFailed(tid=_pack_tid(message.tid), code=message.code, reason=message.reason)
            return pb.ToDecode(failed=failed)
        case Drained():
            return pb.ToDecode(drained=pb.Drained(tid=_pack_tid(message.tid)))
        case Heartbeat():
            return pb.ToDecode(heartbeat=pb.Heartbeat(engine_step=message.engine_step))
        case _:
            assert_never(message)


def unpack_to_decode(message: pb.ToDecode) -> ToDecode:
    match message.WhichOneof("message"):
        case "hello":
            return unpack_hello(message.hello)
        case "refused":
            refused = message.refused
            return Refused(
                field=refused.field,
                ours=refused.ours,
                theirs=refused.theirs,
                is_transient=refused.is_transient,
            )
        case "planned":
            tid = unpack_tid(message.planned.tid, "planned.tid")
            return Planned(tid=tid, num_tokens=message.planned.num_tokens)
        case "final":
            return _unpack_final(message.final)
        case "failed":
            failed = message.failed
            tid = unpack_tid(failed.tid, "failed.tid")
            return TransferFailed(tid=tid, code=failed.code, reason=failed.reason)
        case "drained":
            return Drained(tid=unpack_tid(message.drained.tid, "drained.tid"))
        case "heartbeat":
            return Heartbeat(engine_step=message.heartbeat.engine_step)
        case None:
            malformed("to_decode.message", None, "set")


def _pack_tid(tid: TransferId) -> pb.Tid:
    return pb.Tid(request_id=tid.request_id, attempt=tid.attempt)


def _pack_reserve(reserve: Reserve) -> pb.Reserve:
    return pb.Reserve(
        tid=_pack_tid(reserve.tid),
        page_ids=reserve.page_ids,
        skip_tokens=reserve.skip_tokens,
        deadline_s=reserve.deadline_s,
    )


def _unpack_reserve(reserve: pb.Reserve) -> Reserve:
    is_finite = math.isfinite(reserve.deadline_s)
    require("reserve.deadline_s", reserve.deadline_s, holds=is_finite, rule="finite")
    return Reserve(
        tid=unpack_tid(reserve.tid, "reserve.tid"),
        page_ids=tuple(reserve.page_ids),
        skip_tokens=reserve.skip_tokens,
        deadline_s=reserve.deadline_s,
    )


def _pack_final(final: Final) -> pb.Final:
    return pb.Final(
        tid=_pack_tid(final.tid),
        ranges=[pb.Range(start=start, stop=stop) for start, stop in final.ranges],
        handoff=_pack_handoff(final.handoff),
        checksums=final.checksums,
        has_checksums=final.checksums is not None,
    )


def _unpack_final(final: pb.Final) -> Final:
    require("final.handoff", None, holds=final.HasField("handoff"), rule="set")
    ranges = tuple((one.start, one.stop) for one in final.ranges)
    for pages in ranges:
        require("final.ranges", pages, holds=pages[0] < pages[1], rule="half-open and not empty")
    return Final(
        tid=unpack_tid(final.tid, "final.tid"),
        ranges=ranges,
        handoff=_unpack_handoff(final.handoff),
        checksums=_unpack_checksums(final, num_pages=sum(stop - start for start, stop in ranges)),
    )


def _unpack_checksums(final: pb.Final, *, num_pages: int) -> tuple[int, ...] | None:
    if not final.has_checksums:
        return None
    count = len(final.checksums)
    require("final.checksums", count, holds=count == num_pages, rule=f"{num_pages} values")
    return tuple(final.checksums)


def _pack_handoff(handoff: Handoff) -> pb.Handoff:
    logprob = handoff.first_logprob
    top = () if logprob is None else logprob.top
    return pb.Handoff(
        first_token=handoff.first_token,
        logprob=None if logprob is None else logprob.logprob,
        top_ids=[token_id for token_id, _ in top],
        top_logprobs=[value for _, value in top],
        num_tokens=handoff.num_tokens,
        cached_tokens=handoff.cached_tokens,
        tensors={name: _pack_tensor(tensor) for name, tensor in handoff.tensors.items()},
        queue_s=handoff.queue_s,
        compute_s=handoff.compute_s,
    )


def _unpack_handoff(handoff: pb.Handoff) -> Handoff:
    return Handoff(
        first_token=handoff.first_token,
        first_logprob=_unpack_first_logprob(handoff) if handoff.HasField("logprob") else None,
        num_tokens=handoff.num_tokens,
        cached_tokens=handoff.cached_tokens,
        tensors={name: _unpack_tensor(name, tensor) for name, tensor in handoff.tensors.items()},
        queue_s=handoff.queue_s,
        compute_s=handoff.compute_s,
    )


def _unpack_first_logprob(handoff: pb.Handoff) -> TokenLogprob:
    return unpack_logprob(
        handoff.logprob, top_ids=handoff.top_ids, top_logprobs=handoff.top_logprobs, field="final.handoff"
    )


def _pack_tensor(tensor: NamedTensor) -> pb.Tensor:
    return pb.Tensor(dtype=tensor.dtype, shape=tensor.shape, data=tensor.data)


def _unpack_tensor(name: str, tensor: pb.Tensor) -> NamedTensor:
    field = f"final.handoff.tensors[{name!r}]"
    dtype_rule = f"one of {sorted(TENSOR_DTYPE_BYTES)}"
    require(f"{field}.dtype", tensor.dtype, holds=tensor.dtype in TENSOR_DTYPE_BYTES, rule=dtype_rule)
    shape = tuple(tensor.shape)
    num_bytes = math.prod(shape) * TENSOR_DTYPE_BYTES[tensor.dtype]
    size = len(tensor.data)
    require(f"{field}.data", size, holds=size == num_bytes, rule=f"{num_bytes} bytes for shape {shape}")
    return NamedTensor(dtype=tensor.dtype, shape=shape, data=tensor.data)
