"""What a core counts, under the keys by which `wire.node_metrics` finds it.

Owns the totals and the histograms of one core. Must never know a state of a transfer, nor a role.
"""

from collections import Counter
from collections.abc import Mapping

from engine.request import Request
from wire.tally import Tallies


class CoreCounts:
    """`totals` and `times` only grow, all of them since start."""

    def __init__(self, *times: str) -> None:
        """`times`: the histograms that are there from the start."""
        self.totals: Counter[str] = Counter()
        self.times = Tallies(*times)

    def count(self, key: str, number: int = 1) -> None:
        self.totals[key] += number

    def prefix_looked_up(self, request: Request) -> None:
        """The prefix cache was asked for this prompt."""
        self.totals["prefix_query_tokens"] += len(request.prompt_ids)
        self.totals["prefix_hit_tokens"] += request.num_cached_tokens

    def transferred(self, transport: str, *, num_bytes: int, seconds: float) -> None:
        """The KV of one prompt went over in full."""
        self.totals[f"transfers/{transport}"] += 1
        self.totals[f"transfer_bytes/{transport}"] += num_bytes
        self.times.observe(f"transfer_s/{transport}", seconds)

    def transfer_failed(self, transport: str, code: str) -> None:
        """`transport` "": none was agreed yet."""
        self.totals[f"transfer_failures/{transport or 'none'}/{code}"] += 1

    def unexpected_message(self) -> None:
        """A peer sent a message that its role never sends."""
        self.totals["transfer_faults/unexpected_message"] += 1


def faults_of(faults: Mapping[str, int]) -> dict[str, float]:
    """What a transfer machine counts of messages that its states do not allow."""
    return {f"transfer_faults/{fault}": float(count) for fault, count in faults.items()}
