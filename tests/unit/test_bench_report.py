import json
from collections.abc import Sequence

import pytest

from bench import engine_report, schedule, stats, table
from bench.contenders import Wave
from bench.openai import Completion


def an_answer(*, ttft_s: float = 0.5, total_s: float = 2.0, acceptance: float | None = None) -> Completion:
    return Completion(
        num_prompt_tokens=10,
        num_output_tokens=16,
        ttft_s=ttft_s,
        total_s=total_s,
        acceptance_length=acceptance,
    )


def a_wave(elapsed_s: float, *, streams: int = 1) -> Wave:
    return Wave(elapsed_s=elapsed_s, answers=(an_answer(total_s=elapsed_s),) * streams)


def samples(single: list[float], eight: list[float], long_ttft: list[float]) -> schedule.Samples:
    waves = {1: [a_wave(s) for s in single], 8: [a_wave(s, streams=8) for s in eight]}
    return schedule.Samples(waves=waves, long_ttft_s=long_ttft)


def test_percentiles_are_samples_by_nearest_rank() -> None:
    assert stats.percentile([3.0, 1.0, 2.0, 4.0], 50) == 2.0
    assert stats.percentile(list(range(1, 101)), 99) == 99
    assert stats.percentile([5.0], 1) == 5.0
    with pytest.raises(ValueError, match="percent must be"):
        stats.percentile([1.0], 0)


def test_nothing_cannot_be_summarised() -> None:
    with pytest.raises(ValueError, match="samples must hold"):
        stats.summary([])


def test_the_ratio_is_the_median_of_the_rounds_ratios_not_of_the_medians() -> None:
    assert stats.median_ratio([2.0, 20.0, 3.0], [1.0, 10.0, 3.0]) == 2.0


def test_numbers_are_shown_to_significant_digits() -> None:
    assert [stats.rounded(value) for value in (123.456, 0.000123456, 0.0)] == [123.5, 0.0001235, 0.0]


def test_a_waves_speed_counts_all_tokens_by_wall_time() -> None:
    wave = Wave(elapsed_s=4.0, answers=(an_answer(ttft_s=1.0), an_answer(ttft_s=2.0)))
    assert (wave.tokens_per_s, wave.decode_tokens_per_s) == (8.0, 10.0)


def test_every_round_begins_with_another_contender() -> None:
    assert [schedule.rotated("abc", by) for by in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]


class Recorder:
    def __init__(self, name: str, asked: list[tuple[str, tuple[str, ...], int]]) -> None:
        self.name = name
        self._asked = asked

    async def answer(self, prompts: Sequence[str], *, max_tokens: int) -> Wave:
        self._asked.append((self.name, tuple(prompts), max_tokens))
        return a_wave(1.0, streams=len(prompts))


async def test_all_contenders_get_the_same_prompts_and_none_twice() -> None:
    asked: list[tuple[str, tuple[str, ...], int]] = []
    plan = schedule.Plan(
        prompts=("p", "q"), streams=(1, 3), max_tokens=16, rounds=2, long_prompt=lambda n: f"long {n}"
    )
    result = await schedule.run([Recorder("a", asked), Recorder("b", asked)], plan, report=lambda _: None)
    waves = {name: [one[1] for one in asked if one[0] == name and one[2] == 16] for name in "ab"}
    assert sorted(waves["a"]) == sorted(waves["b"])
    texts = [text for wave in waves["a"] for text in wave]
    assert len(set(texts)) == len(texts) == 8
    longs = [one[1][0] for one in asked if one[1][0].startswith("long")]
    assert len(set(longs)) == len(longs) == 6
    assert {name: {k: len(v) for k, v in one.waves.items()} for name, one in result.items()} == {
        "a": {1: 2, 3: 2},
        "b": {1: 2, 3: 2},
    }
    assert result["a"].long_ttft_s == [0.5, 0.5]


def test_the_report_has_its_documented_keys() -> None:
    phase = engine_report.phase(
        {
            "colocated": samples([1.0], [4.0], [2.0]),
            "pair_nixl": samples([1.0], [4.0], [2.2]),
            "pair_grpc": samples([2.0], [8.0], [2.4]),
            "transformers": samples([2.0], [4.0], [9.0]),
        }
    )
    report = engine_report.sections({"none": phase, "ngram": phase})
    assert report["tokens_per_s"] == {
        "colocated": 16.0,
        "colocated_8": 32.0,
        "pair_nixl": 16.0,
        "pair_nixl_8": 32.0,
        "pair_grpc": 8.0,
        "pair_grpc_8": 16.0,
        "transformers": 8.0,
        "transformers_8": 32.0,
    }
    assert report["ttft_pair_over_colocated"] == pytest.approx(1.1)
    assert report["ratios"]["pair_over_transformers"] == 2.0
    assert report["ratios"]["pair_over_transformers_8"] == 1.0
    assert set(report["by_algorithm"]) == {"none", "ngram"}
    assert json.loads(json.dumps(report)) == report


def test_the_yardstick_is_the_faster_of_its_two_runs_in_each_round() -> None:
    phase = engine_report.phase(
        {
            "pair_nixl": samples([1.0, 1.0], [1.0, 1.0], [1.0, 1.0]),
            "transformers": samples([10.0, 0.5], [2.0, 2.0], [1.0, 1.0]),
            "transformers_passive": samples([1.0, 2.0], [4.0, 4.0], [1.0, 1.0]),
        }
    )
    assert phase["ratios"]["pair_over_transformers"] == 0.75  # 1.0 and 0.5
    assert phase["ratios"]["pair_over_transformers_8"] == 2.0


def test_the_table_shows_each_part_that_was_measured_and_no_other() -> None:
    phase = engine_report.phase(
        {"colocated": samples([1.0], [4.0], [2.0]), "pair_nixl": samples([1.0], [4.0], [2.0])}
    )
    text = table.text({"by_algorithm": {"none": phase}})
    assert "Engine, drafting: none" in text
    assert "ttft_pair_over_colocated" in text
    assert "Router" not in text
    speed = {
        "gb_per_s": 2.0,
        "raw_gb_per_s": 4.0,
        "transfer_over_raw": 0.5,
        "transfer_over_raw_range": (0.4, 0.75),
    }
    shown = table.text({"transfer": {"grpc": {"64": speed, "256": dict.fromkeys(speed) | {"gb_per_s": 3.0}}}})
    assert "grpc     64  2.00                  4.00   0.50  0.40 to 0.75" in shown
    assert "grpc    256  3.00                     -      -             -" in shown


def test_columns_line_up() -> None:
    assert table.columns([["a", "10"], ["bcd", "7"]]) == "  a    10\n  bcd   7\n"
