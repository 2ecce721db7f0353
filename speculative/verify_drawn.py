"""Verifying chains that a draft model drew from its own distribution q: rejection sampling, for a batch.

Owns how the chains of many requests are packed for one pass over p and q. Must never know how a chain was
drawn. What was drafted with certainty, and what is greedy, goes by the target's own draws instead: there
q would be 1 on one token, and that rule has the same law and keeps the text of plain decoding.

Coins: whether the draft of a step stands is (seed, position of the root, step) of the accept stream; the
token after the last that stands takes the target's coin at its position. Each is read in one round only.
Shapes: `R` rows, `D` drafts of all chains, `C` chains.
"""

from collections.abc import Sequence
from itertools import accumulate, pairwise

import torch

from engine.params import TokenLogprob
from engine.randomness import ACCEPT_STREAM, Coins, uniforms
from engine.sampling import NO_TOKEN, Law, Row, draw_from, law_of, logprobs_of, no_token_reason, takes_best
from speculative.accept import Acceptance
from speculative.accept_rules import ChainRule, DrawnChain, residual
from speculative.verify import Drafted, DrawAtEveryNode, Verdict, Verify


class VerifyDrawn:
    """The emitted law is the target's; the text depends on the seed and on what was drafted."""

    def __init__(self, rule: ChainRule, *, coins: Coins = uniforms) -> None:
        self._rule = rule
        self._coins = coins
        self._others = DrawAtEveryNode(coins=coins)

    def __call__(self, logits_RV: torch.Tensor, rounds: Sequence[Drafted]) -> list[Verdict]:
        drawn = [i for i, drafted in enumerate(rounds) if _is_drawn(drafted)]
        if not drawn:
            return self._others(logits_RV, rounds)
        others = sorted(set(range(len(rounds))) - set(drawn))
        first_rows = list(accumulate((drafted.tree.num_nodes for drafted in rounds), initial=0))
        verdicts: dict[int, Verdict] = {}
        verifiers: tuple[tuple[list[int], Verify], ...] = ((drawn, self._judge), (others, self._others))
        for chosen, verify in verifiers:
            rows = [row for i in chosen for row in range(first_rows[i], first_rows[i + 1])]
            part = slice(None) if len(chosen) == len(rounds) else rows
            found = verify(logits_RV[part], [rounds[i] for i in chosen])
            verdicts |= dict(zip(chosen, found, strict=True))
        return [verdicts[i] for i in range(len(rounds))]

    def _judge(self, logits_RV: torch.Tensor, rounds: Sequence[Drafted]) -> list[Verdict]:
        rows = [row for drafted in rounds for row in drafted.rows()]
        law = law_of(logits_RV, rows)
        packed = _Packed(rounds, law.weights_RV)
        chains = packed.chains(self._coins)
        scales = [self._rule.scales(chain) for chain in chains]
        masses = packed.masses(scales) if self._rule.reads_masses else [()] * len(chains)
        counts = [
            self._rule.num_correct(chain, scale, mass)
            for chain, scale, mass in zip(chains, scales, masses, strict=True)
        ]
        left_CV = packed.left(
            counts, [self._rule.scale_after(scale, n) for scale, n in zip(scales, counts, strict=True)]
        )
        last = draw_from(
            left_CV,
            seeds=[drafted.state.params.seed for drafted in rounds],
            positions=[
                drafted.state.num_tokens + count for drafted, count in zip(rounds, counts, strict=True)
            ],
            coins=self._coins,
        )
        accepted = [
            Acceptance(tuple(range(count + 1)), (*drafted.tree.token_ids[1 : count + 1], token_id))
            for drafted, count, token_id in zip(rounds, counts, last, strict=True)
        ]
        return [
            _verdict(outcome, law, rows, logits_RV=logits_RV, first_row=first_row)
            for outcome, first_row in zip(accepted, packed.first_rows, strict=True)
        ]


def _is_drawn(drafted: Drafted) -> bool:
    tree = drafted.tree
    return (
        drafted.q_KV is not None
        and tree.num_nodes > 1
        and tree.is_chain
        and not takes_best(drafted.state.params)
    )


def _verdict(
    accepted: Acceptance, law: Law, rows: Sequence[Row], *, logits_RV: torch.Tensor, first_row: int
) -> Verdict:
    stop = first_row + len(accepted.nodes)
    logprobs: Sequence[TokenLogprob | None] = [None] * len(accepted.nodes)
    if rows[first_row].state.params.logprobs is not None:
        logprobs = logprobs_of(logits_RV[first_row:stop], rows[first_row:stop], accepted.token_ids)
    is_missing = accepted.token_ids[-1] == NO_TOKEN
    error = no_token_reason(law.scores_RV[stop - 1]) if is_missing else ""
    return Verdict(accepted=accepted, logprobs=tuple(logprobs), error=error)


class _Packed:
    """Chains one after the other: a chain of K drafts has K + 1 rows of p and K rows of q."""

    def __init__(self, rounds: Sequence[Drafted], weights_RV: torch.Tensor) -> None:
        self._rounds = rounds
        self._weights_RV = weights_RV
        self._device = weights_RV.device
        self._totals_R = weights_RV.sum(dim=-1, dtype=torch.float64)
        self._lengths = [drafted.tree.num_nodes - 1 for drafted in rounds]
        self._first_drafts = list(accumulate(self._lengths, initial=0))
        self.first_rows = [first + index for index, first in enumerate(self._first_drafts[:-1])]
        q_KVs = [drafted.q_KV for drafted in rounds if drafted.q_KV is not None]
        self._q_DV = torch.cat(q_KVs).to(self._device) if len(q_KVs) > 1 else q_KVs[0].to(self._device)

    def chains(self, coins: Coins) -> list[DrawnChain]:
        """Waits for the device."""
        rows = [
            first + k
            for first, length in zip(self.first_rows, self._lengths, strict=True)
            for k in range(length)
        ]
        rows_D = self._ids(rows)
        tokens_D = self._ids([token for drafted in self._rounds for token in drafted.tree.token_ids[1:]])
        p_D = self._weights_RV[rows_D, tokens_D] / self._totals_R[rows_D]
        q_D = self._q_DV.gather(1, tokens_D[:, None])[:, 0]
        # Where the target's row is no distribution nothing stands, and what is drawn from it says so.
        p, q = torch.stack((p_D.nan_to_num(nan=0.0), q_D.to(p_D.dtype))).tolist()
        coin = self._accept_coins(coins)
        return [
            DrawnChain(p_K=p[start:stop], q_K=q[start:stop], coins_K=coin[start:stop])
            for start, stop in pairwise(self._first_drafts)
        ]

    def masses(self, scales: Sequence[Sequence[float]]) -> list[list[float]]:
        """Per chain, for lengths 1 .. K - 1: the sum of max(scale * p - q, 0). Waits for the device."""
        inner = [(chain, k) for chain, length in enumerate(self._lengths) for k in range(1, length)]
        found: list[list[float]] = [[] for _ in self._lengths]
        if inner:
            left_MV = self._residual(inner, [scales[chain][k - 1] for chain, k in inner])
            for (chain, _), mass in zip(
                inner, left_MV.sum(dim=-1, dtype=torch.float64).tolist(), strict=True
            ):
                found[chain].append(mass)
        return found

    def left(self, counts: Sequence[int], scales: Sequence[float]) -> torch.Tensor:
        """Per chain, what the token after `counts` drafts is drawn from."""
        rows_C = self._ids([first + count for first, count in zip(self.first_rows, counts, strict=True)])
        left_CV = self._weights_RV[rows_C]
        cut = [chain for chain, count in enumerate(counts) if count < self._lengths[chain]]
        if cut:
            rest_XV = self._residual(
                [(chain, counts[chain]) for chain in cut], [scales[chain] for chain in cut]
            )
            # Nothing left although a draft was rejected: p and q are equal but for rounding.
            is_empty_X1 = rest_XV.sum(dim=-1, keepdim=True) == 0
            cut_X = self._ids(cut)
            left_CV[cut_X] = torch.where(is_empty_X1, left_CV[cut_X], rest_XV)
        return left_CV

    def _residual(self, places: Sequence[tuple[int, int]], scales: Sequence[float]) -> torch.Tensor:
        """max(scale * p - q, 0) of chains after so many drafts, as (chain, number of drafts)."""
        rows_X = self._ids([self.first_rows[chain] + k for chain, k in places])
        drafts_X = self._ids([self._first_drafts[chain] + k for chain, k in places])
        weights_XV = self._weights_RV[rows_X]
        factors_X = torch.tensor(scales, dtype=torch.float64, device=self._device) / self._totals_R[rows_X]
        return residual(weights_XV, self._q_DV[drafts_X], factors_X[:, None].to(weights_XV.dtype))

    def _accept_coins(self, coins: Coins) -> list[float]:
        keys = [
            (drafted.state.params.seed, drafted.state.num_tokens - 1, step)
            for drafted, length in zip(self._rounds, self._lengths, strict=True)
            for step in range(length)
        ]
        seeds, positions, columns = zip(*keys, strict=True)
        found: list[float] = coins(seeds, positions, ACCEPT_STREAM, columns).tolist()
        return found

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)
