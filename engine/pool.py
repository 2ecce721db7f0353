"""The KV pool's memory: one byte array of whole pages and typed views into it.

Owns the bytes and where each region of each page lies. Must never know who owns a page.

Shapes: `P` pages, `S` slots of a page, `H` KV heads, `D` head dim; 2 stands for (K, V).
"""

import ctypes
from collections.abc import Mapping, Sequence
from itertools import groupby, pairwise

import torch

from engine.layout import KvLayout, Region

TORCH_DTYPES: Mapping[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}
_ALIGNMENT_BYTES = 4096


class PagePool:
    """`num_pages` pages of `layout`, page p at byte `p * page_bytes`, zeroed at start.

    Every view aliases `storage`, which lives as long as the pool.
    """

    def __init__(self, layout: KvLayout, num_pages: int, device: torch.device) -> None:
        if num_pages < 1:
            raise ValueError(f"num_pages must be at least 1, got {num_pages}")
        self.layout = layout
        self.num_pages = num_pages
        self.device = device
        self.dtype = TORCH_DTYPES[layout.dtype]
        self.storage = _aligned_zeros(num_pages * layout.page_bytes, device)
        elements = self.storage.view(self.dtype)
        regions = {(region.pool, region.layer, region.kind): region for region in layout.regions}
        self._pairs = {
            (pool, layer): self._pair_view(elements, region, regions[pool, layer, "v"])
            for (pool, layer, kind), region in regions.items()
            if kind == "k"
        }
        self._stacks = [
            self._stack_view(elements, list(of_pool))
            for _, of_pool in groupby(layout.regions, key=lambda region: region.pool)
        ]

    @property
    def address(self) -> int:
        """Where the first byte lies (a device address on GPU)."""
        return self.storage.data_ptr()

    @property
    def buffer(self) -> memoryview:
        """The whole pool as writable bytes (CPU only). The caller keeps the pool alive."""
        if self.device.type != "cpu":
            raise ValueError(f"buffer needs a pool in host memory, this one is on {self.device}")
        array = (ctypes.c_uint8 * self.storage.numel()).from_address(self.address)
        return memoryview(array).cast("B")

    def page(self, page_id: int) -> memoryview:
        """The bytes of one page, writable (CPU only)."""
        if not 0 <= page_id < self.num_pages:
            raise ValueError(f"page_id must be in [0, {self.num_pages}), got {page_id}")
        start = page_id * self.layout.page_bytes
        return self.buffer[start : start + self.layout.page_bytes]

    def kv(self, pool: str, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of one layer, each a strided view `[P, S, H, D]`."""
        pair_P2SHD = self._pairs[pool, layer]
        return pair_P2SHD[:, 0], pair_P2SHD[:, 1]

    def kv_pair(self, pool: str, layer: int) -> torch.Tensor:
        """K and V of one layer as one strided view `[P, 2, S, H, D]`."""
        return self._pairs[pool, layer]

    def move_rows(self, source_slots: torch.Tensor, target_slots: torch.Tensor) -> None:
        """Copy slot `source_slots[i]` onto `target_slots[i]` in every region of every pool.

        Slots are flat (`page * page_size + offset`, int64). All sources are read before any target
        is written, so the two sets may overlap.
        """
        page_size = self.layout.page_size
        source = (source_slots // page_size, source_slots % page_size)
        target = (target_slots // page_size, target_slots % page_size)
        for stack_PLSR in self._stacks:
            stack_PLSR[target[0], :, target[1]] = stack_PLSR[source[0], :, source[1]]

    def _stack_view(self, elements: torch.Tensor, regions: Sequence[Region]) -> torch.Tensor:
        """All regions of one pool, K and V of every layer: one view `[P, L, S, R]`, rows of `R` elements."""
        first, spacing = regions[0], regions[1].offset - regions[0].offset
        assert all(b.offset - a.offset == spacing for a, b in pairwise(regions)), "uneven regions of a pool"
        size, row = self.dtype.itemsize, first.num_heads * first.head_dim
        return elements.as_strided(
            (self.num_pages, len(regions), self.layout.page_size, row),
            (self.layout.page_bytes // size, spacing // size, row, 1),
            elements.storage_offset() + first.offset // size,
        )

    def _pair_view(self, elements: torch.Tensor, k: Region, v: Region) -> torch.Tensor:
        size = self.dtype.itemsize
        row = k.num_heads * k.head_dim
        return elements.as_strided(
            (self.num_pages, 2, self.layout.page_size, k.num_heads, k.head_dim),
            (self.layout.page_bytes // size, (v.offset - k.offset) // size, row, k.head_dim, 1),
            elements.storage_offset() + k.offset // size,  # as_strided counts from the raw storage
        )


def _aligned_zeros(num_bytes: int, device: torch.device) -> torch.Tensor:
    """Zeros that start on a memory page, so that a registration covers nobody else's bytes."""
    raw = torch.zeros(num_bytes + _ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    skip = -raw.data_ptr() % _ALIGNMENT_BYTES
    return raw[skip : skip + num_bytes]
