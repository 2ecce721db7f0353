"""The prefill node's core: computes prompts in chunks and writes finished pages while it computes on.

Sans I/O: the host (or the simulation) hands events in, calls `step` and sends the outputs. Owns the order of
a step. Must never know a transfer's state, a socket, a thread or a wall clock.
"""

from collections.abc import Callable

from engine.grammar import Grammars
from engine.request import Request
from kv_transfer.messages import Hello
from kv_transfer.peers import PeerTable
from kv_transfer.prefill_side import PrefillTransfers
from prefill_node.prompts import OutgoingPrompts
from speculative.loop import EngineLoop
from speculative.progress import Progress
from wire.arrivals import Arrival
from wire.core_counts import CoreCounts
from wire.desk import Cancelled, Desk, PeerLost, PeerReady
from wire.host_events import HostEvent, NodeStatus, Output, PeerMessage
from wire.intake import Intake, tid_of
from wire.reports import Reports

_POLL_S = 0.0005
_IDLE_S = 0.1


class PrefillLoop:
    """A `NodeCore`. Invariant: every request in the engine has an account."""

    def __init__(
        self,
        *,
        engine: EngineLoop,
        transfers: PrefillTransfers,
        peers: PeerTable,
        intake: Intake,
        grammars: Grammars | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` tells when a step is over; None: at the time it began."""
        counts = CoreCounts("queue_s", "prefill_s")
        self._engine = engine
        self._peers = peers
        self._desk = Desk(peers=peers, intake=intake, grammars=grammars, counts=counts)
        self._reports = Reports(desk=self._desk, peers=peers, counts=counts, compute_time="prefill_s")
        self._prompts = OutgoingPrompts(
            engine=engine,
            transfers=transfers,
            peers=peers,
            desk=self._desk,
            reports=self._reports,
            counts=counts,
        )
        self._clock = clock

    def hello(self) -> Hello:
        return self._peers.hello()

    def handle(self, event: HostEvent, now: float) -> None:
        num_waiting = self._engine.scheduler.num_waiting
        for news in self._desk.read(event, running=self._reports, num_waiting=num_waiting, now=now):
            match news:
                case Arrival():
                    self._prompts.take_on(news, now=now)
                case Cancelled(tid=tid):
                    self._prompts.cancel(tid, now=now)
                case PeerReady():
                    self._prompts.peer_ready(news)
                case PeerLost():
                    self._prompts.peer_lost(news)
                case PeerMessage(peer=peer, message=message):
                    self._prompts.hear(peer, message, now=now)

    @property
    def idle_wait_s(self) -> float:
        """Only the end of a write or of a compilation comes without an event of the host's."""
        is_near = self._prompts.is_writing or self._desk.num_held or self._engine.is_masking
        return _POLL_S if is_near else _IDLE_S

    def step(self, now: float) -> bool:
        self._prompts.poll(now=now)
        for arrival in self._desk.compiled(now=now):
            self._prompts.take_on(arrival, now=now)
        self._prompts.tick(now=now)
        result = self._engine.step()
        for request in result.admitted:
            self._admitted(request, now)
        if self._clock is not None:
            now = self._clock()  # what the step took belongs to the requests it served
        for progress in result.progress:
            self._advance(progress, now)
        self._prompts.poll(now=now)
        self._desk.stepped(has_progress=bool(result.progress), changes=self._engine.cache.take_changes())
        return bool(result.progress)

    def _admitted(self, request: Request, now: float) -> None:
        self._reports.started(request, now=now)
        self._prompts.admitted(request, now=now)

    def _advance(self, progress: Progress, now: float) -> None:
        tid = tid_of(progress.request)
        if progress.error:
            self._prompts.fail(progress, now=now)
            return
        self._reports.advanced(progress)
        if not progress.tokens:
            self._prompts.chunk_computed(progress.request, now=now)
            return
        self._reports.computed(tid, now=now)
        if progress.finish_reason is None:
            self._prompts.computed(progress, now=now)
            return
        self._reports.finished(tid, progress.finish_reason, num_steps=1, stop_token_id=progress.stop_token_id)
        self._prompts.finished_early(tid, now=now)

    def take_outputs(self) -> list[Output]:
        return self._desk.take_outputs()

    def problems(self) -> list[str]:
        return self._engine.cache.problems(self._engine.requests())

    def status(self) -> NodeStatus:
        return self._desk.status(
            cache=self._engine.cache,
            scheduler=self._engine.scheduler,
            is_idle=not self._reports,
            problems=self.problems,
            counters={**self._engine.counters.as_dict(), **self._prompts.counters},
        )
