import random

import pytest
import torch

from engine.params import SamplingParams
from engine.sampling import NO_TOKEN, Row, draw
from engine.sampling_state import SamplingState
from speculative.accept import Acceptance, Ending, truncate, walk
from speculative.proposer import Proposal
from speculative.tree import Tree, build
from tests.unit.plain_rules import golden_cases, random_parents, random_tokens

SMALL = build(9, Proposal(token_ids=(1, 2, 3, 7), parents=(0, 0, 1, 3)))
CHAIN = build(3, Proposal(token_ids=(4, 5, 6), parents=(0, 1, 2)))
VOCAB_SIZE = 11


@pytest.mark.parametrize(
    ("tree", "drawn", "nodes", "emitted"),
    [
        (SMALL, [1, 3, 6, 7, 5], (0, 1, 3, 4), (1, 3, 7, 5)),
        (SMALL, [1, 8, 6, 7, 5], (0, 1), (1, 8)),
        (SMALL, [2, 3, 4, 7, 5], (0, 2), (2, 4)),
        (SMALL, [6, 3, 4, 7, 5], (0,), (6,)),
        (SMALL, [1, 3, 6, 2, 5], (0, 1, 3), (1, 3, 2)),
        (CHAIN, [4, 5, 6, 7], (0, 1, 2, 3), (4, 5, 6, 7)),
        (CHAIN, [4, 5, 9, 7], (0, 1, 2), (4, 5, 9)),
        (CHAIN, [4, 9, 6, 7], (0, 1), (4, 9)),
        (CHAIN, [8, 5, 6, 7], (0,), (8,)),
        (build(5, Proposal()), [2], (0,), (2,)),
    ],
)
def test_eagle_g2_g3_the_walk_follows_drawn_tokens_as_far_as_drafted(
    tree: Tree, drawn: list[int], nodes: tuple[int, ...], emitted: tuple[int, ...]
) -> None:
    outcome = walk(tree, drawn)
    assert outcome == Acceptance(nodes, emitted)
    assert outcome.num_correct_drafts == len(nodes) - 1
    assert outcome.num_advanced == len(nodes)


def test_golden_trees_greedy_walk_is_reproduced() -> None:
    for case in golden_cases(seed=7):
        parents = tuple(case["tree"]["parent"][1:])
        tree = build(case["root"], Proposal(token_ids=tuple(case["tokens"]), parents=parents))
        outcome = walk(tree, case["greedy"]["argmax"])
        assert list(outcome.nodes) == [node for node in case["greedy"]["accept_index"] if node >= 0]
        assert list(outcome.token_ids) == [case["greedy"]["predict"][node] for node in outcome.nodes]
        assert outcome.num_correct_drafts == case["greedy"]["num_correct_drafts"]


def test_a_node_without_a_token_ends_the_walk_there() -> None:
    assert walk(CHAIN, [4, NO_TOKEN, 6, 7]) == Acceptance((0, 1), (4, NO_TOKEN))


def test_a_cut_round_keeps_a_row_for_each_token_it_keeps() -> None:
    outcome = walk(CHAIN, [4, 5, 6, 7]).cut(2)
    assert outcome == Acceptance((0, 1), (4, 5))
    assert (outcome.num_correct_drafts, outcome.num_advanced) == (1, 2)


@pytest.mark.parametrize(
    ("emitted", "num_outputs", "ending"),
    [
        ([1, 2, 3], 0, Ending((1, 2, 3))),
        ([1, 2, 3], 5, Ending((1, 2, 3), "length")),
        ([1, 2, 3], 6, Ending((1, 2), "length")),
        ([1, 2, 3], 7, Ending((1,), "length")),
        ([1, 9, 3], 0, Ending((1, 9), "stop", 9)),
        ([9, 8, 3], 0, Ending((9,), "stop", 9)),
        ([1, 8, 9], 5, Ending((1, 8), "stop", 8)),
        ([1, 2, 9], 5, Ending((1, 2, 9), "stop", 9)),
        ([1, 2, 9], 6, Ending((1, 2), "length")),
    ],
)
def test_a_run_ends_once_at_its_first_stop_token_or_at_the_cap(
    emitted: list[int], num_outputs: int, ending: Ending
) -> None:
    params = SamplingParams(seed=0, max_tokens=8, stop_token_ids=(8, 9))
    assert truncate(emitted, params=params, num_outputs=num_outputs) == ending


class RandomModel:
    """Logits are a fixed random function of the last two tokens: enough for paths to matter."""

    def __init__(self, seed: int) -> None:
        self._table = torch.randn(
            VOCAB_SIZE, VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed)
        )

    def logits(self, tokens: list[int]) -> torch.Tensor:
        return 2 * self._table[tokens[-2], tokens[-1]]


def plain_decode(model: RandomModel, params: SamplingParams, prompt: list[int]) -> list[int]:
    tokens = list(prompt)
    while True:
        state = SamplingState(params, tokens=tokens, num_prompt_tokens=len(prompt), vocab_size=VOCAB_SIZE)
        token_ids = draw(model.logits(tokens)[None], [Row(state)]).token_ids
        ending = truncate(token_ids, params=params, num_outputs=len(tokens) - len(prompt))
        tokens += ending.token_ids
        if ending.finish_reason:
            return tokens[len(prompt) :]


def random_tree(rng: random.Random, root: int, hint: list[int]) -> Tree:
    """A tree whose first branch often is the text to come, so that walks get deep."""
    parents = random_parents(rng, rng.randrange(1, 10))
    tokens = random_tokens(rng, parents, VOCAB_SIZE)
    children: dict[tuple[int, int], int] = {}
    node, token_ids, tree_parents = 0, list[int](), list[int]()
    for token_id in hint[: rng.randrange(0, 5)]:
        token_ids.append(token_id)
        tree_parents.append(node)
        children[node, token_id] = node = len(token_ids)
    offset = len(token_ids)
    for i, parent in enumerate(parents[1:], start=1):
        place = 0 if parent == 0 else parent + offset
        if (place, tokens[i]) in children:
            place = offset + i - 1
        token_ids.append(tokens[i])
        tree_parents.append(place)
        children[place, tokens[i]] = len(token_ids)
    return build(root, Proposal(token_ids=tuple(token_ids), parents=tuple(tree_parents)))


def speculative_decode(
    model: RandomModel, params: SamplingParams, prompt: list[int], expected: list[int], rng: random.Random
) -> tuple[list[int], int]:
    """Emitted tokens and how many of them were drafts."""
    tokens, num_correct = list(prompt), 0
    state = SamplingState(params, tokens=tokens, num_prompt_tokens=len(prompt), vocab_size=VOCAB_SIZE)
    while True:
        tree = random_tree(rng, tokens[-1], expected[len(tokens) - len(prompt) :])
        logits_NV = torch.stack([model.logits([*tokens, *path]) for path in tree.paths])
        outcome = walk(tree, draw(logits_NV, [Row(state, path) for path in tree.paths]).token_ids)
        ending = truncate(outcome.token_ids, params=params, num_outputs=state.num_outputs)
        num_correct += outcome.num_correct_drafts
        tokens += ending.token_ids
        state.advance(ending.token_ids)
        if ending.finish_reason:
            return tokens[len(prompt) :], num_correct


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 1.0},
        {"temperature": 0.7, "top_k": 3},
        {"temperature": 1.3, "top_p": 0.8, "min_p": 0.05},
        {"temperature": 0.0, "frequency_penalty": 0.7, "presence_penalty": 0.4},
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"temperature": 1.0, "frequency_penalty": 1.5, "repetition_penalty": 1.2, "top_k": 6},
        {"temperature": 1.0, "min_tokens": 12, "stop_token_ids": (1, 2), "logit_bias": ((1, 3.0), (4, -2.0))},
        {"temperature": 1.0, "banned_sequences": ((1,), (2, 2), (3, 4, 5), (3, 4, 6), (5, 4, 5))},
    ],
)
def test_a_walked_tree_emits_the_tokens_of_plain_decoding(options: dict[str, object]) -> None:
    model, num_correct = RandomModel(seed=31), 0
    for seed in range(15):
        print(f"seed {seed}")
        rng = random.Random(seed)
        params = SamplingParams(seed=seed, max_tokens=rng.randrange(13, 30), **options)  # type: ignore[arg-type]
        prompt = [rng.randrange(VOCAB_SIZE) for _ in range(rng.randrange(2, 6))]
        expected = plain_decode(model, params, prompt)
        emitted, correct = speculative_decode(model, params, prompt, expected, rng)
        assert emitted == expected
        num_correct += correct
    assert num_correct > 50
