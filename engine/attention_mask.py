"""Who sees whom: the visibility of context slots to the rows of a span, on the host.

Owns causality, trees and sliding windows. Must never know pages or tensors of a model.

Shapes: `N` rows of a span, `L` context slots.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.batch import Span


@dataclass(frozen=True, slots=True, kw_only=True)
class SpanMask:
    """A span's rows: `ancestors_NN[i, j]` = row i sees row j (None: causal), `depth_N` their place.

    Slot s < num_committed is at place s, row i at place num_committed + depth_N[i]; a window of w
    hides every place <= own place - w.
    """

    num_committed: int
    num_rows: int
    ancestors_NN: npt.NDArray[np.bool_] | None
    depth_N: npt.NDArray[np.int64]
    window: int | None

    @classmethod
    def of(cls, span: Span, *, window: int | None) -> "SpanMask":
        num_rows = len(span.token_ids)
        if span.is_bidirectional:
            ancestors, depth = np.ones((num_rows, num_rows), dtype=np.bool_), np.arange(num_rows)
        elif span.parents is None:
            ancestors, depth = None, np.arange(num_rows)
        else:
            ancestors, depth = _ancestors(span.parents)
        if window is not None and window > span.num_committed + num_rows:
            window = None
        return cls(
            num_committed=span.num_committed,
            num_rows=num_rows,
            ancestors_NN=ancestors,
            depth_N=depth,
            window=window,
        )

    @property
    def is_causal(self) -> bool:
        return self.ancestors_NN is None and self.window is None

    def sees_all(self, first_slot: int, end_slot: int) -> bool:
        """Whether no row misses any slot in [first_slot, end_slot)."""
        last_slot = self.num_committed + self.num_rows - 1
        is_mutual = self.num_rows == 1 or (self.ancestors_NN is not None and bool(self.ancestors_NN.all()))
        is_within = self.window is None or first_slot > last_slot - self.window
        return is_mutual and is_within and end_slot <= last_slot + 1


def visible(mask: SpanMask, first_slot: int, end_slot: int) -> npt.NDArray[np.bool_]:
    """`[N, L]` over slots [first_slot, end_slot); slots past the span's own rows are hidden."""
    place_L = np.arange(first_slot, end_slot)
    place_N = mask.num_committed + mask.depth_N
    if mask.ancestors_NN is None:
        seen_NL = place_L <= place_N[:, None]
    else:
        own = slice(mask.num_committed - first_slot, mask.num_committed - first_slot + mask.num_rows)
        seen_NL = np.zeros((mask.num_rows, len(place_L)), dtype=np.bool_)
        seen_NL[:, : own.start] = True
        seen_NL[:, own] = mask.ancestors_NN
        place_L[own] = place_N
    if mask.window is not None:
        seen_NL &= place_L > place_N[:, None] - mask.window
    return seen_NL


def additive(seen: npt.NDArray[np.bool_], dtype: torch.dtype) -> torch.Tensor:
    """0 where seen, -inf where hidden: the mask form attention kernels take as it is."""
    return torch.from_numpy(np.where(seen, np.float32(0.0), np.float32("-inf"))).to(dtype)


def _ancestors(parents: Sequence[int]) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    """Each row's ancestors, itself included, and its depth below the root."""
    seen_NN = np.eye(len(parents), dtype=np.bool_)
    depth_N = np.zeros(len(parents), dtype=np.int64)
    for row, parent in enumerate(parents):
        if parent >= 0:
            seen_NN[row] |= seen_NN[parent]
            depth_N[row] = depth_N[parent] + 1
    return seen_NN, depth_N
