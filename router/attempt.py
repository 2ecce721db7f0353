"""One dispatch of one request to one pair: both legs opened at once, their events heard as one.

Owns the two legs. Must never know policies, readiness or what happens after the attempt broke.

Which event ends an attempt:

    D Finished stop|length      done, once no index is missing (P's first token may come after it)
    P Finished stop|length      done: the request ended with its first token; D only drops it
    either Finished handed_over that leg is over, the other goes on
    Rejected Preempted Failed   broken, whichever leg it came from ...
    link lost                   ... but what becomes of P no longer matters once D has answered
"""

import asyncio
from dataclasses import dataclass, replace

from router.errors import DeadlineExceeded
from router.links import LinkLost, NodeLinks
from router.merge import MergeFault, TokenMerger
from router.policies import RequestFacts, pages_of
from router.requests import Delta, GenerateRequest, Take
from wire.records import NodeRecord
from wire.work import (
    Event,
    Failed,
    Finished,
    NodeRef,
    Preempted,
    PromptInfo,
    PromptLogprobs,
    Rejected,
    SamplingParams,
    Submit,
    Tokens,
    TransferId,
)

HANDED_OVER = "handed_over"

_REFUSED_CODES = frozenset({"pair_refused", "incompatible"})
"""The two nodes do not fit each other and never will."""

_BUSY_CODES = frozenset({"overloaded", "queue_timeout"})
"""Nothing is wrong but the load."""

_PEER_CODES = frozenset(
    {"peer_lost", "peer_failed", "peer_cancelled", "prefill_timeout", "reserve_timeout", "no_progress"}
)
"""Failures that a node reports but its peer caused."""

_NO_FAULT_CODES = frozenset({"cancelled", "duplicate", "peer_cancelled"})
"""Ends that somebody wanted, or that another attempt of the same request brought about."""

_NOT_THE_USERS_CODES = _REFUSED_CODES | {"cancelled", "duplicate"}
"""Reported as final for this tid, but another attempt has another tid; we did not cancel it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """The two nodes of an attempt. `prefill` None: the decode node does the prompt itself.

    `cached_tokens`: how many of the prompt the node that computes it is believed to have already.
    """

    prefill: NodeRecord | None
    decode: NodeRecord
    cached_tokens: int = 0

    @property
    def key(self) -> tuple[str | None, str]:
        return (None if self.prefill is None else self.prefill.incarnation), self.decode.incarnation

    @property
    def nodes(self) -> tuple[NodeRecord, ...]:
        return (self.decode,) if self.prefill is None else (self.prefill, self.decode)


@dataclass(frozen=True, slots=True, kw_only=True)
class Done:
    """The request is complete. `prefill`, `decode`: the last words of each leg, where they came."""

    last_word: Finished
    prefill: Finished | None
    decode: Finished | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Broken:
    """The attempt is over, the request is not. `cause`: link_lost, preempted, rejected, failed, protocol,
    token_conflict. `blamed`: the node that is better left alone next time."""

    cause: str
    code: str
    reason: str
    is_retryable: bool
    blamed: NodeRecord

    @property
    def is_refusal(self) -> bool:
        """True when no request can ever pass through this pair."""
        return self.code in _REFUSED_CODES

    @property
    def is_load(self) -> bool:
        """True when the nodes only had no room."""
        return self.cause in ("rejected", "preempted") or self.code in _BUSY_CODES

    @property
    def is_node_fault(self) -> bool:
        """True when the pair, not the request or the load, is to blame."""
        is_failure = self.cause in ("failed", "protocol") and self.code not in _NO_FAULT_CODES
        return is_failure and self.is_retryable and not self.is_load


class Attempt:
    """Hands what may be delivered to `take` as it is heard, in order. `close` must be called in any case.

    `end` is None until the nodes ended the attempt. It is over too when `take` wants no more or fails.
    """

    def __init__(
        self,
        request: GenerateRequest,
        *,
        tid: TransferId,
        route: Route,
        merger: TokenMerger,
        links: NodeLinks,
        deadline_s: float,
        take: Take,
    ) -> None:
        self.route = route
        self.end: Done | Broken | None = None
        self.cached_tokens: int | None = None
        self.num_decode_rounds = 0
        self._tid = tid
        self._merger = merger
        self._links = links
        self._num_before = len(merger.delivered)
        self._finished: dict[str, Finished] = {}
        self._last_word: Finished | None = None
        self._deliver = take
        self._fault: Exception | None = None
        self._over = asyncio.get_running_loop().create_future()
        self._sides = {"decode": route.decode} if route.prefill is None else {
            "prefill": route.prefill,
            "decode": route.decode,
        }  # fmt: skip
        self._decode_pages = 0
        merger.restart()
        self._note_sent(request)
        self._legs = {
            side: links.submit(node, self._submit(request, side, deadline_s), side=side, hear=self._hear)
            for side, node in self._sides.items()
        }

    async def over(self) -> None:
        """Until nothing more will be delivered. Raises what `take` raised, and DeadlineExceeded."""
        await self._over
        fault, self._fault = self._fault, None
        try:
            if fault is not None:
                raise fault
        finally:
            del fault  # which knows this frame

    def expire(self) -> None:
        """The request's time is up."""
        self._finish(DeadlineExceeded("the request's deadline passed"))

    def close(self) -> None:
        """Stop listening. A request that is not complete is cancelled on both nodes."""
        legs, self._legs = self._legs, {}  # which know us
        for side, leg in legs.items():
            leg.close(cancel=not isinstance(self.end, Done))
            node = self._sides[side].incarnation
            if side == "decode":
                self._links.sent.end(node, self._tid, pages=self._decode_pages)
            else:
                self._links.sent.remove(node, self._tid)

    def _submit(self, request: GenerateRequest, side: str, deadline_s: float) -> Submit:
        peer = self._other(side)
        return Submit(
            tid=self._tid,
            prompt_ids=request.prompt_ids + tuple(self._merger.delivered),
            num_prompt_tokens=len(request.prompt_ids),
            sampling=self._sampling(request, side),
            peer=None if peer is None else NodeRef(address=peer.address, incarnation=peer.incarnation),
            deadline_s=deadline_s,
            priority=request.priority,
            cache_salt=request.cache_salt,
            grammar="" if request.constraint is None else request.constraint.spec.to_text(),
            trace_context=request.trace_context,
        )

    def _sampling(self, request: GenerateRequest, side: str) -> SamplingParams:
        """Only who computes the prompt is asked what its tokens scored, and only until it is known."""
        sampling = request.sampling
        if sampling.prompt_logprobs is None or (self._merger.wants_scores and self._computes_prompt(side)):
            return sampling
        return replace(sampling, prompt_logprobs=None)

    def _computes_prompt(self, side: str) -> bool:
        return side == "prefill" or self.route.prefill is None

    def _note_sent(self, request: GenerateRequest) -> None:
        num_tokens = len(request.prompt_ids)
        facts = RequestFacts(num_prompt_tokens=num_tokens, max_tokens=request.sampling.max_tokens)
        self._decode_pages = pages_of(facts, self.route.decode.page_size)
        num_tokens += self._num_before - self.route.cached_tokens
        for side, node in self._sides.items():
            self._links.sent.add(
                node.incarnation,
                self._tid,
                tokens=num_tokens if self._computes_prompt(side) else 0,
                pages=pages_of(facts, node.page_size),
            )

    def _other(self, side: str) -> NodeRecord | None:
        return next((node for name, node in self._sides.items() if name != side), None)

    def _hear(self, side: str, event: Event | LinkLost) -> None:
        if self._over.done():
            return
        try:
            for delta in self._take(side, event):
                if not self._deliver(delta):
                    return self._finish()
        except Exception as fault:  # noqa: BLE001  raised where the request is served, not to who tells of it
            return self._finish(fault)
        if self.end is not None:
            self._finish()

    def _finish(self, fault: Exception | None = None) -> None:
        if not self._over.done():
            self._fault = fault
            self._over.set_result(None)

    def _take(self, side: str, event: Event | LinkLost) -> list[Delta]:
        match event:
            case Tokens():
                return self._tokens(side, event)
            case PromptInfo():
                if self._computes_prompt(side):
                    self.cached_tokens = event.cached_tokens
            case PromptLogprobs():
                return self._merge(side, event)
            case Finished():
                self._finished[side] = event
                if event.reason != HANDED_OVER and self._last_word is None:
                    self._last_word = event
                self._settle()
            case Rejected() | Preempted() | Failed() | LinkLost():
                self._broke(side, event)
        return []

    def _tokens(self, side: str, tokens: Tokens) -> list[Delta]:
        if side == "decode":
            self.num_decode_rounds += 1
        else:
            self._links.sent.remove(self._sides[side].incarnation, self._tid)
        return self._merge(side, tokens)

    def _merge(self, side: str, event: Tokens | PromptLogprobs) -> list[Delta]:
        deltas: list[Delta] = []
        try:
            if isinstance(event, PromptLogprobs):
                self._merger.score(event)
            else:
                deltas = self._merger.add(event)
        except MergeFault as fault:
            self._break(
                side, cause="token_conflict", code="token_conflict", reason=str(fault), retryable=False
            )
            return []
        if self._last_word is not None:
            self._settle()
        return deltas

    def _settle(self) -> None:
        """See whether the last words that came end the attempt."""
        complete = len(self._merger.delivered) > self._num_before and not self._merger.has_gap
        if self._last_word is not None and complete:
            self.end = Done(
                last_word=self._last_word,
                prefill=self._finished.get("prefill"),
                decode=self._finished.get("decode"),
            )
        elif len(self._finished) == len(self._sides):
            reason = "both nodes are done but the request is not complete"
            self._break("decode", cause="protocol", code="incomplete", reason=reason, retryable=True)

    def _broke(self, side: str, event: Event | LinkLost) -> None:
        if side == "prefill" and self.num_decode_rounds and not self._merger.has_gap:
            return
        match event:
            case LinkLost():
                self._break(side, cause="link_lost", code="link_lost", reason=event.reason, retryable=True)
            case Preempted():
                reason = f"out of pages at index {event.next_index}"
                self._break(side, cause="preempted", code="preempted", reason=reason, retryable=True)
            case Rejected() | Failed():
                self._break(
                    side,
                    cause="rejected" if isinstance(event, Rejected) else "failed",
                    code=event.code,
                    reason=event.reason,
                    retryable=event.retryable or event.code in _NOT_THE_USERS_CODES,
                )

    def _break(self, side: str, *, cause: str, code: str, reason: str, retryable: bool) -> None:
        peer = self._other(side)
        blamed = peer if peer is not None and code in _PEER_CODES else self._sides[side]
        self.end = Broken(cause=cause, code=code, reason=reason, is_retryable=retryable, blamed=blamed)
