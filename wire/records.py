"""What a node says of itself in the registry. Plain values; `wire.convert` turns them into protobuf."""

from dataclasses import dataclass

from kv_transfer.ids import Incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Load:
    """A node's load at its last heartbeat. Pages are KV pages, tokens prompt tokens not yet computed."""

    free_pages: int = 0
    total_pages: int = 0
    running: int = 0
    waiting: int = 0
    queued_tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeRecord:
    """One node as the registry knows it; written with a time to live, renewed by heartbeats."""

    role: str  # "prefill" or "decode"
    address: str  # host:port of its gRPC server
    incarnation: Incarnation
    model: str
    layout: str  # KvLayout.fingerprint
    page_size: int
    max_model_len: int
    vocab_size: int
    transports: tuple[str, ...]
    eos_token_ids: tuple[int, ...] = ()
    started_at: float = 0.0  # seconds since the epoch; orders the incarnations of one address
    is_draining: bool = False
    load: Load = Load()
    metrics_address: str = ""  # host:port of its /metrics; "": it has none
