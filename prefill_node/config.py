"""Settings of one prefill node: those of every node (`wire.node_config`), and what differs here.

Owns the names, defaults and meanings of its own.
"""

from dataclasses import dataclass

from wire.node_config import NodeConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefillConfig(NodeConfig):
    """Every instance is valid: bad values raise ValueError naming the field."""

    port: int = 7101
    """Port of the gRPC server; 0 takes a free one."""

    max_running: int = 16
    """Most requests in the running batch."""

    algorithm: str = "ngram"
    """Drafting algorithm of the decode nodes this node feeds; "none" for none. Must be equal on a pair."""
