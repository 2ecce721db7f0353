"""Who may start next: a bounded queue before the nodes, by priority, and fair among tenants.

Owns who waits, how many run, and what each tenant was charged. Must never know nodes, pages or how a
request is dispatched: a claim says itself whether there is room for it.

Order: the lowest `priority` first. Among tenants whose best is equal, the one that was charged least per
weight (virtual token counters, Sheng et al. 2024, "Fairness in Serving Large Language Models", alg. 2). What
is charged are tokens that were computed, not those of the prefix cache (Cao et al. 2025, "Locality-aware Fair
Scheduling in LLM Serving"). Within a tenant, first come first served. A request that finds no room holds back
those behind it, so that large ones are not starved by small ones.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from router.errors import DeadlineExceeded, NoDecodePages, Overloaded, QueueFull, QueueTimeout
from router.stats import RouterStats

_PACE_MEMORY = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueConfig:
    """`max_queue` 0: nobody waits. `weights`: a tenant's share, 1 where it is not named."""

    max_in_flight: int = 256
    max_queue: int = 1024
    max_queue_bytes: int = 64 * 1024 * 1024
    max_queue_s: float = 30.0
    retry_after_s: float = 1.0
    weights: Mapping[str, float] = field(default_factory=dict)


@dataclass(slots=True, kw_only=True, eq=False)
class Claim:
    """One request's wish to start. `cost`: tokens it may come to, what its tenant is charged meanwhile."""

    tenant: str
    priority: int
    cost: int
    num_bytes: int
    deadline: float
    has_room: Callable[[], bool]
    refusal: Overloaded | None = None
    started: asyncio.Event = field(default_factory=asyncio.Event)
    decided: asyncio.Event = field(default_factory=asyncio.Event)


class _Line:
    """The claims of one tenant that wait, and what it was charged. Bands are never empty."""

    def __init__(self, charged: float) -> None:
        self.charged = charged
        self.num_running = 0
        self.num_waiting = 0
        self._bands: dict[int, deque[Claim]] = {}

    def push(self, claim: Claim) -> None:
        self._bands.setdefault(claim.priority, deque()).append(claim)
        self.num_waiting += 1

    def remove(self, claim: Claim) -> None:
        band = self._bands[claim.priority]
        band.remove(claim)
        self.num_waiting -= 1
        if not band:
            del self._bands[claim.priority]

    @property
    def best(self) -> Claim:
        return self._bands[min(self._bands)][0]

    @property
    def worst(self) -> Claim:
        return self._bands[max(self._bands)][-1]


class Admission:
    """Invariant: while a claim waits, no slot is free or the one whose turn it is has no room."""

    def __init__(self, config: QueueConfig, *, stats: RouterStats) -> None:
        self._config = config
        self._stats = stats
        self._lines: dict[str, _Line] = {}
        self._num_waiting = 0
        self._num_waiting_bytes = 0
        self._num_running = 0
        self._clock = 0.0  # what the tenant was charged that started last
        self._pace_s = 0.0
        self._last_start = float("-inf")

    @property
    def num_running(self) -> int:
        return self._num_running

    @property
    def num_waiting(self) -> int:
        return self._num_waiting

    async def enter(self, claim: Claim) -> None:
        """Returns when the request may start; `leave` must follow. Raises Overloaded, DeadlineExceeded."""
        self._push(claim)
        self.wake()
        if claim.started.is_set():
            return
        self._shed(claim)
        now = asyncio.get_running_loop().time()
        give_up = now + self._config.max_queue_s
        try:
            async with asyncio.timeout_at(min(give_up, claim.deadline)):
                await claim.decided.wait()
        except TimeoutError:
            if not claim.started.is_set():
                raise self._timed_out(claim, is_deadline=claim.deadline <= give_up) from None
        except BaseException:
            if claim.started.is_set():
                self.leave(claim, used=0)
            raise
        finally:
            self._forget(claim)
            self.wake()
        if claim.refusal is not None:
            raise claim.refusal
        self._stats.waited(asyncio.get_running_loop().time() - now)

    def leave(self, claim: Claim, *, used: int) -> None:
        """A request that started is over: its slot goes to the next, its tenant is charged `used` tokens."""
        line = self._lines[claim.tenant]
        self._num_running -= 1
        line.num_running -= 1
        line.charged -= (claim.cost - used) / self._weight(claim.tenant)
        self._drop_if_idle(claim.tenant, line)
        self.wake()

    def wake(self) -> None:
        """Start whoever may start now."""
        while self._num_waiting and self._num_running < self._config.max_in_flight:
            line = min(
                (line for line in self._lines.values() if line.num_waiting),
                key=lambda line: (line.best.priority, line.charged),
            )
            if not line.best.has_room():
                return
            self._start(line, line.best)

    def _push(self, claim: Claim) -> None:
        line = self._lines.setdefault(claim.tenant, _Line(self._clock))
        if not line.num_waiting:
            # Who was away has saved nothing up.
            line.charged = max(line.charged, self._clock)
        line.push(claim)
        self._num_waiting += 1
        self._num_waiting_bytes += claim.num_bytes
        self._tell()

    def _start(self, line: _Line, claim: Claim) -> None:
        self._clock = max(self._clock, line.charged)
        claim.started.set()
        self._num_running += 1
        line.num_running += 1
        line.charged += claim.cost / self._weight(claim.tenant)
        self._forget(claim)
        claim.decided.set()
        self._note_pace()

    def _forget(self, claim: Claim) -> None:
        """Take a claim out of the queue, if it is still there."""
        line = self._lines.get(claim.tenant)
        if line is None or claim.decided.is_set():
            return
        claim.decided.set()
        line.remove(claim)
        self._num_waiting -= 1
        self._num_waiting_bytes -= claim.num_bytes
        self._drop_if_idle(claim.tenant, line)
        self._tell()

    def _shed(self, newcomer: Claim) -> None:
        """Over a bound, send away the last of the least important, of the tenant that waits most."""
        if newcomer.num_bytes > self._config.max_queue_bytes:
            self._forget(newcomer)
            raise self._refusal(newcomer)
        while self._is_over():
            line = max(
                ((name, line) for name, line in self._lines.items() if line.num_waiting),
                key=lambda item: (item[1].worst.priority, item[1].num_waiting / self._weight(item[0])),
            )[1]
            victim = line.worst
            self._forget(victim)
            victim.refusal = self._refusal(victim)
            if victim is newcomer:
                raise victim.refusal

    def _is_over(self) -> bool:
        config = self._config
        return self._num_waiting > config.max_queue or self._num_waiting_bytes > config.max_queue_bytes

    def _refusal(self, claim: Claim) -> Overloaded:
        has_slot = self._num_running < self._config.max_in_flight
        if has_slot and not claim.has_room():
            return NoDecodePages(
                "no decode node has room for the prompt and its answer now", retry_after_s=self._retry_after()
            )
        return QueueFull(
            f"{self._num_running} requests are in flight and {self._num_waiting} wait",
            retry_after_s=self._retry_after(),
        )

    def _timed_out(self, claim: Claim, *, is_deadline: bool) -> Overloaded | DeadlineExceeded:
        if is_deadline:
            return DeadlineExceeded("the request's deadline passed in the queue")
        error = QueueTimeout if claim.has_room() else NoDecodePages
        return error(f"waited {self._config.max_queue_s:g} s for its turn", retry_after_s=self._retry_after())

    def _retry_after(self) -> float:
        """About how long the queue as it is will take; never less than configured."""
        expected = self._num_waiting * self._pace_s
        return max(self._config.retry_after_s, min(expected, self._config.max_queue_s))

    def _note_pace(self) -> None:
        """Seconds between two starts while others wait."""
        now = asyncio.get_running_loop().time()
        if self._num_waiting and self._last_start > float("-inf"):
            gap = now - self._last_start
            self._pace_s = _PACE_MEMORY * self._pace_s + (1 - _PACE_MEMORY) * gap if self._pace_s else gap
        self._last_start = now

    def _weight(self, tenant: str) -> float:
        return self._config.weights.get(tenant, 1.0)

    def _drop_if_idle(self, tenant: str, line: _Line) -> None:
        if not line.num_waiting and not line.num_running:
            self._lines.pop(tenant, None)

    def _tell(self) -> None:
        self._stats.queue(self._num_waiting, num_bytes=self._num_waiting_bytes)
