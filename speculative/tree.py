"""A proposal as a tree of nodes: what a verify forward, the sampler and the walk need of it.

Owns the shape (parents, depths, paths, sibling links). Must never know logits, KV slots or
how the tokens were drafted. Node 0 is the root, the request's last emitted token.
"""

from dataclasses import dataclass

from speculative.proposer import Proposal


@dataclass(frozen=True, slots=True, kw_only=True)
class Tree:
    """Invariant: parents precede children, siblings carry distinct tokens. One entry per node.

    parents: node ids, -1 for the root. depths: 0 for the root.
    paths: the drafted tokens from below the root down to the node itself; empty for the root.
    """

    token_ids: tuple[int, ...]
    parents: tuple[int, ...]
    depths: tuple[int, ...]
    paths: tuple[tuple[int, ...], ...]

    @property
    def num_nodes(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        """Every node follows the one before it, so plain causal attention verifies it."""
        return self.depths[-1] == len(self.depths) - 1

    @property
    def span_parents(self) -> tuple[int, ...] | None:
        """`parents` as `engine.batch.Span` takes them: None for a chain."""
        return None if self.is_chain else self.parents

    def positions(self, num_committed: int) -> tuple[int, ...]:
        """Absolute position of each node; the root's is `num_committed`."""
        return tuple(num_committed + depth for depth in self.depths)

    def links(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """First child and next sibling of each node, -1 for none; siblings in node order."""
        first_child = [-1] * self.num_nodes
        next_sibling = [-1] * self.num_nodes
        last_child: dict[int, int] = {}
        for node, parent in enumerate(self.parents[1:], start=1):
            if parent in last_child:
                next_sibling[last_child[parent]] = node
            else:
                first_child[parent] = node
            last_child[parent] = node
        return tuple(first_child), tuple(next_sibling)


def build(root_token_id: int, proposal: Proposal) -> Tree:
    """Lay a proposal out below the root. Raises ValueError when it is no tree of distinct siblings."""
    if len(proposal.parents) != len(proposal.token_ids):
        raise ValueError(
            f"parents must be one per token, got {len(proposal.parents)} for {len(proposal.token_ids)} tokens"
        )
    depths: list[int] = [0]
    paths: list[tuple[int, ...]] = [()]
    children: set[tuple[int, int]] = set()
    for node, (token_id, parent) in enumerate(
        zip(proposal.token_ids, proposal.parents, strict=True), start=1
    ):
        if not 0 <= parent < node:
            raise ValueError(f"parents[{node - 1}] must be in [0, {node}), got {parent}")
        if token_id < 0:
            raise ValueError(f"token_ids[{node - 1}] must not be negative, got {token_id}")
        if (parent, token_id) in children:
            raise ValueError(f"token_ids[{node - 1}] repeats a sibling: {token_id} below node {parent}")
        children.add((parent, token_id))
        depths.append(depths[parent] + 1)
        paths.append((*paths[parent], token_id))
    return Tree(
        token_ids=(root_token_id, *proposal.token_ids),
        parents=(-1, *proposal.parents),
        depths=tuple(depths),
        paths=tuple(paths),
    )
