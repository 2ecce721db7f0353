"""Where a request's output stands in its grammar, and what may follow each node of a draft tree.

Owns the walk over a tree. Must never know how a grammar is written or compiled, nor text. No torch.
Shapes: `N` nodes, `W` words of 32 tokens each: token t is bit t % 32 of word t // 32.
"""

from collections.abc import Sequence
from concurrent.futures import Future
from typing import Protocol

import numpy as np
import numpy.typing as npt

Words = npt.NDArray[np.int32]
"""Tokens as bits: set where the token may be drawn."""


class Matcher(Protocol):
    """One request's place in its grammar; only the engine thread touches it once it is handed over."""

    @property
    def stop_token_ids(self) -> tuple[int, ...]:
        """The tokens that may follow once the output is complete, and end it."""
        ...

    @property
    def is_over(self) -> bool:
        """Whether a stop token was accepted: nothing can follow."""
        ...

    def accept(self, token_id: int) -> bool:
        """Step over one token; False, with nothing changed, where it may not follow."""
        ...

    def rollback(self, count: int) -> None:
        """Take the last `count` accepted tokens back."""
        ...

    def fill(self, words_NW: Words, row: int) -> None:
        """Write which tokens may follow into row `row`. Not to be called once `is_over`."""
        ...


class Grammars(Protocol):
    """Compiles grammars off the engine thread."""

    def prepare(
        self, grammar: str, *, emitted: Sequence[int], stop_token_ids: Sequence[int]
    ) -> "Future[Matcher]":
        """A matcher that has stepped over `emitted`, the outputs of earlier attempts. `grammar` is the text
        of a `GrammarSpec`.

        stop_token_ids: what ends the request besides the model's own end-of-sequence ids.
        The future raises ValueError, naming the value, for a grammar that means nothing and for outputs that
        do not follow it.
        """
        ...


def num_words(vocab_size: int) -> int:
    return -(-vocab_size // 32)


def allows(words_W: Words, token_id: int) -> bool:
    return 0 <= token_id < 32 * len(words_W) and bool(int(words_W[token_id >> 5]) >> (token_id & 31) & 1)


def allows_only(words_W: Words, token_ids: Sequence[int]) -> bool:
    """Whether nothing outside `token_ids` may be drawn."""
    others_W = words_W.view(np.uint32).copy()
    for token_id in token_ids:
        others_W[token_id >> 5] &= np.uint32(~(1 << (token_id & 31)) & 0xFFFFFFFF)
    return not others_W.any()


def tree_masks(
    matcher: Matcher,
    token_ids: Sequence[int],
    *,
    first_child: Sequence[int],
    next_sibling: Sequence[int],
    vocab_size: int,
) -> list[Words | None]:
    """What may follow each node of a tree whose root is the last token `matcher` accepted.

    None for nodes that cannot come to stand: below a token that may not follow its parent, and after a stop
    token. One step and one step back for each of the others, in depth-first order; `matcher` ends as it was.
    Links as `speculative.tree.Tree.links` gives them.
    """
    words_NW = np.full((len(token_ids), num_words(vocab_size)), -1, dtype=np.int32)
    is_filled = [False] * len(token_ids)

    def visit(node: int) -> None:
        matcher.fill(words_NW, node)
        is_filled[node] = True
        child = first_child[node]
        while child >= 0:
            if allows(words_NW[node], token_ids[child]):
                is_accepted = matcher.accept(token_ids[child])
                assert is_accepted, f"token {token_ids[child]} is in the mask but not accepted"
                if not matcher.is_over:
                    visit(child)
                matcher.rollback(1)
            child = next_sibling[child]

    visit(0)
    return [words_NW[node] if is_filled[node] else None for node in range(len(token_ids))]
