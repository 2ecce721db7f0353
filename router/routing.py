"""Which route the next attempt of a request takes: what is ready, what fits, and the policy's choice.

Owns the turns of the policy. Must never know what became of an attempt, nor text, HTTP or gRPC.
"""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, replace

from router.attempt import Route
from router.dispatch_config import DispatchConfig
from router.errors import ContextTooLong, DeadlineExceeded, NoReadyPair
from router.links import NodeLinks
from router.pairs import PairBook
from router.policies import Pair, PolicyState, RequestFacts, most_pages_of, policy_named
from router.run import Run
from wire.work import Incarnation

_MAX_PAUSE_S = 2.0
"""Between two attempts: many preemptions must not add up to a wait of minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A route, and for the books why: "remote", "local_short", "local_cached" or "colocated"."""

    route: Route
    kind: str


class Routing:
    """Every route it gives was ready at that moment, and none of its nodes is too small for the request."""

    def __init__(self, links: NodeLinks, pairs: PairBook, config: DispatchConfig) -> None:
        self._links = links
        self._pairs = pairs
        self._config = config
        self._policy = policy_named(config.policy)
        self._turn = 0

    def check(self, run: Run) -> None:
        """Raise NoReadyPair, or ContextTooLong for a request that no ready pair could ever hold."""
        routes = self._pairs.ready(run.request.model)
        if not self._of_kind(routes, run)[0]:
            raise self._no_pair()
        if not any(_fits(route, run.facts) for route in routes):
            least = min(_pages_wanted(route, run.facts) for route in routes)
            raise ContextTooLong(
                f"max_tokens must leave prompt and completion room in a node's KV pages, got "
                f"{run.facts.max_tokens}: at least {least} pages for both, more than any pair of nodes has",
                param="max_tokens",
            )

    def has_room(self, run: Run) -> bool:
        """Could a decode node take the request now, as far as is known here?"""
        routes = self._ready(run)[0]
        if not self._config.admits_by_pages:
            return bool(routes)
        for route in routes:
            load = self._links.sent.load_of(route.decode)
            is_known = load.load.total_pages > 0
            if not is_known or not load.busy_requests or load.free_pages_after(run.facts) >= 0:
                return True
        return False

    async def choose(self, run: Run) -> Decision:
        """Choose nodes for the next attempt. One that broke is chosen again only for want of another."""
        run.facts = replace(run.facts, cached=await self._cached(run))
        routes, kind = await self._wait_ready(run) if run.num_attempts else self._ready(run)
        if routes and all(run.demerits(route) for route in routes):
            await self._pause(run)
            routes, kind = await self._wait_ready(run)
        if not routes:
            raise self._no_pair()
        fewest = min(map(run.demerits, routes))
        pairs = {self._pair(route): route for route in routes if run.demerits(route) == fewest}
        state = PolicyState(turn=self._turn, seed=self._config.policy_seed)
        self._turn += 1
        route = pairs[self._policy(run.facts, tuple(pairs), state)]
        computing = route.decode if route.prefill is None else route.prefill
        cached_tokens = run.facts.cached.get(computing.incarnation, 0)
        return Decision(route=replace(route, cached_tokens=cached_tokens), kind=kind)

    async def _cached(self, run: Run) -> Mapping[Incarnation, int]:
        """What nodes are believed to have of what the next attempt must compute."""
        request, index = run.request, self._links.index
        needs_all_logits = request.sampling.prompt_logprobs is not None
        if index is None or needs_all_logits:
            return {}
        return await index.cached(request.prompt_ids + tuple(run.merger.delivered), request.cache_salt)

    def _no_pair(self) -> NoReadyPair:
        return NoReadyPair(
            "no pair of prefill and decode nodes is ready", retry_after_s=self._config.retry_after_s
        )

    def _ready(self, run: Run) -> tuple[list[Route], str]:
        """Ready routes for a request, and the decision they stand for: where its prompt is computed."""
        routes = [route for route in self._pairs.ready(run.request.model) if _fits(route, run.facts)]
        return self._of_kind(routes, run)

    def _of_kind(self, routes: list[Route], run: Run) -> tuple[list[Route], str]:
        local = [route for route in routes if route.prefill is None]
        if self._config.colocated:
            return local, "colocated"
        facts, limit = run.facts, self._config.local_prompt_tokens
        if local and facts.num_prompt_tokens <= limit:
            return local, "local_short"
        if limit and (near := [one for one in local if facts.uncached_on(one.decode.incarnation) <= limit]):
            return near, "local_cached"
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
        delay = min(_MAX_PAUSE_S, self._config.retry_delay_s * 2.0 ** max(0, run.num_attempts - 1))
        now = asyncio.get_running_loop().time()
        if now + delay >= run.deadline:
            raise DeadlineExceeded("the request's deadline passed while waiting for a node")
        await asyncio.sleep(delay)

    def _pair(self, route: Route) -> Pair:
        load_of = self._links.sent.load_of
        return Pair(
            prefill=None if route.prefill is None else load_of(route.prefill), decode=load_of(route.decode)
        )


def _fits(route: Route, facts: RequestFacts) -> bool:
    """False when a node's whole pool is too small; one that has not told its size is not judged."""
    return all(
        node.load.total_pages == 0 or most_pages_of(facts, node.page_size) <= node.load.total_pages
        for node in route.nodes
    )


def _pages_wanted(route: Route, facts: RequestFacts) -> int:
    return min(most_pages_of(facts, node.page_size) for node in route.nodes)
