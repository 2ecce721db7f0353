"""One transfer on the decode node: which pages its prefill node may write to, and until when.

A pure state machine: events in, actions out; `now` comes with the event. It must never know how pages
are allocated, what a transport is, other transfers, or the time. `lease` = pages whose addresses P knows.

| state | holds | leaves on | deadline |
|---|---|---|---|
| QUEUED | nothing | pages granted → RESERVED | queue age → Refuse; no session in time → Fail |
| RESERVED | lease | first range → RECEIVING; Final of a local hit → LANDED | prefill deadline → CANCELLING |
| RECEIVING | lease | Final and every range landed → LANDED | no page for too long → CANCELLING |
| LANDED | request owns pages | Join: the caller's from here on (RUNNING) | – |
| CANCELLING | lease | Drained, or P's connection torn down → RELEASED | drain time → QUARANTINED |
| QUARANTINED | quarantine owns pages | as CANCELLING → RELEASED | quarantine time → ClosePeer |

A Final that comes before any range is news of the data too: RECEIVING. How long the next page may take
depends on whether P still computes, which ends with Final; until then a step of P's engine is progress, of
whatever prompt. LANDED is passed in one step. The request's own
deadline also ends QUEUED, RESERVED and RECEIVING. `abort`, TransferFailed and loss of the peer are legal
everywhere; any other event a state does not list (`_LISTED`) is counted in `faults` and ends the transfer. A
failure is reported at once, its lease is released later: on P's Drained or after the teardown of P's
connection, never on a timer.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from typing import Final as Constant

from kv_transfer import errors
from kv_transfer.actions import (
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
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.incoming import IncomingPages
from kv_transfer.messages import CancelTransfer, Final, Reserve, TransferFailed


class DecodeState(StrEnum):
    QUEUED = "queued"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    CANCELLING = "cancelling"
    QUARANTINED = "quarantined"


_LEASED: Constant = frozenset({DecodeState.RESERVED, DecodeState.RECEIVING})
_ENDING: Constant = frozenset({DecodeState.CANCELLING, DecodeState.QUARANTINED})
_LISTED: Constant[Mapping[str, frozenset[DecodeState]]] = {
    "granted": frozenset({DecodeState.QUEUED}),
    "landed": _LEASED | _ENDING,
    "final": _LEASED | _ENDING,
    "drained": _ENDING,
}
_TIMEOUT_CODES: Constant[Mapping[DecodeState, str]] = {
    DecodeState.QUEUED: errors.QUEUE_TIMEOUT,
    DecodeState.RESERVED: errors.PREFILL_TIMEOUT,
    DecodeState.RECEIVING: errors.NO_PROGRESS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimeouts:
    session_s: float = 10.0  # Submit to a session with P
    queue_s: float = 30.0  # Submit to pages, with a session
    prefill_s: float = 60.0  # Reserve to the first page, and page to page, while P's engine makes no step
    progress_s: float = 10.0  # page to page once P has said Final
    drain_s: float = 5.0  # CancelTransfer to Drained
    quarantine_s: float = 30.0  # then P's connection is torn down


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeCommon:
    """What all transfers of one node share."""

    page_size: int
    page_checksum: Callable[[Incarnation, int], int]
    timeouts: DecodeTimeouts
    out: list[DecodeAction] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)


class DecodeTransfer:
    """Invariant: a lease ends exactly once, with Join, ReleasePages or ReleaseQuarantine; then `is_over`."""

    def __init__(
        self,
        tid: TransferId,
        *,
        peer: Incarnation,
        num_prompt_tokens: int,
        deadline: float,
        common: DecodeCommon,
        now: float,
    ) -> None:
        self.tid = tid
        self.peer = peer
        self.state = DecodeState.QUEUED
        self.expires = min(now + common.timeouts.session_s, deadline)
        self._queued_since = now
        self._has_session = False
        self.is_over = False
        self._num_prompt_tokens = num_prompt_tokens
        self._deadline = deadline
        self._common = common
        self._pages: IncomingPages | None = None  # the lease
        self._receiving_since: float | None = None

    def peer_ready(self) -> None:
        """There is a session with P: from here on only pages are waited for."""
        if self.state is DecodeState.QUEUED:
            self._has_session = True
            self._move(DecodeState.QUEUED, self._queued_since + self._common.timeouts.queue_s)

    def granted(self, page_ids: tuple[int, ...], *, skip_tokens: int, now: float) -> None:
        """The caller leased `page_ids`. Raises ValueError for a wrong number of them."""
        if not self._is_listed("granted", now):
            return
        self._pages = IncomingPages(
            page_size=self._common.page_size,
            page_ids=page_ids,
            skip_tokens=skip_tokens,
            num_tokens=self._num_prompt_tokens,
        )
        self._move(DecodeState.RESERVED, now + self._common.timeouts.prefill_s)
        left_s = max(self.expires - now, 0.0)
        reserve = Reserve(tid=self.tid, page_ids=page_ids, skip_tokens=skip_tokens, deadline_s=left_s)
        self._send(reserve)

    # -- the peer

    def peer_works(self, now: float) -> None:
        """P's engine makes steps: what it has not computed yet is not lost."""
        if self.state in _LEASED and self._pages is not None and self._pages.final is None:
            self._move(self.state, now + self._common.timeouts.prefill_s)

    def landed(self, start: int, stop: int, now: float) -> None:
        if self._is_listed("landed", now) and self._pages is not None and self.state in _LEASED:
            self._progress(self._pages, self._pages.land(start, stop), now)

    def final(self, message: Final, *, has_checksums: bool, now: float) -> None:
        if self._is_listed("final", now) and self._pages is not None and self.state in _LEASED:
            self._progress(self._pages, self._pages.expect(message, has_checksums=has_checksums), now)

    def failed(self, message: TransferFailed, now: float) -> None:
        if self.state in _ENDING:
            return
        if message.code == errors.FINISHED:
            self._common.out.append(HandedOver(tid=self.tid))
        else:
            self._report(known(message.code), f"{message.code} on the prefill node: {message.reason}")
        self._leave(now)

    def drained(self, now: float) -> None:
        if self._is_listed("drained", now):
            self._release()

    def peer_lost(self, code: str, reason: str) -> None:
        """Nothing of it can write here any more."""
        if self.state not in _ENDING:
            self._report(code, reason)
        self._release()

    # -- its end

    def abort(self, code: str, reason: str, now: float) -> None:
        """Report now; where P knows our pages, ask it to stop and hold them until it has."""
        if self.state in _ENDING:
            return
        if self.state in _LEASED:
            self._send(CancelTransfer(tid=self.tid))
        if self.state is DecodeState.QUEUED and code in (errors.QUEUE_TIMEOUT, errors.DEADLINE):
            is_retryable = code in errors.RETRYABLE
            self._common.out.append(Refuse(tid=self.tid, code=code, retryable=is_retryable, reason=reason))
        else:
            self._report(code, reason)
        self._leave(now)

    def expire(self, now: float) -> str:
        """Its time is up. Returns why the peer must be closed for it, or ""."""
        if self.state is DecodeState.CANCELLING:
            self._move(DecodeState.QUARANTINED, now + self._common.timeouts.quarantine_s)
            self._common.out.append(QuarantinePages(tid=self.tid))
        elif self.state is DecodeState.QUARANTINED:
            self.expires = now + self._common.timeouts.quarantine_s
            return f"{self.tid} is not drained"
        elif self._deadline <= now:
            self.abort(errors.DEADLINE, f"out of time in {self.state}", now)
        elif self.state is DecodeState.QUEUED and not self._has_session:
            self.abort(errors.PEER_LOST, "there is no session with the prefill node", now)
        else:
            self.abort(_TIMEOUT_CODES[self.state], f"out of time in {self.state}", now)
        return ""

    # -- transitions

    def _move(self, state: DecodeState, expires: float) -> None:
        self.state = state
        self.expires = expires if state in _ENDING else min(expires, self._deadline)

    def _is_listed(self, event: str, now: float) -> bool:
        if self.state in _LISTED[event]:
            return True
        self._fault(event, now)
        return False

    def _fault(self, event: str, now: float) -> None:
        self._common.faults[f"{event} in {self.state}"] += 1
        self.abort(errors.PROTOCOL, f"{event} in {self.state}", now)

    def _progress(self, pages: IncomingPages, problem: str, now: float) -> None:
        if problem:
            self._fault(problem, now)
            return
        # Until Final the next page waits for P's engine; after it, only for the data plane.
        timeouts = self._common.timeouts
        wait_s = timeouts.prefill_s if pages.final is None else timeouts.progress_s
        self._move(DecodeState.RECEIVING, now + wait_s)
        if self._receiving_since is None:
            self._receiving_since = now
        if pages.final is None or not pages.has_all_landed:
            return
        corrupt = pages.corrupt_page(partial(self._common.page_checksum, self.peer))
        if corrupt is not None:
            self.abort(errors.CHECKSUM, f"page {corrupt} differs from what was sent", now)
            return
        self.is_over = True
        self._common.out.append(
            Join(
                tid=self.tid,
                handoff=pages.final.handoff,
                page_ids=pages.page_ids,
                skip_tokens=pages.skip_tokens,
                transfer_s=now - self._receiving_since,
            )
        )

    def _leave(self, now: float) -> None:
        """Reported: over at once without a lease, else when P has drained it."""
        if self.state is DecodeState.QUEUED:
            self.is_over = True
        else:
            self._move(DecodeState.CANCELLING, now + self._common.timeouts.drain_s)

    def _report(self, code: str, reason: str) -> None:
        is_retryable = code in errors.RETRYABLE
        self._common.out.append(Fail(tid=self.tid, code=code, retryable=is_retryable, reason=reason))

    def _release(self) -> None:
        if self.state is DecodeState.QUARANTINED:
            self._common.out.append(ReleaseQuarantine(tid=self.tid))
        elif self.state is not DecodeState.QUEUED:
            self._common.out.append(ReleasePages(tid=self.tid))
        self.is_over = True

    def _send(self, message: Reserve | CancelTransfer) -> None:
        self._common.out.append(Send(peer=self.peer, message=message))


def known(code: str) -> str:
    """A peer's code, where we know it."""
    return code if code in errors.CODES else errors.PEER_FAILED
