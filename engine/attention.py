"""Attention over the page pool: a plan per forward, then one `attend` per layer.

Owns slot arithmetic (which page and offset a row writes), the gathering of context and the masks.
Must never know weights, rotary embedding or what a request is.

Shapes: `T` packed rows, `B` spans of a group, `N` rows per span, `L` context slots, `P` pages,
`S` slots of a page, `H` query heads, `K` KV heads, `G` = H / K, `D` head dim, `A` = H * D.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from engine.attention_mask import SpanMask, additive, visible
from engine.batch import Span

# Above this many rows a span is attended to alone: its matrix products are large enough, and
# padding others to its length would not pay.
_MAX_GROUPED_ROWS = 48
# A span joins a group only while padding wastes less than this share of the gathered pages.
_MAX_PADDING = 0.35


class AttentionPlan(Protocol):
    """Where the rows of one forward lie and what each may see."""

    def attend(self, q_THD: torch.Tensor, kv_T2KD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor:
        """Write the rows' K and V into one layer of the pool, then attend: `[T, A]`, new memory."""
        ...


class AttentionBackend(Protocol):
    """How attention is computed on one kind of device."""

    def plan(
        self,
        spans: Sequence[Span],
        *,
        page_size: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> AttentionPlan:
        """Once per forward and window. `dtype`: that of the queries."""
        ...


class TorchAttention:
    """The torch backend: gathers pages, then one `scaled_dot_product_attention` per group of spans."""

    def plan(
        self,
        spans: Sequence[Span],
        *,
        page_size: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "TorchPlan":
        geometry = _Geometry(page_size=page_size, window=window, dtype=dtype, device=device)
        slices = _row_slices(spans)
        small = [i for i, span in enumerate(spans) if len(span.token_ids) <= _MAX_GROUPED_ROWS]
        large = [i for i, span in enumerate(spans) if len(span.token_ids) > _MAX_GROUPED_ROWS]
        parts: list[_Part] = [
            _Group.build([spans[i] for i in members], [slices[i] for i in members], geometry)
            for members in _similar_lengths(spans, small, page_size)
        ]
        parts += [_Single.build(spans[i], slices[i], geometry) for i in large]
        page_T, offset_T = _write_slots(spans, geometry)
        return TorchPlan(parts, page_T, offset_T)


class TorchPlan:
    """The parts partition the packed rows."""

    def __init__(self, parts: Sequence["_Part"], page_T: torch.Tensor, offset_T: torch.Tensor) -> None:
        self._parts = parts
        self._page_T = page_T
        self._offset_T = offset_T

    def attend(self, q_THD: torch.Tensor, kv_T2KD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor:
        pool_P2SKD[self._page_T, :, self._offset_T] = kv_T2KD.to(pool_P2SKD.dtype)
        if len(self._parts) == 1 and isinstance(self._parts[0].rows, slice):
            return self._parts[0].attend(q_THD, pool_P2SKD).flatten(1)
        out_THD = torch.empty(q_THD.shape, dtype=q_THD.dtype, device=q_THD.device)
        for part in self._parts:
            out_THD[part.rows] = part.attend(q_THD, pool_P2SKD)
        return out_THD.flatten(1)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Geometry:
    page_size: int
    window: int | None
    dtype: torch.dtype
    device: torch.device

    def ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def first_page(self, span: Span) -> int:
        """The first page any row of the span can see: earlier ones left the window."""
        if self.window is None:
            return 0
        return max(0, span.num_committed - self.window + 1) // self.page_size


class _Part(Protocol):
    """Some spans attended to in one call. `rows`: their packed rows, in the order of the result."""

    @property
    def rows(self) -> slice | torch.Tensor: ...

    def attend(self, q_THD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _Single:
    """One long span. GQA by a stride of 0: KV heads are the batch, query heads of each its heads."""

    rows: slice
    page_ids: torch.Tensor
    context_len: int
    mask_NL: torch.Tensor | None
    is_causal: bool

    @classmethod
    def build(cls, span: Span, rows: slice, geometry: _Geometry) -> "_Single":
        first_page = geometry.first_page(span)
        first_slot = first_page * geometry.page_size
        length = span.num_committed + len(span.token_ids)
        last_page = -(-length // geometry.page_size)
        mask = SpanMask.of(span, window=geometry.window)
        is_causal = mask.is_causal and span.num_committed == 0
        return cls(
            rows=rows,
            page_ids=geometry.ids(span.pages[first_page:last_page]),
            context_len=length - first_slot,
            mask_NL=None
            if is_causal
            else additive(visible(mask, first_slot, length), geometry.dtype).to(geometry.device),
            is_causal=is_causal,
        )

    def attend(self, q_THD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor:
        k_LKD, v_LKD = _gather(pool_P2SKD, self.page_ids, q_THD.dtype)
        num_kv_heads = k_LKD.shape[1]
        q_KGND = q_THD[self.rows].unflatten(1, (num_kv_heads, -1)).permute(1, 2, 0, 3)
        groups = q_KGND.shape[1]
        k_KGLD = k_LKD[: self.context_len].transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
        v_KGLD = v_LKD[: self.context_len].transpose(0, 1).unsqueeze(1).expand(-1, groups, -1, -1)
        out_KGND = F.scaled_dot_product_attention(
            q_KGND, k_KGLD, v_KGLD, attn_mask=self.mask_NL, is_causal=self.is_causal
        )
        return out_KGND.permute(2, 0, 1, 3).flatten(1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Group:
    """Short spans padded to one shape. GQA folded into rows: a KV head serves its G * N query rows.

    padded_BN: packed row of each (span, row), the last row repeated; None when `rows` is a slice
    and nothing is padded. mask: `[B, 1, G * N, L]` is built per G on first use of `mask_BNL`.
    """

    rows: slice | torch.Tensor
    num_spans: int
    padded_BN: torch.Tensor | None
    kept: torch.Tensor | None
    page_ids: torch.Tensor
    context_len: int
    mask_BNL: torch.Tensor | None

    @classmethod
    def build(cls, spans: Sequence[Span], slices: Sequence[slice], geometry: _Geometry) -> "_Group":
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
        rows, padded_BN, kept = _packing(slices, num_rows, geometry)
        return cls(
            rows=rows,
            num_spans=len(spans),
            padded_BN=padded_BN,
            kept=kept,
            page_ids=geometry.ids(page_ids),
            context_len=context_len,
            mask_BNL=_group_mask(spans, firsts, num_rows, context_len, geometry),
        )

    def attend(self, q_THD: torch.Tensor, pool_P2SKD: torch.Tensor) -> torch.Tensor:
        q_RHD = q_THD[self.rows] if self.padded_BN is None else q_THD[self.padded_BN]
        k_LKD, v_LKD = _gather(pool_P2SKD, self.page_ids, q_THD.dtype)
        num_kv_heads = k_LKD.shape[1]
        q_BNKGD = q_RHD.unflatten(1, (num_kv_heads, -1)).unflatten(0, (self.num_spans, -1))
        groups, num_rows = q_BNKGD.shape[3], q_BNKGD.shape[1]
        q_BKRD = q_BNKGD.permute(0, 2, 3, 1, 4).flatten(2, 3)
        k_BKLD = k_LKD.unflatten(0, (self.num_spans, -1))[:, : self.context_len].transpose(1, 2)
        v_BKLD = v_LKD.unflatten(0, (self.num_spans, -1))[:, : self.context_len].transpose(1, 2)
        mask = None if self.mask_BNL is None else self.mask_BNL.repeat(1, groups, 1).unsqueeze(1)
        out_BKRD = F.scaled_dot_product_attention(q_BKRD, k_BKLD, v_BKLD, attn_mask=mask)
        out_RHD = out_BKRD.unflatten(2, (groups, num_rows)).permute(0, 3, 1, 2, 4).flatten(0, 1).flatten(1, 2)
        return out_RHD if self.kept is None else out_RHD[self.kept]


def _gather(
    pool_P2SKD: torch.Tensor, page_ids: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of the pages, one after the other: `[pages * S, K, D]` each."""
    k = pool_P2SKD[:, 0].index_select(0, page_ids).flatten(0, 1)
    v = pool_P2SKD[:, 1].index_select(0, page_ids).flatten(0, 1)
    return k.to(dtype), v.to(dtype)


def _row_slices(spans: Sequence[Span]) -> list[slice]:
    slices: list[slice] = []
    start = 0
    for span in spans:
        slices.append(slice(start, start + len(span.token_ids)))
        start += len(span.token_ids)
    return slices


def _write_slots(spans: Sequence[Span], geometry: _Geometry) -> tuple[torch.Tensor, torch.Tensor]:
    """Page and offset of every packed row."""
    pages: list[int] = []
    offsets: list[int] = []
    for span in spans:
        for slot in range(span.num_committed, span.num_committed + len(span.token_ids)):
            pages.append(span.pages[slot // geometry.page_size])
            offsets.append(slot % geometry.page_size)
    return geometry.ids(pages), geometry.ids(offsets)


def _similar_lengths(spans: Sequence[Span], members: Sequence[int], page_size: int) -> list[list[int]]:
    """Groups of spans whose contexts pad to one length without much waste; packed order kept inside."""
    pages = {i: -(-(spans[i].num_committed + len(spans[i].token_ids)) // page_size) for i in members}
    groups: list[list[int]] = []
    total = 0
    for i in sorted(members, key=lambda member: -pages[member]):
        if groups and total + pages[i] >= (1 - _MAX_PADDING) * pages[groups[-1][0]] * (len(groups[-1]) + 1):
            groups[-1].append(i)
            total += pages[i]
        else:
            groups.append([i])
            total = pages[i]
    return [sorted(group) for group in groups]


def _packing(
    slices: Sequence[slice], num_rows: int, geometry: _Geometry
) -> tuple[slice | torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """(rows, padded_BN flattened or None, kept or None) of a group; see `_Group`."""
    is_adjacent = all(a.stop == b.start for a, b in zip(slices, slices[1:], strict=False))
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
    geometry: _Geometry,
) -> torch.Tensor | None:
    """`[B, N, L]` additive, or None when every row sees all of the context."""
    masks = []
    for span, first_page in zip(spans, first_pages, strict=True):
        first_slot = first_page * geometry.page_size
        seen_NL = visible(SpanMask.of(span, window=geometry.window), first_slot, first_slot + context_len)
        masks.append(torch.cat((seen_NL, seen_NL[-1:].expand(num_rows - len(seen_NL), -1))))
    seen_BNL = torch.stack(masks)
    if bool(seen_BNL.all()):
        return None
    return additive(seen_BNL, geometry.dtype).to(geometry.device)
