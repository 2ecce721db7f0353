"""The decode node's end of all its transfers: which of them an event is for, and ids that have none.

A pure state machine: events in, actions out; `now` comes with the event. It must never know the states of
a transfer (`decode_transfer`), how pages are allocated, or the time.

Nothing is said for ids that are over or unknown, but a TransferFailed that precedes its Submit is remembered:
that Submit ends at once, holding nothing. P answers every Reserve and every CancelTransfer of an id it has
given up with Drained.

Feed what arrived before `tick`: completion is checked on arrival, so a transfer that finished in time
and is noticed late still joins. `peer_lost` comes after `transport.close_peer`. Landed must be the last
change of its range: after Join D writes its own KV into the last page.
"""

from collections import Counter
from collections.abc import Callable

from kv_transfer import errors
from kv_transfer.actions import ClosePeer, DecodeAction, HandedOver, Refuse, ReleasePages
from kv_transfer.decode_transfer import DecodeCommon, DecodeState, DecodeTimeouts, DecodeTransfer, known
from kv_transfer.ended import EndedTransfers
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Final, Planned, TransferFailed


class DecodeTransfers:
    """Invariant: a tid is live, ended, or unknown; never two of these."""

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
        self._common = DecodeCommon(
            page_size=page_size,
            page_checksum=page_checksum,
            timeouts=timeouts or DecodeTimeouts(),
        )
        self._ended = ended or EndedTransfers()
        self._live: dict[TransferId, DecodeTransfer] = {}
        self._peers: dict[Incarnation, bool] = {}  # connected ones; the value: do pages carry checksums

    # -- what the caller may ask

    @property
    def faults(self) -> Counter[str]:
        """How often each event came that its transfer did not allow."""
        return self._common.faults

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
        transfer = self._live[tid] = DecodeTransfer(
            tid,
            peer=peer,
            num_prompt_tokens=num_prompt_tokens,
            deadline=deadline,
            common=self._common,
            now=now,
        )
        if peer in self._peers:
            transfer.peer_ready()
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
        transfer.granted(page_ids, skip_tokens=skip_tokens, now=now)
        return self._take(transfer)

    def cancel(self, tid: TransferId, *, now: float) -> list[DecodeAction]:
        """The router wants no more of it."""
        return self.fail(tid, code=errors.CANCELLED, reason="cancelled by the router", now=now)

    def fail(self, tid: TransferId, *, code: str, reason: str, now: float) -> list[DecodeAction]:
        """This node cannot take the request on after all; `code` is one of errors.CODES."""
        transfer = self._live.get(tid)
        if transfer is not None:
            transfer.abort(code, reason, now)
        return self._take(transfer)

    # -- the peer

    def peer_ready(self, peer: Incarnation, *, has_checksums: bool) -> None:
        """The session and the transport to this peer are up."""
        self._peers[peer] = has_checksums
        for transfer in self._live.values():
            if transfer.peer == peer:
                transfer.peer_ready()

    def peer_lost(
        self, peer: Incarnation, *, reason: str, code: str = errors.PEER_LOST
    ) -> list[DecodeAction]:
        """Its connection is torn down (or was refused): nothing of it can write here any more."""
        self._peers.pop(peer, None)
        lost = [transfer for transfer in self._live.values() if transfer.peer == peer]
        for transfer in lost:
            transfer.peer_lost(code, reason)
        actions = self._take(*lost)
        self._ended.drop(peer)
        return actions

    def planned(self, peer: Incarnation, message: Planned) -> list[DecodeAction]:
        """P knows the request: nothing to do, but it must be P's to know."""
        return self._take(self._find("planned", message.tid, peer))

    def peer_works(self, peer: Incarnation, *, now: float) -> None:
        """P's engine has gone on: prompts wait for their turn there, however long its queue is."""
        for transfer in self._live.values():
            if transfer.peer == peer:
                transfer.peer_works(now)

    def landed(
        self, peer: Incarnation, tid: TransferId, *, start: int, stop: int, now: float
    ) -> list[DecodeAction]:
        """Our transport saw pages [start, stop) of the request arrive whole; duplicates are harmless."""
        transfer = self._find("landed", tid, peer)
        if transfer is not None:
            transfer.landed(start, stop, now)
        return self._take(transfer)

    def final(self, peer: Incarnation, message: Final, *, now: float) -> list[DecodeAction]:
        """P has said everything: the ranges to see land, and the handoff record."""
        transfer = self._find("final", message.tid, peer)
        if transfer is not None:
            transfer.final(message, has_checksums=self._peers.get(peer, False), now=now)
        return self._take(transfer)

    def failed(self, peer: Incarnation, message: TransferFailed, *, now: float) -> list[DecodeAction]:
        """P gave up, or ("finished") needs no decoding; maybe before the router's Submit is here.

        Its Drained follows where we hold a lease.
        """
        if message.tid not in self._live and self._ended.code(message.tid) is None:
            self._ended.remember(peer, message.tid, message.code)
        transfer = self._find("failed", message.tid, peer)
        if transfer is not None:
            transfer.failed(message, now)
        return self._take(transfer)

    def drained(self, peer: Incarnation, tid: TransferId, *, now: float) -> list[DecodeAction]:
        """P will never write to this lease again."""
        transfer = self._find("drained", tid, peer)
        if transfer is not None:
            transfer.drained(now)
        return self._take(transfer)

    # -- time

    def tick(self, now: float) -> list[DecodeAction]:
        """Let deadlines pass; call after everything that arrived has been fed in."""
        expired = [transfer for transfer in self._live.values() if transfer.expires <= now]
        closing = {transfer.peer: reason for transfer in expired if (reason := transfer.expire(now))}
        self._common.out.extend(ClosePeer(peer=peer, reason=reason) for peer, reason in closing.items())
        return self._take(*expired)

    def _find(self, event: str, tid: TransferId, peer: Incarnation) -> DecodeTransfer | None:
        """The live transfer that this peer may speak of."""
        transfer = self._live.get(tid)
        if transfer is not None and transfer.peer != peer:
            self.faults[f"{event} from a stranger"] += 1
            return None
        return transfer

    def _take(self, *touched: DecodeTransfer | None) -> list[DecodeAction]:
        """What is to be done; of the transfers just touched, those that are over are remembered only."""
        for transfer in touched:
            if transfer is not None and transfer.is_over:
                del self._live[transfer.tid]
                self._ended.remember(transfer.peer, transfer.tid, errors.DONE)
        actions = list(self._common.out)
        self._common.out.clear()
        return actions


def _ended_before_submit(tid: TransferId, code: str) -> HandedOver | Refuse:
    """What P said about an id before we knew it is all there will be."""
    if code == errors.FINISHED:
        return HandedOver(tid=tid)
    ours = known(code)
    reason = f"{code} on the prefill node"
    return Refuse(tid=tid, code=ours, retryable=ours in errors.RETRYABLE, reason=reason)
