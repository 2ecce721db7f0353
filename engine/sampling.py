"""Draws the target model's tokens: one draw for each logits row of many requests at once.

Owns the order of things (adjust, filter, draw, log-probabilities) and the randomness of a draw. Must
never know which rows were speculated: a row is a request and the tokens that lead to it.

The token at a position is a pure function of its logits, the request's parameters and history, and
(seed, position). So drawing at every node of a draft tree and walking it gives the text of plain
decoding, token for token: the law is the target's whatever was drafted.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch

from engine.distribution import Filters, pick, weights
from engine.errors import ALL_FORBIDDEN
from engine.grammar import Words
from engine.params import SamplingParams, TokenLogprob
from engine.randomness import TARGET_STREAM, Coins, uniforms
from engine.sampling_state import SamplingState

# What `Drawn.token_ids` holds for a row in `Drawn.errors`. Equals no token, so no draft is accepted there.
NO_TOKEN = -1

# How many rows of log-probabilities `score` holds at a time.
_SCORED_ROWS = 64


@dataclass(frozen=True, slots=True)
class Row:
    """The draw that follows `path`: tokens assumed emitted after those `state` counts.

    allowed_W: the tokens that the request's grammar lets follow; None: all of them.
    """

    state: SamplingState
    path: tuple[int, ...] = ()
    allowed_W: Words | None = None

    @property
    def position(self) -> int:
        """Absolute position of the token to draw."""
        return self.state.num_tokens + len(self.path)


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """One entry per row. `errors` maps a row from which nothing could be drawn to the reason."""

    token_ids: list[int]
    logprobs: list[TokenLogprob | None]
    errors: dict[int, str]


def draw(logits_RV: torch.Tensor, rows: Sequence[Row], *, coins: Coins = uniforms) -> Drawn:
    """Draw one token per row from float32 logits `[R, V]`, which stay as they are.

    Rows of one request must be neighbours.
    Greedy takes the best score, the lowest id among equals. Waits for the device once per kind of draw.
    """
    scores_RV = _adjusted(logits_RV, rows)
    greedy = [i for i, row in enumerate(rows) if takes_best(row.state.params)]
    if len(greedy) == len(rows):
        token_ids = _best(scores_RV)
    elif not greedy:
        token_ids = _sample(scores_RV, rows, coins)
    else:
        token_ids = [NO_TOKEN] * len(rows)
        sampled = [i for i, row in enumerate(rows) if not takes_best(row.state.params)]
        _scatter(token_ids, greedy, _best(scores_RV[greedy]))
        _scatter(token_ids, sampled, _sample(scores_RV[sampled], [rows[i] for i in sampled], coins))
    return Drawn(
        token_ids=token_ids,
        logprobs=logprobs_of(logits_RV, rows, token_ids),
        errors={
            i: no_token_reason(scores_RV[i]) for i, token_id in enumerate(token_ids) if token_id == NO_TOKEN
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Law:
    """The law `draw` draws from: adjusted scores, and unnormalised probabilities (NaN: see `weights`)."""

    scores_RV: torch.Tensor
    weights_RV: torch.Tensor


def law_of(logits_RV: torch.Tensor, rows: Sequence[Row]) -> Law:
    """As `draw`, without drawing, for rows none of which `takes_best`."""
    scores_RV = _adjusted(logits_RV, rows)
    params = [row.state.params for row in rows]
    return Law(scores_RV=scores_RV, weights_RV=weights(scores_RV, filters_of(params, scores_RV.device)))


def draw_from(
    weights_RV: torch.Tensor, *, seeds: Sequence[int], positions: Sequence[int], coins: Coins
) -> list[int]:
    """The token each row's target emits at its position, by the coin `draw` would use there."""
    coins_R = coins(seeds, positions, TARGET_STREAM)
    ids: list[int] = pick(weights_RV, coins_R.to(weights_RV.device)).tolist()
    return ids


def score(logits_SV: torch.Tensor, token_ids: Sequence[int], num_top: int) -> list[TokenLogprob]:
    """How likely the model found each of these tokens: row i of float32 `[S, V]` came before token i."""
    scores: list[TokenLogprob] = []
    for start in range(0, len(token_ids), _SCORED_ROWS):
        ids = token_ids[start : start + _SCORED_ROWS]
        logprobs_SV = torch.log_softmax(logits_SV[start : start + len(ids)], dim=-1)
        chosen: list[float] = logprobs_SV[range(len(ids)), list(ids)].tolist()
        tops = [_most_likely(logprobs_V, num_top) for logprobs_V in logprobs_SV]
        scores += map(TokenLogprob, chosen, tops)
    return scores


def _adjusted(logits_RV: torch.Tensor, rows: Sequence[Row]) -> torch.Tensor:
    """Scores with penalties, bias and bans; the logits themselves where no row has any."""
    changed = [i for i, row in enumerate(rows) if row.state.changes(row.path)]
    constrained = [i for i, row in enumerate(rows) if row.allowed_W is not None]
    if not changed and not constrained:
        return logits_RV
    scores_RV = logits_RV.clone()
    for _, group in groupby(changed, key=lambda i: id(rows[i].state)):
        indices = list(group)
        rows[indices[0]].state.adjust_(
            scores_RV,
            indices,
            [rows[i].path for i in indices],
            allowed=[rows[i].allowed_W for i in indices],
        )
    if constrained:
        _forbid_(scores_RV, constrained, [words for row in rows if (words := row.allowed_W) is not None])
    return scores_RV


def _forbid_(scores_RV: torch.Tensor, indices: Sequence[int], allowed: Sequence[Words]) -> None:
    """Rows `indices` lose, in place, every token whose bit is not set. What is packed is what is copied."""
    device, vocab_size = scores_RV.device, scores_RV.shape[1]
    words_MW = torch.from_numpy(np.stack(allowed)).to(device)
    bits_32 = torch.arange(32, dtype=torch.int32, device=device)
    is_allowed_MV = (words_MW[:, :, None] >> bits_32 & 1).bool().flatten(1)[:, :vocab_size]
    indices_M = torch.tensor(indices, dtype=torch.int64, device=device)
    scores_RV[indices_M] = scores_RV[indices_M].masked_fill_(~is_allowed_MV, -torch.inf)


def takes_best(params: SamplingParams) -> bool:
    return params.is_greedy or params.top_k == 1


def _best(scores_RV: torch.Tensor) -> list[int]:
    """The first of equals, as both libraries document; NaN counts as the largest."""
    if scores_RV.device.type == "cpu":  # numpy compares many scores at once, torch's kernel one by one
        scores = scores_RV.numpy()
        best_R = scores.argmax(axis=1)
        is_possible_R = np.isfinite(scores[np.arange(len(scores)), best_R])
        ids: list[int] = np.where(is_possible_R, best_R, NO_TOKEN).tolist()
        return ids
    best = scores_RV.max(dim=1)
    ids = torch.where(best.values.isfinite(), best.indices, NO_TOKEN).tolist()
    return ids


def filters_of(params: Sequence[SamplingParams], device: torch.device) -> Filters:
    """What the requests of the rows ask for, one entry per row."""
    return Filters(
        temperature_R=torch.tensor([p.temperature for p in params], dtype=torch.float64, device=device),
        min_p_R=torch.tensor([p.min_p for p in params], dtype=torch.float64, device=device),
        top_k_R=torch.tensor([p.top_k for p in params], dtype=torch.int64, device=device),
        top_p_R=torch.tensor([p.top_p for p in params], dtype=torch.float64, device=device),
    )


def _sample(scores_RV: torch.Tensor, rows: Sequence[Row], coins: Coins) -> list[int]:
    params = [row.state.params for row in rows]
    return draw_from(
        weights(scores_RV, filters_of(params, scores_RV.device)),
        seeds=[p.seed for p in params],
        positions=[row.position for row in rows],
        coins=coins,
    )


def logprobs_of(
    logits_RV: torch.Tensor, rows: Sequence[Row], token_ids: Sequence[int]
) -> list[TokenLogprob | None]:
    """log_softmax of the model's own logits, before anything the request asks for (vLLM's default)."""
    result: list[TokenLogprob | None] = [None] * len(rows)
    for i, row in enumerate(rows):
        num_top = row.state.params.logprobs
        if num_top is not None and token_ids[i] != NO_TOKEN:
            logprobs_V = torch.log_softmax(logits_RV[i], dim=-1)
            result[i] = TokenLogprob(float(logprobs_V[token_ids[i]]), _most_likely(logprobs_V, num_top))
    return result


def _most_likely(logprobs_V: torch.Tensor, num_top: int) -> tuple[tuple[int, float], ...]:
    """The `num_top` best possible (id, logprob), best first, the lower id first among equals."""
    if num_top == 0:
        return ()
    threshold = logprobs_V.topk(min(num_top, len(logprobs_V))).values[-1]
    ids_C = (logprobs_V >= threshold).nonzero()[:, 0]
    values: list[float] = logprobs_V[ids_C].tolist()
    ranked = sorted(zip(ids_C.tolist(), values, strict=True), key=lambda pair: (-pair[1], pair[0]))
    return tuple(pair for pair in ranked[:num_top] if pair[1] > -torch.inf)


def no_token_reason(scores_V: torch.Tensor) -> str:
    """Why nothing can be drawn from such scores."""
    if bool(scores_V.isnan().any()) or bool(scores_V.isposinf().any()):
        return "the model returned a NaN or infinite logit"
    return ALL_FORBIDDEN


def _scatter(target: list[int], indices: Sequence[int], values: Sequence[int]) -> None:
    for i, value in zip(indices, values, strict=True):
        target[i] = value
