"""Growth of a draft tree: the digests' worked examples, ties, and a plain reference on random cases."""

import random

import numpy as np
import pytest

from speculative.growth import Beams, Growth, Selection, node_parents, num_candidates
from speculative.proposer import Proposal
from speculative.tree import Tree, build
from tests.tree_masks import packed_mask
from tests.unit.plain_rules import golden_cases


def floats(rows: list) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


def ids(rows: list) -> np.ndarray:
    return np.array(rows, dtype=np.int64)


def worked_example() -> tuple[Growth, list[Beams]]:
    """G1: two candidates per row, three steps."""
    growth = Growth(floats([[0.6, 0.3]]), ids([[1, 2]]))
    beams = [growth.beams()]
    beams.append(growth.expand(floats([[[0.55, 0.2], [0.7, 0.1]]]), ids([[[3, 4], [5, 6]]])))
    beams.append(growth.expand(floats([[[0.9, 0.05], [0.4, 0.3]]]), ids([[[7, 8], [9, 0]]])))
    return growth, beams


def tree_of(root: int, selection: Selection) -> Tree:
    return build(root, Proposal(token_ids=selection.token_ids, parents=selection.parents))


def test_eagle_g1_grows_the_beams_scores_and_parents() -> None:
    growth, beams = worked_example()
    assert [step.token_ids_BK.tolist() for step in beams] == [[[1, 2]], [[3, 5]], [[7, 9]]]
    assert [step.sources_BK.tolist() for step in beams] == [[[-1, -1]], [[0, 1]], [[0, 1]]]
    assert growth.row_parents_BR.tolist() == [[-1, 0, 1, 2, 4]]
    expected = [0.6, 0.3, 0.33, 0.12, 0.21, 0.03, 0.297, 0.0165, 0.084, 0.063]
    assert growth.scores_BC[0].tolist() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("limit", "candidates", "token_ids", "parents", "positions", "ranks"),
    [
        (3, (0, 1, 2), (1, 2, 3), (0, 0, 1), (7, 8, 8, 9), (1, 3, 2)),
        (4, (0, 1, 2, 6), (1, 2, 3, 7), (0, 0, 1, 3), (7, 8, 8, 9, 10), (1, 3, 2, 4)),
        (
            7,
            (0, 1, 2, 3, 4, 6, 8),
            (1, 2, 3, 4, 5, 7, 9),
            (0, 0, 1, 1, 2, 3, 5),
            (7, 8, 8, 9, 9, 9, 10, 10),
            (1, 3, 2, 6, 5, 4, 7),
        ),
    ],
)
def test_eagle_g1_selects_the_nodes(
    limit: int,
    candidates: tuple[int, ...],
    token_ids: tuple[int, ...],
    parents: tuple[int, ...],
    positions: tuple[int, ...],
    ranks: tuple[int, ...],
) -> None:
    selection = worked_example()[0].select(0, limit)
    assert selection == Selection(candidates=candidates, token_ids=token_ids, parents=parents, ranks=ranks)
    assert tree_of(9, selection).positions(7) == positions


def test_eagle_g1_has_the_packed_masks() -> None:
    growth, _ = worked_example()
    packed = {limit: packed_mask(tree_of(9, growth.select(0, limit))) for limit in (3, 4, 7)}
    assert packed == {
        3: (1, 3, 5, 11),
        4: (1, 3, 5, 11, 27),
        7: (1, 3, 5, 11, 19, 37, 75, 165),
    }


def test_eagle_g3_one_candidate_per_step_is_a_chain() -> None:
    """G3"""
    growth = Growth(floats([[0.9]]), ids([[4]]))
    growth.expand(floats([[[0.8]]]), ids([[[5]]]))
    growth.expand(floats([[[0.7]]]), ids([[[6]]]))
    assert growth.row_parents_BR.tolist() == [[-1, 0, 1]]
    selection = growth.select(0, 8)
    assert selection == Selection(
        candidates=(0, 1, 2), token_ids=(4, 5, 6), parents=(0, 1, 2), ranks=(1, 2, 3)
    )
    assert tree_of(3, selection).positions(10) == (10, 11, 12, 13)


def test_eagle_g3_one_step_is_a_star() -> None:
    """G3"""
    growth = Growth(floats([[0.5, 0.3, 0.1]]), ids([[7, 8, 9]]))
    tree = tree_of(1, growth.select(0, 3))
    assert tree.links() == ((1, -1, -1, -1), (-1, 2, 3, -1))
    assert tree.positions(2) == (2, 3, 3, 3)


def test_ancestor_closure_under_certain_and_impossible_ties() -> None:
    """The digest's orphan: scores [1, 0, 1, 0, 0, 0, 1, 0, 0, 0], five nodes."""
    growth = Growth(floats([[1.0, 0.0]]), ids([[1, 2]]))
    growth.expand(floats([[[1.0, 0.0], [1.0, 0.0]]]), ids([[[1, 2], [1, 2]]]))
    growth.expand(floats([[[1.0, 0.0], [1.0, 0.0]]]), ids([[[1, 2], [1, 2]]]))
    assert growth.scores_BC[0].tolist() == [1, 0, 1, 0, 0, 0, 1, 0, 0, 0]
    assert growth.select(0, 5).candidates == (0, 1, 2, 3, 6)


def plain_growth(
    steps: list[list[list[float]]], width: int, limit: int
) -> tuple[list[int], list[int], list[int]]:
    """(selected candidates, their parent nodes, parent candidate of every row) with lists and loops."""
    scores, row_parents = list(steps[0][0]), [-1]
    beams = list(range(width))
    for rows in steps[1:]:
        first = len(scores)
        for beam, row in zip(beams, rows, strict=True):
            row_parents.append(beam)
            scores += [float(np.float32(scores[beam]) * np.float32(p)) for p in row]
        fresh = range(first, len(scores))
        beams = sorted(fresh, key=lambda c: (-scores[c], c))[:width]
    chosen = sorted(sorted(range(len(scores)), key=lambda c: (-scores[c], c))[:limit])
    parent_of = [row_parents[c // width] for c in chosen]
    return chosen, [0 if parent < 0 else chosen.index(parent) + 1 for parent in parent_of], row_parents


@pytest.mark.parametrize("levels", [[0.0, 1.0], [0.5, 1.0], [0.0, 0.25, 0.5, 1.0], None])
def test_random_growths_with_and_without_ties_equal_the_plain_reference(levels: list[float] | None) -> None:
    seed = 6
    print(f"seed {seed}")
    rng = random.Random(seed)
    for _ in range(150):
        width, num_steps, num_requests = rng.randrange(1, 6), rng.randrange(1, 5), rng.randrange(1, 4)
        limit = rng.randrange(1, num_candidates(width=width, num_steps=num_steps) + 2)

        def row(size: int = width) -> list[float]:
            drawn = [rng.choice(levels) if levels else rng.random() for _ in range(size)]
            return sorted(drawn, reverse=True)

        steps = [
            [[row() for _ in range(1 if step == 0 else width)] for step in range(num_steps)]
            for _ in range(num_requests)
        ]
        growth = Growth(
            floats([request[0][0] for request in steps]),
            ids([[rng.randrange(9) for _ in range(width)] for _ in steps]),
        )
        for step in range(1, num_steps):
            tokens = [[[rng.randrange(9) for _ in range(width)] for _ in range(width)] for _ in steps]
            growth.expand(floats([request[step] for request in steps]), ids(tokens))
        for index, request in enumerate(steps):
            chosen, parents, row_parents = plain_growth(request, width, limit)
            selection = growth.select(index, limit)
            assert list(selection.candidates) == chosen
            assert list(selection.parents) == parents
            for lower in range(1, limit):
                kept = [c for c, r in zip(selection.candidates, selection.ranks, strict=True) if r <= lower]
                assert growth.select(index, lower).candidates == tuple(kept)
            assert growth.row_parents_BR[index].tolist() == row_parents


def test_golden_trees_parents_are_reproduced() -> None:
    """Of the published file where it is at hand; growths of the plain reference otherwise and besides."""
    for case in golden_cases(seed=3):
        if "parent_list" in case:
            parents = node_parents(case["selected"], case["parent_list"] or [-1], width=case["topk"])
            assert [-1, *parents] == case["tree"]["parent"]
    rng = random.Random(4)
    for _ in range(60):
        width = rng.randrange(1, 5)
        steps = [
            [[rng.random() for _ in range(width)] for _ in range(1 if i == 0 else width)] for i in range(3)
        ]
        chosen, expected, row_parents = plain_growth(steps, width, 9)
        assert list(node_parents(chosen, row_parents, width=width)) == expected
