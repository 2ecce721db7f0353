"""The prefill node's end of all its transfers: which of them an event is for, and ids that have none.

A pure state machine: events in, actions out; `now` comes with the event. It must never know the states of
a transfer (`prefill_transfer`), how pages are computed or owned, or the time.

A Reserve may precede its Submit: it waits, bounded per peer, until its own deadline. Every tid that P
gives up gets TransferFailed and Drained, at once or when a late Reserve or CancelTransfer asks.

After PeerGone the caller answers with `close_peer` and `peer_lost` at once: the tids are gone before the
failures of their writes are fed in. But a transport may still read our pages then: those of a lost peer's
open writes are released when the last of them settles. Feed what arrived before `tick`.
"""

from collections import Counter
from collections.abc import Callable

from kv_transfer import errors
from kv_transfer.actions import CancelWrite, ClosePeer, PrefillAction, Refuse, ReleasePages
from kv_transfer.early import EarlyReserves
from kv_transfer.ended import EndedTransfers
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import CancelTransfer, Drained, Handoff, Renew, Reserve, TransferFailed
from kv_transfer.outgoing import OutgoingPages
from kv_transfer.prefill_transfer import PrefillCommon, PrefillState, PrefillTimeouts, PrefillTransfer
from kv_transfer.transport import CompletionEvent, WriteHandle
from kv_transfer.unsettled import UnsettledWrites


class PrefillTransfers:
    """Invariant: a tid is waited for (an early Reserve), live, ended, or unknown; never two of these."""

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
        self._common = PrefillCommon(page_checksum=page_checksum, timeouts=timeouts or PrefillTimeouts())
        self._early = early or EarlyReserves()
        self._ended = ended or EndedTransfers()
        self._live: dict[TransferId, PrefillTransfer] = {}
        self._unsettled = UnsettledWrites()

    # -- what the caller may ask

    @property
    def faults(self) -> Counter[str]:
        """How often each event came that its transfer did not allow."""
        return self._common.faults

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
        transfer = self._live[tid] = PrefillTransfer(
            tid,
            peer=peer,
            deadline=deadline,
            pages=OutgoingPages(tid=tid, page_size=self._page_size, num_tokens=num_prompt_tokens),
            common=self._common,
        )
        early = self._early.take(peer, tid)
        if early is not None:
            transfer.reserve(early, now)
        return self._take(transfer)

    def planned(self, tid: TransferId, *, num_tokens: int, now: float) -> list[PrefillAction]:
        """The engine scheduled it: `num_tokens` to compute, the rest is cached. Optional; once is enough."""
        transfer = self._live.get(tid)
        if transfer is not None:
            transfer.planned(num_tokens, now)
        return self._take(transfer)

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
        transfer = self._live.get(tid)
        if transfer is not None:
            transfer.computed(num_tokens, pages=pages, event=event, handoff=handoff, now=now)
        return self._take(transfer)

    def finished_early(self, tid: TransferId, *, now: float) -> list[PrefillAction]:
        """The request ended with its first token: the caller has reported it, D is told to forget it."""
        transfer = self._live.get(tid)
        if transfer is not None:
            transfer.finished_early(now)
        return self._take(transfer)

    def cancel(self, tid: TransferId, *, now: float) -> list[PrefillAction]:
        """The router wants no more of it."""
        return self.fail(tid, code=errors.CANCELLED, reason="cancelled by the router", now=now)

    def fail(self, tid: TransferId, *, code: str, reason: str, now: float) -> list[PrefillAction]:
        """The request cannot go on here; `code` is one of errors.CODES."""
        transfer = self._live.get(tid)
        if transfer is not None:
            transfer.abort(code, reason, now)
        return self._take(transfer)

    # -- the peer

    def peer_ready(self, peer: Incarnation, *, has_checksums: bool) -> None:
        """The session and the transport to this peer are up."""
        self._common.has_checksums[peer] = has_checksums

    def peer_lost(
        self, peer: Incarnation, *, reason: str, code: str = errors.PEER_LOST
    ) -> list[PrefillAction]:
        """Its connection is torn down (or was refused): nothing is written to it any more, and what still
        reads our pages for it settles."""
        self._common.has_checksums.pop(peer, None)
        for transfer in [each for each in self._live.values() if each.peer == peer]:
            self._unsettled.keep(transfer.tid, transfer.peer_lost(code, reason))
            del self._live[transfer.tid]
        self._early.drop(peer)
        self._ended.drop(peer)
        return self._take()

    def reserve(self, peer: Incarnation, message: Reserve, *, now: float) -> list[PrefillAction]:
        """D says where the pages go, maybe before the router's Submit is here."""
        transfer = self._live.get(message.tid)
        if transfer is None:
            self._reserve_without_transfer(peer, message, now)
        elif transfer.peer != peer:
            self.faults["reserve from a stranger"] += 1
        else:
            transfer.reserve(message, now)
        return self._take(transfer)

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
            self._common.send(peer, Drained(tid=message.tid))
        elif transfer.peer != peer:
            self.faults["cancel from a stranger"] += 1
        else:
            transfer.abort(errors.PEER_CANCELLED, "cancelled by the decode node", now)
        return self._take(transfer)

    # -- the transport

    def wrote(self, handle: WriteHandle) -> list[PrefillAction]:
        """The Write for `handle.tid` is on its way; call before any other event."""
        transfer = self._live.get(handle.tid)
        is_wanted = transfer is not None and transfer.wrote(handle)
        return [] if is_wanted else [CancelWrite(handle=handle)]

    def write_done(self, handle: WriteHandle, *, now: float) -> list[PrefillAction]:
        """D has the bytes."""
        transfer = self._settled(handle)
        if transfer is not None:
            transfer.write_done(handle, now)
        return self._take(transfer)

    def write_failed(self, handle: WriteHandle, *, reason: str, now: float) -> list[PrefillAction]:
        """D has not all the bytes, and no more of them will land."""
        transfer = self._settled(handle)
        if transfer is not None:
            transfer.write_failed(handle, reason, now)
        return self._take(transfer)

    # -- time

    def tick(self, now: float) -> list[PrefillAction]:
        """Let deadlines pass; call after everything that arrived has been fed in."""
        for peer, tid in self._early.expired(now):
            self._early.take(peer, tid)
            self._give_up(peer, tid, errors.RESERVE_TIMEOUT)
        expired = [transfer for transfer in self._live.values() if transfer.expires <= now]
        closing = {transfer.peer: reason for transfer in expired if (reason := transfer.expire(now))}
        self._common.out.extend(ClosePeer(peer=peer, reason=reason) for peer, reason in closing.items())
        return self._take(*expired)

    # -- ids without a transfer

    def _reserve_without_transfer(self, peer: Incarnation, message: Reserve, now: float) -> None:
        tid, code = message.tid, self._ended.code(message.tid)
        if code == errors.DONE:
            self.faults["reserve after the end"] += 1
        elif code is not None:
            self._give_up(peer, tid, code)
        elif self._early.take(peer, tid) is not None:
            self.faults["second reserve"] += 1
            self._give_up(peer, tid, errors.PROTOCOL)
        elif not self._early.put(peer, message, now=now):
            self._give_up(peer, tid, errors.OVERLOADED)

    def _give_up(self, peer: Incarnation, tid: TransferId, code: str) -> None:
        """Nothing of ours will ever write for this id: say so, and remember it."""
        self._ended.remember(peer, tid, code)
        reason = "it is over on the prefill node"
        self._common.send(peer, TransferFailed(tid=tid, code=code, reason=reason))
        self._common.send(peer, Drained(tid=tid))

    def _settled(self, handle: WriteHandle) -> PrefillTransfer | None:
        """The live transfer it was for, if any; the last one kept of a lost peer's frees its pages."""
        if self._unsettled.settle(handle):
            self._common.out.append(ReleasePages(tid=handle.tid))
        return self._live.get(handle.tid)

    def _refuse(self, tid: TransferId, code: str) -> Refuse:
        if code in errors.CODES and code != errors.DUPLICATE:
            return Refuse(tid=tid, code=code, retryable=code in errors.RETRYABLE, reason="it is over already")
        self.faults["second submit"] += 1
        return Refuse(tid=tid, code=errors.DUPLICATE, retryable=False, reason=f"{tid} was submitted before")

    def _take(self, *touched: PrefillTransfer | None) -> list[PrefillAction]:
        """What is to be done; of the transfers just touched, those that are over are remembered only."""
        for transfer in touched:
            if transfer is not None and transfer.is_over:
                del self._live[transfer.tid]
                self._ended.remember(transfer.peer, transfer.tid, transfer.code)
        actions = list(self._common.out)
        self._common.out.clear()
        return actions
