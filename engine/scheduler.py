"""Which requests run, in which order, and how many prompt tokens each may compute in the next step.

Owns the waiting and running lists. Pages are asked of the `KvCache`; tokens are never looked at.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

from engine.kv_cache import KvCache
from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    """chunk_tokens: prompt tokens per step over all requests; scored_tokens: those of them whose logits are
    wanted too, a row of the vocabulary each. reserve_tokens: how far ahead each request's growth is counted
    on when another one asks to be let in."""

    max_running: int = 64
    chunk_tokens: int = 256
    scored_tokens: int = 512
    reserve_tokens: int = 512

    def __post_init__(self) -> None:
        if self.max_running < 1:
            raise ValueError(f"max_running must be at least 1, got {self.max_running}")
        if self.chunk_tokens < 1:
            raise ValueError(f"chunk_tokens must be at least 1, got {self.chunk_tokens}")
        if self.scored_tokens < 1:
            raise ValueError(f"scored_tokens must be at least 1, got {self.scored_tokens}")
        if self.reserve_tokens < 0:
            raise ValueError(f"reserve_tokens must be at least 0, got {self.reserve_tokens}")


class Scheduler:
    """The lowest priority number first, then first come, first served. Invariant: a running request holds
    pages for its whole prompt, and of the most urgent the oldest is never the one to be preempted."""

    def __init__(self, cache: KvCache, limits: SchedulerLimits) -> None:
        self._cache = cache
        self._limits = limits
        self._waiting: dict[Hashable, Request] = {}
        self._running: dict[Hashable, Request] = {}

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def queued_tokens(self) -> int:
        """Prompt tokens not yet computed, waiting and running."""
        pending = [*self._waiting.values(), *self.prefilling()]
        return sum(len(request.prompt_ids) - request.num_committed for request in pending)

    def growth_pages(self, request: Request) -> int:
        """Pages beyond its prompt's that a request is counted on to need."""
        still_wanted = request.sampling.max_tokens - request.num_outputs
        ahead = len(request.tokens) + min(still_wanted, self._limits.reserve_tokens)
        held = max(len(request.pages), self._cache.pages_for(len(request.prompt_ids)))
        return max(0, self._cache.pages_for(ahead) - held)

    def has_room(self, request: Request, num_pages: int, *, others: Sequence[Request]) -> bool:
        """May `request` take `num_pages` now, given the growth of what runs and of `others`?

        With nobody else about, whatever fits is granted; with `max_running` of them, nothing.
        """
        rivals = [*self._running.values(), *others]
        if not rivals:
            return num_pages <= self._cache.num_available
        if len(rivals) >= self._limits.max_running:
            return False
        growth = sum(map(self.growth_pages, [request, *rivals]))
        return num_pages + growth <= self._cache.num_available

    def requests(self) -> list[Request]:
        return [*self._waiting.values(), *self._running.values()]

    def add(self, request: Request) -> None:
        self._waiting[request.key] = request

    def join(self, request: Request) -> None:
        """A request whose prompt is already in its pages starts running at once."""
        self._running[request.key] = request

    def remove(self, key: Hashable) -> Request | None:
        return self._waiting.pop(key, None) or self._running.pop(key, None)

    def admit(self) -> list[Request]:
        """Move waiting requests to the running ones while pages for their prompts are there."""
        admitted: list[Request] = []
        for key, request in sorted(self._waiting.items(), key=lambda item: item[1].priority):
            if not self._try_admit(request):
                break
            del self._waiting[key]
            self._running[key] = request
            admitted.append(request)
        return admitted

    def decoding(self) -> list[Request]:
        return [request for request in self._running.values() if request.is_prompt_done]

    def prefilling(self) -> list[Request]:
        return [request for request in self._running.values() if not request.is_prompt_done]

    def chunks(self) -> list[tuple[Request, int]]:
        """Prompt tokens to compute now, the most urgent first, within `chunk_tokens` and `scored_tokens`."""
        budget, scored_budget = self._limits.chunk_tokens, self._limits.scored_tokens
        planned = []
        for request in sorted(self.prefilling(), key=lambda request: request.priority):
            count = min(budget, len(request.prompt_ids) - request.num_committed)
            if request.sampling.prompt_logprobs is not None:
                count = min(count, scored_budget)
                scored_budget -= count
            if count:
                planned.append((request, count))
            budget -= count
            if budget == 0:
                break
        return planned

    def youngest(self) -> Request:
        """The running request to give up first: of the least urgent, the last that started."""
        return max(reversed(self._running.values()), key=lambda request: request.priority)

    def _try_admit(self, request: Request) -> bool:
        self._cache.attach_prefix(request)
        slots = len(request.prompt_ids) + 1
        if not self.has_room(request, self._cache.pages_for(slots) - len(request.pages), others=()):
            self._cache.release(request)
            request.num_cached_tokens = 0
            return False
        self._cache.grow(request, slots)
        return True
