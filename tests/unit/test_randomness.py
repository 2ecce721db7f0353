import numpy as np
import pytest
import torch
from scipy.stats import chi2

from engine.randomness import DRAFT_STREAM, TARGET_STREAM, coin, murmur3, uniform, uniforms
from tests.unit.plain_rules import golden_coins
from tests.unit.plain_rules import murmur3 as plain_murmur3


def words(*values: int) -> list[np.ndarray]:
    return [np.array([value], dtype=np.uint32) for value in values]


def test_eagle_g6_murmur3_of_a_text() -> None:
    assert int(murmur3(words(int.from_bytes(b"test", "little")))[0]) == 0xBA6BD213


@pytest.mark.parametrize(
    ("seed", "position", "hashes"),
    [
        (42, 10, [0x3E7F8A86, 0xD3606085, 0xDCCE6FFD, 0x72A16C5C, 0xF0A084F9]),
        (1234567890123, 7, [0xAC5243D1, 0xFDACBD76, 0xAF7C23A8, 0xD41E688A, 0xCCE3E8A2]),
    ],
)
def test_eagle_g6_murmur3_of_seed_position_column(seed: int, position: int, hashes: list[int]) -> None:
    for column, expected in enumerate(hashes):
        key = words(seed & 0xFFFFFFFF, seed >> 32, position, column)
        assert int(murmur3(key)[0]) == expected


def test_eagle_g6_coins_of_a_seed() -> None:
    coins = [coin(42, 10, column) for column in range(5)]
    assert coins == pytest.approx([0.2441336, 0.8256894, 0.8625250, 0.4477756, 0.9399493], abs=5e-8)


def test_golden_trees_coins_equal_the_reference_and_stay_below_one() -> None:
    for case in golden_coins(seed=11):
        value = coin(case["seed"], case["position"], case["column"])
        assert value == pytest.approx(case["coin"], abs=6e-8)
        assert 0.0 <= value < 1.0


def test_a_uniform_has_the_53_bits_of_two_hashes() -> None:
    seed, position = 2**63 + 12345, 77
    high, low = (
        plain_murmur3([seed & 0xFFFFFFFF, seed >> 32, position, 2**31 + 2 * DRAFT_STREAM + half])
        for half in (0, 1)
    )
    assert uniform(seed, position, DRAFT_STREAM) == ((high << 21) | (low >> 11)) / 2**53


def test_many_uniforms_equal_single_ones_in_any_company() -> None:
    seeds, positions = [0, 1, 2**64 - 1, 42], [0, 5, 131071, 2**32 - 1]
    together = uniforms(seeds, positions, TARGET_STREAM)
    assert together.dtype == torch.float64
    alone = [uniform(seed, position, TARGET_STREAM) for seed, position in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone


def test_uniforms_are_flat_over_positions_and_over_seeds() -> None:
    num, bins = 20_000, 50
    limit = float(chi2.ppf(1 - 1e-6, bins - 1))
    for values in (
        uniforms([7] * num, range(num), TARGET_STREAM),
        uniforms(range(num), [7] * num, TARGET_STREAM),
        uniforms([7] * num, range(num), DRAFT_STREAM),
    ):
        counts = torch.histc(values, bins=bins, min=0.0, max=1.0)
        assert float(((counts - num / bins) ** 2).sum() / (num / bins)) < limit
        assert float(values.min()) >= 0.0
        assert float(values.max()) < 1.0


def test_streams_and_neighbouring_positions_are_uncorrelated() -> None:
    num = 20_000
    target = uniforms([3] * num, range(num), TARGET_STREAM)
    draft = uniforms([3] * num, range(num), DRAFT_STREAM)
    for left, right in ((target, draft), (target[1:], target[:-1])):
        correlation = float(torch.corrcoef(torch.stack((left, right)))[0, 1])
        assert abs(correlation) < 5 / num**0.5
