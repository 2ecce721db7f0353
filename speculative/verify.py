"""From the target's logits at every drafted node to the tokens a round emits: the seam for acceptance rules.

Owns which rows a rule reads and the coins it reads them with. Must never know how drafts were made, nor
what becomes of the tokens. Rounds that draft nothing and the ends of prompts are verified like any other.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.grammar import Words
from engine.params import TokenLogprob
from engine.randomness import Coins, uniforms
from engine.sampling import Row, draw
from engine.sampling_state import SamplingState
from speculative.accept import Acceptance, walk
from speculative.tree import Tree

# From the target's own token at every node to what of the tree stands.
Accept = Callable[[Tree, Sequence[int]], Acceptance]


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafted:
    """One request's round before its verdict; `q_KV` as in `speculative.proposer.Proposal`.

    allowed: per node, the tokens that the request's grammar lets follow; None for a request without one.
    """

    state: SamplingState
    tree: Tree
    q_KV: torch.Tensor | None = None
    allowed: Sequence[Words | None] | None = None

    def rows(self) -> list[Row]:
        """One per node: the draw that follows its path."""
        if self.allowed is None:
            return [Row(self.state, path) for path in self.tree.paths]
        return [Row(self.state, *one) for one in zip(self.tree.paths, self.allowed, strict=True)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What stands. Only the last token can be `NO_TOKEN`; `error` says why then, and is empty otherwise.

    logprobs: one entry per token, None where the request wants none.
    """

    accepted: Acceptance
    logprobs: tuple[TokenLogprob | None, ...]
    error: str = ""


class Verify(Protocol):
    """An acceptance rule. `logits_RV`: the nodes of each round, one after the other, in order."""

    def __call__(self, logits_RV: torch.Tensor, rounds: Sequence[Drafted]) -> list[Verdict]:
        """One verdict per round."""
        ...


class DrawAtEveryNode:
    """The target draws its own token at every node, keyed on its position; `accept` goes by these tokens.

    With `walk` the text is plain decoding's, token for token, whatever was drafted.
    """

    def __init__(self, accept: Accept = walk, *, coins: Coins = uniforms) -> None:
        self._accept = accept
        self._coins = coins

    def __call__(self, logits_RV: torch.Tensor, rounds: Sequence[Drafted]) -> list[Verdict]:
        if not rounds:
            return []
        rows = [row for drafted in rounds for row in drafted.rows()]
        drawn = draw(logits_RV, rows, coins=self._coins)
        verdicts, start = [], 0
        for drafted in rounds:
            tree = drafted.tree
            accept = self._accept if tree.num_nodes > 1 else walk
            accepted = accept(tree, drawn.token_ids[start : start + tree.num_nodes])
            nodes = [start + node for node in accepted.nodes]
            logprobs = tuple(drawn.logprobs[node] for node in nodes)
            error = drawn.errors.get(nodes[-1], "")
            verdicts.append(Verdict(accepted=accepted, logprobs=logprobs, error=error))
            start += tree.num_nodes
        return verdicts
