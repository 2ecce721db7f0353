"""What ties a draft's vocabulary to the target's: its output head, the map of its ids, its embedding.

Owns the id map and its checks. Must never know the network in between.

Shapes: `R` rows, `E` hidden width, `V` draft vocabulary, `K` candidates per row.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from engine.linear import Linear
from engine.models.model import Model
from speculative.drafts import names
from speculative.drafts.config import check_same
from speculative.drafts.folder import TensorReader

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftHead:
    """`target_ids_V`: the target's id of each draft id, or None where they are the same."""

    head: Linear
    target_ids_V: Ids | None

    @property
    def vocab_size(self) -> int:
        return self.head.num_outputs

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.head(hidden_RE).float()

    def to_target(self, draft_ids: Ids) -> Ids:
        return draft_ids if self.target_ids_V is None else self.target_ids_V[draft_ids]


def best(logits_RV: torch.Tensor, count: int) -> tuple[Floats, Ids]:
    """The `count` likeliest ids of each row, best first, equals by id; and their probabilities."""
    values_RK, ids_RK = logits_RV.topk(count)
    # Rounding may push a probability above 1, and a child above its parent.
    p_RK = (values_RK - logits_RV.logsumexp(dim=1, keepdim=True)).exp().clamp_(max=1.0)
    p, ids = p_RK.cpu().numpy(), ids_RK.cpu().numpy()
    order = (np.arange(len(p))[:, None], np.lexsort((ids, -p), axis=1))
    return p[order], ids[order]


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


def read_target_ids(reader: TensorReader, *, size: int, target_vocab: int) -> Ids | None:
    """The checkpoint's map for a draft vocabulary of `size`; None where it is the target's own.

    Raises ValueError for a map that is missing or cannot be.
    """
    if not reader.has(names.D2T):
        if size != target_vocab:
            raise ValueError(f"the draft's checkpoint lacks d2t, which draft_vocab_size {size} needs")
        if reader.has(names.T2D):
            raise ValueError("the draft's checkpoint has t2d without d2t")
        return None
    target_ids = target_ids_of(reader.take_raw(names.D2T, (size,)), target_vocab=target_vocab)
    if reader.has(names.T2D):
        check_membership(reader.take_raw(names.T2D, (target_vocab,)), target_ids)
    return target_ids


def read_embedding(reader: TensorReader, shape: tuple[int, int], model: Model) -> torch.Tensor:
    """The draft's own where the checkpoint has one, else the target's, which must be as wide."""
    if not reader.has(names.EMBEDDING):
        check_same(f"hidden_size without {names.EMBEDDING}", shape[1], model.config.hidden_size)
        return model.embedding_VE
    return reader.take(names.EMBEDDING, shape)
