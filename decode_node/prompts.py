"""The prompts that prefill nodes compute for a decode node: from the wait for pages until they run here.

Owns the requests on that way, and carries out what the transfer machine asks, on the cache, the engine and
the desk. Must never know how rounds are run, nor a socket, a thread or a wall clock.
"""

from collections.abc import Iterable
from typing import assert_never

from decode_node.handoff import draft_start_of, seed_of
from engine.request import Request
from kv_transfer import errors
from kv_transfer.actions import (
    ClosePeer,
    DecodeAction,
    Fail,
    HandedOver,
    Join,
    QuarantinePages,
    Refuse,
    ReleasePages,
    ReleaseQuarantine,
    Send,
)
from kv_transfer.decode_side import DecodeTransfers
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Drained, Final, Heartbeat, Planned, ToDecode, ToPrefill, TransferFailed
from kv_transfer.peers import PeerTable
from kv_transfer.transport import Landed, PeerGone
from speculative.loop import EngineLoop
from wire.core_counts import CoreCounts, faults_of
from wire.desk import Desk, PeerLost, PeerReady
from wire.intake import rejected, tid_of
from wire.reports import Account, Reports
from wire.work import Failed, Finished


class IncomingPrompts:
    """Invariant: a request is here from `submit` until it joins the engine or its account is closed."""

    def __init__(
        self,
        *,
        engine: EngineLoop,
        transfers: DecodeTransfers,
        peers: PeerTable,
        desk: Desk,
        reports: Reports,
        counts: CoreCounts,
    ) -> None:
        self._engine = engine
        self._cache = engine.cache
        self._transfers = transfers
        self._peers = peers
        self._desk = desk
        self._reports = reports
        self._counts = counts
        self._requests: dict[TransferId, Request] = {}

    def __contains__(self, tid: object) -> bool:
        return tid in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    def requests(self) -> Iterable[Request]:
        return self._requests.values()

    @property
    def is_receiving(self) -> bool:
        """May pages land at any moment?"""
        return any(map(self._cache.has_lease, self._requests))

    @property
    def is_idle(self) -> bool:
        """Does nothing wait here, and no peer owe us its word on pages?"""
        return self._transfers.next_deadline is None

    @property
    def counters(self) -> dict[str, float]:
        return faults_of(self._transfers.faults)

    # the router

    def submit(self, account: Account, *, now: float) -> None:
        request, peer = account.request, account.peer
        assert peer is not None, "only a prompt from elsewhere comes in"
        self._requests[tid_of(request)] = request
        actions = self._transfers.submit(
            tid_of(request),
            peer=peer,
            num_prompt_tokens=len(request.prompt_ids),
            deadline=account.deadline,
            now=now,
        )
        self._do(actions, now)

    def cancel(self, tid: TransferId, *, now: float) -> None:
        self._do(self._transfers.cancel(tid, now=now), now)

    # the peers

    def peer_ready(self, news: PeerReady) -> None:
        self._transfers.peer_ready(news.peer, has_checksums=news.has_checksums)

    def peer_lost(self, news: PeerLost, *, now: float) -> None:
        self._do(self._transfers.peer_lost(news.peer, reason=news.reason, code=news.code), now)

    def hear(self, peer: Incarnation, message: ToPrefill | ToDecode, *, now: float) -> None:
        match message:
            case Planned():
                self._do(self._transfers.planned(peer, message), now)
            case Final():
                self._do(self._transfers.final(peer, message, now=now), now)
            case TransferFailed():
                self._do(self._transfers.failed(peer, message, now=now), now)
            case Drained(tid=tid):
                self._do(self._transfers.drained(peer, tid, now=now), now)
            case Heartbeat():
                self._transfers.peer_works(peer, now=now)
            case _:
                self.peer_lost(self._desk.unexpected(peer, message), now=now)

    def poll(self, *, now: float) -> None:
        """Hear of pages that have landed."""
        for event in self._peers.poll():
            if isinstance(event, Landed):
                actions = self._transfers.landed(
                    event.peer, event.tid, start=event.start, stop=event.stop, now=now
                )
                self._do(actions, now)
            elif isinstance(event, PeerGone):
                self.peer_lost(self._desk.drop(event.peer, event.reason), now=now)

    def tick(self, *, now: float) -> None:
        self._do(self._transfers.tick(now), now)

    # pages

    def grant(self, *, now: float) -> None:
        """Lease pages to waiting transfers, the most urgent first, while what runs can go on growing."""
        waiting = sorted(self._transfers.grantable(), key=lambda tid: self._requests[tid].priority)
        leased = [request for tid, request in self._requests.items() if self._cache.has_lease(tid)]
        for tid in waiting:
            request = self._requests[tid]
            self._agree(self._reports.account(tid))
            self._cache.attach_prefix(request)
            missing = self._cache.pages_for(len(request.prompt_ids)) - len(request.pages)
            if not self._engine.scheduler.has_room(request, missing, others=leased):
                self._cache.release(request)
                return
            pages = self._cache.lease(tid, missing)
            leased.append(request)
            self._counts.prefix_looked_up(request)
            actions = self._transfers.granted(
                tid, page_ids=pages, skip_tokens=request.num_cached_tokens, now=now
            )
            self._do(actions, now)

    def _agree(self, account: Account) -> None:
        """Before its pages are looked up: will our draft's KV come with the prompt's?"""
        assert account.peer is not None, "only a prompt from elsewhere waits for a grant"
        account.terms = self._peers.agreement(account.peer)
        if account.seedless:
            num_tokens = len(account.request.prompt_ids)
            account.request.draft_start = draft_start_of(num_tokens, page_size=self._cache.page_size)

    def _do(self, actions: list[DecodeAction], now: float) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self._desk.send(peer, message)
                case Join():
                    self._join(action, now)
                case Fail(tid=tid):
                    self._reports.transfer_failed(action)
                    self._leave(tid)
                case Refuse(tid=tid):
                    self._reports.end(rejected(action))
                    self._leave(tid)
                case HandedOver(tid=tid):
                    self._reports.end(Finished(tid=tid, reason="handed_over"))
                    self._leave(tid)
                case ReleasePages(tid=tid):
                    self._cache.release_lease(tid)
                    self._unlease(tid)
                case QuarantinePages(tid=tid):
                    self._counts.count("quarantined")
                    self._cache.quarantine(tid)
                case ReleaseQuarantine(tid=tid):
                    self._cache.release_quarantine(tid)
                case ClosePeer(peer=peer, reason=reason):
                    self.peer_lost(self._desk.drop(peer, reason), now=now)
                case _:
                    assert_never(action)

    def _leave(self, tid: TransferId) -> None:
        """The transfer will not join, and its router knows."""
        self._reports.close(tid)
        self._unlease(tid)

    def _unlease(self, tid: TransferId) -> None:
        """Let go of the cached prefix it stood on."""
        request = self._requests.pop(tid, None)
        if request is not None:
            self._cache.release(request)

    def _join(self, action: Join, now: float) -> None:
        request = self._requests.pop(action.tid)
        account = self._reports.account(action.tid)
        terms = account.terms
        assert terms is not None, "pages are granted on terms"
        self._cache.lease_to_request(action.tid, request)
        request.num_committed = len(request.prompt_ids)
        if terms.is_seedless:  # the end of the prompt is computed here once more, for the draft to see it
            request.num_committed = max(request.draft_start, request.num_cached_tokens)
        try:
            seed = seed_of(action.handoff, terms, self._engine.proposer.needs.handoff)
            self._engine.join(request, first_token=action.handoff.first_token, seed=seed)
        except ValueError as error:
            self._cache.release(request)
            self._counts.count("bad_handoffs")
            self._reports.end(Failed(tid=action.tid, code=errors.PROTOCOL, retryable=True, reason=str(error)))
            self._reports.close(action.tid)
            return
        self._counts.count("seedless_joins", seed is None)
        self._counts.count("joined")
        account.started = now
        self._reports.transferred(
            action.tid,
            transport=terms.transport,
            num_bytes=len(action.page_ids) * terms.copy_bytes,
            seconds=action.transfer_s,
        )
