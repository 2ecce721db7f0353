"""What a node's core reports of each request it has taken on, and what is counted of it on the way.

Owns the account of every such request, and the words to its router. Must never know pages, nor how a
transfer or a step came to its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from engine.request import Request
from kv_transfer import errors
from kv_transfer.actions import Fail, Refuse
from kv_transfer.geometry import Agreement
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.peers import PeerTable
from speculative.progress import Progress
from wire.core_counts import CoreCounts
from wire.desk import Desk
from wire.intake import tid_of
from wire.work import Failed, Finished, Preempted, PromptInfo, PromptLogprobs, Rejected, Tokens


@dataclass(slots=True, kw_only=True)
class Account:
    """What is noted of one request while it is here, by whoever learns it. Times are the core's."""

    request: Request
    submitted: float
    deadline: float
    peer: Incarnation | None
    started: float = 0.0
    computed: float = 0.0  # P: its prompt; D: its last token
    kv_bytes: int = 0
    transport: str = ""
    transfer_s: float = 0.0
    terms: Agreement | None = None  # D: with the peer, once pages are granted

    @property
    def queue_s(self) -> float:
        return self.started - self.submitted

    @property
    def compute_s(self) -> float:
        return self.computed - self.started

    @property
    def seedless(self) -> str:
        """What of the drafts differs, where the prompt comes without ours."""
        return str(self.terms.draft_differs) if self.terms is not None and self.terms.is_seedless else ""


def undrawn_code(progress: Progress) -> str:
    """Why a request fails for which no token could be drawn."""
    return errors.NO_TOKEN if progress.is_all_forbidden else errors.BAD_LOGITS


class Reports:
    """Invariant: a request has an account from `open` to `close`, however its router has been answered."""

    def __init__(self, *, desk: Desk, peers: PeerTable, counts: CoreCounts, compute_time: str) -> None:
        """`compute_time`: the key under which the seconds of computing are counted."""
        self._desk = desk
        self._peers = peers
        self._counts = counts
        self._compute_time = compute_time
        self._accounts: dict[TransferId, Account] = {}

    def __contains__(self, tid: object) -> bool:
        return tid in self._accounts

    def __len__(self) -> int:
        return len(self._accounts)

    def __iter__(self) -> Iterator[TransferId]:
        return iter(tuple(self._accounts))

    def account(self, tid: TransferId) -> Account:
        return self._accounts[tid]

    def open(self, account: Account) -> None:
        self._accounts[tid_of(account.request)] = account

    def close(self, tid: TransferId) -> None:
        """Nothing more will be reported; unknown ids are ignored."""
        self._accounts.pop(tid, None)

    def started(self, request: Request, *, now: float) -> None:
        """The engine has admitted it."""
        tid = tid_of(request)
        self._accounts[tid].started = now
        self._counts.prefix_looked_up(request)
        self._desk.tell(PromptInfo(tid=tid, cached_tokens=request.num_cached_tokens))

    def advanced(self, progress: Progress) -> None:
        """Tell what a step added to it."""
        tid = tid_of(progress.request)
        if progress.prompt_logprobs:
            self._desk.tell(
                PromptLogprobs(tid=tid, first_index=progress.first_scored, logprobs=progress.prompt_logprobs)
            )
        if progress.tokens:
            self._desk.tell(
                Tokens(
                    tid=tid,
                    first_index=progress.request.num_outputs - len(progress.tokens),
                    ids=progress.tokens,
                    logprobs=progress.logprobs,
                    drafted=progress.num_drafted,
                    accepted=progress.num_accepted,
                )
            )

    def computed(self, tid: TransferId, *, now: float) -> Account:
        """Nothing of it is left to compute here."""
        account = self._accounts[tid]
        account.computed = now
        self._counts.times.observe("queue_s", account.queue_s)
        self._counts.times.observe(self._compute_time, account.compute_s)
        return account

    def transferred(self, tid: TransferId, *, transport: str, num_bytes: int, seconds: float) -> None:
        """Its KV has gone over in full."""
        account = self._accounts[tid]
        account.transport, account.kv_bytes, account.transfer_s = transport, num_bytes, seconds
        self._counts.transferred(transport, num_bytes=num_bytes, seconds=seconds)

    def transfer_failed(self, action: Fail | Refuse) -> None:
        account = self._accounts.get(action.tid)
        peer = None if account is None else account.peer
        transport = "" if peer is None else self._peers.transport_name(peer)
        self._counts.transfer_failed(transport, action.code)
        self.end(Failed(tid=action.tid, code=action.code, retryable=action.retryable, reason=action.reason))

    def finished(
        self, tid: TransferId, reason: str, *, num_steps: int, stop_token_id: int | None = None
    ) -> None:
        """It came to its end, with all that its account says."""
        account = self._accounts[tid]
        self.end(
            Finished(
                tid=tid,
                reason=reason,
                stop_token_id=stop_token_id,
                kv_bytes=account.kv_bytes,
                transport=account.transport,
                queue_s=account.queue_s,
                compute_s=account.compute_s,
                transfer_s=account.transfer_s,
                num_steps=num_steps,
                seedless=account.seedless,
            )
        )

    def end(self, event: Failed | Finished | Preempted | Rejected) -> None:
        """The last its router hears of it. The account stays until `close`."""
        if isinstance(event, Failed):
            self._counts.count(f"failed/{event.code}")
        elif isinstance(event, Finished):
            self._counts.count(f"finished/{event.reason}")
        self._desk.tell(event)
