"""What lies where inside a KV page. Torch-free values, compared at handshake.

A page holds, for `page_size` tokens, every layer's K and V of every pool (target, then draft),
contiguous in memory. A region is `[page_size, num_heads, head_dim]` of one `(pool, layer, kind)`.
Must never know where the pool lives or who owns a page.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TARGET_POOL = "target"


@dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """KV geometry of one model: "target" or a draft."""

    pool: str
    num_layers: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """One `[page_size, num_heads, head_dim]` array inside every page, `offset` bytes from its start."""

    pool: str
    layer: int
    kind: str  # "k" or "v"
    offset: int
    num_heads: int
    head_dim: int

    @property
    def name(self) -> str:
        return f"{self.pool}.{self.layer}.{self.kind}"


@dataclass(frozen=True, slots=True, kw_only=True)
class KvLayout:
    """The regions of a page. Equal `fingerprint` means a page can be copied whole between two nodes."""

    page_size: int
    dtype: str
    page_bytes: int
    regions: tuple[Region, ...]

    @property
    def fingerprint(self) -> str:
        text = repr((self.page_size, self.dtype, self.page_bytes, self.regions))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()

    @property
    def target_regions(self) -> tuple[Region, ...]:
        return tuple(region for region in self.regions if region.pool == TARGET_POOL)

    @property
    def target_bytes(self) -> int:
        """The leading bytes of a page that hold no draft's region: all of the target's, as we build them."""
        drafts = [region.offset for region in self.regions if region.pool != TARGET_POOL]
        return min(drafts, default=self.page_bytes)


def build_layout(*, page_size: int, dtype: str, pools: Sequence[PoolSpec]) -> KvLayout:
    """Lay the pools out one after the other, K before V in each layer, regions 64-byte aligned."""
    if page_size < 1:
        raise ValueError(f"page_size must be at least 1, got {page_size}")
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"kv dtype must be one of {sorted(DTYPE_BYTES)}, got {dtype!r}")
    regions: list[Region] = []
    offset = 0
    for spec in pools:
        region_bytes = page_size * spec.num_kv_heads * spec.head_dim * DTYPE_BYTES[dtype]
        for layer in range(spec.num_layers):
            for kind in ("k", "v"):
                regions.append(
                    Region(
                        pool=spec.pool,
                        layer=layer,
                        kind=kind,
                        offset=offset,
                        num_heads=spec.num_kv_heads,
                        head_dim=spec.head_dim,
                    )
                )
                offset += -(-region_bytes // 64) * 64
    return KvLayout(page_size=page_size, dtype=dtype, page_bytes=offset, regions=tuple(regions))
