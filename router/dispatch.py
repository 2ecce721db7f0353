"""Runs one generation on a pair of nodes, and goes on with another pair when the first one breaks.

Owns the requests in flight. Must never know text, HTTP, gRPC or how a policy chooses. There is one
way to recover: dispatch attempt k+1 with prompt + tokens delivered so far, whatever broke attempt k.
"""

import asyncio
import logging
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from router.admission import Admission, Claim
from router.attempt import Attempt, Broken, Done
from router.dispatch_config import DispatchConfig
from router.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    NodeFailed,
    NodesBusy,
    RouterDraining,
    RouterError,
    TokenConflict,
)
from router.links import NodeLinks
from router.pairs import PairBook
from router.refusals import refused
from router.requests import Delta, GenerateRequest, Outcome, Take
from router.routing import Routing
from router.run import Run
from router.stats import RouterStats
from wire.logs import about
from wire.tracing import NO_TRACES, Tracer
from wire.work import TransferId

__all__ = ["DispatchConfig", "Dispatcher"]

logger = logging.getLogger(__name__)


def new_request_id() -> str:
    return uuid.uuid4().hex


class Dispatcher:
    """Every generation runs on at most one pair at a time, and is admitted once, however often it moves."""

    def __init__(
        self,
        links: NodeLinks,
        pairs: PairBook,
        *,
        stats: RouterStats,
        config: DispatchConfig,
        new_id: Callable[[], str] = new_request_id,
        tracer: Tracer = NO_TRACES,
    ) -> None:
        self._links = links
        self._pairs = pairs
        self._stats = stats
        self._config = config
        self._new_id = new_id
        self._tracer = tracer
        self._routing = Routing(links, pairs, config)
        self._admission = Admission(config.queue, stats=stats)
        self._num_open = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()
        pairs.on_change(self._admission.wake)

    @property
    def num_in_flight(self) -> int:
        return self._admission.num_running

    @property
    def num_queued(self) -> int:
        return self._admission.num_waiting

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def drain(self) -> None:
        """Take no new request; returns when the last one that waits or runs is over."""
        self._is_draining = True
        await self._idle.wait()

    async def generate(self, request: GenerateRequest, take: Take) -> Outcome | None:
        """Hands deltas to `take`, in index order; None when it wanted no more. Raises what `take` raises,
        and errors.RouterError.

        Cancel it: that cancels the request on its nodes, whatever its phase.
        """
        loop = asyncio.get_running_loop()
        with self._counted():
            run = self._arrive(request)
            claim = self._claim(run)
            await self._enter(claim)
            self._stats.started()
            run.start(now=loop.time())
            run.trace(self._tracer)

            def deliver(delta: Delta) -> bool:
                run.deliver(delta, now=loop.time())
                return take(delta)

            try:
                while run.outcome is None:
                    attempt = await self._open(run, deliver)
                    deadline = loop.call_at(run.deadline, attempt.expire)
                    try:
                        await attempt.over()
                    finally:
                        deadline.cancel()
                        attempt.close()
                        run.close_attempt(attempt)
                    if attempt.end is None:
                        return None
                    self._conclude(run, attempt)
                self._stats.finished(run.outcome)
                return run.outcome
            except RouterError as error:
                run.ending = error.code
                raise
            finally:
                self._leave(run, claim)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        """What waits or runs keeps `drain` from returning."""
        self._num_open += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._num_open -= 1
            if self._num_open == 0:
                self._idle.set()

    def _arrive(self, request: GenerateRequest) -> Run:
        """A run for a request that could be served, were there room for it."""
        now = asyncio.get_running_loop().time()
        longest = self._config.default_deadline_s
        deadline_s = longest if request.deadline_s is None else min(longest, request.deadline_s)
        run = Run(request, request_id=self._new_id(), now=now, deadline=now + deadline_s)
        with self._refusing():
            if self._is_draining:
                raise RouterDraining("this router is draining", retry_after_s=self._config.retry_after_s)
            self._routing.check(run)
        return run

    async def _enter(self, claim: Claim) -> None:
        with self._refusing():
            await self._admission.enter(claim)

    @contextmanager
    def _refusing(self) -> Iterator[None]:
        """Count what is refused before it started."""
        try:
            yield
        except RouterError as error:
            self._stats.refused(error.code)
            raise

    def _claim(self, run: Run) -> Claim:
        request = run.request
        return Claim(
            tenant=request.tenant,
            priority=request.priority,
            cost=len(request.prompt_ids) + request.sampling.max_tokens,
            num_bytes=4 * len(request.prompt_ids),
            deadline=run.deadline,
            has_room=lambda: self._routing.has_room(run),
        )

    def _leave(self, run: Run, claim: Claim) -> None:
        self._admission.leave(claim, used=run.num_computed_tokens)
        now = asyncio.get_running_loop().time()
        self._stats.ended(run.ending, seconds=now - run.started)
        summary = run.summary(now=now)
        self._stats.left(summary)
        run.end_trace(summary)
        self._stats.duplicates(run.merger.duplicates)
        if run.first_token_at is not None:
            self._stats.first_token(run.first_token_at - run.started)
            self._stats.produced(
                num_prompt_tokens=len(run.request.prompt_ids),
                num_output_tokens=len(run.merger.delivered),
                decode_seconds=run.last_token_at - run.first_token_at,
            )

    async def _open(self, run: Run, take: Take) -> Attempt:
        decision = await self._routing.choose(run)
        run.dispatch(now=asyncio.get_running_loop().time())
        self._stats.decided(self._config.policy, decision.kind)
        self._stats.believed_cached(decision.route.cached_tokens)
        return Attempt(
            run.request,
            tid=TransferId(run.request_id, run.num_attempts),
            route=decision.route,
            merger=run.merger,
            links=self._links,
            deadline_s=run.deadline - asyncio.get_running_loop().time(),
            take=take,
        )

    def _conclude(self, run: Run, attempt: Attempt) -> None:
        """Set the outcome, or let the next attempt happen, or raise what the user shall see."""
        now = asyncio.get_running_loop().time()
        match attempt.end:
            case Done() as done:
                self._pairs.succeeded(attempt.route)
                run.finish(done, now=now)
            case Broken() as broken:
                self._pairs.broke(attempt.route, broken)
                if broken.cause != "token_conflict" and run.finish_by_tokens(now=now):
                    return
                run.broke(attempt.route, broken)
                _log_broken(run, broken)
                self._raise_if_over(run, broken)
                self._stats.redispatched(broken.cause)

    def _raise_if_over(self, run: Run, broken: Broken) -> None:
        detail = f"{broken.blamed.role} node {broken.blamed.address}: {broken.reason} ({broken.code})"
        if broken.cause == "token_conflict":
            self._stats.conflict()
            raise TokenConflict(detail)
        if broken.code in ("deadline", DeadlineExceeded.default_code):
            raise DeadlineExceeded(detail)
        if not broken.is_retryable:
            raise refused(run.request, broken) or NodeFailed(detail)
        too_often = run.num_failures >= self._config.max_attempts
        if too_often or run.num_preemptions > self._config.max_preemptions:
            error = NodesBusy if broken.is_load else AttemptsExhausted
            message = f"given up after {run.num_attempts} attempts; last, {detail}"
            raise error(message, retry_after_s=self._config.retry_after_s)


def _log_broken(run: Run, broken: Broken) -> None:
    """Without the reason: a refusal may repeat what the user asked for."""
    logger.warning(
        "attempt %d broke on the %s node %s: %s (%s)",
        run.num_attempts,
        broken.blamed.role,
        broken.blamed.address,
        broken.cause,
        broken.code,
        extra=about(run.request_id),
    )
