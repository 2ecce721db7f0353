"""A draft's output head: logits over its own vocabulary, and what its ids mean in the target's.

Owns the id map and its checks. Must never know the network before it.

Shapes: `R` rows, `E` hidden width, `V` draft vocabulary, `K` candidates per row.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """`target_ids_V`: the target's id of each draft id, or None where they are the same."""

    head_VE: torch.Tensor
    target_ids_V: Ids | None

    @property
    def vocab_size(self) -> int:
        return self.head_VE.shape[0]

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden_RE, self.head_VE).float()

    def to_target(self, draft_ids: Ids) -> Ids:
        return draft_ids if self.target_ids_V is None else self.target_ids_V[draft_ids]


def best(logits_RV: torch.Tensor, count: int) -> tuple[Floats, Ids]:
    """The `count` likeliest ids of each row, best first, equals by id; and their probabilities."""
    values_RK, ids_RK = logits_RV.topk(count)
    # Rounding may push a probability above 1, and a child above its parent.
    p_RK = (values_RK - logits_RV.logsumexp(dim=1, keepdim=True)).exp().clamp_(max=1.0)
    p, ids = p_RK.cpu().numpy(), ids_RK.cpu().numpy()
    order = np.lexsort((ids, -p), axis=1)
    return np.take_along_axis(p, order, axis=1), np.take_along_axis(ids, order, axis=1)


def target_ids_of(d2t_V: torch.Tensor, *, target_vocab: int) -> Ids:
    """Ids from a `d2t` table, which holds offsets: draft id i is the target's i + d2t[i].

    Raises ValueError when an id falls outside the target's vocabulary or two draft ids meet.
    """
    offsets = d2t_V.cpu().to(torch.int64).numpy()
    ids: Ids = np.arange(len(offsets), dtype=np.int64) + offsets
    outside = np.flatnonzero((ids < 0) | (ids >= target_vocab))
    if len(outside):
        first = int(outside[0])
        raise ValueError(
            f"d2t must stay inside the target's vocabulary of {target_vocab},"
            f" got id {int(ids[first])} at d2t[{first}]"
        )
    if len(np.unique(ids)) != len(ids):
        raise ValueError("d2t must give every draft id its own target id, got one twice")
    return ids


def check_membership(t2d: torch.Tensor, target_ids: Ids) -> None:
    """`t2d` marks the target ids that the draft has. Raises ValueError when it contradicts `d2t`."""
    members = np.flatnonzero(t2d.cpu().to(torch.bool).numpy())
    if not np.array_equal(members, np.sort(target_ids)):
        raise ValueError(f"t2d must mark the {len(target_ids)} target ids of d2t, got {len(members)} others")
