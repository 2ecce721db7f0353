"""The decode node's core: leases pages, waits for KV to land, runs rounds, reports tokens.

Sans I/O: the host (or the simulation) hands events in, calls `step` and sends the outputs. Owns the
joint life of a request in the transfer machine, the cache and the engine loop. Must never know a
socket, a thread or a wall clock.
"""

from collections import Counter
from collections.abc import Callable

from decode_node.account import Account
from decode_node.handoff import draft_start_of, seed_of
from engine.grammar import Grammars
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
from kv_transfer.messages import (
    Drained,
    Final,
    Heartbeat,
    Hello,
    Planned,
    Refused,
    ToDecode,
    ToPrefill,
    TransferFailed,
)
from kv_transfer.peers import PeerTable
from kv_transfer.transport import Landed, PeerGone
from speculative.loop import EngineLoop
from speculative.progress import Progress
from wire.arrivals import Arrival, Arrivals
from wire.host_events import (
    Drain,
    DropPeer,
    HostEvent,
    Link,
    LinkClosed,
    LinkMessage,
    LinkOpened,
    NodeStatus,
    Output,
    PagesChanged,
    PeerAccepted,
    PeerClosed,
    PeerHello,
    PeerMessage,
    PeerRefused,
    ToPeer,
)
from wire.intake import PAIR_REFUSED, Intake, rejected, tid_of
from wire.link_table import LinkTable
from wire.records import Load
from wire.tally import Tallies
from wire.transfer_counts import TransferCounts, faults_of
from wire.work import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    Preempted,
    PromptInfo,
    PromptLogprobs,
    Rejected,
    Submit,
    Tokens,
)

_POLL_S = 0.002  # polling takes cores that the prefill node beside us may be computing with
_IDLE_S = 0.1


class DecodeLoop:
    """Invariant: every live tid has an account; its pages are a lease, quarantined, or the engine's."""

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
        self._engine = engine
        self._cache = engine.cache
        self._transfers = transfers
        self._peers = peers
        self._links = LinkTable()
        self._arrivals = Arrivals(intake=intake, links=self._links, grammars=grammars)
        self._accounts: dict[TransferId, Account] = {}
        self._incoming: dict[TransferId, Request] = {}
        self._outputs: list[Output] = []
        self._counters: Counter[str] = Counter()
        self._steps = 0
        self._times = Tallies("queue_s", "decode_s")
        self._transferred = TransferCounts(self._counters, self._times)
        self._is_draining = False
        self._now = 0.0
        self._clock = clock

    def hello(self) -> Hello:
        return self._peers.hello()

    # events

    def handle(self, event: HostEvent, now: float) -> None:
        self._now = now
        match event:
            case LinkOpened(link=link):
                self._links.open(link)
            case LinkMessage(link=link, message=Submit() as submit):
                self._submit(link, submit)
            case LinkMessage(message=Cancel(tid=tid)):
                self._cancel(tid)
            case LinkClosed(link=link):
                for tid in self._links.close(link):
                    self._cancel(tid)
            case PeerHello(hello=hello):
                self._meet(hello)
            case PeerMessage(peer=peer, message=message):
                self._hear(peer, message)
            case PeerClosed(peer=peer):
                self._lose(peer, "its session closed")
            case Drain():
                self._is_draining = True

    def _submit(self, link: Link, submit: Submit) -> None:
        arrival = self._arrivals.submit(
            link,
            submit,
            num_waiting=self._engine.scheduler.num_waiting + len(self._incoming),
            is_live=submit.tid in self._accounts,
            is_draining=self._is_draining,
            now=self._now,
        )
        if arrival is not None:
            self._take_on(arrival)

    def _take_on(self, arrival: Arrival) -> None:
        submit, request = arrival.submit, arrival.request
        peer = None if submit.peer is None else submit.peer.incarnation
        if peer is not None and (why := self._peers.refusal(peer)) is not None:
            reason = f"refused at handshake: {why}"
            return self._arrivals.refuse(arrival, PAIR_REFUSED, reason, retryable=True)
        deadline = arrival.received + submit.deadline_s
        self._accounts[submit.tid] = Account(
            request=request, submitted=arrival.received, deadline=deadline, peer=peer
        )
        self._links.own(arrival.link, submit.tid)
        self._links.emit(Accepted(tid=submit.tid, queued_behind=self._engine.scheduler.num_waiting))
        if peer is None:
            self._engine.add(request)
            self._counters["local_prefills"] += 1
            return None
        self._incoming[submit.tid] = request
        num_tokens = len(request.prompt_ids)
        return self._do(
            self._transfers.submit(
                submit.tid, peer=peer, num_prompt_tokens=num_tokens, deadline=deadline, now=self._now
            )
        )

    def _cancel(self, tid: TransferId) -> None:
        """The router wants no more; nothing is said back."""
        self._links.forget(tid)
        self._counters["cancelled"] += self._arrivals.drop(tid)
        if self._accounts.pop(tid, None) is None:
            return
        self._counters["cancelled"] += 1
        if tid in self._incoming:
            self._do(self._transfers.cancel(tid, now=self._now))
        else:
            self._engine.release(tid)

    # peers

    def _meet(self, hello: Hello) -> None:
        outcome = self._peers.accept(hello)
        if isinstance(outcome, Refused):
            self._counters["peers_refused"] += 1
            self._outputs.append(PeerRefused(peer=hello.incarnation, refused=outcome))
            self._do(
                self._transfers.peer_lost(
                    hello.incarnation,
                    reason=f"refused at handshake: {outcome}",
                    code=errors.PEER_LOST if outcome.is_transient else errors.INCOMPATIBLE,
                )
            )
            return
        self._counters["degraded/transport_fallback"] += self._peers.is_fallback(outcome)
        self._transfers.peer_ready(hello.incarnation, has_checksums=outcome.has_checksums)
        note = self._peers.fresh_note(hello.incarnation)
        self._outputs.append(PeerAccepted(peer=hello.incarnation, reply=None, note=note))

    def _hear(self, peer: Incarnation, message: ToPrefill | ToDecode) -> None:
        now = self._now
        if self._peers.agreement(peer) is None:
            return  # dropped by us; what it said before it knows is of no use, and its close is on the way
        match message:
            case Planned():
                self._do(self._transfers.planned(peer, message, now=now))
            case Final():
                self._do(self._transfers.final(peer, message, now=now))
            case TransferFailed():
                self._do(self._transfers.failed(peer, message, now=now))
            case Drained(tid=tid):
                self._do(self._transfers.drained(peer, tid, now=now))
            case Heartbeat():
                pass
            case _:
                self._transferred.unexpected()
                self._drop(peer, f"unexpected {type(message).__name__}")

    def _lose(self, peer: Incarnation, reason: str) -> None:
        self._peers.drop(peer)
        self._do(self._transfers.peer_lost(peer, reason=reason))

    def _drop(self, peer: Incarnation, reason: str) -> None:
        self._counters["peers_dropped"] += 1
        self._outputs.append(DropPeer(peer=peer, reason=reason))
        self._lose(peer, reason)

    # work

    @property
    def idle_wait_s(self) -> float:
        """Only what lands on a lease and what is compiled come without an event of the host's."""
        is_near = self._arrivals.num_held or self._engine.is_masking
        return _POLL_S if is_near or any(map(self._cache.has_lease, self._incoming)) else _IDLE_S

    def step(self, now: float) -> bool:
        self._now = now
        self._poll()
        for arrival in self._arrivals.take(now=now):
            self._take_on(arrival)
        self._do(self._transfers.tick(now))
        self._grant()
        self._expire()
        result = self._engine.step()
        for request in result.admitted:
            self._accounts[tid_of(request)].started = now
            self._count_prefix(request)
            self._links.emit(PromptInfo(tid=tid_of(request), cached_tokens=request.num_cached_tokens))
        for request in result.preempted:
            self._end(Preempted(tid=tid_of(request), next_index=request.num_outputs))
        self._now = self._after_step(now)
        for progress in result.progress:
            self._report(progress)
        self._steps += bool(result.progress)
        if (changes := self._cache.take_changes()) is not None:
            self._outputs.append(PagesChanged(changes=changes))
        return bool(result.progress)

    def _after_step(self, before: float) -> float:
        """What a step took belongs to the requests it served, where there is a clock to tell."""
        return before if self._clock is None else self._clock()

    def take_outputs(self) -> list[Output]:
        outputs, self._outputs = [*self._outputs, *self._links.take()], []
        return outputs

    def _poll(self) -> None:
        for event in self._peers.poll():
            if isinstance(event, Landed):
                self._do(
                    self._transfers.landed(
                        event.peer, event.tid, start=event.start, stop=event.stop, now=self._now
                    )
                )
            elif isinstance(event, PeerGone):
                self._drop(event.peer, event.reason)

    def _grant(self) -> None:
        """Lease pages to waiting transfers, the most urgent first, while what runs can go on growing."""
        waiting = sorted(self._transfers.grantable(), key=lambda tid: self._incoming[tid].priority)
        leased = [request for tid, request in self._incoming.items() if self._cache.has_lease(tid)]
        for tid in waiting:
            request = self._incoming[tid]
            self._agree(self._accounts[tid])
            self._cache.attach_prefix(request)
            missing = self._cache.pages_for(len(request.prompt_ids)) - len(request.pages)
            if not self._engine.scheduler.has_room(request, missing, others=leased):
                self._cache.release(request)
                return
            pages = self._cache.lease(tid, missing)
            leased.append(request)
            self._count_prefix(request)
            self._do(
                self._transfers.granted(
                    tid, page_ids=pages, skip_tokens=request.num_cached_tokens, now=self._now
                )
            )

    def _count_prefix(self, request: Request) -> None:
        self._counters["prefix_query_tokens"] += len(request.prompt_ids)
        self._counters["prefix_hit_tokens"] += request.num_cached_tokens

    def _agree(self, account: Account) -> None:
        """Before its pages are looked up: will our draft's KV come with the prompt's?"""
        assert account.peer is not None, "only a prompt from elsewhere waits for a grant"
        account.terms = self._peers.agreement(account.peer)
        if account.seedless:
            num_tokens = len(account.request.prompt_ids)
            account.request.draft_start = draft_start_of(num_tokens, page_size=self._cache.page_size)

    def _expire(self) -> None:
        for tid, account in list(self._accounts.items()):
            if account.deadline <= self._now and tid not in self._incoming:
                self._engine.release(tid)
                self._end(Failed(tid=tid, code=errors.DEADLINE, retryable=False, reason="out of time"))

    def _do(self, actions: list[DecodeAction]) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self._outputs.append(ToPeer(peer=peer, message=message))
                case Join():
                    self._join(action)
                case Fail(tid=tid):
                    self._count_failure(action)
                    self._end(
                        Failed(tid=tid, code=action.code, retryable=action.retryable, reason=action.reason)
                    )
                    self._unlease(tid)
                case Refuse(tid=tid):
                    self._end(rejected(action))
                    self._unlease(tid)
                case HandedOver(tid=tid):
                    self._end(Finished(tid=tid, reason="handed_over"))
                    self._unlease(tid)
                case ReleasePages(tid=tid):
                    self._cache.release_lease(tid)
                    self._unlease(tid)
                case QuarantinePages(tid=tid):
                    self._counters["quarantined"] += 1
                    self._cache.quarantine(tid)
                case ReleaseQuarantine(tid=tid):
                    self._cache.release_quarantine(tid)
                case ClosePeer(peer=peer, reason=reason):
                    self._drop(peer, reason)

    def _count_failure(self, action: Fail) -> None:
        account = self._accounts.get(action.tid)
        transport = (
            "" if account is None or account.peer is None else self._peers.transport_name(account.peer)
        )
        self._transferred.failed(transport, action.code)

    def _unlease(self, tid: TransferId) -> None:
        """The transfer will not join: let go of the cached prefix it stood on."""
        request = self._incoming.pop(tid, None)
        if request is not None:
            self._cache.release(request)

    def _join(self, action: Join) -> None:
        request = self._incoming.pop(action.tid)
        account = self._accounts[action.tid]
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
            self._counters["bad_handoffs"] += 1
            self._end(Failed(tid=action.tid, code=errors.PROTOCOL, retryable=True, reason=str(error)))
            return
        self._counters["seedless_joins"] += seed is None
        account.started = self._now
        account.transfer_s = action.transfer_s
        account.kv_bytes = len(action.page_ids) * terms.copy_bytes
        account.transport = terms.transport
        self._counters["joined"] += 1
        self._transferred.done(account.transport, num_bytes=account.kv_bytes, seconds=action.transfer_s)

    # reports

    def _report(self, progress: Progress) -> None:
        request = progress.request
        tid = tid_of(request)
        if progress.error:
            self._end(Failed(tid=tid, code=errors.BAD_LOGITS, retryable=False, reason=progress.error))
            return
        if progress.prompt_logprobs:
            self._links.emit(
                PromptLogprobs(tid=tid, first_index=progress.first_scored, logprobs=progress.prompt_logprobs)
            )
        if progress.tokens:
            self._links.emit(
                Tokens(
                    tid=tid,
                    first_index=request.num_outputs - len(progress.tokens),
                    ids=progress.tokens,
                    logprobs=progress.logprobs,
                    drafted=progress.num_drafted,
                    accepted=progress.num_accepted,
                )
            )
        if progress.finish_reason is not None:
            self._end(self._finished(progress, self._accounts[tid]))

    def _finished(self, progress: Progress, account: Account) -> Finished:
        assert progress.finish_reason is not None
        return Finished(
            tid=tid_of(progress.request),
            reason=progress.finish_reason,
            stop_token_id=progress.stop_token_id,
            kv_bytes=account.kv_bytes,
            transport=account.transport,
            queue_s=account.started - account.submitted,
            compute_s=self._now - account.started,
            transfer_s=account.transfer_s,
            num_steps=progress.request.num_steps,
            seedless=account.seedless,
        )

    def _end(self, event: Failed | Finished | Preempted | Rejected) -> None:
        account = self._accounts.pop(event.tid, None)
        if isinstance(event, Failed):
            self._counters[f"failed/{event.code}"] += 1
        elif isinstance(event, Finished):
            self._counters[f"finished/{event.reason}"] += 1
            if account is not None and event.reason != "handed_over":
                self._times.observe("queue_s", account.started - account.submitted)
                self._times.observe("decode_s", self._now - account.started)
        self._links.emit(event)

    def problems(self) -> list[str]:
        return self._cache.problems([*self._engine.requests(), *self._incoming.values()])

    def status(self) -> NodeStatus:
        scheduler = self._engine.scheduler
        is_idle = not self._accounts and not self._arrivals.num_held and self._transfers.next_deadline is None
        return NodeStatus(
            step=self._steps,
            load=Load(
                free_pages=self._cache.num_available,
                total_pages=self._cache.num_pages,
                running=scheduler.num_running,
                waiting=scheduler.num_waiting + len(self._incoming) + self._arrivals.num_held,
                queued_tokens=scheduler.queued_tokens,
            ),
            quarantined_pages=self._cache.num_quarantined,
            is_draining=self._is_draining,
            is_idle=is_idle,
            integrity="; ".join(self.problems()) if is_idle else "",
            counters={
                **self._engine.counters.as_dict(),
                **self._counters,
                "rejected": self._arrivals.num_rejected,
                **faults_of(self._transfers.faults),
            },
            peers=self._peers.states(),
            distributions=self._times.read(),
        )
