"""Attention over the page pool: a plan per forward, then one `attend` per layer.

Owns slot arithmetic (which page and offset a row writes) and which spans are attended to together;
`engine.attention_parts` computes. Must never know weights, rotary embedding or what a request is.

Shapes: `T` packed rows, `B` spans of a group, `N` rows per span, `L` context slots, `P` pages,
`S` slots of a page, `H` query heads, `K` KV heads, `G` = H / K, `D` head dim, `A` = H * D.
"""

from collections.abc import Sequence
from typing import Protocol

import torch

from engine.attention_parts import Geometry, Group, Part, Scratch, Single
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
    """The torch backend: gathers pages into scratch memory that all layers and forwards share.

    One instance per engine thread: the scratch is in use during each `attend`.
    """

    def __init__(self) -> None:
        self._scratch = Scratch()

    def plan(
        self,
        spans: Sequence[Span],
        *,
        page_size: int,
        window: int | None,
        dtype: torch.dtype,
        device: torch.device,
    ) -> "TorchPlan":
        geometry = Geometry(
            page_size=page_size, window=window, dtype=dtype, device=device, scratch=self._scratch
        )
        slices = _row_slices(spans)
        small = [i for i, span in enumerate(spans) if len(span.token_ids) <= _MAX_GROUPED_ROWS]
        large = [i for i, span in enumerate(spans) if len(span.token_ids) > _MAX_GROUPED_ROWS]
        parts: list[Part] = [
            Group.build([spans[i] for i in members], [slices[i] for i in members], geometry)
            for members in _similar_lengths(spans, small, page_size)
        ]
        parts += [Single.build(spans[i], slices[i], geometry) for i in large]
        page_T, offset_T = _write_slots(spans, geometry)
        return TorchPlan(parts, page_T, offset_T)


class TorchPlan:
    """The parts partition the packed rows."""

    def __init__(self, parts: Sequence["Part"], page_T: torch.Tensor, offset_T: torch.Tensor) -> None:
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


def _row_slices(spans: Sequence[Span]) -> list[slice]:
    slices: list[slice] = []
    start = 0
    for span in spans:
        slices.append(slice(start, start + len(span.token_ids)))
        start += len(span.token_ids)
    return slices


def _write_slots(spans: Sequence[Span], geometry: Geometry) -> tuple[torch.Tensor, torch.Tensor]:
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
