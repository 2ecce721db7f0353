import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from scipy.stats import chi2

from engine.grammar import Words, num_words
from engine.params import SamplingParams, TokenLogprob
from engine.randomness import TARGET_STREAM, uniform
from engine.sampling import NO_TOKEN, Row, draw
from engine.sampling_state import SamplingState
from tests.unit.plain_rules import adjusted, distribution, inverse_cdf

INF = math.inf

Options = dict[str, Any]


def state_of(
    prompt: list[int], outputs: list[int], *, vocab_size: int = 8, seed: int = 1, **options: Any
) -> SamplingState:
    params = SamplingParams(seed=seed, max_tokens=100, **options)
    return SamplingState(
        params, tokens=[*prompt, *outputs], num_prompt_tokens=len(prompt), vocab_size=vocab_size
    )


def adjusted_row(row: list[float], state: SamplingState, path: tuple[int, ...] = ()) -> list[float]:
    scores_1V = torch.tensor([row])
    state.adjust_(scores_1V, [0], [path], allowed=[None])
    return scores_1V[0].tolist()


def token_of(row: list[float], state: SamplingState, path: tuple[int, ...] = ()) -> int:
    return draw(torch.tensor([row]), [Row(state, path)]).token_ids[0]


def test_greedy_takes_the_lowest_id_of_the_best() -> None:
    logits_RV = torch.tensor([[1.0, 3.0, 3.0, 2.0], [5.0, 5.0, 5.0, 5.0]])
    state = state_of([0], [], vocab_size=4, temperature=0.0)
    assert draw(logits_RV, [Row(state)] * 2).token_ids == [1, 0]
    assert draw(torch.zeros(1, 50_000), [Row(state)]).token_ids == [0]


def test_only_allowed_tokens_are_drawn_whatever_the_bias_and_however_drafted() -> None:
    row = [9.0, 1.0, 8.0, 2.0]
    state = state_of(
        [0], [], vocab_size=4, temperature=0.0, allowed_token_ids=(1, 3), logit_bias=((0, 100.0),)
    )
    assert token_of(row, state) == 3
    assert adjusted_row(row, state, path=(3, 1)) == [-INF, 1.0, -INF, 2.0]
    hot = state_of([0], [], vocab_size=4, temperature=2.0, allowed_token_ids=(1, 3))
    drawn = {token_of(row, hot, path=(1,) * n) for n in range(40)}
    assert drawn == {1, 3}
    with pytest.raises(ValueError, match="allowed_token_ids id 4 is outside"):
        state_of([0], [], vocab_size=4, allowed_token_ids=(4,))


def test_a_banned_sequence_is_not_completed_in_the_answer_or_on_a_path() -> None:
    row = [1.0] * 6
    bans = ((5,), (1, 2), (1, 2, 3), (4, 1, 2), (0, 0, 0, 0))

    def forbidden(prompt: list[int], outputs: list[int], path: tuple[int, ...] = ()) -> set[int]:
        state = state_of(prompt, outputs, vocab_size=6, banned_sequences=bans)
        return {i for i, score in enumerate(adjusted_row(row, state, path)) if score == -INF}

    assert forbidden([1], []) == {5}, "the prompt does not count"
    assert forbidden([0], [1]) == forbidden([0], [], (1,)) == forbidden([0], [4], (1,)) == {5, 2}
    assert forbidden([0], [1, 2]) == forbidden([0], [1], (2,)) == forbidden([0], [], (1, 2)) == {5, 3}
    assert forbidden([0], [0, 0, 0]) == forbidden([0], [0, 0], (0,)) == {5, 0}
    assert forbidden([0, 0], [0, 0]) == {5}
    with pytest.raises(ValueError, match="banned_sequences id 8 is outside"):
        state_of([0], [], vocab_size=8, banned_sequences=((1, 8),))
    with pytest.raises(ValueError, match="banned_sequences must be none of them empty"):
        state_of([0], [], vocab_size=8, banned_sequences=((1, 2), ()))


def test_only_rows_where_something_is_banned_are_changed() -> None:
    state = state_of([0], [3], vocab_size=6, banned_sequences=((1, 2),))
    assert [state.changes(path) for path in ((), (1,), (1, 2))] == [False, True, False]
    state.advance([1])
    assert state.changes(())


def test_a_stop_forbidden_and_all_else_not_allowed_leaves_nothing() -> None:
    state = state_of([0], [], vocab_size=4, allowed_token_ids=(2,), stop_token_ids=(2,), min_tokens=1)
    drawn = draw(torch.zeros(1, 4), [Row(state)])
    assert (drawn.token_ids, drawn.errors) == ([NO_TOKEN], {0: "no token is possible: all are forbidden"})


def test_top_k_of_one_is_greedy_at_any_temperature() -> None:
    assert token_of([1.0, 3.0, 3.0, 2.0], state_of([0], [], vocab_size=4, temperature=2.0, top_k=1)) == 1


def test_a_token_is_the_inverse_cdf_at_the_uniform_of_its_position() -> None:
    logits = [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]
    for num_prompt in range(1, 40):
        state = state_of([0] * num_prompt, [1, 2], vocab_size=4, seed=99)
        for path in ((), (3,), (3, 0)):
            position = num_prompt + 2 + len(path)
            assert Row(state, path).position == position
            expected = inverse_cdf([0.1, 0.2, 0.3, 0.4], uniform(99, position, TARGET_STREAM))
            assert token_of(logits, state, path) == expected


def test_a_node_of_a_tree_draws_what_its_path_would_once_emitted() -> None:
    logits = torch.randn(8, generator=torch.Generator().manual_seed(2)).tolist()
    for seed in range(50):
        options: Options = {
            "seed": seed,
            "frequency_penalty": 1.0,
            "repetition_penalty": 1.3,
            "min_tokens": 3,
        }
        ahead = state_of([1, 2], [3], stop_token_ids=(0, 4), **options)
        later = state_of([1, 2], [3, 5, 5], stop_token_ids=(0, 4), **options)
        assert token_of(logits, ahead, (5, 5)) == token_of(logits, later)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.8},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.3, "temperature": 1.5},
        {"frequency_penalty": 0.8, "presence_penalty": -0.5, "repetition_penalty": 1.4},
        {"logit_bias": ((0, 2.0), (5, -1.0)), "top_k": 5, "top_p": 0.9},
    ],
)
def test_draws_over_seeds_follow_the_law_of_the_plain_reference(options: Options) -> None:
    num_draws, prompt, outputs = 4000, [1, 2, 2], [3, 3, 6]
    logits = [0.3, 1.1, -0.4, 0.9, 1.4, 0.0, 0.7, -2.0]
    rows = [Row(state_of(prompt, outputs, seed=seed, **options)) for seed in range(num_draws)]
    token_ids = draw(torch.tensor(logits).expand(num_draws, -1), rows).token_ids
    params = rows[0].state.params
    expected = distribution(adjusted(logits, params, prompt, outputs), params)
    counts = [token_ids.count(i) for i in range(8)]
    assert [count for count, p in zip(counts, expected, strict=True) if p == 0] == [0] * expected.count(0.0)
    possible = [(count, num_draws * p) for count, p in zip(counts, expected, strict=True) if p > 0]
    distance = sum((count - mean) ** 2 / mean for count, mean in possible)
    assert distance < chi2.ppf(1 - 1e-6, len(possible) - 1)


def test_a_request_draws_alike_alone_and_among_neighbours() -> None:
    logits_RV = 3 * torch.randn(12, 1000, generator=torch.Generator().manual_seed(3))
    kinds: list[Options] = [
        {},
        {"temperature": 0.0},
        {"top_p": 0.9},
        {"top_k": 20, "temperature": 1.7},
        {"frequency_penalty": 1.0, "temperature": 0.0},
        {"min_p": 0.05, "logit_bias": ((7, 4.0),)},
    ]
    states = [state_of([1], [2, 3], vocab_size=1000, seed=i, **kind) for i, kind in enumerate(kinds)]
    rows = [row for state in states for row in (Row(state), Row(state, (4, 5)))]
    together = draw(logits_RV, rows).token_ids
    assert together == [draw(logits_RV[i : i + 1], [row]).token_ids[0] for i, row in enumerate(rows)]
    assert len(set(together)) > 4


def test_seeds_give_distinct_texts_that_are_not_greedy() -> None:
    logits_RV = torch.randn(24, 500, generator=torch.Generator().manual_seed(9))
    texts = {
        tuple(
            draw(
                logits_RV, [Row(state_of([0] * i, [], vocab_size=500, seed=seed)) for i in range(1, 25)]
            ).token_ids
        )
        for seed in range(40)
    }
    assert len(texts) == 40
    assert tuple(logits_RV.argmax(-1).tolist()) not in texts


def test_the_logits_are_left_as_they_are() -> None:
    logits_RV = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    state = state_of([0], [3], vocab_size=4, temperature=0.0, frequency_penalty=2.0, logprobs=1)
    assert draw(logits_RV, [Row(state)]).token_ids == [2]
    assert logits_RV.tolist() == [[1.0, 2.0, 3.0, 4.0]]


# ---- adjustments


def test_penalties_follow_their_formulas() -> None:
    row = [2.0, -2.0, 2.0, -2.0]
    state = state_of([0, 1], [2, 3, 3], vocab_size=4, repetition_penalty=2.0)
    assert adjusted_row(row, state) == [1.0, -4.0, 1.0, -4.0]
    state = state_of([0, 1], [2, 3, 3], vocab_size=4, frequency_penalty=0.5)
    assert adjusted_row(row, state) == [2.0, -2.0, 1.5, -3.0]
    state = state_of([0, 1], [2, 3, 3], vocab_size=4, presence_penalty=0.5)
    assert adjusted_row(row, state) == [2.0, -2.0, 1.5, -2.5]


def test_penalties_count_the_tokens_of_each_path() -> None:
    state = state_of([0], [2], vocab_size=5, frequency_penalty=0.5, repetition_penalty=2.0)
    scores_RV = torch.full((3, 5), 4.0)
    state.adjust_(scores_RV, [0, 1, 2], [(), (2, 3), (4, 4)], allowed=[None] * 3)
    assert scores_RV.tolist() == [
        [2.0, 4.0, 1.5, 4.0, 4.0],
        [2.0, 4.0, 1.0, 1.5, 4.0],
        [2.0, 4.0, 1.5, 4.0, 1.0],
    ]


def test_adjusting_touches_only_the_named_rows() -> None:
    scores_RV = torch.ones(3, 4)
    state_of([0], [1], vocab_size=4, presence_penalty=1.0).adjust_(scores_RV, [1], [()], allowed=[None])
    assert scores_RV.tolist() == [[1.0] * 4, [1.0, 0.0, 1.0, 1.0], [1.0] * 4]


def test_a_bias_is_added_and_the_last_of_one_id_counts() -> None:
    state = state_of([0], [], vocab_size=4, logit_bias=((2, 5.0), (0, -100.0), (2, 1.5)))
    assert adjusted_row([1.0] * 4, state) == [-99.0, 1.0, 2.5, 1.0]


def test_stop_tokens_are_forbidden_until_min_tokens_counting_the_path() -> None:
    row = [9.0, 1.0, 0.0]
    options: Options = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": (0, 777)}
    assert token_of(row, state_of([1], [1, 1], vocab_size=3, **options)) == 1
    assert token_of(row, state_of([1], [1], vocab_size=3, **options), (1,)) == 1
    assert token_of(row, state_of([1], [1], vocab_size=3, **options), (1, 1)) == 0
    assert token_of(row, state_of([1, 1, 1], [1, 1, 1], vocab_size=3, **options)) == 0


def test_no_bias_lets_a_stop_token_through_before_min_tokens() -> None:
    state = state_of([1], [], vocab_size=3, min_tokens=1, stop_token_ids=(0,), logit_bias=((0, 100.0),))
    assert adjusted_row([0.0] * 3, state)[0] == -INF


def test_a_state_advanced_step_by_step_equals_one_built_from_all_tokens() -> None:
    seed = 6
    print(f"seed {seed}")
    rng = random.Random(seed)
    row = [rng.gauss(0, 2) for _ in range(300)]
    options: Options = {
        "frequency_penalty": 0.3,
        "presence_penalty": 0.2,
        "repetition_penalty": 1.1,
        "banned_sequences": tuple(tuple(rng.randrange(300) for _ in range(n % 2 + 1)) for n in range(2000)),
    }
    prompt = [rng.randrange(300) for _ in range(70)]
    outputs: list[int] = []
    state = state_of(prompt, outputs, vocab_size=300, **options)
    for _ in range(60):
        step = [rng.randrange(300) for _ in range(rng.randrange(1, 6))]
        outputs += step
        state.advance(step)
        whole = state_of(prompt, outputs, vocab_size=300, **options)
        path = tuple(rng.randrange(300) for _ in range(3))
        assert adjusted_row(row, state, path) == adjusted_row(row, whole, path)
        assert adjusted_row(row, state, path) == pytest.approx(
            adjusted(row, state.params, prompt, [*outputs, *path]), abs=1e-5
        )
        assert (state.num_tokens, state.num_outputs) == (70 + len(outputs), len(outputs))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"logit_bias": ((8, 1.0),)}, "logit_bias id 8 is outside the vocabulary of 8"),
        ({"presence_penalty": 1.0}, "token id 9 is outside the vocabulary of 8"),
    ],
)
def test_ids_outside_the_vocabulary_are_refused_at_admission(options: Options, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        state_of([9], [], vocab_size=8, **options)


# ---- what cannot be drawn


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        ([0.0, math.nan, 0.0], "the model returned a NaN or infinite logit"),
        ([0.0, INF, 0.0], "the model returned a NaN or infinite logit"),
        ([-INF, -INF, -INF], "no token is possible: all are forbidden"),
    ],
)
def test_a_bad_row_is_an_error_of_that_row_alone(temperature: float, bad: list[float], reason: str) -> None:
    state = state_of([0], [], vocab_size=3, temperature=temperature, logprobs=1)
    drawn = draw(torch.tensor([[0.0, 50.0, 0.0], bad]), [Row(state), Row(state)])
    assert drawn.token_ids == [1, NO_TOKEN]
    assert drawn.errors == {1: reason}
    assert drawn.logprobs[0] is not None
    assert drawn.logprobs[1] is None


def words(*token_ids: int, vocab_size: int) -> Words:
    words_W = np.zeros(num_words(vocab_size), dtype=np.uint32)
    for token_id in token_ids:
        words_W[token_id // 32] |= np.uint32(1 << token_id % 32)
    return words_W.view(np.int32)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_only_allowed_tokens_are_drawn(temperature: float) -> None:
    state = state_of([0], [], vocab_size=70, temperature=temperature)
    logits_RV = torch.zeros(4, 70)
    logits_RV[:, 1] = 99.0
    allowed = [words(31, vocab_size=70), None, words(69, vocab_size=70), words(vocab_size=70)]
    drawn = draw(logits_RV, [Row(state, (), allowed_W) for allowed_W in allowed])
    assert drawn.token_ids == [31, 1, 69, NO_TOKEN]
    assert drawn.errors == {3: "no token is possible: all are forbidden"}


def test_a_grammar_leaves_the_logits_and_the_logprobs_alone() -> None:
    state = state_of([0], [], vocab_size=4, temperature=0.0, logprobs=1)
    logits_1V = torch.tensor([[0.0, 3.0, 1.0, 2.0]])
    drawn = draw(logits_1V, [Row(state, (), words(2, vocab_size=4))])
    expected = torch.log_softmax(logits_1V[0], dim=-1)
    assert drawn.token_ids == [2]
    assert drawn.logprobs == [TokenLogprob(float(expected[2]), ((1, float(expected[1])),))]
    assert logits_1V.tolist() == [[0.0, 3.0, 1.0, 2.0]]


def test_penalties_count_below_a_grammar() -> None:
    state = state_of([0], [2, 2], vocab_size=4, temperature=0.0, frequency_penalty=2.0)
    row = Row(state, (), words(2, 3, vocab_size=4))
    assert draw(torch.tensor([[9.0, 9.0, 5.0, 2.0]]), [row]).token_ids == [3]


def test_min_tokens_keeps_a_grammar_going_while_it_can() -> None:
    state = state_of([0], [], vocab_size=4, temperature=0.0, min_tokens=5, stop_token_ids=(3,))
    logits_2V = torch.tensor([[0.0, 0.0, 0.0, 9.0]] * 2)
    can_go_on, is_finished = words(1, 3, vocab_size=4), words(3, vocab_size=4)
    assert draw(logits_2V, [Row(state, (), can_go_on), Row(state, (), is_finished)]).token_ids == [1, 3]


def test_no_rows_draw_nothing() -> None:
    assert draw(torch.empty(0, 5), []).token_ids == []


# ---- log-probabilities


def test_logprobs_are_the_models_own_whatever_the_request_asks() -> None:
    logits = [math.log(p) for p in (0.1, 0.2, 0.3, 0.4)]
    state = state_of([0], [3], vocab_size=4, temperature=0.0, presence_penalty=2.0, logprobs=2)
    drawn = draw(torch.tensor([logits]), [Row(state)])
    (logprob,) = drawn.logprobs
    assert drawn.token_ids == [2]
    assert logprob is not None
    assert logprob.logprob == pytest.approx(math.log(0.3), abs=1e-6)
    assert [token_id for token_id, _ in logprob.top] == [3, 2]
    assert [value for _, value in logprob.top] == pytest.approx([math.log(0.4), math.log(0.3)], abs=1e-6)


def test_tied_logprobs_rank_by_lower_id() -> None:
    state = state_of([0], [], vocab_size=4, temperature=0.0, logprobs=3)
    (logprob,) = draw(torch.tensor([[0.0, 1.0, 1.0, 1.0]]), [Row(state)]).logprobs
    assert logprob is not None
    assert [token_id for token_id, _ in logprob.top] == [1, 2, 3]
    (logprob,) = draw(torch.zeros(1, 4), [Row(state)]).logprobs
    assert logprob is not None
    assert [token_id for token_id, _ in logprob.top] == [0, 1, 2]


def test_logprobs_come_only_for_the_rows_that_want_them() -> None:
    quiet = state_of([0], [], vocab_size=4, temperature=0.0)
    chosen = state_of([0], [], vocab_size=4, temperature=0.0, logprobs=0)
    drawn = draw(torch.zeros(2, 4), [Row(quiet), Row(chosen)])
    assert drawn.logprobs == [None, TokenLogprob(float(torch.zeros(4).log_softmax(0)[0]), ())]


def test_impossible_tokens_are_not_among_the_likely() -> None:
    state = state_of([0], [], vocab_size=3, temperature=0.0, logprobs=20)
    (logprob,) = draw(torch.tensor([[0.0, -INF, -INF]]), [Row(state)]).logprobs
    assert logprob == TokenLogprob(0.0, ((0, 0.0),))
