"""Why a transfer ended, as the codes both sides, their routers and the counters use.

Owns the list and which of them another attempt can cure. Must never know who reports them, or to whom.
"""

from typing import Final

FINISHED: Final = "finished"  # not an error: the request ended with its first token, on P
DONE: Final = "done"  # not an error: handed over (P) or joined the batch (D)

CANCELLED: Final = "cancelled"  # by the router
DEADLINE: Final = "deadline"  # the request's own
DUPLICATE: Final = "duplicate"  # this id was seen before

QUEUE_TIMEOUT: Final = "queue_timeout"  # D had no pages in time
PREFILL_TIMEOUT: Final = "prefill_timeout"  # D reserved and nothing came
NO_PROGRESS: Final = "no_progress"  # pages stopped landing
RESERVE_TIMEOUT: Final = "reserve_timeout"  # P computed and D never reserved
WRITE_TIMEOUT: Final = "write_timeout"  # P's writes did not settle
WRITE_FAILED: Final = "write_failed"  # a transport said so
CHECKSUM: Final = "checksum"  # what landed is not what left
PEER_CANCELLED: Final = "peer_cancelled"  # D gave up on it
PEER_FAILED: Final = "peer_failed"  # P failed for a reason only P knows
PEER_LOST: Final = "peer_lost"  # or D never got a session to P
INCOMPATIBLE: Final = "incompatible"  # the pair's Hellos differ
OVERLOADED: Final = "overloaded"
BAD_LOGITS: Final = "bad_logits"  # no token could be drawn, and none could on another node
NO_TOKEN: Final = "no_token"  # the same, because the request itself forbids all
PROTOCOL: Final = "protocol"  # an event that its state does not list

RETRYABLE: Final = frozenset(
    {
        QUEUE_TIMEOUT,
        PREFILL_TIMEOUT,
        NO_PROGRESS,
        RESERVE_TIMEOUT,
        WRITE_TIMEOUT,
        WRITE_FAILED,
        CHECKSUM,
        PEER_CANCELLED,
        PEER_FAILED,
        PEER_LOST,
        INCOMPATIBLE,
        OVERLOADED,
        PROTOCOL,
    }
)
CODES: Final = RETRYABLE | {CANCELLED, DEADLINE, DUPLICATE, BAD_LOGITS, NO_TOKEN}
