"""The prefill node's end of every transfer: which computed pages leave, and when they stop being read.

A pure state machine: events in, actions out; `now` comes with the event. It must never know how pages
are computed or owned, what a transport does with a write, or the time. One row per tid.

| state | holds | leaves on | deadline |
|---|---|---|---|
| COMPUTING | request owns pages | last chunk → FLUSHING or WAIT_RESERVE | the request's |
| WAIT_RESERVE | request owns pages | Reserve → FLUSHING | reserve time → Fail, ReleasePages |
| FLUSHING | pages pinned by writes | all writes done → DONE, ReleasePages | no write done → CANCELLING |
| CANCELLING | pages pinned by writes | every write settled → Drained, ReleasePages | drain time → ClosePeer |

In COMPUTING each `computed` sends what is Ready and D has not got in one Write, so pages leave while later
chunks are computed; the partial last page goes with the last chunk. Final leaves with the last write
posted, since D waits for Final and for every range to land anyway; with checksums it leaves after the last
write is done, because only then are the bytes to sum known to be final. DONE waits for every write.

A Reserve may precede its Submit: it waits, bounded per peer, until its own deadline. Every tid that P
gives up gets TransferFailed and Drained, at once or when a late Reserve or CancelTransfer asks. Cancel,
CancelTransfer, `fail`, failed writes and loss of the peer are legal everywhere; any other event that a
state does not list (`_LISTED`) is counted in `faults` and ends the tid.

A settled write changes no page of D's any more (`kv_transfer.transport`), hence Drained; the exception,
failures that follow PeerGone, is kept by answering PeerGone with `close_peer` and `peer_lost` at once: the
tids are gone before such a failure is fed in. But a transport may still read our pages then: those of a lost
peer's open writes are released when the last of them settles. Feed what arrived before `tick`.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final as Constant

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
from kv_transfer.early import EarlyReserves
from kv_transfer.ended import EndedTransfers
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import (
    CancelTransfer,
    Drained,
    Handoff,
    Planned,
    Renew,
    Reserve,
    ToDecode,
    TransferFailed,
)
from kv_transfer.outgoing import OutgoingPages
from kv_transfer.transport import CompletionEvent, WriteHandle
from kv_transfer.unsettled import UnsettledWrites


class PrefillState(StrEnum):
    COMPUTING = "computing"
    WAIT_RESERVE = "wait_reserve"
    FLUSHING = "flushing"
    CANCELLING = "cancelling"


_EVERY: Constant = frozenset(PrefillState)
_RUNNING: Constant = frozenset({PrefillState.COMPUTING, PrefillState.CANCELLING})
_LISTED: Constant[Mapping[str, frozenset[PrefillState]]] = {
    "planned": _RUNNING,
    "computed": _RUNNING,
    "finished_early": _RUNNING,
    "reserve": frozenset({PrefillState.COMPUTING, PrefillState.WAIT_RESERVE}),
}
_TIMEOUT_CODES: Constant[Mapping[PrefillState, str]] = {
    PrefillState.COMPUTING: errors.DEADLINE,
    PrefillState.WAIT_RESERVE: errors.RESERVE_TIMEOUT,
    PrefillState.FLUSHING: errors.WRITE_TIMEOUT,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillTimeouts:
    reserve_s: float = 30.0  # prompt computed to Reserve
    write_s: float = 10.0  # write to write
    drain_s: float = 5.0  # CancelWrite to settled


@dataclass(slots=True, kw_only=True)
class _Transfer:
    tid: TransferId
    peer: Incarnation
    deadline: float
    expires: float
    pages: OutgoingPages
    state: PrefillState = PrefillState.COMPUTING
    handles: dict[WriteHandle, None] = field(default_factory=dict)  # writes not settled
    num_unposted: int = 0  # Write actions whose handle is not known yet
    has_sent_final: bool = False
    writing_since: float | None = None
    code: str = errors.DONE

    @property
    def is_writing(self) -> bool:
        return bool(self.handles) or self.num_unposted > 0

    def move(self, state: PrefillState, expires: float) -> None:
        self.state = state
        self.expires = expires if state is PrefillState.CANCELLING else min(expires, self.deadline)


class PrefillTransfers:
    """Invariant: ReleasePages(tid) comes exactly once per tid taken on, after its last write settled."""

    def __init__(
        self,
        *,
        page_size: int,
        page_checksum: Callable[[Incarnation, int], int],
        timeouts: PrefillTimeouts | None = None,
        early: EarlyReserves | None = None,
        ended: EndedTransfers | None = None,
    ) -> None:
        """`page_checksum(peer, page_id)`: CRC-32 of what that peer gets of one of our pages, asked only
        where checksums are agreed."""
        self._page_size = page_size
        self._page_checksum = page_checksum
        self._timeouts = timeouts or PrefillTimeouts()
        self._early = early or EarlyReserves()
        self._ended = ended or EndedTransfers()
        self._live: dict[TransferId, _Transfer] = {}
        self._peers: dict[Incarnation, bool] = {}  # connected ones; the value: do pages carry checksums
        self._unsettled = UnsettledWrites()
        self._out: list[PrefillAction] = []
        self.faults: Counter[str] = Counter()

    # -- what the caller may ask

    @property
    def next_deadline(self) -> float | None:
        deadlines = [transfer.expires for transfer in self._live.values()]
        early = self._early.next_deadline()
        return min(deadlines if early is None else [*deadlines, early], default=None)

    @property
    def is_writing(self) -> bool:
        """Is any write not settled?"""
        return bool(self._unsettled) or any(transfer.is_writing for transfer in self._live.values())

    def state(self, tid: TransferId) -> PrefillState | None:
        """None once it ended, or when it was never seen."""
        transfer = self._live.get(tid)
        return None if transfer is None else transfer.state

    # -- the router and our own loop

    def submit(
        self, tid: TransferId, *, peer: Incarnation, num_prompt_tokens: int, deadline: float, now: float
    ) -> list[PrefillAction]:
        """A request to compute for `peer`. `num_prompt_tokens` counts all of its `prompt_ids`."""
        is_held = tid in self._live or tid in self._unsettled
        code = errors.DUPLICATE if is_held else self._ended.code(tid)
        if code is not None:
            return [self._refuse(tid, code)]
        transfer = _Transfer(
            tid=tid,
            peer=peer,
            deadline=deadline,
            expires=deadline,
            pages=OutgoingPages(tid=tid, page_size=self._page_size, num_tokens=num_prompt_tokens),
        )
        self._live[tid] = transfer
        early = self._early.take(peer, tid)
        if early is not None:
            self._reserve(transfer, early, now)
        return self._take()

    def planned(self, tid: TransferId, *, num_tokens: int, now: float) -> list[PrefillAction]:
        """The engine scheduled it: `num_tokens` to compute, the rest is cached. Optional; once is enough."""
        transfer = self._find("planned", tid, now)
        if transfer is not None and transfer.state is PrefillState.COMPUTING:
            self._send(transfer.peer, Planned(tid=tid, num_tokens=num_tokens))
        return self._take()

    def computed(
        self,
        tid: TransferId,
        *,
        num_tokens: int,
        pages: tuple[int, ...],
        event: CompletionEvent,
        now: float,
        handoff: Handoff | None = None,
    ) -> list[PrefillAction]:
        """The prompt's first `num_tokens` are in the request's `pages` once `event` is complete.

        `pages` is the whole page table so far, cached ones too; `event` stands for all earlier chunks.
        `handoff` comes with the last chunk and only with it.
        """
        transfer = self._find("computed", tid, now)
        if transfer is not None and transfer.state is PrefillState.COMPUTING:
            transfer.pages.computed(num_tokens, pages=pages, event=event, handoff=handoff)
            if handoff is not None:
                transfer.move(PrefillState.WAIT_RESERVE, now + self._timeouts.reserve_s)
            self._pump(transfer, now)
        return self._take()

    def finished_early(self, tid: TransferId, *, now: float) -> list[PrefillAction]:
        """The request ended with its first token: the caller has reported it, D is told to forget it."""
        transfer = self._find("finished_early", tid, now)
        if transfer is not None and transfer.state is PrefillState.COMPUTING:
            self._wind_down(transfer, errors.FINISHED, "ended with its first token", now)
        return self._take()

    def cancel(self, tid: TransferId, *, now: float) -> list[PrefillAction]:
        """The router wants no more of it."""
        return self.fail(tid, code=errors.CANCELLED, reason="cancelled by the router", now=now)

    def fail(self, tid: TransferId, *, code: str, reason: str, now: float) -> list[PrefillAction]:
        """The request cannot go on here; `code` is one of errors.CODES."""
        transfer = self._live.get(tid)
        if transfer is not None:
            self._abort(transfer, code, reason, now)
        return self._take()

    # -- the peer

    def peer_ready(self, peer: Incarnation, *, has_checksums: bool) -> None:
        """The session and the transport to this peer are up."""
        self._peers[peer] = has_checksums

    def peer_lost(
        self, peer: Incarnation, *, reason: str, code: str = errors.PEER_LOST
    ) -> list[PrefillAction]:
        """Its connection is torn down (or was refused): nothing is written to it any more, and what still
        reads our pages for it settles."""
        self._peers.pop(peer, None)
        for transfer in [each for each in self._live.values() if each.peer == peer]:
            if transfer.state is not PrefillState.CANCELLING:
                self._report(transfer, code, reason)
            if self._unsettled.keep(transfer.tid, transfer.handles):
                del self._live[transfer.tid]
            else:
                self._release(transfer)
        self._early.drop(peer)
        self._ended.drop(peer)
        return self._take()

    def reserve(self, peer: Incarnation, message: Reserve, *, now: float) -> list[PrefillAction]:
        """D says where the pages go, maybe before the router's Submit is here."""
        transfer = self._live.get(message.tid)
        code = self._ended.code(message.tid)
        if transfer is not None and self._is_listed("reserve", transfer, peer, now):
            self._reserve(transfer, message, now)
        elif transfer is None and code == errors.DONE:
            self.faults["reserve after the end"] += 1
        elif transfer is None and code is not None:
            self._give_up(peer, message.tid, code)
        elif transfer is None and self._early.take(peer, message.tid) is not None:
            self.faults["second reserve"] += 1
            self._give_up(peer, message.tid, errors.PROTOCOL)
        elif transfer is None and not self._early.put(peer, message, now=now):
            self._give_up(peer, message.tid, errors.OVERLOADED)
        return self._take()

    def renew(self, peer: Incarnation, message: Renew, *, now: float) -> list[PrefillAction]:
        """D still wants what it reserved and the router has not submitted."""
        self._early.renew(peer, message.tids, now=now)
        return self._take()

    def cancel_transfer(
        self, peer: Incarnation, message: CancelTransfer, *, now: float
    ) -> list[PrefillAction]:
        """D gave up. It gets Drained as soon as nothing of ours can write to its pages, else at once."""
        transfer = self._live.get(message.tid)
        if transfer is None:
            self._early.take(peer, message.tid)
            if self._ended.code(message.tid) is None:
                self._ended.remember(peer, message.tid, errors.PEER_CANCELLED)
            self._send(peer, Drained(tid=message.tid))
        elif transfer.peer != peer:
            self.faults["cancel from a stranger"] += 1
        else:
            self._abort(transfer, errors.PEER_CANCELLED, "cancelled by the decode node", now)
        return self._take()

    # -- the transport

    def wrote(self, handle: WriteHandle) -> list[PrefillAction]:
        """The Write for `handle.tid` is on its way; call before any other event."""
        transfer = self._live.get(handle.tid)
        if transfer is None or transfer.num_unposted == 0:
            return [CancelWrite(handle=handle)]
        transfer.num_unposted -= 1
        transfer.handles[handle] = None
        return []

    def write_done(self, handle: WriteHandle, *, now: float) -> list[PrefillAction]:
        """D has the bytes."""
        transfer = self._settle(handle)
        if transfer is None:
            return self._take()
        if transfer.state is PrefillState.FLUSHING:
            transfer.move(PrefillState.FLUSHING, now + self._timeouts.write_s)
        self._finish(transfer, now)
        return self._take()

    def write_failed(self, handle: WriteHandle, *, reason: str, now: float) -> list[PrefillAction]:
        """D has not all the bytes, and no more of them will land."""
        transfer = self._settle(handle)
        if transfer is None:
            return self._take()
        if transfer.state is PrefillState.CANCELLING:
            self._finish(transfer, now)
        else:
            self._abort(transfer, errors.WRITE_FAILED, reason, now)
        return self._take()

    # -- time

    def tick(self, now: float) -> list[PrefillAction]:
        """Let deadlines pass; call after everything that arrived has been fed in."""
        for peer, tid in self._early.expired(now):
            self._early.take(peer, tid)
            self._give_up(peer, tid, errors.RESERVE_TIMEOUT)
        closing: dict[Incarnation, str] = {}
        for transfer in [each for each in self._live.values() if each.expires <= now]:
            if transfer.state is PrefillState.CANCELLING:
                transfer.expires = now + self._timeouts.drain_s
                closing[transfer.peer] = f"a write of {transfer.tid} does not settle"
            else:
                code = errors.DEADLINE if transfer.deadline <= now else _TIMEOUT_CODES[transfer.state]
                self._abort(transfer, code, f"out of time in {transfer.state}", now)
        self._out.extend(ClosePeer(peer=peer, reason=reason) for peer, reason in closing.items())
        return self._take()

    # -- transitions

    def _find(self, event: str, tid: TransferId, now: float) -> _Transfer | None:
        transfer = self._live.get(tid)
        if transfer is None or not self._is_listed(event, transfer, transfer.peer, now):
            return None
        return transfer

    def _is_listed(self, event: str, transfer: _Transfer, peer: Incarnation, now: float) -> bool:
        if transfer.peer != peer:
            self.faults[f"{event} from a stranger"] += 1
            return False
        if transfer.state in _LISTED[event] and not (event == "reserve" and transfer.pages.is_reserved):
            return True
        self._fault(event, transfer, now)
        return False

    def _fault(self, event: str, transfer: _Transfer, now: float, *, detail: str = "") -> None:
        """`event` is one of a few words, because it is counted by it; `detail` is for the reader."""
        self.faults[f"{event} in {transfer.state}"] += 1
        self._abort(transfer, errors.PROTOCOL, f"{detail or event} in {transfer.state}", now)

    def _reserve(self, transfer: _Transfer, message: Reserve, now: float) -> None:
        problem = transfer.pages.reserve(message)
        if problem:
            self._fault("reserve that does not fit", transfer, now, detail=problem)
        else:
            self._pump(transfer, now)

    def _pump(self, transfer: _Transfer, now: float) -> None:
        """Send what is computed, reserved and not sent; with the last of it go over to FLUSHING."""
        if not transfer.pages.is_reserved:
            return
        ready = transfer.pages.take_ready()
        if ready is not None:
            transfer.num_unposted += 1
            transfer.writing_since = now if transfer.writing_since is None else transfer.writing_since
            self._out.append(Write(peer=transfer.peer, pages=ready))
        if transfer.pages.handoff is not None:
            transfer.move(PrefillState.FLUSHING, now + self._timeouts.write_s)
            if not self._peers.get(transfer.peer, False):
                self._send_final(transfer, None)
            self._finish(transfer, now)

    def _send_final(self, transfer: _Transfer, page_checksum: Callable[[int], int] | None) -> None:
        assert transfer.pages.handoff is not None, "Final needs the handoff record"
        transfer.has_sent_final = True
        self._send(transfer.peer, transfer.pages.final(transfer.pages.handoff, page_checksum))

    def _settle(self, handle: WriteHandle) -> _Transfer | None:
        """Take a settled write off the books; None for one of a transfer that is over."""
        if self._unsettled.settle(handle):
            self._out.append(ReleasePages(tid=handle.tid))
        transfer = self._live.get(handle.tid)
        if transfer is None or handle not in transfer.handles:
            return None
        del transfer.handles[handle]
        return transfer

    def _finish(self, transfer: _Transfer, now: float) -> None:
        """Once no write is pending: FLUSHING is done, CANCELLING is drained."""
        if transfer.is_writing:
            return
        if transfer.state is PrefillState.FLUSHING:
            self._hand_over(transfer, now)
        elif transfer.state is PrefillState.CANCELLING:
            self._send(transfer.peer, Drained(tid=transfer.tid))
            self._release(transfer)

    def _hand_over(self, transfer: _Transfer, now: float) -> None:
        if not transfer.has_sent_final:
            self._send_final(transfer, partial(self._page_checksum, transfer.peer))
        self._out.append(
            HandoverDone(
                tid=transfer.tid,
                num_pages=transfer.pages.num_sent,
                transfer_s=0.0 if transfer.writing_since is None else now - transfer.writing_since,
            )
        )
        self._release(transfer)

    def _abort(self, transfer: _Transfer, code: str, reason: str, now: float) -> None:
        """Report and wind down; nothing when that is under way."""
        if transfer.state is PrefillState.CANCELLING:
            return
        self._report(transfer, code, reason)
        self._wind_down(transfer, code, reason, now)

    def _wind_down(self, transfer: _Transfer, code: str, reason: str, now: float) -> None:
        transfer.code = code
        transfer.move(PrefillState.CANCELLING, now + self._timeouts.drain_s)
        self._out.extend(CancelWrite(handle=handle) for handle in transfer.handles)
        self._send(transfer.peer, TransferFailed(tid=transfer.tid, code=code, reason=reason))
        self._finish(transfer, now)

    def _report(self, transfer: _Transfer, code: str, reason: str) -> None:
        is_retryable = code in errors.RETRYABLE
        self._out.append(Fail(tid=transfer.tid, code=code, retryable=is_retryable, reason=reason))
        if transfer.state is PrefillState.COMPUTING:
            self._out.append(StopCompute(tid=transfer.tid))

    def _give_up(self, peer: Incarnation, tid: TransferId, code: str) -> None:
        """Nothing of ours will ever write for this id: say so, and remember it."""
        self._ended.remember(peer, tid, code)
        self._send(peer, TransferFailed(tid=tid, code=code, reason="it is over on the prefill node"))
        self._send(peer, Drained(tid=tid))

    def _release(self, transfer: _Transfer) -> None:
        self._out.append(ReleasePages(tid=transfer.tid))
        del self._live[transfer.tid]
        self._ended.remember(transfer.peer, transfer.tid, transfer.code)

    def _refuse(self, tid: TransferId, code: str) -> Refuse:
        if code in errors.CODES and code != errors.DUPLICATE:
            return Refuse(tid=tid, code=code, retryable=code in errors.RETRYABLE, reason="it is over already")
        self.faults["second submit"] += 1
        return Refuse(tid=tid, code=errors.DUPLICATE, retryable=False, reason=f"{tid} was submitted before")

    def _send(self, peer: Incarnation, message: ToDecode) -> None:
        """To a peer that is not connected nothing is said; its Reserve will be answered."""
        if peer in self._peers:
            self._out.append(Send(peer=peer, message=message))

    def _take(self) -> list[PrefillAction]:
        out, self._out = self._out, []
        return out
