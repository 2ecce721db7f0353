"""Runs one generation on a pair of nodes, and goes on with another pair when the first one breaks.

Owns the requests in flight. Must never know text, HTTP, gRPC or how a policy chooses. There is one
way to recover: dispatch attempt k+1 with prompt + tokens delivered so far, whatever broke attempt k.
"""

import asyncio
import uuid
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass

from router.attempt import Attempt, Broken, Done, Route
from router.errors import (
    AttemptsExhausted,
    DeadlineExceeded,
    NodeFailed,
    NodesBusy,
    NoReadyPair,
    QueueFull,
    RequestRefused,
    RouterDraining,
    RouterError,
    TokenConflict,
)
from router.links import NodeLinks
from router.pairs import PairBook
from router.policies import Pair, PolicyState, policy_named
from router.requests import Delta, GenerateRequest, Outcome
from router.run import Run
from router.stats import RouterStats
from wire.work import BAD_GRAMMAR, TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """`max_attempts` bounds the attempts that fail; `max_preemptions`, apart, those that ran out of pages.

    `colocated`: decode nodes do all prompts. `local_prompt_tokens`: they do prompts up to that long.
    `requeue_wait_s`: how long a broken request waits for a pair; a new one does not wait.
    """

    policy: str = "least_load"
    policy_seed: int = 0
    colocated: bool = False
    local_prompt_tokens: int = 0
    max_in_flight: int = 256
    max_attempts: int = 3
    max_preemptions: int = 8
    default_deadline_s: float = 600.0
    requeue_wait_s: float = 30.0
    retry_delay_s: float = 0.05
    retry_after_s: float = 1.0
    mailbox_events: int = 4096


def new_request_id() -> str:
    return uuid.uuid4().hex


class Dispatcher:
    """At most `max_in_flight` generations run at once; each runs on at most one pair at a time."""

    def __init__(
        self,
        links: NodeLinks,
        pairs: PairBook,
        *,
        stats: RouterStats,
        config: DispatchConfig,
        new_id: Callable[[], str] = new_request_id,
    ) -> None:
        self._links = links
        self._pairs = pairs
        self._stats = stats
        self._config = config
        self._new_id = new_id
        self._policy = policy_named(config.policy)
        self._turn = 0
        self._num_in_flight = 0
        self._is_draining = False
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def num_in_flight(self) -> int:
        return self._num_in_flight

    @property
    def is_draining(self) -> bool:
        return self._is_draining

    async def drain(self) -> None:
        """Take no new request; returns when the last one in flight is over."""
        self._is_draining = True
        await self._idle.wait()

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta | Outcome]:
        """Yields deltas in index order, then one Outcome. Raises errors.RouterError, on the first item
        when nothing was dispatched.

        Close it (contextlib.aclosing): that cancels the request on its nodes, whatever its phase.
        """
        run = self._admit(request)
        try:
            while run.outcome is None:
                attempt = await self._open(run)
                # One timer an attempt: a timeout around every wait would cost more than the wait.
                deadline = asyncio.get_running_loop().call_at(run.deadline, attempt.expire)
                try:
                    while attempt.end is None:
                        for delta in await attempt.receive():
                            run.deliver(delta)
                            yield delta
                finally:
                    deadline.cancel()
                    attempt.close()
                    run.close_attempt(attempt)
                self._conclude(run, attempt)
            self._stats.finished(run.outcome)
            yield run.outcome
        except RouterError as error:
            run.ending = error.code
            raise
        finally:
            self._leave(run)

    def _admit(self, request: GenerateRequest) -> Run:
        if self._is_draining:
            self._stats.refused(RouterDraining.default_code)
            raise RouterDraining("this router is draining", retry_after_s=self._config.retry_after_s)
        if self._num_in_flight >= self._config.max_in_flight:
            self._stats.refused(QueueFull.default_code)
            raise QueueFull(
                f"{self._num_in_flight} requests are in flight", retry_after_s=self._config.retry_after_s
            )
        self._num_in_flight += 1
        self._idle.clear()
        self._stats.started()
        deadline_s = self._config.default_deadline_s if request.deadline_s is None else request.deadline_s
        now = asyncio.get_running_loop().time()
        return Run(request, request_id=self._new_id(), now=now, deadline=now + deadline_s)

    def _leave(self, run: Run) -> None:
        self._num_in_flight -= 1
        if self._num_in_flight == 0:
            self._idle.set()
        now = asyncio.get_running_loop().time()
        self._stats.ended(run.ending, seconds=now - run.started)
        self._stats.left(run.summary(now=now))
        self._stats.duplicates(run.merger.duplicates)
        if run.first_token_at is not None:
            self._stats.first_token(run.first_token_at - run.started)
            self._stats.produced(
                num_prompt_tokens=len(run.request.prompt_ids),
                num_output_tokens=len(run.merger.delivered),
                decode_seconds=run.last_token_at - run.first_token_at,
            )

    async def _open(self, run: Run) -> Attempt:
        route, decision = await self._route(run)
        run.dispatch()
        self._stats.decided(self._config.policy, decision)
        return Attempt(
            run.request,
            tid=TransferId(run.request_id, run.num_attempts),
            route=route,
            merger=run.merger,
            links=self._links,
            deadline_s=run.deadline - asyncio.get_running_loop().time(),
            capacity=self._config.mailbox_events,
        )

    async def _route(self, run: Run) -> tuple[Route, str]:
        """Choose nodes for the next attempt. One that broke is chosen again only for want of another."""
        routes, decision = await self._wait_ready(run) if run.num_attempts else self._ready(run)
        if routes and all(run.demerits(route) for route in routes):
            await self._pause(run)
            routes, decision = await self._wait_ready(run)
        if not routes:
            raise NoReadyPair(
                "no pair of prefill and decode nodes is ready", retry_after_s=self._config.retry_after_s
            )
        fewest = min(map(run.demerits, routes))
        pairs = {self._pair(route): route for route in routes if run.demerits(route) == fewest}
        state = PolicyState(turn=self._turn, seed=self._config.policy_seed)
        self._turn += 1
        return pairs[self._policy(run.facts, tuple(pairs), state)], decision

    def _ready(self, run: Run) -> tuple[list[Route], str]:
        """Ready routes for a request, and the decision they stand for: where its prompt is computed."""
        routes = self._pairs.ready(run.request.model)
        local = [route for route in routes if route.prefill is None]
        if self._config.colocated:
            return local, "colocated"
        if local and run.facts.num_prompt_tokens <= self._config.local_prompt_tokens:
            return local, "local_short"
        return [route for route in routes if route.prefill is not None], "remote"

    async def _wait_ready(self, run: Run) -> tuple[list[Route], str]:
        give_up = asyncio.get_running_loop().time() + self._config.requeue_wait_s
        try:
            async with asyncio.timeout_at(min(give_up, run.deadline)):
                while not (found := self._ready(run))[0]:
                    await self._pairs.wait_change()
        except TimeoutError:
            return self._ready(run)
        return found

    async def _pause(self, run: Run) -> None:
        """Leave a node that just broke or was full a moment before asking it again."""
        delay = self._config.retry_delay_s * 2.0 ** max(0, run.num_attempts - 1)
        now = asyncio.get_running_loop().time()
        if now + delay >= run.deadline:
            raise DeadlineExceeded("the request's deadline passed while waiting for a node")
        await asyncio.sleep(delay)

    def _pair(self, route: Route) -> Pair:
        load_of = self._links.sent.load_of
        return Pair(
            prefill=None if route.prefill is None else load_of(route.prefill), decode=load_of(route.decode)
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
                self._raise_if_over(run, broken)
                self._stats.redispatched(broken.cause)

    def _raise_if_over(self, run: Run, broken: Broken) -> None:
        detail = f"{broken.blamed.role} node {broken.blamed.address}: {broken.reason} ({broken.code})"
        if broken.cause == "token_conflict":
            self._stats.conflict()
            raise TokenConflict(detail)
        if broken.code in ("deadline", DeadlineExceeded.default_code):
            raise DeadlineExceeded(detail)
        if not broken.is_retryable and broken.cause == "rejected":
            raise _refused(run.request, broken)
        if not broken.is_retryable:
            raise NodeFailed(detail)
        too_often = run.num_failures >= self._config.max_attempts
        if too_often or run.num_preemptions > self._config.max_preemptions:
            error = NodesBusy if broken.is_load else AttemptsExhausted
            message = f"given up after {run.num_attempts} attempts; last, {detail}"
            raise error(message, retry_after_s=self._config.retry_after_s)


def _refused(request: GenerateRequest, broken: Broken) -> RequestRefused:
    """A grammar that means nothing is told under the name its field has for the user."""
    if broken.code != BAD_GRAMMAR or request.constraint is None:
        return RequestRefused(broken.reason, code=broken.code)
    field = request.constraint.field
    return RequestRefused(
        f"{field} cannot be used: {broken.reason.removeprefix('grammar: ')}", code=broken.code, param=field
    )
