"""What one request has come to so far, over all its attempts.

Owns the tallies that become its Outcome. Must never know links, policies or how to dispatch.
"""

from collections import Counter
from dataclasses import replace

from router.attempt import Attempt, Broken, Done, Route
from router.merge import TokenMerger
from router.policies import RequestFacts
from router.requests import Delta, GenerateRequest, Outcome, Stage, Summary, Timings
from router.spans import attributes_of
from router.stages import stages_of, unfinished_stages
from wire.tally import TOKEN_SECONDS, Tally
from wire.tracing import NO_TRACES, OpenSpan, Tracer


class Run:
    """`outcome` is None until the request is complete. `ending` says for the books how it ended."""

    def __init__(self, request: GenerateRequest, *, request_id: str, now: float, deadline: float) -> None:
        self.request = request
        self.request_id = request_id
        self.started = now
        self.queue_s = 0.0
        self.deadline = deadline
        is_scored = request.sampling.prompt_logprobs is not None
        self.merger = TokenMerger(
            max_tokens=request.sampling.max_tokens,
            num_scores=len(request.prompt_ids) - 1 if is_scored else None,
        )
        self.facts = RequestFacts(
            num_prompt_tokens=len(request.prompt_ids),
            max_tokens=request.sampling.max_tokens,
            priority=request.priority,
        )
        self.outcome: Outcome | None = None
        self.ending = "closed"
        self.num_attempts = 0
        self.num_failures = 0
        self.num_preemptions = 0
        self.first_token_at: float | None = None
        self.last_token_at = now
        self._dispatched_at = now
        self._stages: tuple[Stage, ...] = ()
        self._gaps = Tally(TOKEN_SECONDS)
        self._acceptance: Counter[int] = Counter()
        self._drafted = 0
        self._accepted = 0
        self._num_steps = 0
        self._last_rounds = 0
        self._cached_tokens: int | None = None
        self._route: Route | None = None
        self._span: OpenSpan | None = None
        self._bad_nodes: set[str] = set()
        self._bad_routes: set[tuple[str | None, str]] = set()

    @property
    def num_computed_tokens(self) -> int:
        """What it cost the nodes, as far as it is the user's doing: the prompt without what the cache had, as
        they told, and the answer. A prompt counts in full from its dispatch on, until the cache is known."""
        if not self.num_attempts:
            return 0
        num_prompt = len(self.request.prompt_ids)
        return num_prompt - min(self._cached_tokens or 0, num_prompt) + len(self.merger.delivered)

    def start(self, *, now: float) -> None:
        """It has waited long enough for its turn."""
        self.queue_s = now - self.started

    def trace(self, tracer: Tracer) -> None:
        """Its nodes' spans belong to the one that begins here; a client's trace goes on in it."""
        if tracer is NO_TRACES:
            return
        context = self.request.trace_context
        self._span = tracer.start("request", parent=context, at=self.started)
        if self._span.context != context:
            self.request = replace(self.request, trace_context=self._span.context)

    def end_trace(self, summary: Summary) -> None:
        if self._span is not None:
            attributes = attributes_of(summary, model=self.request.model)
            error = summary.ending if summary.is_failure else ""
            self._span.end(at=summary.ended_at, attributes=attributes, error=error)

    def dispatch(self, *, now: float) -> None:
        """One more attempt begins."""
        self.num_attempts += 1
        self._dispatched_at = now

    def deliver(self, delta: Delta, *, now: float) -> None:
        if self.first_token_at is None:
            self.first_token_at = now
        else:
            self._gaps.observe(now - self.last_token_at)
        self.last_token_at = now
        self._drafted += delta.drafted
        self._accepted += delta.accepted
        if delta.drafted:
            self._acceptance[delta.accepted] += 1

    def demerits(self, route: Route) -> int:
        """How much speaks against using this route again; 0 for one that never broke."""
        return sum(node.incarnation in self._bad_nodes for node in route.nodes) + (
            route.key in self._bad_routes
        )

    def broke(self, route: Route, broken: Broken) -> None:
        if not broken.is_refusal:  # which says nothing against either node with another peer
            self._bad_nodes.add(broken.blamed.incarnation)
        self._bad_routes.add(route.key)
        if broken.cause == "preempted":
            self.num_preemptions += 1
        else:
            self.num_failures += 1

    def close_attempt(self, attempt: Attempt) -> None:
        """Take over what an attempt counted, complete or not. The first to tell of the cache is right:
        later prompts hold our own output."""
        self._route = attempt.route
        self._num_steps += attempt.num_decode_rounds
        self._last_rounds = attempt.num_decode_rounds
        if self._cached_tokens is None:
            self._cached_tokens = attempt.cached_tokens

    def finish(self, done: Done, *, now: float) -> None:
        """The nodes said the request is complete."""
        word, first = done.last_word, done.prefill or done.last_word
        prefill_s, join_s, decode_s = self._split(done, now=now)
        self._stages = stages_of(
            since_arrival_s=self._dispatched_at - self.started,
            total_s=now - self.started,
            queue_s=first.queue_s,
            prefill_s=prefill_s,
            transfer_s=word.transfer_s,
            join_s=join_s,
        )
        if word.num_steps:  # the node's own count, where it keeps one, of what we saw as rounds
            self._num_steps += word.num_steps - self._last_rounds
        self.outcome = self._outcome(
            word.reason,
            stop_token_id=word.stop_token_id,
            kv_bytes=word.kv_bytes,
            transport=word.transport,
            timings=replace(
                self._timings(now, queue_s=first.queue_s, prefill_s=prefill_s, transfer_s=word.transfer_s),
                join_s=join_s,
                decode_s=decode_s,
            ),
        )

    def summary(self, *, now: float) -> Summary:
        """What is remembered of this request once it is over."""
        route, outcome, num_tokens = self._route, self.outcome, len(self.merger.delivered)
        first_at = self.first_token_at
        has_speed = first_at is not None and num_tokens > 1
        return Summary(
            request_id=self.request_id,
            ending=self.ending,
            started_at=self.started,
            ended_at=now,
            ttft_s=None if first_at is None else first_at - self.started,
            tpot_s=(self.last_token_at - (first_at or 0.0)) / (num_tokens - 1) if has_speed else None,
            num_prompt_tokens=len(self.request.prompt_ids),
            num_output_tokens=num_tokens,
            num_attempts=self.num_attempts,
            cached_tokens=self._cached_tokens or 0,
            drafted=self._drafted,
            accepted=self._accepted,
            acceptance=self._acceptance,
            gaps=self._gaps,
            kv_bytes=0 if outcome is None else outcome.kv_bytes,
            transport="" if outcome is None else outcome.transport,
            prefill_node="" if route is None or route.prefill is None else route.prefill.address,
            decode_node="" if route is None else route.decode.address,
            stages=self._stages or unfinished_stages(self.started, first_at, now),
        )

    def _split(self, done: Done, *, now: float) -> tuple[float, float, float]:
        """Seconds of prefill, from dispatch until decoding began, and of decoding."""
        word = done.last_word
        if done.prefill is not None and done.prefill is not word:
            return done.prefill.compute_s, word.queue_s, word.compute_s
        if done.prefill is not None:  # the first token was all
            return word.compute_s, now - self._dispatched_at, 0.0
        first_at = self.last_token_at if self.first_token_at is None else self.first_token_at
        prefill_s = min(max(0.0, first_at - self._dispatched_at - word.queue_s), word.compute_s)
        return prefill_s, word.queue_s + prefill_s, word.compute_s - prefill_s

    def finish_by_tokens(self, *, now: float) -> bool:
        """True when the tokens themselves say that the request is complete, though its nodes no longer
        can: a further attempt would have nothing to do."""
        sampling, delivered = self.request.sampling, self.merger.delivered
        # Before `min_tokens` a stop token is only drawn where a finished grammar leaves nothing else.
        is_stopped = bool(delivered) and delivered[-1] in sampling.stop_token_ids
        if not is_stopped and len(delivered) < sampling.max_tokens:
            return False
        self.outcome = self._outcome(
            "stop" if is_stopped else "length",
            stop_token_id=delivered[-1] if is_stopped else None,
            kv_bytes=0,
            transport="",
            timings=self._timings(now),
        )
        return True

    def _timings(
        self, now: float, *, queue_s: float = 0.0, prefill_s: float = 0.0, transfer_s: float = 0.0
    ) -> Timings:
        return Timings(
            queue_s=self.queue_s + queue_s,
            prefill_s=prefill_s,
            transfer_s=transfer_s,
            ttft_s=0.0 if self.first_token_at is None else self.first_token_at - self.started,
            total_s=now - self.started,
        )

    def _outcome(
        self, reason: str, *, stop_token_id: int | None, kv_bytes: int, transport: str, timings: Timings
    ) -> Outcome:
        assert self._route is not None
        prefill = self._route.prefill
        self.ending = reason
        return Outcome(
            reason=reason,
            stop_token_id=stop_token_id,
            cached_tokens=min(self._cached_tokens or 0, len(self.request.prompt_ids)),
            num_output_tokens=len(self.merger.delivered),
            num_steps=self._num_steps,
            drafted=self._drafted,
            accepted=self._accepted,
            kv_bytes=kv_bytes,
            transport=transport,
            timings=timings,
            prefill_node="" if prefill is None else prefill.address,
            decode_node=self._route.decode.address,
            attempts=self.num_attempts,
        )
