"""One transfer on the prefill node: which of its computed pages leave, and when they stop being read.

A pure state machine: events in, actions out; `now` comes with the event. It must never know how pages
are computed or owned, what a transport does with a write, other transfers, or the time.

| state | holds | leaves on | deadline |
|---|---|---|---|
| COMPUTING | request owns pages | last chunk → FLUSHING or WAIT_RESERVE | the request's |
| WAIT_RESERVE | request owns pages | Reserve → FLUSHING | reserve time → Fail, ReleasePages |
| FLUSHING | pages pinned by writes | all writes done → DONE, ReleasePages | no write done → CANCELLING |
| CANCELLING | pages pinned by writes | every write settled → Drained, ReleasePages | drain time → ClosePeer |

In COMPUTING each `computed` sends what is Ready and D has not got, so pages leave while later
chunks are computed; the partial last page goes with the last chunk. Final leaves with the last write
posted, since D waits for Final and for every range to land anyway; with checksums it leaves after the last
write is done, because only then are the bytes to sum known to be final. DONE waits for every write.

`abort`, failed writes and loss of the peer are legal everywhere; any other event that a state does not list
(`_LISTED`) is counted in `faults` and ends the transfer. A settled write changes no page of D's any more
(`kv_transfer.transport`), hence Drained.
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
    Fail,
    HandoverDone,
    PrefillAction,
    ReleasePages,
    Send,
    StopCompute,
    Write,
)
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Drained, Handoff, Planned, Reserve, ToDecode, TransferFailed
from kv_transfer.outgoing import OutgoingPages
from kv_transfer.transport import CompletionEvent, WriteHandle


class PrefillState(StrEnum):
    COMPUTING = "computing"
    WAIT_RESERVE = "wait_reserve"
    FLUSHING = "flushing"
    CANCELLING = "cancelling"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillCommon:
    """What all transfers of one node share."""

    page_checksum: Callable[[Incarnation, int], int]
    timeouts: PrefillTimeouts
    has_checksums: dict[Incarnation, bool] = field(default_factory=dict)  # of every connected peer
    out: list[PrefillAction] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)

    def send(self, peer: Incarnation, message: ToDecode) -> None:
        """To a peer that is not connected nothing is said; its Reserve will be answered."""
        if peer in self.has_checksums:
            self.out.append(Send(peer=peer, message=message))


class PrefillTransfer:
    """Invariant: ReleasePages comes at most once, after the last write settled; then `is_over`."""

    def __init__(
        self,
        tid: TransferId,
        *,
        peer: Incarnation,
        deadline: float,
        pages: OutgoingPages,
        common: PrefillCommon,
    ) -> None:
        self.tid = tid
        self.peer = peer
        self.state = PrefillState.COMPUTING
        self.expires = deadline
        self.code: str = errors.DONE  # how it ends
        self.is_over = False
        self._deadline = deadline
        self._pages = pages
        self._common = common
        self._handles: dict[WriteHandle, None] = {}  # writes not settled
        self._num_unposted = 0  # Write actions whose handle is not known yet
        self._has_sent_final = False
        self._writing_since: float | None = None

    @property
    def is_writing(self) -> bool:
        return bool(self._handles) or self._num_unposted > 0

    # -- the engine

    def planned(self, num_tokens: int, now: float) -> None:
        if self._is_listed("planned", now) and self.state is PrefillState.COMPUTING:
            self._send(Planned(tid=self.tid, num_tokens=num_tokens))

    def computed(
        self,
        num_tokens: int,
        *,
        pages: tuple[int, ...],
        event: CompletionEvent,
        handoff: Handoff | None,
        now: float,
    ) -> None:
        if not self._is_listed("computed", now) or self.state is not PrefillState.COMPUTING:
            return
        self._pages.computed(num_tokens, pages=pages, event=event, handoff=handoff)
        if handoff is not None:
            self._move(PrefillState.WAIT_RESERVE, now + self._common.timeouts.reserve_s)
        self._pump(now)

    def finished_early(self, now: float) -> None:
        if self._is_listed("finished_early", now) and self.state is PrefillState.COMPUTING:
            self._wind_down(errors.FINISHED, "ended with its first token", now)

    # -- the peer

    def reserve(self, message: Reserve, now: float) -> None:
        """D's pages; also those it named before this transfer was known here."""
        if not self._is_listed("reserve", now):
            return
        problem = self._pages.reserve(message)
        if problem:
            self._fault("reserve that does not fit", now, detail=problem)
        else:
            self._pump(now)

    def peer_lost(self, code: str, reason: str) -> tuple[WriteHandle, ...]:
        """Its end. Returns the writes that may still read our pages; where there are none, they go back."""
        if self.state is not PrefillState.CANCELLING:
            self._report(code, reason)
        if not self._handles:
            self._release()
        return tuple(self._handles)

    # -- the transport

    def wrote(self, handle: WriteHandle) -> bool:
        """The Write asked for is on its way; False where none was."""
        if self._num_unposted == 0:
            return False
        self._num_unposted -= 1
        self._handles[handle] = None
        return True

    def write_done(self, handle: WriteHandle, now: float) -> None:
        if not self._settle(handle):
            return
        if self.state is PrefillState.FLUSHING:
            self._move(PrefillState.FLUSHING, now + self._common.timeouts.write_s)
        self._finish(now)

    def write_failed(self, handle: WriteHandle, reason: str, now: float) -> None:
        if not self._settle(handle):
            return
        if self.state is PrefillState.CANCELLING:
            self._finish(now)
        else:
            self.abort(errors.WRITE_FAILED, reason, now)

    # -- its end

    def abort(self, code: str, reason: str, now: float) -> None:
        """Report and wind down; nothing when that is under way."""
        if self.state is PrefillState.CANCELLING:
            return
        self._report(code, reason)
        self._wind_down(code, reason, now)

    def expire(self, now: float) -> str:
        """Its time is up. Returns why the peer must be closed for it, or ""."""
        if self.state is PrefillState.CANCELLING:
            self.expires = now + self._common.timeouts.drain_s
            return f"a write of {self.tid} does not settle"
        code = errors.DEADLINE if self._deadline <= now else _TIMEOUT_CODES[self.state]
        self.abort(code, f"out of time in {self.state}", now)
        return ""

    # -- transitions

    def _move(self, state: PrefillState, expires: float) -> None:
        self.state = state
        self.expires = expires if state is PrefillState.CANCELLING else min(expires, self._deadline)

    def _is_listed(self, event: str, now: float) -> bool:
        if self.state in _LISTED[event] and not (event == "reserve" and self._pages.is_reserved):
            return True
        self._fault(event, now)
        return False

    def _fault(self, event: str, now: float, *, detail: str = "") -> None:
        """`event` is one of a few words, because it is counted by it; `detail` is for the reader."""
        self._common.faults[f"{event} in {self.state}"] += 1
        self.abort(errors.PROTOCOL, f"{detail or event} in {self.state}", now)

    def _pump(self, now: float) -> None:
        """Send what is computed, reserved and not sent; with the last of it go over to FLUSHING."""
        if not self._pages.is_reserved:
            return
        while (ready := self._pages.take_ready()) is not None:
            self._num_unposted += 1
            self._writing_since = now if self._writing_since is None else self._writing_since
            self._common.out.append(Write(peer=self.peer, pages=ready))
        if self._pages.handoff is not None:
            self._move(PrefillState.FLUSHING, now + self._common.timeouts.write_s)
            if not self._common.has_checksums.get(self.peer, False):
                self._send_final(None)
            self._finish(now)

    def _send_final(self, page_checksum: Callable[[int], int] | None) -> None:
        assert self._pages.handoff is not None, "Final needs the handoff record"
        self._has_sent_final = True
        self._send(self._pages.final(self._pages.handoff, page_checksum))

    def _settle(self, handle: WriteHandle) -> bool:
        """Take a settled write off the books; False where it is not on them."""
        if handle not in self._handles:
            return False
        del self._handles[handle]
        return True

    def _finish(self, now: float) -> None:
        """Once no write is pending: FLUSHING is done, CANCELLING is drained."""
        if self.is_writing:
            return
        if self.state is PrefillState.FLUSHING:
            self._hand_over(now)
        elif self.state is PrefillState.CANCELLING:
            self._send(Drained(tid=self.tid))
            self._release()

    def _hand_over(self, now: float) -> None:
        if not self._has_sent_final:
            self._send_final(partial(self._common.page_checksum, self.peer))
        self._common.out.append(
            HandoverDone(
                tid=self.tid,
                num_pages=self._pages.num_sent,
                transfer_s=0.0 if self._writing_since is None else now - self._writing_since,
            )
        )
        self._release()

    def _wind_down(self, code: str, reason: str, now: float) -> None:
        self.code = code
        self._move(PrefillState.CANCELLING, now + self._common.timeouts.drain_s)
        self._common.out.extend(CancelWrite(handle=handle) for handle in self._handles)
        self._send(TransferFailed(tid=self.tid, code=code, reason=reason))
        self._finish(now)

    def _report(self, code: str, reason: str) -> None:
        is_retryable = code in errors.RETRYABLE
        self._common.out.append(Fail(tid=self.tid, code=code, retryable=is_retryable, reason=reason))
        if self.state is PrefillState.COMPUTING:
            self._common.out.append(StopCompute(tid=self.tid))

    def _release(self) -> None:
        self._common.out.append(ReleasePages(tid=self.tid))
        self.is_over = True

    def _send(self, message: ToDecode) -> None:
        self._common.send(self.peer, message)
