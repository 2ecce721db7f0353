"""What the logits of one request depend on besides the model: its own tokens, counted as they come.

Owns penalties, logit_bias, allowed_token_ids, banned_sequences, min_tokens and the request's place in its
grammar. Must never know how a token is drawn from the result.
Shapes: `R` logit rows, `V` vocabulary, `U` distinct tokens seen so far, `W` words of 32 tokens.
"""

import itertools
from collections.abc import Iterable, Sequence

import numpy as np
import torch

from engine.bans import Bans
from engine.grammar import Matcher, Words, allows_only, tree_masks
from engine.params import SamplingParams


class SamplingState:
    """Invariant: equal to a state built anew from the same tokens, whatever steps led here.

    `num_tokens` counts prompt and outputs, so it is the position of the next token to draw.
    Cost per emitted token is O(1); cost per row is O(distinct tokens), and only with penalties.
    Raises ValueError when a biased or (under penalties) a seen token lies outside the vocabulary.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        tokens: Sequence[int],
        num_prompt_tokens: int,
        vocab_size: int,
        matcher: Matcher | None = None,
    ) -> None:
        """`matcher` has stepped over the outputs among `tokens`; from here on it is this state's."""
        if not 0 <= num_prompt_tokens <= len(tokens):
            raise ValueError(f"num_prompt_tokens must be in [0, {len(tokens)}], got {num_prompt_tokens}")
        _require_in_vocabulary("logit_bias", (token_id for token_id, _ in params.logit_bias), vocab_size)
        self.params = params
        self.num_tokens = len(tokens)
        self._num_prompt_tokens = num_prompt_tokens
        self._vocab_size = vocab_size
        self._matcher = matcher
        self._unmatched: list[int] = []  # emitted, and not yet stepped over by the matcher
        biases = dict(params.logit_bias)
        self._bias_ids = torch.tensor(list(biases), dtype=torch.int64)
        self._biases = torch.tensor(list(biases.values()), dtype=torch.float32)
        _require_in_vocabulary("allowed_token_ids", params.allowed_token_ids, vocab_size)
        self._forbidden_V = _all_but(params.allowed_token_ids, vocab_size)
        for sequence in params.banned_sequences:
            _require_in_vocabulary("banned_sequences", sequence, vocab_size)
        self._bans = Bans(params.banned_sequences, tokens[num_prompt_tokens:])
        stop_ids = [token_id for token_id in params.stop_token_ids if 0 <= token_id < vocab_size]
        self._stop_ids = torch.tensor(stop_ids, dtype=torch.int64)
        self._history = _History() if _has_penalties(params) else None
        if self._history is not None:
            _require_in_vocabulary("token", tokens, vocab_size)
            if params.repetition_penalty != 1.0:
                self._history.add(tokens[:num_prompt_tokens], count=0)
            self._history.add(tokens[num_prompt_tokens:], count=1)

    @property
    def num_outputs(self) -> int:
        return self.num_tokens - self._num_prompt_tokens

    @property
    def is_constrained(self) -> bool:
        return self._matcher is not None

    def masks(
        self, token_ids: Sequence[int], *, first_child: Sequence[int], next_sibling: Sequence[int]
    ) -> list[Words | None]:
        """What the grammar lets follow each node of a draft tree below the last emitted token; only for a
        constrained request. See `engine.grammar.tree_masks`.

        May take long, and on any thread: nothing else of this state is touched. Raises ValueError for an
        emitted token that the grammar forbids.
        """
        assert self._matcher is not None
        for token_id in self._unmatched:
            if not self._matcher.accept(token_id):
                raise ValueError(f"token {token_id} does not follow the request's grammar")
        self._unmatched.clear()
        return tree_masks(
            self._matcher,
            token_ids,
            first_child=first_child,
            next_sibling=next_sibling,
            vocab_size=self._vocab_size,
        )

    def advance(self, token_ids: Sequence[int]) -> None:
        """These tokens were emitted."""
        if self._matcher is not None:
            self._unmatched += token_ids
        self.num_tokens += len(token_ids)
        self._bans.advance(token_ids)
        if self._history is not None:
            self._history.add(token_ids, count=1)

    def changes(self, path: Sequence[int]) -> bool:
        """Whether `adjust_` would alter the logits that follow the tokens of `path`."""
        params = self.params
        is_shaped = self._history is not None or bool(params.logit_bias) or bool(params.allowed_token_ids)
        return is_shaped or self._forbids_stop(path) or bool(self._bans.after(path))

    def adjust_(
        self,
        scores_RV: torch.Tensor,
        rows: Sequence[int],
        paths: Sequence[Sequence[int]],
        *,
        allowed: Sequence[Words | None],
    ) -> None:
        """Change, in place, rows `rows` of float32 `[R, V]`: row `rows[i]` follows the tokens of `paths[i]`.

        Order: repetition (prompt and outputs), frequency and presence (outputs) penalties, logit_bias,
        then forbidden: all but allowed_token_ids, what completes one of banned_sequences, and stop tokens
        while fewer than min_tokens outputs exist, unless the row's grammar is finished: its entry of
        `allowed` has nothing else. A path counts as output.
        """
        device = scores_RV.device
        rows_R1 = torch.tensor(rows, dtype=torch.int64, device=device)[:, None]
        if self._history is not None:
            ids_U, counts_RU, seen_RU = self._history.along(paths)
            ids_U = ids_U.to(device)
            old_RU = scores_RV[rows_R1, ids_U]
            scores_RV[rows_R1, ids_U] = self._penalised(old_RU, counts_RU.to(device), seen_RU.to(device))
        if self.params.logit_bias:
            scores_RV[rows_R1, self._bias_ids.to(device)] += self._biases.to(device)
        if self._forbidden_V is not None:
            forbidden_V = self._forbidden_V.to(device)
            for row in rows:
                scores_RV[row].masked_fill_(forbidden_V, -torch.inf)
        for row, path in zip(rows, paths, strict=True):
            if banned := self._bans.after(path):
                scores_RV[row, banned] = -torch.inf
        early = [
            row
            for row, path, words_W in zip(rows, paths, allowed, strict=True)
            if self._forbids_stop(path) and not self._must_stop(words_W)
        ]
        if early:
            early_E1 = torch.tensor(early, dtype=torch.int64, device=device)[:, None]
            scores_RV[early_E1, self._stop_ids.to(device)] = -torch.inf

    def _forbids_stop(self, path: Sequence[int]) -> bool:
        return self.num_outputs + len(path) < self.params.min_tokens and len(self._stop_ids) > 0

    def _must_stop(self, words_W: Words | None) -> bool:
        return words_W is not None and allows_only(words_W, self._stop_ids.tolist())

    def _penalised(
        self, scores_RU: torch.Tensor, counts_RU: torch.Tensor, seen_RU: torch.Tensor
    ) -> torch.Tensor:
        params = self.params
        if params.repetition_penalty != 1.0:
            factor = params.repetition_penalty
            repeated_RU = torch.where(scores_RU > 0, scores_RU / factor, scores_RU * factor)
            scores_RU = torch.where(seen_RU, repeated_RU, scores_RU)
        penalty_RU = params.frequency_penalty * counts_RU + params.presence_penalty * (counts_RU > 0)
        return scores_RU - penalty_RU


class _History:
    """Distinct tokens in order of first sight, and how often each was an output. Grows by doubling."""

    def __init__(self) -> None:
        self._slots: dict[int, int] = {}
        self._ids = np.zeros(64, dtype=np.int64)
        self._counts = np.zeros(64, dtype=np.float32)

    def add(self, token_ids: Iterable[int], *, count: int) -> None:
        for token_id in token_ids:
            slot = self._slots.setdefault(token_id, len(self._slots))
            if slot == len(self._ids):
                self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
                self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
            self._ids[slot] = token_id
            self._counts[slot] += count

    def along(self, paths: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """ids int64 `[U]`; output counts float32 and seen bool `[R, U]`, paths included, on CPU."""
        num_old = len(self._slots)
        fresh: dict[int, int] = {}
        for token_id in itertools.chain.from_iterable(paths):
            if token_id not in self._slots:
                fresh.setdefault(token_id, num_old + len(fresh))
        ids_U = np.concatenate((self._ids[:num_old], np.fromiter(fresh, dtype=np.int64, count=len(fresh))))
        counts_RU = np.zeros((len(paths), len(ids_U)), dtype=np.float32)
        counts_RU[:, :num_old] = self._counts[:num_old]
        seen_RU = np.zeros(counts_RU.shape, dtype=np.bool_)
        seen_RU[:, :num_old] = True
        for row, path in enumerate(paths):
            for token_id in path:
                slot = fresh[token_id] if token_id in fresh else self._slots[token_id]
                counts_RU[row, slot] += 1
                seen_RU[row, slot] = True
        return torch.from_numpy(ids_U), torch.from_numpy(counts_RU), torch.from_numpy(seen_RU)


def _has_penalties(params: SamplingParams) -> bool:
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


def _all_but(allowed: Sequence[int], vocab_size: int) -> torch.Tensor | None:
    """bool `[V]`, True for tokens that must not be drawn; None when all may."""
    if not allowed:
        return None
    forbidden_V = torch.ones(vocab_size, dtype=torch.bool)
    forbidden_V[list(allowed)] = False
    return forbidden_V


def _require_in_vocabulary(field: str, token_ids: Iterable[int], vocab_size: int) -> None:
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"{field} id {token_id} is outside the vocabulary of {vocab_size}")
