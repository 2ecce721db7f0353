"""What a node tells routers of the pages in its prefix cache (PROTOCOL.md, "KV events"). Plain values."""

from dataclasses import dataclass

from engine.page_hash import DIGEST_BYTES, PageHash

__all__ = ["DIGEST_BYTES", "KvSubscribe", "KvUpdate", "PageHash"]


@dataclass(frozen=True, slots=True, kw_only=True)
class KvSubscribe:
    """Router to node: tell me all cached pages, then every change. Sent again, it starts over."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KvUpdate:
    """Node to router. Applies to what was known up to change number `previous`, and is then up to `sequence`.

    With `hashing` it begins anew: whatever was known of this node is void, whatever `previous` says.
    """

    previous: int
    sequence: int
    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    hashing: PageHash | None = None
