"""What the transfer state machines ask their caller to do. Frozen values, carried out in order.

Owns the vocabulary of both sides. Must never know when an action is due: that is `prefill_side` and
`decode_side`.
"""

from dataclasses import dataclass

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Handoff, ToDecode, ToPrefill
from kv_transfer.transport import Ready, WriteHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    """Put a message on the session to this peer."""

    peer: Incarnation
    message: ToPrefill | ToDecode


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuse:
    """Answer a Submit with Rejected. From `submit` it concerns only that Submit, never a live tid."""

    tid: TransferId
    code: str
    retryable: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Fail:
    """Tell the router Failed. Pages may outlive the report; they come back by ReleasePages."""

    tid: TransferId
    code: str
    retryable: bool
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleasePages:
    """D: the lease returns to the pool. P: no write reads the request's pages any more."""

    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class ClosePeer:
    """Tear this peer's data connection and session down, then report `peer_lost`."""

    peer: Incarnation
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Join:
    """D: every page landed. The lease becomes the request's; it joins the running batch."""

    tid: TransferId
    handoff: Handoff
    page_ids: tuple[int, ...]
    skip_tokens: int
    transfer_s: float  # first news of the data to the last


@dataclass(frozen=True, slots=True, kw_only=True)
class HandedOver:
    """D: the request ended on P with its first token; report Finished "handed_over", generate nothing."""

    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class QuarantinePages:
    """D: P may still write: the lease moves to quarantine."""

    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class ReleaseQuarantine:
    """D: P cannot write any more: the quarantined pages return to the pool."""

    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class Write:
    """P: call `transport.write(peer, pages.tid, pages)` and report its handle with `wrote`, at once."""

    peer: Incarnation
    pages: Ready


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelWrite:
    """P: call `transport.cancel`; the write still settles by an event."""

    handle: WriteHandle


@dataclass(frozen=True, slots=True, kw_only=True)
class StopCompute:
    """P: the engine must write no more KV of this request, but must keep its pages until ReleasePages."""

    tid: TransferId


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverDone:
    """P: D has every page and the handoff record; report Finished "handed_over"."""

    tid: TransferId
    num_pages: int  # written
    transfer_s: float  # first write to the last acknowledgement


DecodeAction = (
    Send | Refuse | Fail | ReleasePages | ClosePeer | Join | HandedOver | QuarantinePages | ReleaseQuarantine
)
PrefillAction = (
    Send | Refuse | Fail | ReleasePages | ClosePeer | Write | CancelWrite | StopCompute | HandoverDone
)
