"""How a draft tree grows: beams by joint probability, then the best nodes with all their ancestors.

Owns scores and parents of every candidate, for a batch of requests that grow in step. Must never know
networks, KV or what the tokens are. Choices are stable: by score, equals by the earlier candidate; as a
child never scores above its parent and comes after it, what is chosen is closed under ancestors.

Shapes: `B` requests, `K` candidates per row and beams per step, `C` candidates so far.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Beams:
    """What the next forward expands. `sources_BK`: the beam before from which each comes (-1: the root)."""

    token_ids_BK: Ids
    sources_BK: Ids


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Chosen candidates of one request in order. `parents`: node ids, 0 = root, node i + 1 = entry i.

    ranks: the least limit at which each entry is chosen.
    """

    candidates: tuple[int, ...]
    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    ranks: tuple[int, ...]


class Growth:
    """Candidates in rows of K siblings: row 0 below the root, then K rows (one per beam) per step."""

    def __init__(self, p_BK: Floats, token_ids_BK: Ids) -> None:
        num_requests, self._width = p_BK.shape
        self._scores_BC = p_BK
        self._token_ids_BC = token_ids_BK
        self._row_parents_BR: Ids = np.full((num_requests, 1), -1, dtype=np.int64)
        self._beam_scores_BK = p_BK
        self._beam_ids_BK: Ids = np.tile(np.arange(self._width), (num_requests, 1))

    @property
    def scores_BC(self) -> Floats:
        return self._scores_BC

    @property
    def row_parents_BR(self) -> Ids:
        """The candidate below which each row of siblings hangs, -1 for the root."""
        return self._row_parents_BR

    def beams(self) -> Beams:
        """The first beams: all candidates below the root."""
        return Beams(token_ids_BK=self._token_ids_BC, sources_BK=np.full_like(self._beam_ids_BK, -1))

    def expand(self, p_BKK: Floats, token_ids_BKK: Ids) -> Beams:
        """Take the candidates below every beam; keep the K best of them as the next beams."""
        width, first = self._width, self._scores_BC.shape[1]
        joint_BC = (self._beam_scores_BK[:, :, None] * p_BKK).reshape(len(p_BKK), -1)
        flat_BC = token_ids_BKK.reshape(len(p_BKK), -1)
        self._scores_BC = np.concatenate((self._scores_BC, joint_BC), axis=1)
        self._token_ids_BC = np.concatenate((self._token_ids_BC, flat_BC), axis=1)
        self._row_parents_BR = np.concatenate((self._row_parents_BR, self._beam_ids_BK), axis=1)
        chosen_BK = np.argsort(-joint_BC, axis=1, kind="stable")[:, :width]
        self._beam_scores_BK = np.take_along_axis(joint_BC, chosen_BK, axis=1)
        self._beam_ids_BK = chosen_BK + first
        return Beams(
            token_ids_BK=np.take_along_axis(flat_BC, chosen_BK, axis=1), sources_BK=chosen_BK // width
        )

    def select(self, request: int, limit: int) -> Selection:
        """The `limit` best candidates (all, where there are fewer) as nodes; parents precede children."""
        best = np.argsort(-self._scores_BC[request], kind="stable")[:limit]
        order = np.argsort(best)
        chosen = best[order]
        candidates = chosen.tolist()
        return Selection(
            candidates=tuple(candidates),
            token_ids=tuple(self._token_ids_BC[request, chosen].tolist()),
            parents=node_parents(candidates, self._row_parents_BR[request].tolist(), width=self._width),
            ranks=tuple((order + 1).tolist()),
        )


def node_parents(candidates: Sequence[int], row_parents: Sequence[int], *, width: int) -> tuple[int, ...]:
    """Parent node of each candidate of an ascending selection that is closed under ancestors."""
    node_of = {-1: 0} | {candidate: node for node, candidate in enumerate(candidates, start=1)}
    return tuple(node_of[row_parents[candidate // width]] for candidate in candidates)


def num_candidates(*, width: int, num_steps: int) -> int:
    """How many candidates a growth of `num_steps` steps has."""
    return width + (num_steps - 1) * width**2
