import itertools
from typing import Any

import pytest
import torch

from speculative.accept_rules import BLOCK, TOKEN_WISE, ChainRule, inverse_cdf, target_only, verify_chain
from speculative.proposer import Proposal
from speculative.tree import Tree, build
from tests.unit.plain_rules import golden_cases

Sparse = dict[int, float]

G4_TREE = build(9, Proposal(token_ids=(1, 2, 3, 7), parents=(0, 0, 1, 3)))
G4_ROWS: list[Sparse] = [
    {1: 0.5, 2: 0.2, 6: 0.3},
    {3: 0.4, 4: 0.1, 8: 0.5},
    {5: 0.6, 6: 0.4},
    {7: 0.25, 0: 0.75},
    {5: 1.0},
]
G5_P = torch.tensor([[0.5, 0.3, 0.2, 0.0], [0.1, 0.6, 0.1, 0.2], [0.25] * 4], dtype=torch.float64)
G5_Q = torch.tensor([[0.2, 0.7, 0.1, 0.0], [0.3, 0.3, 0.2, 0.2]], dtype=torch.float64)


def dense(rows: list[Sparse]) -> torch.Tensor:
    p_NV = torch.zeros(len(rows), 10, dtype=torch.float64)
    for node, row in enumerate(rows):
        for token_id, p in row.items():
            p_NV[node, token_id] = p
    return p_NV


@pytest.mark.parametrize(
    ("coins", "final", "nodes", "emitted"),
    [
        ([0.45, 0.3, 0.9, 0.2, 0.5], 0.1, (0, 1, 3, 4), (1, 3, 7, 5)),
        ([0.6, 0.3, 0.9, 0.2, 0.5], 0.5, (0, 2), (2, 5)),
        ([0.75, 0.3, 0.9, 0.2, 0.5], 0.5, (0,), (6,)),
        ([0.1, 0.4, 0.9, 0.2, 0.5], 0.2, (0, 1), (1, 8)),
    ],
)
def test_eagle_g4_target_only_outcomes(
    coins: list[float], final: float, nodes: tuple[int, ...], emitted: tuple[int, ...]
) -> None:
    outcome = target_only(G4_TREE, dense(G4_ROWS), coins=coins, final_coin=final)
    assert (outcome.nodes, outcome.token_ids) == (nodes, emitted)


def test_eagle_g4_lossy_thresholds_accept_more_than_the_law_allows() -> None:
    p_NV = dense(G4_ROWS)
    outcome = target_only(
        G4_TREE, p_NV, coins=[0.75, 0.9, 0.5, 0.5, 0.5], final_coin=0.7, lossy_accept_threshold=0.5
    )
    assert outcome.token_ids == (1, 8)
    outcome = target_only(G4_TREE, p_NV, coins=[0.99] * 5, final_coin=0.7, lossy_single_threshold=0.2)
    assert outcome.nodes == (0, 1, 3, 4)


def test_eagle_g4_the_first_token_follows_p() -> None:
    counts = torch.zeros(10, dtype=torch.float64)
    for coin in (torch.arange(1000) + 0.5) / 1000:
        outcome = target_only(G4_TREE, dense(G4_ROWS), coins=[float(coin)] * 5, final_coin=0.5)
        counts[outcome.token_ids[0]] += 1
    assert (counts / 1000).tolist() == pytest.approx(dense(G4_ROWS)[0].tolist(), abs=1e-9)


def test_target_only_draws_what_no_child_covers_from_the_rest_of_p() -> None:
    tree = build(9, Proposal(token_ids=(0,), parents=(0,)))
    p_NV = torch.tensor([[0.3, 0.1, 0.6]] * 2, dtype=torch.float64)
    grid = [(i + 0.5) / 70 for i in range(70)]
    counts = [0, 0, 0]
    for coin, final in itertools.product(grid, grid):
        counts[target_only(tree, p_NV, coins=[coin, 0.0], final_coin=final).token_ids[0]] += 1
    assert [count / 4900 for count in counts] == pytest.approx([0.3, 0.1, 0.6], abs=1e-9)


@pytest.mark.parametrize(
    ("drafts", "coins", "final", "emitted"),
    [
        ([0, 1], [0.9, 0.9], 0.6, (0, 1, 2)),
        ([1, 1], [0.5, 0.1], 0.5, (0,)),
        ([1, 0], [0.4, 0.4], 0.9, (1, 1)),
        ([3, 0], [0.0, 0.0], 0.49, (0,)),
    ],
)
def test_eagle_g5_chain_rejection_outcomes(
    drafts: list[int], coins: list[float], final: float, emitted: tuple[int, ...]
) -> None:
    outcome = verify_chain(TOKEN_WISE, drafts, p_NV=G5_P, q_KV=G5_Q, coins=coins, final_coin=final)
    assert outcome.token_ids == emitted
    assert outcome.nodes == tuple(range(len(emitted)))


@pytest.mark.parametrize(("coin", "emitted"), [(0.29, (1, 0)), (0.31, (0,))])
def test_eagle_g5_a_certain_draft_is_accepted_with_its_probability(
    coin: float, emitted: tuple[int, ...]
) -> None:
    one_hot = torch.tensor([[0.0, 1.0, 0.0, 0.0]], dtype=torch.float64)
    p_NV = torch.stack((G5_P[0], torch.tensor([1.0, 0.0, 0.0, 0.0], dtype=torch.float64)))
    outcome = verify_chain(TOKEN_WISE, [1], p_NV=p_NV, q_KV=one_hot, coins=[coin], final_coin=0.5)
    assert outcome.token_ids == emitted


def test_eagle_g5_a_certain_target_accepts_its_token_whatever_the_coin() -> None:
    p_NV = torch.tensor([[0.0, 0.0, 1.0, 0.0]] * 2, dtype=torch.float64)
    outcome = verify_chain(TOKEN_WISE, [2], p_NV=p_NV, q_KV=G5_Q[1:], coins=[0.999], final_coin=0.5)
    assert outcome.token_ids == (2, 2)


@pytest.mark.parametrize(
    ("drafts", "coins", "emitted"), [([1, 1], [0.6, 0.5], (1, 1, 2)), ([1, 0], [0.4, 0.9], (0,))]
)
def test_eagle_g5_block_verification_outcomes(
    drafts: list[int], coins: list[float], emitted: tuple[int, ...]
) -> None:
    outcome = verify_chain(BLOCK, drafts, p_NV=G5_P, q_KV=G5_Q, coins=coins, final_coin=0.5)
    assert outcome.token_ids == emitted


@pytest.mark.parametrize("rule", [TOKEN_WISE, BLOCK], ids=["token-wise", "block"])
def test_eagle_g5_the_first_token_of_a_drawn_draft_follows_p(rule: ChainRule) -> None:
    steps, law = 30, torch.zeros(4, dtype=torch.float64)
    grid = [(i + 0.5) / steps for i in range(steps)]
    p_NV, q_KV = G5_P[[0, 2]], G5_Q[:1]
    for draft in range(3):
        share = float(q_KV[0, draft]) / steps**2
        for coin, final in itertools.product(grid, grid):
            outcome = verify_chain(rule, [draft], p_NV=p_NV, q_KV=q_KV, coins=[coin], final_coin=final)
            law[outcome.token_ids[0]] += share
    assert law.tolist() == pytest.approx(G5_P[0].tolist(), abs=1 / steps)


def test_golden_trees_sampled_trees_and_chains_are_reproduced() -> None:
    for case in golden_cases(seed=5):
        parents = tuple(case["tree"]["parent"][1:])
        tree = build(case["root"], Proposal(token_ids=tuple(case["tokens"]), parents=parents))
        _check_tree(tree, case["target_only"])
        chain = case["chain"]
        for rule, key in ((TOKEN_WISE, "token_wise"), (BLOCK, "block")):
            outcome = verify_chain(
                rule,
                chain["candidates"][1:],
                p_NV=torch.tensor(chain["p"], dtype=torch.float64),
                q_KV=torch.tensor(chain["q"], dtype=torch.float64),
                coins=chain["coins"],
                final_coin=chain["final"],
            )
            assert list(outcome.token_ids) == chain[key]["emitted"]
            assert outcome.num_correct_drafts == chain[key]["num_correct_drafts"]


def _check_tree(tree: Tree, case: dict[str, Any]) -> None:
    p_NV = torch.tensor(case["p"], dtype=torch.float64)
    outcome = target_only(tree, p_NV, coins=case["coins"], final_coin=case["final"])
    assert list(outcome.nodes) == [node for node in case["accept_index"] if node >= 0]
    assert list(outcome.token_ids) == [case["predict"][node] for node in outcome.nodes]


@pytest.mark.parametrize(
    ("weights", "uniform", "index"),
    [
        ([0.0, 2.0, 0.0, 2.0, 0.0], 0.0, 1),
        ([0.0, 2.0, 0.0, 2.0, 0.0], 0.5, 3),
        ([0.0, 2.0, 0.0, 2.0, 0.0], 1.0, 3),
        ([0.0, 0.0, 0.0], 0.3, 2),
    ],
)
def test_the_inverse_cdf_takes_the_first_index_above_and_never_a_weightless_one(
    weights: list[float], uniform: float, index: int
) -> None:
    assert inverse_cdf(torch.tensor(weights), uniform) == index
