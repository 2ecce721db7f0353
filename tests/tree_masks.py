"""What each node of a draft tree may attend to among the tree's own rows, as the engine masks it."""

from engine.attention_mask import SpanMask, visible
from engine.batch import Span
from speculative.tree import Tree


def mask_of(tree: Tree) -> list[list[int]]:
    """Row i has 1 in column j where node i sees node j."""
    nodes = range(tree.num_nodes)
    span = Span(
        token_ids=tree.token_ids,
        num_committed=0,
        pages=(),
        positions=nodes,
        logit_rows=nodes,
        parents=tree.span_parents,
    )
    rows: list[list[int]] = visible(SpanMask.of(span, window=None), 0, tree.num_nodes).astype(int).tolist()
    return rows


def packed_mask(tree: Tree) -> tuple[int, ...]:
    """The rows of `mask_of` as numbers: bit j is column j."""
    return tuple(sum(bit << j for j, bit in enumerate(row)) for row in mask_of(tree))
