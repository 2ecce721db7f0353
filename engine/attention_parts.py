"""How the torch backend attends: long spans one by one, short ones padded into groups.

Owns the gathering of context and the shapes kernels like. Must never know which row belongs where
in the pool (`engine.attention`), nor why a row may see another (`engine.attention_mask`).

Shapes: `T` packed rows, `B` spans of a group, `N` rows per span, `L` context slots, `P` pages,
`S` slots of a page, `H` query heads, `K` KV heads, `G` = H / K, `D` head dim, `M` masked slots,
`X` = B * K, `R` = G * N.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F

from engine.attention_mask import SpanMask, additive, visible
from engine.batch import Span

# Rows of a long span whose scores are computed at once.
_BLOCK_ROWS = 128
# Up to this many context slots in a group, one fused call beats separate products.
_MAX_FUSED_SLOTS = 512


class Scratch:
    """Grow-only buffers by name: fresh memory for a whole context costs more than reading it."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
        """Uninitialised memory of `like`'s dtype and device, the previous taker's of that name."""
        size = prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < size or buffer.dtype != like.dtype:
            with torch.inference_mode(False):  # usable in and out of inference mode
                buffer = torch.empty(size, dtype=like.dtype, device=like.device)
            self._buffers[name] = buffer
        return buffer[:size].view(shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What every part of one plan shares."""

    page_size: int
    window: int | None
    dtype: torch.dtype
    device: torch.device
    scratch: Scratch

    def ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def first_page(self, span: Span) -> int:
        """The first page any row of the span can see: earlier ones left the window."""
        if self.window is None:
            return 0
        return max(0, span.num_committed - self.window + 1) // self.page_size


class Part(Protocol):
    """Some spans attended to together. `rows`: their packed rows, in the order of the result."""

    @property
    def rows(self) -> slice | torch.Tensor: ...

    def attend(self, q_THD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Block:
    """Some rows of a long span and the context slots any of them sees, counted from its first page.

    mask_NM: additive, for the last M of those slots; all before are seen by every row.
    """

    rows: slice
    slots: slice
    mask_NM: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Single:
    """One long span, block of rows after block of rows: none computes scores it would mask away,
    but for its own diagonal, and scores stay in cache."""

    rows: slice
    page_ids: torch.Tensor
    blocks: tuple[_Block, ...]
    scratch: Scratch

    @classmethod
    def build(cls, span: Span, rows: slice, geometry: Geometry) -> "Single":
        first_page = geometry.first_page(span)
        last_page = -(-(span.num_committed + len(span.token_ids)) // geometry.page_size)
        mask = SpanMask.of(span, window=geometry.window)
        return cls(
            rows=rows,
            scratch=geometry.scratch,
            page_ids=geometry.ids(span.pages[first_page:last_page]),
            blocks=tuple(
                _block(mask, start, first_page * geometry.page_size, geometry)
                for start in range(0, mask.num_rows, _BLOCK_ROWS)
            ),
        )

    def attend(self, q_THD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor:
        num_kv_heads, head_dim = pool_P2SKD.shape[3:]
        k_KLD, v_KLD = _gather_by_head(
            pool_P2SKD, self.page_ids, self.scratch, num_spans=1, dtype=q_THD.dtype
        )
        q_NHD = q_THD[self.rows]
        q_KGND = q_NHD.view(len(q_NHD), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        out_NHD = torch.empty(q_NHD.shape, dtype=q_NHD.dtype, device=q_NHD.device)
        out_KGND = out_NHD.view(len(q_NHD), num_kv_heads, -1, head_dim).permute(1, 2, 0, 3)
        for block in self.blocks:
            q_KRD = q_KGND[:, :, block.rows].reshape(num_kv_heads, -1, head_dim)
            scores_KRL = _scores(q_KRD, k_KLD[:, block.slots])
            num_rows, num_masked = block.mask_NM.shape
            scores_KRL.view(num_kv_heads, -1, num_rows, scores_KRL.shape[2])[..., -num_masked:].add_(
                block.mask_NM
            )
            attended_KRD = torch.bmm(scores_KRL.softmax(dim=2), v_KLD[:, block.slots])
            out_KGND[:, :, block.rows] = attended_KRD.view(num_kv_heads, -1, num_rows, head_dim)
        return out_NHD


def _block(mask: SpanMask, start: int, first_slot: int, geometry: Geometry) -> _Block:
    stop = min(start + _BLOCK_ROWS, mask.num_rows)
    end_slot = mask.num_committed + (stop if mask.ancestors_NN is None else mask.num_rows)
    begin_slot, mask_slot = first_slot, mask.num_committed
    if mask.is_causal:
        mask_slot += start
    elif mask.window is not None:
        begin_slot = mask_slot = max(first_slot, mask.num_committed + start - mask.window + 1)
        if mask.ancestors_NN is not None:
            begin_slot = mask_slot = first_slot
    seen_NM = visible(mask, mask_slot, end_slot)[start:stop]
    return _Block(
        rows=slice(start, stop),
        slots=slice(begin_slot - first_slot, end_slot - first_slot),
        mask_NM=additive(seen_NM, geometry.dtype).to(geometry.device),
    )


@dataclass(slots=True, kw_only=True)
class Group:
    """Short spans padded to one shape. GQA folded into rows: a KV head serves its G * N query rows.

    padded_T: packed row of each (span, row), the last row repeated; None when `rows` is a slice and
    nothing is padded. kept_T: which padded rows are real. mask_BNL: None when every row sees all.
    mask_XRL: the same for X = B * K heads and R = G * N rows, made by the first layer.
    """

    rows: slice | torch.Tensor
    num_spans: int
    padded_T: torch.Tensor | None
    kept_T: torch.Tensor | None
    page_ids: torch.Tensor
    context_len: int
    is_fused: bool
    scratch: Scratch
    mask_BNL: torch.Tensor | None
    mask_XRL: torch.Tensor | None = None

    @classmethod
    def build(cls, spans: Sequence[Span], slices: Sequence[slice], geometry: Geometry) -> "Group":
        num_rows = max(len(span.token_ids) for span in spans)
        firsts = [geometry.first_page(span) for span in spans]
        lengths = [span.num_committed + len(span.token_ids) for span in spans]
        tables = [
            list(span.pages[first : -(-length // geometry.page_size)])
            for span, first, length in zip(spans, firsts, lengths, strict=True)
        ]
        num_pages = max(len(table) for table in tables)
        page_ids = [page for table in tables for page in table + table[-1:] * (num_pages - len(table))]
        context_len = max(
            length - first * geometry.page_size for length, first in zip(lengths, firsts, strict=True)
        )
        is_fused = len(spans) * context_len <= _MAX_FUSED_SLOTS
        if not is_fused:
            context_len = num_pages * geometry.page_size  # `bmm` would copy anything narrower
        rows, padded_T, kept_T = _packing(slices, num_rows, geometry)
        return cls(
            rows=rows,
            num_spans=len(spans),
            padded_T=padded_T,
            kept_T=kept_T,
            page_ids=geometry.ids(page_ids),
            context_len=context_len,
            is_fused=is_fused,
            scratch=geometry.scratch,
            mask_BNL=_group_mask(spans, firsts, num_rows, context_len, geometry),
        )

    def attend(self, q_THD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor:
        num_kv_heads, head_dim = pool_P2SKD.shape[3:]
        q_RHD = q_THD[self.rows] if self.padded_T is None else q_THD[self.padded_T]
        q_BNKGD = q_RHD.view(self.num_spans, -1, num_kv_heads, q_RHD.shape[1] // num_kv_heads, head_dim)
        q_XRD = q_BNKGD.permute(0, 2, 3, 1, 4).reshape(self.num_spans * num_kv_heads, -1, head_dim)
        self._fold_mask(num_kv_heads, groups=q_BNKGD.shape[3])
        if self.is_fused:
            out_XRD = self._attend_fused(q_XRD, pool_P2SKD)
        else:
            out_XRD = self._attend_by_products(q_XRD, pool_P2SKD)
        num_rows, groups = q_BNKGD.shape[1], q_BNKGD.shape[3]
        out_BKGND = out_XRD.reshape(self.num_spans, num_kv_heads, groups, num_rows, head_dim)
        out_RHD = out_BKGND.permute(0, 3, 1, 2, 4).reshape(q_RHD.shape)
        return out_RHD if self.kept_T is None else out_RHD[self.kept_T]

    def _fold_mask(self, num_kv_heads: int, *, groups: int) -> None:
        if self.mask_BNL is not None and self.mask_XRL is None:
            mask_BKGNL = self.mask_BNL[:, None, None].expand(-1, num_kv_heads, groups, -1, -1)
            self.mask_XRL = mask_BKGNL.flatten(0, 1).flatten(1, 2)

    def _attend_fused(self, q_XRD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor:
        """One fused kernel: fewest calls, best while there is little to compute."""
        k_BKLD, v_BKLD = (
            pool_P2SKD[:, kind]
            .index_select(0, self.page_ids)
            .to(q_XRD.dtype)
            .view(self.num_spans, -1, *pool_P2SKD.shape[3:])[:, : self.context_len]
            .transpose(1, 2)
            for kind in (0, 1)
        )
        q_BKRD = q_XRD.view(self.num_spans, -1, *q_XRD.shape[1:])
        mask = None if self.mask_XRL is None else self.mask_XRL.view(*q_BKRD.shape[:3], -1)
        return F.scaled_dot_product_attention(q_BKRD, k_BKLD, v_BKLD, attn_mask=mask)

    def _attend_by_products(self, q_XRD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor:
        """Two batched products: three times the fused kernel's speed on CPU once there is work."""
        k_XLD, v_XLD = _gather_by_head(
            pool_P2SKD, self.page_ids, self.scratch, num_spans=self.num_spans, dtype=q_XRD.dtype
        )
        scores_XRL = _scores(q_XRD, k_XLD, self.mask_XRL)
        return torch.bmm(scores_XRL.softmax(dim=2), v_XLD)


def _scores(q_XRD: torch.Tensor, k_XLD: torch.Tensor, mask_XRL: torch.Tensor | None = None) -> torch.Tensor:
    """q k^T / sqrt(D) + mask, `[X, R, L]`."""
    scale = q_XRD.shape[2] ** -0.5
    if mask_XRL is None:
        return torch.baddbmm(q_XRD[:, :1, :1], q_XRD, k_XLD.transpose(1, 2), beta=0.0, alpha=scale)
    return torch.baddbmm(mask_XRL, q_XRD, k_XLD.transpose(1, 2), alpha=scale)


def _gather_by_head(
    pool_P2SKD: torch.Tensor, page_ids: torch.Tensor, scratch: Scratch, *, num_spans: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the pages, each `[num_spans * K, slots, D]` contiguous: what `bmm` takes as it is."""
    num_kv_heads, head_dim = pool_P2SKD.shape[3:]
    pages = scratch.take("pages", (len(page_ids), *pool_P2SKD.shape[1:]), pool_P2SKD)
    torch.index_select(pool_P2SKD, 0, page_ids, out=pages)
    by_head_2BKPSD = pages.view(num_spans, -1, *pages.shape[1:]).permute(2, 0, 4, 1, 3, 5)
    heads_2BKPSD = scratch.take("heads", by_head_2BKPSD.shape, pool_P2SKD).copy_(by_head_2BKPSD)
    heads_2XLD = heads_2BKPSD.view(2, num_spans * num_kv_heads, -1, head_dim).to(dtype)
    return heads_2XLD[0], heads_2XLD[1]


def _packing(
    slices: Sequence[slice], num_rows: int, geometry: Geometry
) -> tuple[slice | torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(rows, padded_BN flattened or None, kept or None) of a group; see `Group`."""
    is_adjacent = all(a.stop == b.start for a, b in pairwise(slices))
    is_even = all(part.stop - part.start == num_rows for part in slices)
    if is_adjacent and is_even:
        return slice(slices[0].start, slices[-1].stop), None, None
    padded = [min(part.start + row, part.stop - 1) for part in slices for row in range(num_rows)]
    kept = [
        index * num_rows + row for index, part in enumerate(slices) for row in range(part.stop - part.start)
    ]
    rows = geometry.ids([row for part in slices for row in range(part.start, part.stop)])
    return rows, geometry.ids(padded), geometry.ids(kept)


def _group_mask(
    spans: Sequence[Span],
    first_pages: Sequence[int],
    num_rows: int,
    context_len: int,
    geometry: Geometry,
) -> torch.Tensor | None:
    """`[B, N, L]` additive, or None when every row sees all of the context."""
    masks = [SpanMask.of(span, window=geometry.window) for span in spans]
    firsts = [page * geometry.page_size for page in first_pages]
    if all(mask.sees_all(first, first + context_len) for mask, first in zip(masks, firsts, strict=True)):
        return None
    seen_BNL = np.empty((len(spans), num_rows, context_len), dtype=np.bool_)
    for mask, first, seen_NL in zip(masks, firsts, seen_BNL, strict=True):
        seen_NL[: mask.num_rows] = visible(mask, first, first + context_len)
        seen_NL[mask.num_rows :] = seen_NL[mask.num_rows - 1]  # padding rows are the last one again
    return additive(seen_BNL, geometry.dtype).to(geometry.device)
