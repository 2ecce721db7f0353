"""`wire.work` values to protobuf and back.

Owns the mapping of every message on a `Work` stream. `unpack_*` raises ValueError naming the field
for anything malformed. Must never know who sends or receives.
"""

from typing import assert_never

from engine.params import SamplingParams
from kv_transfer.ids import TransferId
from wire.convert_events import pack_tid
from wire.convert_fields import (
    malformed,
    pack_int32s,
    require,
    unpack_incarnation,
    unpack_tid,
    unpack_token_ids,
)
from wire.convert_kv import pack_kv_update, unpack_kv_update
from wire.convert_rounds import pack_events, unpack_events
from wire.gen import node_pb2 as pb
from wire.kv_events import KvSubscribe, KvUpdate
from wire.work import (
    Cancel,
    Frame,
    NodeRef,
    Submit,
    Unreadable,
    WorkHello,
)

ToNode = WorkHello | Submit | Cancel | KvSubscribe
FromNode = WorkHello | Frame | KvUpdate


def pack_to_node(message: ToNode) -> pb.ToNode:
    match message:
        case WorkHello():
            return pb.ToNode(hello=_pack_hello(message))
        case Submit():
            return pb.ToNode(submit=_pack_submit(message))
        case Cancel():
            return pb.ToNode(cancel=pb.Cancel(tid=pack_tid(message.tid)))
        case KvSubscribe():
            return pb.ToNode(kv_subscribe=pb.KvSubscribe())
        case _:
            assert_never(message)


def unpack_to_node(message: pb.ToNode) -> ToNode | Unreadable:
    match message.WhichOneof("message"):
        case "hello":
            return _unpack_hello(message.hello)
        case "submit":
            return _read_submit(message.submit)
        case "cancel":
            return Cancel(tid=unpack_tid(message.cancel.tid, "cancel.tid"))
        case "kv_subscribe":
            return KvSubscribe()
        case None:
            malformed("to_node.message", None, "set")


def pack_from_node(message: FromNode) -> pb.FromNode:
    match message:
        case WorkHello():
            return pb.FromNode(hello=_pack_hello(message))
        case Frame():
            return pb.FromNode(frame=pb.Frame(step=message.step, events=pack_events(message.events)))
        case KvUpdate():
            return pb.FromNode(kv_update=pack_kv_update(message))
        case _:
            assert_never(message)


def unpack_from_node(message: pb.FromNode) -> FromNode:
    match message.WhichOneof("message"):
        case "hello":
            return _unpack_hello(message.hello)
        case "frame":
            return Frame(step=message.frame.step, events=unpack_events(message.frame.events))
        case "kv_update":
            return unpack_kv_update(message.kv_update)
        case None:
            malformed("from_node.message", None, "set")


def _pack_hello(hello: WorkHello) -> pb.WorkHello:
    return pb.WorkHello(
        incarnation=hello.incarnation,
        role=hello.role,
        version=hello.version,
        has_kv_events=hello.has_kv_events,
    )


def _unpack_hello(hello: pb.WorkHello) -> WorkHello:
    incarnation = unpack_incarnation(hello.incarnation, "hello.incarnation")
    return WorkHello(
        incarnation=incarnation,
        role=hello.role,
        version=hello.version,
        has_kv_events=hello.has_kv_events,
    )


def _pack_submit(submit: Submit) -> pb.Submit:
    peer = submit.peer
    return pb.Submit(
        tid=pack_tid(submit.tid),
        prompt_ids=pack_int32s(submit.prompt_ids, "submit.prompt_ids"),
        num_prompt_tokens=submit.num_prompt_tokens,
        sampling=_pack_sampling(submit.sampling),
        peer=None if peer is None else pb.NodeRef(address=peer.address, incarnation=peer.incarnation),
        deadline_s=submit.deadline_s,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        grammar=submit.grammar,
        trace_context=submit.trace_context,
    )


def _read_submit(submit: pb.Submit) -> Submit | Unreadable:
    """A stream carries the work of many: only a Submit that names no tid may end it."""
    tid = unpack_tid(submit.tid, "submit.tid")
    try:
        return _unpack_submit(submit, tid)
    except ValueError as error:
        return Unreadable(tid=tid, reason=str(error))


def _unpack_submit(submit: pb.Submit, tid: TransferId) -> Submit:
    require("submit.sampling", None, holds=submit.HasField("sampling"), rule="set")
    prompt_ids = unpack_token_ids(submit.prompt_ids, "submit.prompt_ids")
    count = submit.num_prompt_tokens
    require(
        "submit.num_prompt_tokens", count, holds=count <= len(prompt_ids), rule=f"at most {len(prompt_ids)}"
    )
    return Submit(
        tid=tid,
        prompt_ids=prompt_ids,
        num_prompt_tokens=count,
        sampling=_unpack_sampling(submit.sampling),
        peer=_unpack_peer(submit.peer) if submit.HasField("peer") else None,
        deadline_s=submit.deadline_s,
        priority=submit.priority,
        cache_salt=submit.cache_salt,
        grammar=submit.grammar,
        trace_context=submit.trace_context,
    )


def _unpack_peer(peer: pb.NodeRef) -> NodeRef:
    incarnation = unpack_incarnation(peer.incarnation, "submit.peer.incarnation")
    return NodeRef(address=peer.address, incarnation=incarnation)


def _pack_sampling(sampling: SamplingParams) -> pb.SamplingParams:
    return pb.SamplingParams(
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs,
        prompt_logprobs=sampling.prompt_logprobs,
        stop_token_ids=sampling.stop_token_ids,
        bias_ids=[token_id for token_id, _ in sampling.logit_bias],
        bias_values=[bias for _, bias in sampling.logit_bias],
        allowed_token_ids=sampling.allowed_token_ids,
        banned_sequences=[pb.TokenSequence(ids=ids) for ids in sampling.banned_sequences],
    )


def _unpack_sampling(sampling: pb.SamplingParams) -> SamplingParams:
    ids, values = sampling.bias_ids, sampling.bias_values
    field = "submit.sampling.bias_values"
    require(field, len(values), holds=len(ids) == len(values), rule=f"{len(ids)} values")
    return SamplingParams(
        seed=sampling.seed,
        max_tokens=sampling.max_tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        repetition_penalty=sampling.repetition_penalty,
        min_tokens=sampling.min_tokens,
        logprobs=sampling.logprobs if sampling.HasField("logprobs") else None,
        prompt_logprobs=sampling.prompt_logprobs if sampling.HasField("prompt_logprobs") else None,
        stop_token_ids=tuple(sampling.stop_token_ids),
        logit_bias=tuple(zip(ids, values, strict=True)),
        allowed_token_ids=tuple(sampling.allowed_token_ids),
        banned_sequences=tuple(tuple(sequence.ids) for sequence in sampling.banned_sequences),
    )
