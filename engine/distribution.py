"""From scores to a probability distribution per row, and from a uniform number to a token.

Owns temperature, min-p, top-k, top-p and the inverse CDF. Must never know of requests or seeds.
Shapes: `R` rows, `V` vocabulary, `C` most likely candidates, `L` lanes of one block.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch.nn.functional import pad

# The CDF is built in two levels: over blocks of this many tokens, then within one block.
_BLOCK_TOKENS = 128
# How many candidates the first search for a boundary looks at; where they do not do, it sorts all.
_FIRST_CANDIDATES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Filters:
    """Per row, float64 or int64 `[R]` on the scores' device. top_k 0, top_p 1 and min_p 0 mean off."""

    temperature_R: torch.Tensor
    min_p_R: torch.Tensor
    top_k_R: torch.Tensor
    top_p_R: torch.Tensor

    def of(self, rows_R: torch.Tensor) -> "Filters":
        return Filters(
            temperature_R=self.temperature_R[rows_R],
            min_p_R=self.min_p_R[rows_R],
            top_k_R=self.top_k_R[rows_R],
            top_p_R=self.top_p_R[rows_R],
        )


def weights(scores_RV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """Unnormalised probabilities, float32 `[R, V]`, from float32 scores `[R, V]`. Temperatures are positive.

    Filters apply one after the other, in vLLM's order, each to what the one before has left:
    temperature; min-p keeps p >= min_p * max p; top-k keeps exactly k; top-p keeps the shortest run of
    the most likely whose mass reaches top_p. Equal scores rank by lower id. A row without any possible
    token, or with a NaN or +inf, comes back as NaN.
    """
    probs_RV = torch.softmax(scores_RV / filters.temperature_R[:, None].float(), dim=-1)
    if bool((filters.min_p_R > 0).any()):
        floor_R = probs_RV.amax(dim=-1) * filters.min_p_R
        probs_RV.mul_(probs_RV >= floor_R[:, None].float())
    is_ranked_R = (filters.top_k_R > 0) | (filters.top_p_R < 1.0)
    ranked_F = is_ranked_R.nonzero()[:, 0]
    if len(ranked_F) == len(probs_RV):
        probs_RV.mul_(_is_most_likely(probs_RV, scores_RV, filters))
    elif len(ranked_F):
        ranked_FV = probs_RV[ranked_F]
        probs_RV[ranked_F] = ranked_FV * _is_most_likely(ranked_FV, scores_RV[ranked_F], filters.of(ranked_F))
    return probs_RV


def pick(weights_RV: torch.Tensor, uniforms_R: torch.Tensor) -> torch.Tensor:
    """Inverse CDF in token-id order: the first token whose cumulated weight exceeds u * total. int64 `[R]`.

    uniforms float64 `[R]` in [0, 1). Never a token of weight 0. Rows whose total is NaN or 0 give -1.
    """
    num_rows, vocab_size = weights_RV.shape
    padded_RV = (
        pad(weights_RV, (0, -vocab_size % _BLOCK_TOKENS)) if vocab_size % _BLOCK_TOKENS else weights_RV
    )
    blocks_RBL = padded_RV.view(num_rows, -1, _BLOCK_TOKENS)
    # Sums are float64 from here on: the rest of a row's law must not depend on how the row was split.
    ends_RB = blocks_RBL.sum(dim=-1).double().cumsum(dim=-1)
    goals_R = uniforms_R * ends_RB[:, -1]
    block_R = (ends_RB <= goals_R[:, None]).sum(dim=-1).clamp(max=ends_RB.shape[1] - 1)
    rows_R = torch.arange(num_rows, device=weights_RV.device)
    start_R = torch.where(block_R > 0, ends_RB[rows_R, (block_R - 1).clamp(min=0)], 0.0)
    inner_RL = blocks_RBL[rows_R, block_R].double().cumsum(dim=-1)
    lane_R = (inner_RL <= (goals_R - start_R)[:, None]).sum(dim=-1)
    # Rounding can place the goal past the block's last possible token; that token is meant then.
    last_R = (inner_RL < inner_RL[:, -1:]).sum(dim=-1)
    token_R = block_R * _BLOCK_TOKENS + torch.minimum(lane_R, last_R)
    return torch.where(ends_RB[:, -1] > 0, token_R, -1)


def _is_most_likely(probs_RV: torch.Tensor, scores_RV: torch.Tensor, filters: Filters) -> torch.Tensor:
    """What top-k, then top-p leave. Ranks by score, because different scores may round to one probability."""
    vocab_size = scores_RV.shape[1]
    top_k_R = torch.where(filters.top_k_R > 0, filters.top_k_R, vocab_size).clamp(max=vocab_size)
    num_candidates = min(vocab_size, int(top_k_R.max()) + 1, _FIRST_CANDIDATES)
    best = scores_RV.topk(num_candidates, dim=-1)
    mass_RC = probs_RV.gather(1, best.indices)
    num_kept_R = _num_kept(mass_RC, probs_RV, top_k_R, filters.top_p_R)
    edges_R = _Edges.after(best.values, num_kept_R.clamp(max=num_candidates))
    if num_candidates < vocab_size:
        for row in (num_kept_R >= num_candidates).nonzero()[:, 0].tolist():
            edges_R.replace_(row, _exact_edge(probs_RV, scores_RV, top_k_R, filters.top_p_R, row=row))
    return edges_R.is_inside(scores_RV)


@dataclass(frozen=True, slots=True)
class _Edges:
    """Where each row's kept run ends: its last score, how many of that score stay, and whether some go."""

    score_R: torch.Tensor
    num_tied_R: torch.Tensor
    cuts_tie_R: torch.Tensor

    @staticmethod
    def after(ranked_RC: torch.Tensor, num_kept_R: torch.Tensor) -> "_Edges":
        """The first `num_kept_R` of scores that fall along C; they are whole, or one more than are kept."""
        score_R1 = ranked_RC.gather(1, num_kept_R[:, None] - 1)
        num_above_R = (ranked_RC > score_R1).sum(dim=-1)
        num_upto_R = (ranked_RC >= score_R1).sum(dim=-1)
        return _Edges(score_R1[:, 0], num_kept_R - num_above_R, num_upto_R > num_kept_R)

    def replace_(self, row: int, edge: "_Edges") -> None:
        self.score_R[row] = edge.score_R[0]
        self.num_tied_R[row] = edge.num_tied_R[0]
        self.cuts_tie_R[row] = edge.cuts_tie_R[0]

    def is_inside(self, scores_RV: torch.Tensor) -> torch.Tensor:
        is_kept_RV = scores_RV >= self.score_R[:, None]
        if bool(self.cuts_tie_R.any()):
            is_tied_RV = scores_RV == self.score_R[:, None]
            is_kept_RV &= ~is_tied_RV | (is_tied_RV.cumsum(dim=-1) <= self.num_tied_R[:, None])
        return is_kept_RV


def _num_kept(
    mass_RC: torch.Tensor, probs_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor
) -> torch.Tensor:
    """How many of the best each row keeps, at least one; C or more means that C candidates do not do.

    mass_RC: probabilities after min-p of the best candidates, best first.
    """
    num_candidates, vocab_size = mass_RC.shape[1], probs_RV.shape[1]
    ends_RC = mass_RC.double().cumsum(dim=-1)
    top_k_mass_R = ends_RC.gather(1, top_k_R.clamp(max=num_candidates)[:, None] - 1)[:, 0]
    top_k_mass_R = torch.where(top_k_R > num_candidates, torch.inf, top_k_mass_R)
    total_R = torch.where(top_k_R < vocab_size, top_k_mass_R, probs_RV.sum(dim=-1).double())
    num_short_R = (ends_RC < (top_p_R * total_R)[:, None]).sum(dim=-1)
    # With top-p off nothing may be lost to the rounding of the total.
    return torch.where(top_p_R < 1.0, torch.minimum(num_short_R + 1, top_k_R), top_k_R)


def _exact_edge(
    probs_RV: torch.Tensor, scores_RV: torch.Tensor, top_k_R: torch.Tensor, top_p_R: torch.Tensor, *, row: int
) -> _Edges:
    """The edge of one row from the whole of it, sorted."""
    # Probabilities fall as scores fall, so sorting each by itself keeps them in step.
    one = slice(row, row + 1)
    ranked_1V, mass_1V = _sorted_down(scores_RV[one]), _sorted_down(probs_RV[one])
    num_kept_1 = _num_kept(mass_1V, probs_RV[one], top_k_R[one], top_p_R[one]).clamp(max=ranked_1V.shape[1])
    return _Edges.after(ranked_1V[:, : int(num_kept_1[0]) + 1], num_kept_1)


def _sorted_down(values_RV: torch.Tensor) -> torch.Tensor:
    """On the CPU numpy sorts many times faster than torch does."""
    if values_RV.device.type == "cpu":
        return torch.from_numpy(-np.sort(-values_RV.numpy(), axis=-1))
    return values_RV.sort(dim=-1, descending=True).values
