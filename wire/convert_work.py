"""`wire.work` values to protobuf and back.

Owns the mapping of every message on a `Work` stream. `unpack_*` raises ValueError naming the field
for anything malformed. Must never know who sends or receives.
"""

from collections.abc import Iterable
from typing import assert_never

from engine.params import SamplingParams, TokenLogprob
from kv_transfer.ids import TransferId
from wire.convert_fields import (
    malformed,
    pack_int32s,
    require,
    unpack_incarnation,
    unpack_logprob,
    unpack_tid,
    unpack_token_ids,
)
from wire.convert_kv import pack_kv_update, unpack_kv_update
from wire.gen import node_pb2 as pb
from wire.kv_events import KvSubscribe, KvUpdate
from wire.work import (
    Accepted,
    Cancel,
    Event,
    Failed,
    Finished,
    Frame,
    NodeRef,
    Preempted,
    PromptInfo,
    PromptLogprobs,
    Rejected,
    Submit,
    Tokens,
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
            return pb.ToNode(cancel=pb.Cancel(tid=_pack_tid(message.tid)))
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
            events = [_pack_event(event) for event in message.events]
            return pb.FromNode(frame=pb.Frame(step=message.step, events=events))
        case KvUpdate():
            return pb.FromNode(kv_update=pack_kv_update(message))
        case _:
            assert_never(message)


def unpack_from_node(message: pb.FromNode) -> FromNode:
    match message.WhichOneof("message"):
        case "hello":
            return _unpack_hello(message.hello)
        case "frame":
            events = tuple(_unpack_event(event) for event in message.frame.events)
            return Frame(step=message.frame.step, events=events)
        case "kv_update":
            return unpack_kv_update(message.kv_update)
        case None:
            malformed("from_node.message", None, "set")


def _pack_tid(tid: TransferId) -> pb.Tid:
    return pb.Tid(request_id=tid.request_id, attempt=tid.attempt)


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
        tid=_pack_tid(submit.tid),
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


def _pack_event(event: Event) -> pb.Event:
    tid = _pack_tid(event.tid)
    match event:
        case Tokens():
            return pb.Event(tid=tid, tokens=_pack_tokens(event))
        case Finished():
            return pb.Event(tid=tid, finished=_pack_finished(event))
        case Accepted():
            return pb.Event(tid=tid, accepted=pb.Accepted(queued_behind=event.queued_behind))
        case Rejected():
            rejected = pb.Rejected(code=event.code, retryable=event.retryable, reason=event.reason)
            return pb.Event(tid=tid, rejected=rejected)
        case PromptInfo():
            return pb.Event(tid=tid, prompt_info=pb.PromptInfo(cached_tokens=event.cached_tokens))
        case PromptLogprobs():
            scored = [_pack_logprob(one) for one in event.logprobs]
            return pb.Event(
                tid=tid, prompt_logprobs=pb.PromptLogprobs(first_index=event.first_index, logprobs=scored)
            )
        case Preempted():
            return pb.Event(tid=tid, preempted=pb.Preempted(next_index=event.next_index))
        case Failed():
            failed = pb.Failed(code=event.code, retryable=event.retryable, reason=event.reason)
            return pb.Event(tid=tid, failed=failed)
        case _:
            assert_never(event)


def _unpack_event(event: pb.Event) -> Event:
    tid = unpack_tid(event.tid, "event.tid")
    match event.WhichOneof("event"):
        case "tokens":
            return _unpack_tokens(tid, event.tokens)
        case "finished":
            return _unpack_finished(tid, event.finished)
        case "accepted":
            return Accepted(tid=tid, queued_behind=event.accepted.queued_behind)
        case "rejected":
            rejected = event.rejected
            return Rejected(tid=tid, code=rejected.code, retryable=rejected.retryable, reason=rejected.reason)
        case "prompt_info":
            return PromptInfo(tid=tid, cached_tokens=event.prompt_info.cached_tokens)
        case "prompt_logprobs":
            scored = event.prompt_logprobs
            return PromptLogprobs(
                tid=tid,
                first_index=scored.first_index,
                logprobs=_unpack_logprobs(scored.logprobs, "prompt_logprobs"),
            )
        case "preempted":
            return Preempted(tid=tid, next_index=event.preempted.next_index)
        case "failed":
            failed = event.failed
            return Failed(tid=tid, code=failed.code, retryable=failed.retryable, reason=failed.reason)
        case None:
            malformed("event.event", None, "set")


def _pack_tokens(tokens: Tokens) -> pb.Tokens:
    return pb.Tokens(
        first_index=tokens.first_index,
        ids=tokens.ids,
        logprobs=None if tokens.logprobs is None else [_pack_logprob(one) for one in tokens.logprobs],
        drafted=tokens.drafted,
        accepted=tokens.accepted,
        has_logprobs=tokens.logprobs is not None,
    )


def _unpack_tokens(tid: TransferId, tokens: pb.Tokens) -> Tokens:
    ids, logprobs = tuple(tokens.ids[:]), None  # a slice comes at once, iterating takes them one by one
    if tokens.has_logprobs:
        logprobs = _unpack_logprobs(tokens.logprobs, "tokens.logprobs")
        holds = len(logprobs) == len(ids)
        require("tokens.logprobs", len(logprobs), holds=holds, rule=f"{len(ids)} values")
    return Tokens(
        tid=tid,
        first_index=tokens.first_index,
        ids=ids,
        logprobs=logprobs,
        drafted=tokens.drafted,
        accepted=tokens.accepted,
    )


def _unpack_logprobs(logprobs: Iterable[pb.Logprob], field: str) -> tuple[TokenLogprob, ...]:
    return tuple(
        unpack_logprob(one.logprob, top_ids=one.top_ids, top_logprobs=one.top_logprobs, field=field)
        for one in logprobs
    )


def _pack_logprob(logprob: TokenLogprob) -> pb.Logprob:
    return pb.Logprob(
        logprob=logprob.logprob,
        top_ids=[token_id for token_id, _ in logprob.top],
        top_logprobs=[value for _, value in logprob.top],
    )


def _pack_finished(finished: Finished) -> pb.Finished:
    return pb.Finished(
        reason=finished.reason,
        stop_token_id=finished.stop_token_id,
        kv_bytes=finished.kv_bytes,
        transport=finished.transport,
        queue_s=finished.queue_s,
        compute_s=finished.compute_s,
        transfer_s=finished.transfer_s,
        num_steps=finished.num_steps,
        seedless=finished.seedless,
    )


def _unpack_finished(tid: TransferId, finished: pb.Finished) -> Finished:
    return Finished(
        tid=tid,
        reason=finished.reason,
        stop_token_id=finished.stop_token_id if finished.HasField("stop_token_id") else None,
        kv_bytes=finished.kv_bytes,
        transport=finished.transport,
        queue_s=finished.queue_s,
        compute_s=finished.compute_s,
        transfer_s=finished.transfer_s,
        num_steps=finished.num_steps,
        seedless=finished.seedless,
    )
