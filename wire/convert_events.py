"""Single events of a `Work` stream to protobuf and back. Must never know what else is in their frame."""

from collections.abc import Iterable
from typing import assert_never

from engine.params import TokenLogprob
from kv_transfer.ids import TransferId
from wire.convert_fields import malformed, require, unpack_logprob, unpack_tid
from wire.gen import node_pb2 as pb
from wire.work import (
    Accepted,
    Event,
    Failed,
    Finished,
    Preempted,
    PromptInfo,
    PromptLogprobs,
    Rejected,
    Tokens,
)


def pack_tid(tid: TransferId) -> pb.Tid:
    return pb.Tid(request_id=tid.request_id, attempt=tid.attempt)


def pack_event(event: Event) -> pb.Event:
    tid = pack_tid(event.tid)
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


def unpack_event(event: pb.Event) -> Event:
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
        case "rounds" | None:
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
