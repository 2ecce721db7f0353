"""What a core counts of its transfers, under the keys by which `wire.node_metrics` finds them.

Owns the keys. Must never know a state of a transfer, nor a role.
"""

from collections import Counter
from collections.abc import Mapping

from wire.tally import Tallies

UNEXPECTED = "transfer_faults/unexpected_message"


class TransferCounts:
    """Counts into its core's `counters` and `times`."""

    def __init__(self, counters: Counter[str], times: Tallies) -> None:
        self._counters = counters
        self._times = times

    def done(self, transport: str, *, num_bytes: int, seconds: float) -> None:
        """The KV of one prompt went over in full."""
        self._counters[f"transfers/{transport}"] += 1
        self._counters[f"transfer_bytes/{transport}"] += num_bytes
        self._times.observe(f"transfer_s/{transport}", seconds)

    def failed(self, transport: str, code: str) -> None:
        """`transport` "": none was agreed yet."""
        self._counters[f"transfer_failures/{transport or 'none'}/{code}"] += 1

    def unexpected(self) -> None:
        """A peer sent a message that its role never sends."""
        self._counters[UNEXPECTED] += 1


def faults_of(faults: Mapping[str, int]) -> dict[str, float]:
    """What a transfer machine counts of messages that its states do not allow."""
    return {f"transfer_faults/{fault}": float(count) for fault, count in faults.items()}
