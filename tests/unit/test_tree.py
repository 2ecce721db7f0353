import random

import pytest

from speculative.proposer import Proposal
from speculative.tree import Tree, build
from tests.tree_masks import mask_of, packed_mask
from tests.unit.plain_rules import describe, golden_cases, random_parents, random_tokens


def tree_of(root: int, tokens: list[int], parents: list[int]) -> Tree:
    return build(root, Proposal(token_ids=tuple(tokens), parents=tuple(parents)))


def test_eagle_g1_a_tree_of_four_drafts_has_its_layout() -> None:
    tree = tree_of(9, [1, 2, 3, 7], [0, 0, 1, 3])
    assert tree.token_ids == (9, 1, 2, 3, 7)
    assert tree.parents == tree.span_parents == (-1, 0, 0, 1, 3)
    assert tree.positions(7) == (7, 8, 8, 9, 10)
    assert tree.paths == ((), (1,), (2,), (1, 3), (1, 3, 7))
    assert packed_mask(tree) == (1, 3, 5, 11, 27)
    assert tree.links() == ((1, 3, -1, 4, -1), (-1, 2, -1, -1, -1))
    assert not tree.is_chain


def test_eagle_g1_a_tree_of_seven_drafts_has_its_layout() -> None:
    tree = tree_of(9, [1, 2, 3, 4, 5, 7, 9], [0, 0, 1, 1, 2, 3, 5])
    assert tree.positions(7) == (7, 8, 8, 9, 9, 9, 10, 10)
    assert packed_mask(tree) == (1, 3, 5, 11, 19, 37, 75, 165)
    assert tree.links() == ((1, 3, 5, 6, -1, 7, -1, -1), (-1, 2, -1, 4, -1, -1, -1, -1))


def test_eagle_g3_a_chain_is_a_plain_causal_span() -> None:
    tree = tree_of(3, [4, 5, 6], [0, 1, 2])
    assert tree.is_chain
    assert tree.span_parents is None
    assert tree.positions(10) == (10, 11, 12, 13)
    assert mask_of(tree) == [[1, 0, 0, 0], [1, 1, 0, 0], [1, 1, 1, 0], [1, 1, 1, 1]]
    assert tree.links()[0] == (1, 2, 3, -1)


def test_eagle_g3_a_star_links_its_siblings_in_node_order() -> None:
    tree = tree_of(3, [4, 5, 6], [0, 0, 0])
    assert tree.positions(2) == (2, 3, 3, 3)
    assert tree.links() == ((1, -1, -1, -1), (-1, 2, 3, -1))


def test_an_empty_proposal_is_the_root_alone() -> None:
    tree = build(5, Proposal())
    assert (tree.token_ids, tree.parents, tree.paths) == ((5,), (-1,), ((),))
    assert tree.is_chain


@pytest.mark.parametrize(
    ("tokens", "parents", "message"),
    [
        ([1, 2], [0], "one per token"),
        ([1, 2], [0, 2], r"parents\[1\] must be in \[0, 2\), got 2"),
        ([1], [-1], r"parents\[0\] must be in \[0, 1\), got -1"),
        ([1, 2, 1], [0, 0, 0], r"token_ids\[2\] repeats a sibling: 1 below node 0"),
        ([-1], [0], r"token_ids\[0\] must not be negative, got -1"),
    ],
)
def test_what_is_no_tree_of_distinct_siblings_is_refused(
    tokens: list[int], parents: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tree_of(0, tokens, parents)


def test_one_token_may_stand_below_different_parents() -> None:
    assert tree_of(9, [9, 9, 9], [0, 1, 2]).paths[-1] == (9, 9, 9)


def test_golden_trees_layout_is_reproduced() -> None:
    for case in golden_cases(seed=3):
        expected = case["tree"]
        tree = tree_of(case["root"], case["tokens"], expected["parent"][1:])
        assert list(tree.depths) == expected["depth"]
        assert list(tree.positions(case["committed"])) == expected["positions"]
        assert mask_of(tree) == expected["mask"]
        assert [list(links) for links in tree.links()] == [expected["next_token"], expected["next_sibling"]]


def test_trees_beyond_a_machine_word_are_masked_as_described() -> None:
    seed = 20
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(20):
        parents = random_parents(rng, rng.randrange(60, 140))
        tree = tree_of(*_split(random_tokens(rng, parents, 50)), parents[1:])
        assert mask_of(tree) == describe(parents, 0)["mask"]


def _split(tokens: list[int]) -> tuple[int, list[int]]:
    return tokens[0], tokens[1:]
