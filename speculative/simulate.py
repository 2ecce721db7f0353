"""Acceptance that ignores the target, so that load tests can set how many drafts stand. The text is wrong.

Owns the draw of a round's length and the path it takes. Must never be reached unless a setting asked for it.
"""

import random
from collections.abc import Sequence

from speculative.accept import Acceptance
from speculative.tree import Tree


class SimulatedAcceptance:
    """Accepts the mean rounded down or up, at random so that the mean comes out, as far as was drafted."""

    def __init__(self, mean: float) -> None:
        self._whole = int(mean)
        self._share_of_more = mean - self._whole
        self._random = random.Random(0)

    def __call__(self, tree: Tree, drawn: Sequence[int]) -> Acceptance:
        wanted = self._whole + (self._random.random() < self._share_of_more)
        nodes = _deepest_path(tree)[: 1 + wanted]
        drafts = tuple(tree.token_ids[node] for node in nodes[1:])
        return Acceptance(nodes, (*drafts, drawn[nodes[-1]]))


def _deepest_path(tree: Tree) -> tuple[int, ...]:
    """Nodes from the root to the deepest one, the first of equals."""
    depths = [0] * tree.num_nodes
    for node in range(1, tree.num_nodes):
        depths[node] = depths[tree.parents[node]] + 1
    node = depths.index(max(depths))
    path = [node]
    while node:
        node = tree.parents[node]
        path.append(node)
    return tuple(reversed(path))
