"""The prefill node's core: computes prompts in chunks and writes finished pages while it computes on.

Sans I/O: the host (or the simulation) hands events in, calls `step` and sends the outputs. Owns the
joint life of a request in the engine loop and the transfer machine. Must never know a socket, a thread
or a wall clock.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from engine.grammar import Grammars
from engine.request import Request
from kv_transfer import errors
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
from kv_transfer.messages import (
    CancelTransfer,
    Handoff,
    Hello,
    Refused,
    Renew,
    Reserve,
    ToDecode,
    ToPrefill,
)
from kv_transfer.peers import PeerTable
from kv_transfer.prefill_side import PrefillTransfers
from kv_transfer.transport import Completed, PeerGone, WriteDone, WriteFailed
from prefill_node.handoff import tensors_of
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
from wire.intake import INVALID, PAIR_REFUSED, Intake, tid_of
from wire.link_table import LinkTable
from wire.records import Load
from wire.tally import Tallies
from wire.transfer_counts import TransferCounts, faults_of
from wire.work import Accepted, Cancel, Failed, Finished, PromptInfo, PromptLogprobs, Submit, Tokens

_POLL_S = 0.0005
_IDLE_S = 0.1


@dataclass(slots=True, kw_only=True)
class _Account:
    """What the router and the decode node are told about one request's prefill."""

    request: Request
    peer: Incarnation
    submitted: float
    started: float = 0.0
    finished: float = 0.0


class PrefillLoop:
    """Invariant: every tid the transfer machine holds has an account and a request in the engine."""

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
        self._engine = engine
        self._transfers = transfers
        self._peers = peers
        self._links = LinkTable()
        self._arrivals = Arrivals(intake=intake, links=self._links, grammars=grammars)
        self._accounts: dict[TransferId, _Account] = {}
        self._outputs: list[Output] = []
        self._counters: Counter[str] = Counter()
        self._steps = 0
        self._times = Tallies("queue_s", "prefill_s")
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
            num_waiting=self._engine.scheduler.num_waiting,
            is_live=submit.tid in self._accounts,
            is_draining=self._is_draining,
            now=self._now,
        )
        if arrival is not None:
            self._take_on(arrival)

    def _take_on(self, arrival: Arrival) -> None:
        """Start computing, or refuse when the pair does not fit or the id was used before."""
        submit, request = arrival.submit, arrival.request
        if submit.peer is None:
            reason = "peer must be set: a prefill node does not decode"
            return self._arrivals.refuse(arrival, INVALID, reason)
        peer = submit.peer.incarnation
        if (why := self._peers.refusal(peer)) is not None:
            reason = f"refused at handshake: {why}"
            return self._arrivals.refuse(arrival, PAIR_REFUSED, reason, retryable=True)
        actions = self._transfers.submit(
            submit.tid,
            peer=peer,
            num_prompt_tokens=len(submit.prompt_ids),
            deadline=arrival.received + submit.deadline_s,
            now=self._now,
        )
        for action in actions:
            if isinstance(action, Refuse):
                return self._arrivals.refuse(arrival, action.code, action.reason, retryable=action.retryable)
        self._accounts[submit.tid] = _Account(request=request, peer=peer, submitted=arrival.received)
        self._links.own(arrival.link, submit.tid)
        self._links.emit(Accepted(tid=submit.tid, queued_behind=self._engine.scheduler.num_waiting))
        self._engine.add(request, hold=True)
        self._do(actions)  # an early Reserve that does not fit ends it here and now
        return None

    def _cancel(self, tid: TransferId) -> None:
        """The router wants no more; nothing is said back."""
        self._links.forget(tid)
        self._counters["cancelled"] += self._arrivals.drop(tid)
        if tid in self._accounts:
            self._counters["cancelled"] += 1
            self._do(self._transfers.cancel(tid, now=self._now))

    # peers

    def _meet(self, hello: Hello) -> None:
        outcome = self._peers.accept(hello)
        reply = outcome if isinstance(outcome, Refused) else self._peers.reply(hello.incarnation)
        if isinstance(reply, Refused):
            self._counters["peers_refused"] += 1
            self._outputs.append(PeerRefused(peer=hello.incarnation, refused=reply))
            self._do(
                self._transfers.peer_lost(
                    hello.incarnation,
                    reason=f"refused at handshake: {reply}",
                    code=errors.PEER_LOST if reply.is_transient else errors.INCOMPATIBLE,
                )
            )
            return
        assert not isinstance(outcome, Refused)
        self._counters["degraded/transport_fallback"] += self._peers.is_fallback(outcome)
        self._transfers.peer_ready(hello.incarnation, has_checksums=outcome.has_checksums)
        note = self._peers.fresh_note(hello.incarnation)
        self._outputs.append(PeerAccepted(peer=hello.incarnation, reply=reply, note=note))

    def _hear(self, peer: Incarnation, message: ToPrefill | ToDecode) -> None:
        if self._peers.agreement(peer) is None:
            return  # dropped by us; what it said before it knows is of no use, and its close is on the way
        match message:
            case Reserve():
                self._do(self._transfers.reserve(peer, message, now=self._now))
            case Renew():
                self._do(self._transfers.renew(peer, message, now=self._now))
            case CancelTransfer():
                self._do(self._transfers.cancel_transfer(peer, message, now=self._now))
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
        """Only the end of a write or of a compilation comes without an event of the host's."""
        is_near = self._transfers.is_writing or self._arrivals.num_held or self._engine.is_masking
        return _POLL_S if is_near else _IDLE_S

    def step(self, now: float) -> bool:
        self._now = now
        self._poll()
        for arrival in self._arrivals.take(now=now):
            self._take_on(arrival)
        self._do(self._transfers.tick(now))
        result = self._engine.step()
        for request in result.admitted:
            self._admitted(request)
        self._now = self._after_step(now)
        for progress in result.progress:
            self._advance(progress)
        self._poll()
        self._steps += bool(result.progress)
        if (changes := self._engine.cache.take_changes()) is not None:
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
            match event:
                case WriteDone(handle=handle):
                    self._do(self._transfers.write_done(handle, now=self._now))
                case WriteFailed(handle=handle, reason=reason):
                    self._do(self._transfers.write_failed(handle, reason=reason, now=self._now))
                case PeerGone(peer=peer, reason=reason):
                    self._drop(peer, reason)

    def _admitted(self, request: Request) -> None:
        tid = tid_of(request)
        self._accounts[tid].started = self._now
        self._links.emit(PromptInfo(tid=tid, cached_tokens=request.num_cached_tokens))
        self._counters["prefix_query_tokens"] += len(request.prompt_ids)
        self._counters["prefix_hit_tokens"] += request.num_cached_tokens
        num_tokens = len(request.prompt_ids) - request.num_cached_tokens
        self._do(self._transfers.planned(tid, num_tokens=num_tokens, now=self._now))

    def _advance(self, progress: Progress) -> None:
        request, tid = progress.request, tid_of(progress.request)
        if progress.error:
            self._do(self._transfers.fail(tid, code=errors.BAD_LOGITS, reason=progress.error, now=self._now))
            return
        if progress.prompt_logprobs:
            self._links.emit(
                PromptLogprobs(tid=tid, first_index=progress.first_scored, logprobs=progress.prompt_logprobs)
            )
        if not progress.tokens:
            self._do(self._computed(request, None))
            return
        account = self._accounts[tid]
        account.finished = self._now
        self._times.observe("queue_s", account.started - account.submitted)
        self._times.observe("prefill_s", account.finished - account.started)
        self._links.emit(
            Tokens(
                tid=tid,
                first_index=request.num_outputs - 1,
                ids=progress.tokens,
                logprobs=progress.logprobs,
            )
        )
        if progress.finish_reason is None:
            self._do(self._computed(request, self._handoff(progress, account)))
            return
        self._links.emit(
            self._finished(account, reason=progress.finish_reason, stop_token_id=progress.stop_token_id)
        )
        self._do(self._transfers.finished_early(tid, now=self._now))

    def _computed(self, request: Request, handoff: Handoff | None) -> list[PrefillAction]:
        """A page leaves once it is final; at the end of the prompt nothing of it is written here again."""
        return self._transfers.computed(
            tid_of(request),
            num_tokens=self._engine.cache.num_final(request) if handoff is None else request.num_committed,
            pages=tuple(request.pages),
            event=Completed(),
            now=self._now,
            handoff=handoff,
        )

    def _handoff(self, progress: Progress, account: _Account) -> Handoff:
        request = progress.request
        return Handoff(
            first_token=progress.tokens[0],
            first_logprob=progress.logprobs[0] if progress.logprobs else None,
            num_tokens=request.num_committed,
            cached_tokens=request.num_cached_tokens,
            tensors=tensors_of(self._engine.seed(request)),
            queue_s=account.started - account.submitted,
            compute_s=account.finished - account.started,
        )

    def _do(self, actions: list[PrefillAction]) -> None:
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self._outputs.append(ToPeer(peer=peer, message=message))
                case Write(peer=peer, pages=pages):
                    handle = self._peers.transport(peer).write(peer, pages.tid, pages)
                    self._do(self._transfers.wrote(handle))
                case CancelWrite(handle=handle):
                    self._peers.cancel(handle)
                case StopCompute(tid=tid):
                    self._engine.hold(tid)
                case ReleasePages(tid=tid):
                    self._engine.release(tid)
                    self._accounts.pop(tid, None)
                case HandoverDone():
                    self._handed_over(action)
                case Fail(tid=tid) | Refuse(tid=tid):
                    self._fail(action)
                case ClosePeer(peer=peer, reason=reason):
                    self._drop(peer, reason)

    def _handed_over(self, action: HandoverDone) -> None:
        self._counters["handed_over"] += 1
        account = self._accounts[action.tid]
        kv_bytes = action.num_pages * self._peers.copy_bytes(account.peer)
        transport = self._peers.transport_name(account.peer)
        self._transferred.done(transport, num_bytes=kv_bytes, seconds=action.transfer_s)
        self._links.emit(
            self._finished(
                account,
                reason="handed_over",
                kv_bytes=kv_bytes,
                transport=transport,
                transfer_s=action.transfer_s,
            )
        )

    def _finished(
        self,
        account: _Account,
        *,
        reason: str,
        stop_token_id: int | None = None,
        kv_bytes: int = 0,
        transport: str = "",
        transfer_s: float = 0.0,
    ) -> Finished:
        self._counters[f"finished/{reason}"] += 1
        return Finished(
            tid=tid_of(account.request),
            reason=reason,
            stop_token_id=stop_token_id,
            kv_bytes=kv_bytes,
            transport=transport,
            transfer_s=transfer_s,
            queue_s=account.started - account.submitted,
            compute_s=account.finished - account.started,
            num_steps=1,
        )

    def _fail(self, action: Fail | Refuse) -> None:
        self._counters[f"failed/{action.code}"] += 1
        account = self._accounts.get(action.tid)
        transport = "" if account is None else self._peers.transport_name(account.peer)
        self._transferred.failed(transport, action.code)
        self._links.emit(
            Failed(tid=action.tid, code=action.code, retryable=action.retryable, reason=action.reason)
        )

    def problems(self) -> list[str]:
        return self._engine.cache.problems(self._engine.requests())

    def status(self) -> NodeStatus:
        cache, scheduler = self._engine.cache, self._engine.scheduler
        is_idle = not self._accounts and not self._arrivals.num_held
        return NodeStatus(
            step=self._steps,
            load=Load(
                free_pages=cache.num_available,
                total_pages=cache.num_pages,
                running=scheduler.num_running,
                waiting=scheduler.num_waiting + self._arrivals.num_held,
                queued_tokens=scheduler.queued_tokens,
            ),
            quarantined_pages=cache.num_quarantined,
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
