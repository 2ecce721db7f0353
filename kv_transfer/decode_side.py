"""The decode node's end of every transfer: which pages a prefill node may write to, and until when.

A pure state machine: events in, actions out; `now` comes with the event. It must never know how pages
are allocated, what a transport is, or the time. One row per tid; `lease` = pages whose addresses P knows.

| state | holds | leaves on | deadline |
|---|---|---|---|
| QUEUED | nothing | pages granted → RESERVED | queue age → Refuse |
| RESERVED | lease | first range → RECEIVING; Final of a local hit → LANDED | prefill deadline → CANCELLING |
| RECEIVING | lease | Final and every range landed → LANDED | no page for too long → CANCELLING |
| LANDED | request owns pages | Join: the caller's from here on (RUNNING) | – |
| CANCELLING | lease | Drained, or P's connection torn down → RELEASED | drain time → QUARANTINED |
| QUARANTINED | quarantine owns pages | as CANCELLING → RELEASED | quarantine time → ClosePeer |

A Final that comes before any range is news of the data too: RECEIVING. How long the next page may take
depends on whether P still computes, which ends with Final. LANDED is passed in one step. The request's own
deadline also ends QUEUED, RESERVED and RECEIVING. Cancel, TransferFailed and loss of the peer are legal
everywhere; any other event a state does not list (`_LISTED`) is counted in `faults` and ends the tid. A
failure is reported at once, its lease is released later: on P's Drained or after the teardown of P's
connection, never on a timer. Nothing is said for ids that are over or unknown, but a TransferFailed that
precedes its Submit is remembered: that Submit ends at once, holding nothing. P answers every Reserve and
every CancelTransfer of an id it has given up with Drained.

Feed what arrived before `tick`: completion is checked on arrival, so a transfer that finished in time
and is noticed late still joins. `peer_lost` comes after `transport.close_peer`. Landed must be the last
change of its range: after Join D writes its own KV into the last page.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import Final as Constant

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
from kv_transfer.ended import EndedTransfers
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.incoming import IncomingPages
from kv_transfer.messages import CancelTransfer, Final, Planned, Reserve, TransferFailed


class DecodeState(StrEnum):
    QUEUED = "queued"
    RESERVED = "reserved"
    RECEIVING = "receiving"
    CANCELLING = "cancelling"
    QUARANTINED = "quarantined"


_LEASED: Constant = frozenset({DecodeState.RESERVED, DecodeState.RECEIVING})
_ENDING: Constant = frozenset({DecodeState.CANCELLING, DecodeState.QUARANTINED})
_EVERY: Constant = frozenset(DecodeState)
_LISTED: Constant[Mapping[str, frozenset[DecodeState]]] = {
    "granted": frozenset({DecodeState.QUEUED}),
    "planned": _EVERY,
    "landed": _LEASED | _ENDING,
    "final": _LEASED | _ENDING,
    "failed": _EVERY,
    "drained": _ENDING,
}
_TIMEOUT_CODES: Constant[Mapping[DecodeState, str]] = {
    DecodeState.QUEUED: errors.QUEUE_TIMEOUT,
    DecodeState.RESERVED: errors.PREFILL_TIMEOUT,
    DecodeState.RECEIVING: errors.NO_PROGRESS,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeTimeouts:
    queue_s: float = 30.0
    prefill_s: float = 60.0  # Reserve to the first page, and page to page while P computes
    progress_s: float = 10.0  # page to page once P has said Final
    drain_s: float = 5.0  # CancelTransfer to Drained
    quarantine_s: float = 30.0  # then P's connection is torn down


@dataclass(slots=True, kw_only=True)
class _Transfer:
    tid: TransferId
    peer: Incarnation
    num_prompt_tokens: int
    deadline: float
    expires: float
    state: DecodeState = DecodeState.QUEUED
    pages: IncomingPages | None = None  # the lease
    receiving_since: float | None = None

    def move(self, state: DecodeState, expires: float) -> None:
        self.state = state
        self.expires = expires if state in _ENDING else min(expires, self.deadline)


class DecodeTransfers:
    """Invariant: a leased page is given back exactly once: Join, ReleasePages or ReleaseQuarantine."""

    def __init__(
        self,
        *,
        page_size: int,
        page_checksum: Callable[[Incarnation, int], int],
        timeouts: DecodeTimeouts | None = None,
        ended: EndedTransfers | None = None,
    ) -> None:
        """`page_checksum(peer, page_id)`: CRC-32 of what that peer sends of one of our pages, asked only
        where checksums came."""
        self._page_size = page_size
        self._page_checksum = page_checksum
        self._timeouts = timeouts or DecodeTimeouts()
        self._ended = ended or EndedTransfers()
        self._live: dict[TransferId, _Transfer] = {}
        self._peers: dict[Incarnation, bool] = {}  # connected ones; the value: do pages carry checksums
        self._out: list[DecodeAction] = []
        self.faults: Counter[str] = Counter()
        self.num_corrupt = 0

    # -- what the caller may ask

    @property
    def next_deadline(self) -> float | None:
        return min((transfer.expires for transfer in self._live.values()), default=None)

    def state(self, tid: TransferId) -> DecodeState | None:
        """None once it joined, was released, or was never seen."""
        transfer = self._live.get(tid)
        return None if transfer is None else transfer.state

    def grantable(self) -> list[TransferId]:
        """Waiting for pages with a peer that is connected, in order of arrival."""
        return [
            transfer.tid
            for transfer in self._live.values()
            if transfer.state is DecodeState.QUEUED and transfer.peer in self._peers
        ]

    # -- the router and our own loop

    def submit(
        self, tid: TransferId, *, peer: Incarnation, num_prompt_tokens: int, deadline: float, now: float
    ) -> list[DecodeAction]:
        """A request whose prompt `peer` computes. `num_prompt_tokens` counts all of its `prompt_ids`."""
        code = errors.DONE if tid in self._live else self._ended.code(tid)
        if code == errors.DONE:
            self.faults["second submit"] += 1
            reason = f"{tid} was submitted before"
            return [Refuse(tid=tid, code=errors.DUPLICATE, retryable=False, reason=reason)]
        if code is not None:
            self._ended.remember(peer, tid, errors.DONE)
            return [_ended_before_submit(tid, code)]
        self._live[tid] = _Transfer(
            tid=tid,
            peer=peer,
            num_prompt_tokens=num_prompt_tokens,
            deadline=deadline,
            expires=min(now + self._timeouts.queue_s, deadline),
        )
        return []

    def granted(
        self, tid: TransferId, *, page_ids: tuple[int, ...], skip_tokens: int, now: float
    ) -> list[DecodeAction]:
        """The caller leased `page_ids` to `tid`; it holds the first `skip_tokens` (whole pages) already.

        A grant that comes too late is handed straight back. Raises ValueError for a wrong number of pages.
        """
        transfer = self._live.get(tid)
        if transfer is None or transfer.peer not in self._peers:
            return [ReleasePages(tid=tid)]
        if not self._is_listed("granted", transfer, now):
            return self._take()
        transfer.pages = IncomingPages(
            page_size=self._page_size,
            page_ids=page_ids,
            skip_tokens=skip_tokens,
            num_tokens=transfer.num_prompt_tokens,
        )
        transfer.move(DecodeState.RESERVED, now + self._timeouts.prefill_s)
        left_s = max(transfer.expires - now, 0.0)
        reserve = Reserve(tid=tid, page_ids=page_ids, skip_tokens=skip_tokens, deadline_s=left_s)
        self._send(transfer, reserve)
        return self._take()

    def cancel(self, tid: TransferId, *, now: float) -> list[DecodeAction]:
        """The router wants no more of it."""
        return self.fail(tid, code=errors.CANCELLED, reason="cancelled by the router", now=now)

    def fail(self, tid: TransferId, *, code: str, reason: str, now: float) -> list[DecodeAction]:
        """This node cannot take the request on after all; `code` is one of errors.CODES."""
        transfer = self._live.get(tid)
        if transfer is not None and transfer.state not in _ENDING:
            self._abort(transfer, code, reason, now)
        return self._take()

    # -- the peer

    def peer_ready(self, peer: Incarnation, *, has_checksums: bool) -> None:
        """The session and the transport to this peer are up."""
        self._peers[peer] = has_checksums

    def peer_lost(
        self, peer: Incarnation, *, reason: str, code: str = errors.PEER_LOST
    ) -> list[DecodeAction]:
        """Its connection is torn down (or was refused): nothing of it can write here any more."""
        self._peers.pop(peer, None)
        for transfer in [each for each in self._live.values() if each.peer == peer]:
            if transfer.state not in _ENDING:
                self._report(transfer, code, reason)
            self._release(transfer)
        self._ended.drop(peer)
        return self._take()

    def planned(self, peer: Incarnation, message: Planned, *, now: float) -> list[DecodeAction]:
        """P knows the request: nothing to do, but it must be P's to know."""
        self._find("planned", message.tid, peer, now)
        return self._take()

    def landed(
        self, peer: Incarnation, tid: TransferId, *, start: int, stop: int, now: float
    ) -> list[DecodeAction]:
        """Our transport saw pages [start, stop) of the request arrive whole; duplicates are harmless."""
        transfer = self._find("landed", tid, peer, now)
        if transfer is not None and transfer.pages is not None and transfer.state in _LEASED:
            self._progress(transfer, transfer.pages, transfer.pages.land(start, stop), now)
        return self._take()

    def final(self, peer: Incarnation, message: Final, *, now: float) -> list[DecodeAction]:
        """P has said everything: the ranges to see land, and the handoff record."""
        transfer = self._find("final", message.tid, peer, now)
        if transfer is not None and transfer.pages is not None and transfer.state in _LEASED:
            problem = transfer.pages.expect(message, has_checksums=self._peers.get(peer, False))
            self._progress(transfer, transfer.pages, problem, now)
        return self._take()

    def failed(self, peer: Incarnation, message: TransferFailed, *, now: float) -> list[DecodeAction]:
        """P gave up, or ("finished") needs no decoding; maybe before the router's Submit is here.

        Its Drained follows where we hold a lease.
        """
        if message.tid not in self._live and self._ended.code(message.tid) is None:
            self._ended.remember(peer, message.tid, message.code)
        transfer = self._find("failed", message.tid, peer, now)
        if transfer is None or transfer.state in _ENDING:
            return self._take()
        if message.code == errors.FINISHED:
            self._out.append(HandedOver(tid=transfer.tid))
        else:
            self._report(
                transfer, _known(message.code), f"{message.code} on the prefill node: {message.reason}"
            )
        self._leave(transfer, now)
        return self._take()

    def drained(self, peer: Incarnation, tid: TransferId, *, now: float) -> list[DecodeAction]:
        """P will never write to this lease again."""
        transfer = self._find("drained", tid, peer, now)
        if transfer is not None:
            self._release(transfer)
        return self._take()

    # -- time

    def tick(self, now: float) -> list[DecodeAction]:
        """Let deadlines pass; call after everything that arrived has been fed in."""
        closing: dict[Incarnation, str] = {}
        for transfer in [each for each in self._live.values() if each.expires <= now]:
            if transfer.state is DecodeState.CANCELLING:
                transfer.move(DecodeState.QUARANTINED, now + self._timeouts.quarantine_s)
                self._out.append(QuarantinePages(tid=transfer.tid))
            elif transfer.state is DecodeState.QUARANTINED:
                transfer.expires = now + self._timeouts.quarantine_s
                closing[transfer.peer] = f"{transfer.tid} is not drained"
            else:
                code = errors.DEADLINE if transfer.deadline <= now else _TIMEOUT_CODES[transfer.state]
                self._abort(transfer, code, f"out of time in {transfer.state}", now)
        self._out.extend(ClosePeer(peer=peer, reason=reason) for peer, reason in closing.items())
        return self._take()

    # -- transitions

    def _find(self, event: str, tid: TransferId, peer: Incarnation, now: float) -> _Transfer | None:
        """The live transfer this event is for, or None after dealing with one that is not listed."""
        transfer = self._live.get(tid)
        if transfer is None:
            return None
        if transfer.peer != peer:
            self.faults[f"{event} from a stranger"] += 1
            return None
        return transfer if self._is_listed(event, transfer, now) else None

    def _is_listed(self, event: str, transfer: _Transfer, now: float) -> bool:
        if transfer.state in _LISTED[event]:
            return True
        self._fault(event, transfer, now)
        return False

    def _fault(self, event: str, transfer: _Transfer, now: float) -> None:
        self.faults[f"{event} in {transfer.state}"] += 1
        if transfer.state not in _ENDING:
            self._abort(transfer, errors.PROTOCOL, f"{event} in {transfer.state}", now)

    def _progress(self, transfer: _Transfer, pages: IncomingPages, problem: str, now: float) -> None:
        if problem:
            self._fault(problem, transfer, now)
            return
        # Until Final the next page waits for P's engine; after it, only for the data plane.
        wait_s = self._timeouts.prefill_s if pages.final is None else self._timeouts.progress_s
        transfer.move(DecodeState.RECEIVING, now + wait_s)
        if transfer.receiving_since is None:
            transfer.receiving_since = now
        if pages.final is None or not pages.has_all_landed:
            return
        corrupt = pages.corrupt_page(partial(self._page_checksum, transfer.peer))
        if corrupt is not None:
            self.num_corrupt += 1
            self._abort(transfer, errors.CHECKSUM, f"page {corrupt} differs from what was sent", now)
            return
        self._forget(transfer)
        self._out.append(
            Join(
                tid=transfer.tid,
                handoff=pages.final.handoff,
                page_ids=pages.page_ids,
                skip_tokens=pages.skip_tokens,
                transfer_s=now - transfer.receiving_since,
            )
        )

    def _abort(self, transfer: _Transfer, code: str, reason: str, now: float) -> None:
        """Report now; where P knows our pages, ask it to stop and hold them until it has."""
        if transfer.state in _LEASED:
            self._send(transfer, CancelTransfer(tid=transfer.tid))
        if transfer.state is DecodeState.QUEUED and code in (errors.QUEUE_TIMEOUT, errors.DEADLINE):
            self._out.append(Refuse(tid=transfer.tid, code=code, retryable=_retryable(code), reason=reason))
        else:
            self._report(transfer, code, reason)
        self._leave(transfer, now)

    def _leave(self, transfer: _Transfer, now: float) -> None:
        """Reported: over at once without a lease, else when P has drained it."""
        if transfer.state is DecodeState.QUEUED:
            self._forget(transfer)
        else:
            transfer.move(DecodeState.CANCELLING, now + self._timeouts.drain_s)

    def _report(self, transfer: _Transfer, code: str, reason: str) -> None:
        self._out.append(Fail(tid=transfer.tid, code=code, retryable=_retryable(code), reason=reason))

    def _release(self, transfer: _Transfer) -> None:
        if transfer.state is DecodeState.QUARANTINED:
            self._out.append(ReleaseQuarantine(tid=transfer.tid))
        elif transfer.state is not DecodeState.QUEUED:
            self._out.append(ReleasePages(tid=transfer.tid))
        self._forget(transfer)

    def _forget(self, transfer: _Transfer) -> None:
        del self._live[transfer.tid]
        self._ended.remember(transfer.peer, transfer.tid, errors.DONE)

    def _send(self, transfer: _Transfer, message: Reserve | CancelTransfer) -> None:
        self._out.append(Send(peer=transfer.peer, message=message))

    def _take(self) -> list[DecodeAction]:
        out, self._out = self._out, []
        return out


def _ended_before_submit(tid: TransferId, code: str) -> HandedOver | Refuse:
    """What P said about an id before we knew it is all there will be."""
    if code == errors.FINISHED:
        return HandedOver(tid=tid)
    known, reason = _known(code), f"{code} on the prefill node"
    return Refuse(tid=tid, code=known, retryable=_retryable(known), reason=reason)


def _known(code: str) -> str:
    return code if code in errors.CODES else errors.PEER_FAILED


def _retryable(code: str) -> bool:
    return code in errors.RETRYABLE
