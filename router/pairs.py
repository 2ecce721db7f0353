"""Which pairs of nodes may be used: only those through which a real generation has passed.

Owns the state of every pair and the canaries. Must never know users' requests or policies.

    state     means                                     leaves on
    waiting   a link is not open                        both links open -> probing
    draining  a node takes nothing new                  its record says otherwise -> probing
    probing   a canary is on its way                    its end -> ready, failed or refused
    ready     may be used                               repeated node faults -> probing
    failed    the last canary failed, see `reason`      back-off over -> probing
    refused   the nodes do not fit each other           never: another incarnation is another pair
"""

import asyncio
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from router.attempt import Attempt, Broken, Done, Route
from router.links import NodeLinks
from router.merge import TokenMerger
from router.requests import GenerateRequest
from router.stats import RouterStats
from wire.records import NodeRecord
from wire.work import SamplingParams, TransferId

_CANARY_PRIORITY = -(2**31)
"""Before all users' work: a node that comes back to busy peers would else wait for its turn in vain."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairConfig:
    """`with_prefill`: pairs of two nodes; `with_local`: decode nodes that do the prompt themselves.

    One incident breaks everything that is in flight: faults within `incident_s` count as one.
    """

    with_prefill: bool = True
    with_local: bool = False
    min_prefill: int = 1
    min_decode: int = 1
    breaker_faults: int = 3
    incident_s: float = 0.5
    canary_prompt_tokens: int = 4
    canary_timeout_s: float = 30.0
    max_canaries: int = 4
    first_backoff_s: float = 0.5
    max_backoff_s: float = 10.0


@dataclass(slots=True)
class _Entry:
    route: Route
    state: str = "waiting"
    reason: str = ""
    num_faults: int = 0
    incident_until: float = float("-inf")
    is_suspect: asyncio.Event = field(default_factory=asyncio.Event)
    prover: asyncio.Task[None] | None = None


class PairBook:
    """A route is handed out only while its entry is `ready` and both its links are open."""

    def __init__(
        self, links: NodeLinks, *, stats: RouterStats, new_id: Callable[[], str], config: PairConfig
    ) -> None:
        self._links = links
        self._stats = stats
        self._new_id = new_id
        self._config = config
        self._entries: dict[tuple[str | None, str], _Entry] = {}
        self._group: asyncio.TaskGroup | None = None
        self._canary_slots = asyncio.Semaphore(config.max_canaries)
        self._changed = asyncio.Event()
        self._listeners: list[Callable[[], None]] = []
        links.on_change(self._refresh)

    async def run(self) -> None:
        """Prove pairs until cancelled."""
        async with asyncio.TaskGroup() as group:
            self._group = group
            try:
                self._refresh()
                await asyncio.Event().wait()
            finally:
                self._group = None

    def ready(self, model: str = "") -> list[Route]:
        """Routes that may be used for a model ("": any), in an order that heartbeats do not change."""
        return [
            entry.route
            for entry in self._entries.values()
            if entry.state == "ready"
            and self._idle_reason(entry.route) is None
            and model in ("", entry.route.decode.model)
        ]

    @property
    def is_ready(self) -> bool:
        routes = self.ready()
        num_prefill = len({route.prefill.incarnation for route in routes if route.prefill is not None})
        num_decode = len({route.decode.incarnation for route in routes})
        enough_prefill = num_prefill >= self._config.min_prefill or not self._config.with_prefill
        return bool(routes) and enough_prefill and num_decode >= self._config.min_decode

    def on_change(self, callback: Callable[[], None]) -> None:
        """Call back whenever the state of a pair or the load of a node may have changed."""
        self._listeners.append(callback)

    async def wait_change(self) -> None:
        """Until the state of any pair changes."""
        await self._changed.wait()

    def succeeded(self, route: Route) -> None:
        if (entry := self._entries.get(route.key)) is not None:
            entry.num_faults = 0

    def broke(self, route: Route, broken: Broken) -> None:
        """An attempt on this route broke. Only what speaks against the pair itself counts."""
        entry = self._entries.get(route.key)
        if entry is None:
            return
        if broken.is_refusal:
            self._stop(entry)
            self._set(entry, "refused", _refusal(broken))
        elif broken.is_node_fault:
            now = asyncio.get_running_loop().time()
            if now >= entry.incident_until:
                entry.num_faults += 1
                entry.incident_until = now + self._config.incident_s
            if entry.state == "ready" and entry.num_faults >= self._config.breaker_faults:
                self._set(entry, "probing", f"{entry.num_faults} faults in a row, last: {broken.reason}")
                entry.is_suspect.set()

    def report(self) -> dict[str, Any]:
        """What /ready shows."""
        return {
            "ready": self.is_ready,
            "pairs": [
                {
                    "prefill": None if entry.route.prefill is None else entry.route.prefill.address,
                    "decode": entry.route.decode.address,
                    "state": entry.state,
                    "reason": entry.reason,
                }
                for entry in self._entries.values()
            ],
            "nodes": [
                {
                    "role": record.role,
                    "address": record.address,
                    "incarnation": record.incarnation,
                    "model": record.model,
                    "link": self._links.reason(record.incarnation) or "open",
                    "draining": record.is_draining,
                    "load": asdict(record.load),
                }
                for record in self._links.records()
            ],
        }

    def _refresh(self) -> None:
        """Bring the entries in line with records and links."""
        routes = {route.key: route for route in self._routes()}
        for key, entry in self._entries.items():
            if key not in routes:
                self._stop(entry)
        # Rebuilt in the order of the routes, so that round-robin does not depend on who came first.
        self._entries = {key: self._entries.get(key) or _Entry(route) for key, route in routes.items()}
        for key, entry in self._entries.items():
            entry.route = routes[key]
            if entry.state == "refused":
                continue
            if (idle := self._idle_reason(entry.route)) is not None:
                self._stop(entry)
                self._set(entry, *idle)
            elif entry.prover is None and self._group is not None:
                entry.prover = self._group.create_task(self._prove(entry))
        self._note_change()

    def _routes(self) -> list[Route]:
        records = self._links.records()
        prefills: list[NodeRecord | None] = []
        if self._config.with_prefill:
            prefills += [record for record in records if record.role == "prefill"]
        if self._config.with_local:
            prefills.append(None)
        return [
            Route(prefill=prefill, decode=decode)
            for prefill in prefills
            for decode in records
            if decode.role == "decode"
        ]

    def _idle_reason(self, route: Route) -> tuple[str, str] | None:
        """State and reason of a route that cannot be used now whatever its canaries say."""
        for node in route.nodes:
            if not self._links.is_open(node.incarnation):
                return "waiting", f"{node.address}: {self._links.reason(node.incarnation)}"
        for node in route.nodes:
            if node.is_draining:
                return "draining", f"{node.address} is draining"
        return None

    def _stop(self, entry: _Entry) -> None:
        if entry.prover is not None:
            entry.prover.cancel()
        entry.prover = None

    def _set(self, entry: _Entry, state: str, reason: str) -> None:
        entry.state, entry.reason = state, reason
        self._note_change()

    def _note_change(self) -> None:
        self._stats.ready_pairs(len(self.ready()))
        self._changed.set()
        self._changed = asyncio.Event()
        for listener in self._listeners:
            listener()

    async def _prove(self, entry: _Entry) -> None:
        """Probe a route whose links are open, and again whenever it fell under suspicion."""
        delay = self._config.first_backoff_s
        while True:
            self._set(entry, "probing", entry.reason)
            async with self._canary_slots:
                end = await self._canary(entry.route)
            if isinstance(end, Done):
                entry.num_faults, delay = 0, self._config.first_backoff_s
                entry.is_suspect.clear()
                self._set(entry, "ready", _caveat(end))
                await entry.is_suspect.wait()
            elif end.is_refusal:
                self._set(entry, "refused", _refusal(end))
                return
            else:
                self._set(entry, "failed", end.reason)
                await asyncio.sleep(delay)
                delay = min(2 * delay, self._config.max_backoff_s)

    async def _canary(self, route: Route) -> Done | Broken:
        """One greedy generation of two tokens; its salt is its own, so no cache can answer it."""
        request_id = f"canary-{self._new_id()}"
        vocab_size = max(1, route.decode.vocab_size)
        request = GenerateRequest(
            prompt_ids=tuple(i % vocab_size for i in range(1, self._config.canary_prompt_tokens + 1)),
            sampling=SamplingParams(seed=0, max_tokens=2, temperature=0.0),
            priority=_CANARY_PRIORITY,
            cache_salt=request_id,
        )
        attempt = Attempt(
            request,
            tid=TransferId(request_id, 1),
            route=route,
            merger=TokenMerger(max_tokens=2),
            links=self._links,
            deadline_s=self._config.canary_timeout_s,
            take=lambda _: True,
        )
        end: Done | Broken
        try:
            async with asyncio.timeout(self._config.canary_timeout_s):
                await attempt.over()
            assert attempt.end is not None
            end = attempt.end
        except TimeoutError:
            end = _timed_out(route, self._config.canary_timeout_s)
        finally:
            attempt.close()
        self._stats.canary("ok" if isinstance(end, Done) else "failed")
        return end


def _refusal(broken: Broken) -> str:
    """Who says so goes first: that is where its `here` is."""
    return f"{broken.blamed.address}: {broken.reason}"


def _caveat(end: Done) -> str:
    """Why a pair is not as good as it could be; empty when it is."""
    seedless = "" if end.decode is None else end.decode.seedless
    return f"seedless, {seedless}" if seedless else ""


def _timed_out(route: Route, seconds: float) -> Broken:
    reason = f"no answer to the canary in {seconds:g} s"
    return Broken(cause="failed", code="timeout", reason=reason, is_retryable=True, blamed=route.decode)
