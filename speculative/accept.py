"""Which drafted tokens stand, and where a request's text ends.

Owns the walk and the stop rules. Must never know probabilities: the target's token at every node is
already drawn (`engine.sampling`), so a child stands exactly when it is that token. For any set of
distinct children that accepts each with the target's probability of it, and emits plain decoding's tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NewType

from engine.params import SamplingParams
from speculative.progress import FinishReason
from speculative.tree import Tree

# Drafted tokens that stand: neither the root nor the target's own last token counts.
NumCorrectDrafts = NewType("NumCorrectDrafts", int)
# Tokens emitted, and equally rows whose KV becomes committed: always one more than the correct drafts.
NumAdvanced = NewType("NumAdvanced", int)


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Invariant: `token_ids[i]` follows `nodes[i]`, which are the root and accepted nodes in path order.

    A round's last token is the target's own; its KV is not computed yet.
    """

    nodes: tuple[int, ...]
    token_ids: tuple[int, ...]

    @property
    def num_correct_drafts(self) -> NumCorrectDrafts:
        return NumCorrectDrafts(len(self.nodes) - 1)

    @property
    def num_advanced(self) -> NumAdvanced:
        return NumAdvanced(len(self.nodes))

    def cut(self, num_tokens: int) -> "Acceptance":
        """The same round as if it had emitted only its first `num_tokens` (at least one)."""
        return Acceptance(self.nodes[:num_tokens], self.token_ids[:num_tokens])


@dataclass(frozen=True, slots=True)
class Ending:
    """What is left of emitted tokens once stop tokens and max_tokens apply; no reason while it goes on."""

    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None


def walk(tree: Tree, drawn: Sequence[int]) -> Acceptance:
    """Follow the drawn tokens (one per node) down the tree as far as it drafted them."""
    child_of = {
        (parent, tree.token_ids[node]): node for node, parent in enumerate(tree.parents) if parent >= 0
    }
    nodes, token_ids = [0], [drawn[0]]
    while (child := child_of.get((nodes[-1], token_ids[-1]))) is not None:
        nodes.append(child)
        token_ids.append(drawn[child])
    return Acceptance(tuple(nodes), tuple(token_ids))


def truncate(emitted: Sequence[int], *, params: SamplingParams, num_outputs: int) -> Ending:
    """End the run at its first stop token (kept as the last id) or at max_tokens, whichever is first.

    `num_outputs`: tokens the request had emitted before this run, fewer than max_tokens. A stop token
    that is also the last allowed token counts as a stop.
    """
    room = params.max_tokens - num_outputs
    for i, token_id in enumerate(emitted[:room]):
        if token_id in params.stop_token_ids:
            return Ending(tuple(emitted[: i + 1]), "stop", token_id)
    if len(emitted) >= room:
        return Ending(tuple(emitted[:room]), "length")
    return Ending(tuple(emitted))
