"""Drawing the drafts of a chain from the draft's own distribution, and keeping what they were drawn from.

Owns q: the draft's logits under the temperature and the filters of the request, in the target's ids. Must
never know the network, nor how a chain is verified.

The coin of a draft is (seed, position of the round's root, step) of the draft stream. Not the draft's own
position: a draft that fell bears on what its round emitted, so the next round must not draw by its coin.
Shapes: `R` rows, one per request; `V` draft vocabulary, `K` steps.
"""

from collections.abc import MutableSequence, Sequence

import torch

from engine.distribution import pick, weights
from engine.randomness import DRAFT_STREAM, Coins
from engine.request import Request
from engine.sampling import filters_of, takes_best
from speculative.drafts.head import Ids


def draws_drafts(request: Request) -> bool:
    """Whether drawing can make a difference; the likeliest token is certain otherwise."""
    return not takes_best(request.sampling)


class ChainDraws:
    """The draws of one proposal. Invariant: as many rows of q per request as tokens drawn for it."""

    def __init__(self, coins: Coins, *, target_ids_V: Ids | None, target_vocab_size: int) -> None:
        self._coins = coins
        self._target_ids_V = target_ids_V
        self._target_vocab_size = target_vocab_size
        self._q_rows: dict[Request, list[torch.Tensor]] = {}

    def redraw_(
        self, ids: MutableSequence[int], requests: Sequence[Request], logits_RV: torch.Tensor, *, step: int
    ) -> None:
        """Put drawn ids in the places of the requests that sample; `logits_RV`, float32, has all rows."""
        rows = [row for row, request in enumerate(requests) if draws_drafts(request)]
        if rows:
            part = slice(None) if len(rows) == len(requests) else rows
            drawn = self.draw([requests[row] for row in rows], logits_RV[part], step=step)
            for row, draft_id in zip(rows, drawn, strict=True):
                ids[row] = draft_id

    def draw(self, requests: Sequence[Request], logits_RV: torch.Tensor, *, step: int) -> list[int]:
        """One draft id per request, all of which `draws_drafts`, from float32 logits `[R, V]`."""
        params = [request.sampling for request in requests]
        weights_RV = weights(logits_RV, filters_of(params, logits_RV.device))
        q_RV = weights_RV / weights_RV.sum(dim=-1, keepdim=True)
        coins_R = self._coins(
            [p.seed for p in params],
            [request.num_committed for request in requests],
            DRAFT_STREAM,
            [step] * len(requests),
        )
        ids: list[int] = pick(q_RV, coins_R.to(q_RV.device)).tolist()
        for row, request in enumerate(requests):
            if ids[row] < 0:  # the draft's logits are no numbers: whatever it drafts then is certain
                ids[row] = 0
                q_RV[row] = 0.0
                q_RV[row, 0] = 1.0
            self._q_rows.setdefault(request, []).append(self._in_target_ids(q_RV[row]))
        return ids

    def q_KV(self, request: Request, count: int) -> torch.Tensor | None:
        """Of the first `count` tokens; None where none was drawn, because they are certain."""
        rows = self._q_rows.get(request, [])[:count]
        return torch.stack(rows) if rows else None

    def _in_target_ids(self, q_V: torch.Tensor) -> torch.Tensor:
        if self._target_ids_V is None:
            return q_V
        whole_V = q_V.new_zeros(self._target_vocab_size)
        whole_V[torch.from_numpy(self._target_ids_V).to(q_V.device)] = q_V
        return whole_V
