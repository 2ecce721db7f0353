"""The decode node's core: waits for KV to land, runs rounds, reports tokens.

Sans I/O: the host (or the simulation) hands events in, calls `step` and sends the outputs. Owns the order of
a step, and the requests that run. Must never know a transfer's state, a socket, a thread or a wall clock.
"""

from collections.abc import Callable

from decode_node.prompts import IncomingPrompts
from engine.grammar import Grammars
from kv_transfer import errors
from kv_transfer.decode_side import DecodeTransfers
from kv_transfer.ids import TransferId
from kv_transfer.messages import Hello
from kv_transfer.peers import PeerTable
from speculative.loop import EngineLoop
from speculative.progress import Progress
from wire.arrivals import Arrival
from wire.core_counts import CoreCounts
from wire.desk import Cancelled, Desk, PeerLost, PeerReady
from wire.host_events import HostEvent, NodeStatus, Output, PeerMessage
from wire.intake import Intake, tid_of
from wire.reports import Account, Reports, undrawn_code
from wire.work import Failed, Preempted

_POLL_S = 0.002  # polling takes cores that the prefill node beside us may be computing with
_IDLE_S = 0.1


class DecodeLoop:
    """A `NodeCore`. Invariant: every live tid has an account; its pages are a lease, quarantined, or the
    engine's."""

    def __init__(
        self,
        *,
        engine: EngineLoop,
        transfers: DecodeTransfers,
        peers: PeerTable,
        intake: Intake,
        grammars: Grammars | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """`clock` tells when a step is over; None: at the time it began."""
        self._counts = CoreCounts("queue_s", "decode_s")
        self._engine = engine
        self._cache = engine.cache
        self._peers = peers
        self._desk = Desk(peers=peers, intake=intake, grammars=grammars, counts=self._counts)
        self._reports = Reports(desk=self._desk, peers=peers, counts=self._counts, compute_time="decode_s")
        self._prompts = IncomingPrompts(
            engine=engine,
            transfers=transfers,
            peers=peers,
            desk=self._desk,
            reports=self._reports,
            counts=self._counts,
        )
        self._clock = clock

    def hello(self) -> Hello:
        return self._peers.hello()

    def handle(self, event: HostEvent, now: float) -> None:
        num_waiting = self._engine.scheduler.num_waiting + len(self._prompts)
        for news in self._desk.read(event, running=self._reports, num_waiting=num_waiting, now=now):
            match news:
                case Arrival():
                    self._take_on(news, now)
                case Cancelled(tid=tid):
                    self._cancel(tid, now)
                case PeerReady():
                    self._prompts.peer_ready(news)
                case PeerLost():
                    self._prompts.peer_lost(news, now=now)
                case PeerMessage(peer=peer, message=message):
                    self._prompts.hear(peer, message, now=now)

    def _take_on(self, arrival: Arrival, now: float) -> None:
        """Its prompt is computed by the peer it names, or here where it names none."""
        submit = arrival.submit
        account = Account(
            request=arrival.request,
            submitted=arrival.received,
            deadline=arrival.received + submit.deadline_s,
            peer=None if submit.peer is None else submit.peer.incarnation,
        )
        self._reports.open(account)
        self._desk.accept(arrival, queued_behind=self._engine.scheduler.num_waiting)
        if submit.peer is None:
            self._engine.add(arrival.request)
            self._counts.count("local_prefills")
        else:
            self._prompts.submit(account, now=now)

    def _cancel(self, tid: TransferId, now: float) -> None:
        self._reports.close(tid)
        if tid in self._prompts:
            self._prompts.cancel(tid, now=now)
        else:
            self._engine.release(tid)

    @property
    def idle_wait_s(self) -> float:
        """Only what lands on a lease and what is compiled come without an event of the host's."""
        is_near = self._desk.num_held or self._engine.is_masking or self._prompts.is_receiving
        return _POLL_S if is_near else _IDLE_S

    def step(self, now: float) -> bool:
        self._prompts.poll(now=now)
        for arrival in self._desk.compiled(now=now):
            self._take_on(arrival, now)
        self._prompts.tick(now=now)
        self._prompts.grant(now=now)
        self._expire(now)
        result = self._engine.step()
        for request in result.admitted:
            self._reports.started(request, now=now)
        for request in result.preempted:
            self._end(Preempted(tid=tid_of(request), next_index=request.num_outputs))
        if self._clock is not None:
            now = self._clock()  # what the step took belongs to the requests it served
        for progress in result.progress:
            self._report(progress, now)
        self._desk.stepped(has_progress=bool(result.progress), changes=self._cache.take_changes())
        return bool(result.progress)

    def _expire(self, now: float) -> None:
        """Requests that run; the others' deadlines are the transfer machine's."""
        for tid in self._reports:
            if self._reports.account(tid).deadline <= now and tid not in self._prompts:
                self._engine.release(tid)
                self._end(Failed(tid=tid, code=errors.DEADLINE, retryable=False, reason="out of time"))

    def _report(self, progress: Progress, now: float) -> None:
        request, tid = progress.request, tid_of(progress.request)
        if progress.error:
            code = undrawn_code(progress)
            self._end(Failed(tid=tid, code=code, retryable=False, reason=progress.error))
            return
        self._reports.advanced(progress)
        if progress.finish_reason is not None:
            self._reports.computed(tid, now=now)
            self._reports.finished(
                tid,
                progress.finish_reason,
                num_steps=request.num_steps,
                stop_token_id=progress.stop_token_id,
            )
            self._reports.close(tid)

    def _end(self, event: Failed | Preempted) -> None:
        self._reports.end(event)
        self._reports.close(event.tid)

    def take_outputs(self) -> list[Output]:
        return self._desk.take_outputs()

    def problems(self) -> list[str]:
        return self._cache.problems([*self._engine.requests(), *self._prompts.requests()])

    def status(self) -> NodeStatus:
        return self._desk.status(
            cache=self._cache,
            scheduler=self._engine.scheduler,
            num_incoming=len(self._prompts),
            is_idle=not self._reports and self._prompts.is_idle,
            problems=self.problems,
            counters={**self._engine.counters.as_dict(), **self._prompts.counters},
        )
