import math
import random

import pytest
import torch

from engine.distribution import Filters, pick, weights
from engine.params import SamplingParams
from tests.unit.plain_rules import distribution, inverse_cdf

INF = math.inf


def filters(params: list[SamplingParams]) -> Filters:
    return Filters(
        temperature_R=torch.tensor([p.temperature for p in params], dtype=torch.float64),
        min_p_R=torch.tensor([p.min_p for p in params], dtype=torch.float64),
        top_k_R=torch.tensor([p.top_k for p in params], dtype=torch.int64),
        top_p_R=torch.tensor([p.top_p for p in params], dtype=torch.float64),
    )


def params_with(**options: float) -> SamplingParams:
    return SamplingParams(seed=0, max_tokens=1, **options)  # type: ignore[arg-type]


def law(scores: list[float], **options: float) -> list[float]:
    weights_1V = weights(torch.tensor([scores]), filters([params_with(**options)]))
    return (weights_1V / weights_1V.sum())[0].tolist()


def kept(scores: list[float], **options: float) -> list[int]:
    return [i for i, p in enumerate(law(scores, **options)) if p > 0]


def test_temperature_divides_the_scores() -> None:
    scores = [0.0, math.log(4.0)]
    assert law(scores, temperature=1.0) == pytest.approx([0.2, 0.8])
    assert law(scores, temperature=2.0) == pytest.approx([1 / 3, 2 / 3])
    assert law(scores, temperature=0.5) == pytest.approx([1 / 17, 16 / 17])
    assert law(scores, temperature=1e-6) == [0.0, 1.0]


def test_top_k_keeps_exactly_k_and_the_lower_ids_of_a_tie() -> None:
    scores = [1.0, 2.0, 1.0, 3.0, 1.0]
    assert kept(scores, top_k=1) == [3]
    assert kept(scores, top_k=3) == [0, 1, 3]
    assert kept(scores, top_k=4) == [0, 1, 2, 3]
    assert kept(scores, top_k=99) == [0, 1, 2, 3, 4]
    assert kept([5.0] * 5, top_k=2) == [0, 1]


def test_top_p_keeps_the_shortest_run_that_reaches_it() -> None:
    scores = [math.log(p) for p in (0.125, 0.5, 0.25, 0.125)]
    assert kept(scores, top_p=1e-9) == [1]
    assert kept(scores, top_p=0.4999) == [1]
    assert kept(scores, top_p=0.51) == [1, 2]
    assert kept(scores, top_p=0.7499) == [1, 2]
    assert kept(scores, top_p=0.76) == [0, 1, 2]
    assert kept(scores, top_p=0.88) == [0, 1, 2, 3]


def test_top_p_counts_what_top_k_has_left() -> None:
    scores = [math.log(p) for p in (0.4, 0.3, 0.2, 0.1)]
    assert kept(scores, top_p=0.5) == [0, 1]
    assert kept(scores, top_p=0.5, top_k=2) == [0]


def test_min_p_is_relative_to_the_likeliest() -> None:
    scores = [math.log(p) for p in (0.5, 0.26, 0.24)]
    assert kept(scores, min_p=0.5) == [0, 1]
    assert kept(scores, min_p=1.0) == [0]
    assert kept([1.0, 2.0, 2.0], min_p=1.0) == [1, 2]
    assert kept(scores, min_p=0.5, temperature=2.0) == [0, 1, 2]


def test_impossible_tokens_stay_impossible_under_every_filter() -> None:
    scores = [-INF, 0.0, -INF, 1.0]
    for options in ({"top_k": 3}, {"top_p": 0.999}, {"min_p": 0.01}, {"temperature": 2.0}):
        assert kept(scores, **options) == [1, 3]


@pytest.mark.parametrize("vocab_size", [7, 128, 300, 2000])
def test_the_law_equals_the_plain_reference(vocab_size: int) -> None:
    seed = 100 + vocab_size
    print(f"seed {seed}")
    rng = random.Random(seed)
    params = [
        params_with(
            temperature=rng.choice([0.3, 1.0, 2.0]),
            top_k=rng.choice([0, 0, 1, 5, 150, vocab_size]),
            top_p=rng.choice([1.0, 0.05, 0.9, 0.999]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.3]),
        )
        for _ in range(40)
    ]
    # Quarters make many exact ties.
    rows = [[rng.randrange(-12, 12) / 4 for _ in range(vocab_size)] for _ in params]
    weights_RV = weights(torch.tensor(rows), filters(params)).double()
    for i, (row, param) in enumerate(zip(rows, params, strict=True)):
        got = weights_RV[i] / weights_RV[i].sum()
        assert got.tolist() == pytest.approx(distribution(row, param), rel=2e-5, abs=1e-12)


def test_a_row_is_filtered_alike_alone_and_among_neighbours() -> None:
    scores_RV = 3 * torch.randn(6, 5000, generator=torch.Generator().manual_seed(4))
    params = [
        params_with(),
        params_with(top_k=40),
        params_with(top_p=0.95),
        params_with(top_p=0.5, top_k=900),
        params_with(min_p=0.1, temperature=0.5),
        params_with(top_k=1),
    ]
    together = weights(scores_RV, filters(params))
    for i, param in enumerate(params):
        assert torch.equal(together[i], weights(scores_RV[i : i + 1], filters([param]))[0])


def test_pick_takes_the_first_token_above_the_goal_and_never_a_weightless_one() -> None:
    weights_1V = torch.tensor([[0.0, 2.0, 0.0, 1.0, 1.0, 0.0]])
    uniforms = [0.0, 0.4999, 0.5, 0.7499, 0.75, 1 - 2**-53]
    picked = pick(weights_1V.expand(6, -1), torch.tensor(uniforms, dtype=torch.float64))
    assert picked.tolist() == [1, 1, 3, 3, 4, 4]


@pytest.mark.parametrize("vocab_size", [1, 127, 128, 129, 1000])
def test_pick_equals_the_plain_inverse_cdf(vocab_size: int) -> None:
    seed = 200 + vocab_size
    print(f"seed {seed}")
    rng = random.Random(seed)
    rows = [
        [rng.choice([0.0, 0.0, rng.randrange(1, 64) / 64]) for _ in range(vocab_size)] for _ in range(200)
    ]
    rows = [row if sum(row) else [1.0, *row[1:]] for row in rows]
    uniforms = [rng.choice([rng.random(), 0.0, 1 - 2**-53]) for _ in rows]
    picked = pick(torch.tensor(rows), torch.tensor(uniforms, dtype=torch.float64)).tolist()
    assert picked == [inverse_cdf(row, u) for row, u in zip(rows, uniforms, strict=True)]


def test_pick_on_rounded_sums_never_leaves_the_possible_tokens() -> None:
    weights_RV = torch.rand(400, 3000, generator=torch.Generator().manual_seed(8)) ** 30
    weights_RV[:, ::3] = 0.0
    for uniform in (0.0, 1e-300, 1 - 2**-53):
        picked = pick(weights_RV, torch.full((400,), uniform, dtype=torch.float64))
        assert bool((weights_RV[torch.arange(400), picked] > 0).all())


@pytest.mark.parametrize("bad", [math.nan, INF])
def test_a_row_with_a_bad_score_is_reported_and_spoils_no_other(bad: float) -> None:
    scores_RV = torch.tensor([[0.0, bad, 1.0], [5.0, -INF, -INF], [-INF] * 3])
    for param in (params_with(), params_with(top_k=2), params_with(top_p=0.5), params_with(min_p=0.5)):
        weights_RV = weights(scores_RV, filters([param] * 3))
        assert pick(weights_RV, torch.full((3,), 0.5, dtype=torch.float64)).tolist() == [-1, 0, -1]
