"""The prompts a prefill node computes for decode nodes: their way out, from the Submit to the last write.

Carries out what the transfer machine asks, on the engine, the data plane and the desk, and feeds back what
comes of it. Must never know when a prompt is computed, nor a socket, a thread or a wall clock.
"""

from typing import assert_never

from engine.request import Request
from kv_transfer.actions import (
    CancelWrite,
    ClosePeer,
    Fail,
    HandoverDone,
    PrefillAction,
    Refuse,
    ReleasePages,
    Send,
    StopCompute,
    Write,
)
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import CancelTransfer, Handoff, Renew, Reserve, ToDecode, ToPrefill
from kv_transfer.peers import PeerTable
from kv_transfer.prefill_side import PrefillTransfers
from kv_transfer.transport import Completed, PeerGone, WriteDone, WriteFailed
from prefill_node.handoff import tensors_of
from speculative.loop import EngineLoop
from speculative.progress import Progress
from wire.arrivals import Arrival
from wire.core_counts import CoreCounts, faults_of
from wire.desk import Desk, PeerLost, PeerReady
from wire.intake import INVALID, tid_of
from wire.reports import Account, Reports, undrawn_code


class OutgoingPrompts:
    """Invariant: every tid the transfer machine holds has an account and a request in the engine."""

    def __init__(
        self,
        *,
        engine: EngineLoop,
        transfers: PrefillTransfers,
        peers: PeerTable,
        desk: Desk,
        reports: Reports,
        counts: CoreCounts,
    ) -> None:
        self._engine = engine
        self._transfers = transfers
        self._peers = peers
        self._desk = desk
        self._reports = reports
        self._counts = counts

    @property
    def is_writing(self) -> bool:
        return self._transfers.is_writing

    # the router

    def take_on(self, arrival: Arrival, *, now: float) -> None:
        """Start computing, or refuse where nobody is to decode it or the id was used before."""
        submit, request = arrival.submit, arrival.request
        if submit.peer is None:
            reason = "peer must be set: a prefill node does not decode"
            return self._desk.refuse(arrival, INVALID, reason)
        peer, deadline = submit.peer.incarnation, arrival.received + submit.deadline_s
        actions = self._transfers.submit(
            submit.tid, peer=peer, num_prompt_tokens=len(submit.prompt_ids), deadline=deadline, now=now
        )
        for action in actions:
            if isinstance(action, Refuse):
                return self._desk.refuse(arrival, action.code, action.reason, retryable=action.retryable)
        self._reports.open(Account(request=request, submitted=arrival.received, deadline=deadline, peer=peer))
        self._desk.accept(arrival, queued_behind=self._engine.scheduler.num_waiting)
        self._engine.add(request, hold=True)
        return self._do(actions)  # an early Reserve that does not fit ends it here and now

    def cancel(self, tid: TransferId, *, now: float) -> None:
        self._do(self._transfers.cancel(tid, now=now))

    # the peers

    def peer_ready(self, news: PeerReady) -> None:
        self._transfers.peer_ready(news.peer, has_checksums=news.has_checksums)

    def peer_lost(self, news: PeerLost) -> None:
        self._do(self._transfers.peer_lost(news.peer, reason=news.reason, code=news.code))

    def hear(self, peer: Incarnation, message: ToPrefill | ToDecode, *, now: float) -> None:
        match message:
            case Reserve():
                self._do(self._transfers.reserve(peer, message, now=now))
            case Renew():
                self._do(self._transfers.renew(peer, message, now=now))
            case CancelTransfer():
                self._do(self._transfers.cancel_transfer(peer, message, now=now))
            case _:
                self.peer_lost(self._desk.unexpected(peer, message))

    def poll(self, *, now: float) -> None:
        """Hear of writes that have ended."""
        for event in self._peers.poll():
            match event:
                case WriteDone(handle=handle):
                    self._do(self._transfers.write_done(handle, now=now))
                case WriteFailed(handle=handle, reason=reason):
                    self._do(self._transfers.write_failed(handle, reason=reason, now=now))
                case PeerGone(peer=peer, reason=reason):
                    self.peer_lost(self._desk.drop(peer, reason))

    def tick(self, *, now: float) -> None:
        self._do(self._transfers.tick(now))

    # the engine

    def admitted(self, request: Request, *, now: float) -> None:
        num_tokens = len(request.prompt_ids) - request.num_cached_tokens
        self._do(self._transfers.planned(tid_of(request), num_tokens=num_tokens, now=now))

    def chunk_computed(self, request: Request, *, now: float) -> None:
        """A page leaves once it is final."""
        self._computed(request, self._engine.cache.num_final(request), None, now)

    def computed(self, progress: Progress, *, now: float) -> None:
        """At the end of the prompt nothing of it is written here again, and its first token is known."""
        request = progress.request
        account = self._reports.account(tid_of(request))
        handoff = Handoff(
            first_token=progress.tokens[0],
            first_logprob=progress.logprobs[0] if progress.logprobs else None,
            num_tokens=request.num_committed,
            cached_tokens=request.num_cached_tokens,
            tensors=tensors_of(self._engine.seed(request)),
            queue_s=account.queue_s,
            compute_s=account.compute_s,
        )
        self._computed(request, request.num_committed, handoff, now)

    def finished_early(self, tid: TransferId, *, now: float) -> None:
        """The request ended with its first token, and that is reported."""
        self._do(self._transfers.finished_early(tid, now=now))

    def fail(self, progress: Progress, *, now: float) -> None:
        """No token could be drawn."""
        tid, code = tid_of(progress.request), undrawn_code(progress)
        self._do(self._transfers.fail(tid, code=code, reason=progress.error, now=now))

    # what is left to say

    @property
    def counters(self) -> dict[str, float]:
        return faults_of(self._transfers.faults)

    def _computed(self, request: Request, num_tokens: int, handoff: Handoff | None, now: float) -> None:
        self._do(
            self._transfers.computed(
                tid_of(request),
                num_tokens=num_tokens,
                pages=tuple(request.pages),
                event=Completed(),
                now=now,
                handoff=handoff,
            )
        )

    def _do(self, actions: list[PrefillAction]) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self._desk.send(peer, message)
                case Write(peer=peer, pages=pages):
                    handle = self._peers.transport(peer).write(peer, pages.tid, pages)
                    self._do(self._transfers.wrote(handle))
                case CancelWrite(handle=handle):
                    self._peers.cancel(handle)
                case StopCompute(tid=tid):
                    self._engine.hold(tid)
                case ReleasePages(tid=tid):
                    self._engine.release(tid)
                    self._reports.close(tid)
                case HandoverDone():
                    self._handed_over(action)
                case Fail() | Refuse():
                    self._reports.transfer_failed(action)
                case ClosePeer(peer=peer, reason=reason):
                    self.peer_lost(self._desk.drop(peer, reason))
                case _:
                    assert_never(action)

    def _handed_over(self, action: HandoverDone) -> None:
        self._counts.count("handed_over")
        peer = self._reports.account(action.tid).peer
        assert peer is not None, "a prefill node takes on nothing without a peer"
        self._reports.transferred(
            action.tid,
            transport=self._peers.transport_name(peer),
            num_bytes=action.num_pages * self._peers.copy_bytes(peer),
            seconds=action.transfer_s,
        )
        self._reports.finished(action.tid, "handed_over", num_steps=1)
