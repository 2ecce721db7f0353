import pytest

from engine.grammar import allows, allows_only, num_words, tree_masks
from engine.params import SamplingParams
from engine.sampling_state import SamplingState
from speculative.proposer import Proposal
from speculative.tree import build
from tests.fakes_grammar import ListMatcher, packed, unpacked


def test_eagle_g9_masks_and_calls_of_the_walk() -> None:
    """The language 1-3-7 | 2-5-9 on the tree of eight nodes."""
    tree = build(9, Proposal(token_ids=(1, 2, 3, 4, 5, 7, 9), parents=(0, 0, 1, 1, 2, 3, 5)))
    matcher = ListMatcher([[1, 3, 7], [2, 5, 9]])
    first_child, next_sibling = tree.links()
    masks = tree_masks(
        matcher, tree.token_ids, first_child=first_child, next_sibling=next_sibling, vocab_size=10
    )
    rows = [None if words_W is None else unpacked(words_W) for words_W in masks]
    assert rows == [{1, 2}, {3}, {5}, {7}, None, {9}, None, None]
    steps = [call for call in matcher.calls if call != "fill"]
    assert " ".join(steps) == "acc1 acc3 acc7 rb rb rb acc2 acc5 acc9 rb rb rb"
    assert matcher.accepted == []


def test_bits_are_tokens() -> None:
    words_W = packed({0, 31, 32, 63}, num_words=num_words(64))
    assert [token_id for token_id in range(-1, 70) if allows(words_W, token_id)] == [0, 31, 32, 63]
    assert allows_only(words_W, [0, 31, 32, 63, 5])
    assert not allows_only(words_W, [0, 31, 32])
    assert unpacked(words_W) == {0, 31, 32, 63}


def test_a_token_outside_the_grammar_cannot_be_emitted() -> None:
    params = SamplingParams(seed=0, max_tokens=5)
    state = SamplingState(
        params, tokens=[0], num_prompt_tokens=1, vocab_size=8, matcher=ListMatcher([[1, 2], [1, 3]])
    )
    state.advance([1])
    state.advance([4])
    with pytest.raises(ValueError, match="token 4 does not follow the request's grammar"):
        state.masks([4], first_child=[-1], next_sibling=[-1])
