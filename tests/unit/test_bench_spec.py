"""How drafting algorithms are written, which prompts are taken, and what is made of the answers."""

import json
from dataclasses import replace
from pathlib import Path
from time import perf_counter

import pytest
import torch

from bench import spec, spec_report
from bench.forwards import ENTRY_POINTS, ForwardClock, forward_clock
from bench.spec_config import Contender, SpecBench, contenders
from bench.spec_report import Answer
from engine.linear import Linear
from speculative.build import BuiltEngine, build_engine
from tests.conformance.test_loop import prompt_of
from tests.engines import make_engine, make_request, run, tiny_folder
from tests.every_proposer import NAMES, drafter

PLAIN = Answer(
    tokens=(1, 2, 3, 4, 5), accepted=(0,) * 4, drafted=0, prefill_s=1.0, decode_s=4.0, forward_s=3.0
)
DRAFTED = Answer(
    tokens=(1, 2, 3, 4, 5), accepted=(2, 0), drafted=6, prefill_s=1.0, decode_s=2.0, forward_s=1.5
)


def test_algorithms_are_names_with_options_and_plain_decoding_is_always_first() -> None:
    assert contenders("ngram, eagle3:num_steps=4+topk=2,none") == (
        Contender(label="none", algorithm="none", options={}),
        Contender(label="ngram", algorithm="ngram", options={}),
        Contender(label="eagle3:num_steps=4+topk=2", algorithm="eagle3", options={"num_steps": 4, "topk": 2}),
    )


def test_another_head_may_be_named_among_the_options() -> None:
    (_, eagle) = contenders("eagle3:draft=/heads/mine+topk=2+budget=adaptive")
    assert eagle.options == {"draft": "/heads/mine", "topk": 2, "budget": "adaptive"}


def test_an_algorithm_may_be_a_factory_in_a_module() -> None:
    found = contenders("my.drafts:create,my.drafts:create:topk=2")
    assert [(one.algorithm, one.options) for one in found[1:]] == [
        ("my.drafts:create", {}),
        ("my.drafts:create", {"topk": 2}),
    ]


def test_a_budget_with_its_slots_is_an_option_like_others() -> None:
    found = contenders("ngram:budget=adaptive,my.drafts:create:budget=count+budget_slots=1:0/2;4:0")
    assert [(one.algorithm, one.options) for one in found[1:]] == [
        ("ngram", {"budget": "adaptive"}),
        ("my.drafts:create", {"budget": "count", "budget_slots": "1:0/2;4:0"}),
    ]


def test_a_bundled_head_keeps_its_shape_under_another_budget() -> None:
    settings = SpecBench(prompts="f", algorithms="eagle3,eagle3:budget=adaptive,eagle3:topk=1")
    (_, bundled, adaptive, own) = (
        spec.engine_settings(settings, one, Path("f")).draft_options for one in settings.contenders
    )
    assert "num_steps" in bundled
    assert (adaptive, own) == ({**bundled, "budget": "adaptive"}, {"topk": 1})


@pytest.mark.parametrize(
    "text", ["", "eagle3:topk=2+x", "eagle3:=2", ":topk=2", "eagle3:draft=", "ngram,ngram"]
)
def test_algorithms_that_cannot_be_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"^algorithms must"):
        SpecBench(prompts="f", algorithms=text)


@pytest.mark.parametrize(
    ("field", "value"), [("per_category", -1), ("max_tokens", 1), ("threads", -1), ("prompts", "")]
)
def test_bad_settings_are_refused_by_name(field: str, value: int | str) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must"):
        SpecBench(**{"prompts": "f", field: value})  # type: ignore[arg-type]


def test_the_first_prompts_of_each_category_are_taken(tmp_path: Path) -> None:
    file = tmp_path / "p.jsonl"
    lines = [
        {"category": kind, "turns": [f"{kind}{i}", "second"]} for i in range(3) for kind in ("qa", "rag")
    ]
    file.write_text("\n".join([*map(json.dumps, lines), '"bare"', ""]))
    assert spec.by_category(file, most=2) == {
        "qa": ["qa0", "qa1"],
        "rag": ["rag0", "rag1"],
        "prompts": ["bare"],
    }
    assert len(spec.by_category(file, most=0)["qa"]) == 3


def test_a_file_without_prompts_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ValueError, match="prompts must hold at least one line"):
        spec.by_category(tmp_path / "empty", most=0)
    with pytest.raises(ValueError, match="prompts must be a readable file"):
        spec.by_category(tmp_path / "missing", most=0)


def test_acceptance_at_a_position_is_a_share_of_all_rounds() -> None:
    assert spec_report.accepted_at([2, 0, 1, 0]) == [0.5, 0.25]
    assert spec_report.accepted_at([0, 0]) == []


def test_numbers_hold_both_sides_of_the_ratio_and_every_prompt_again_under_all() -> None:
    found = spec_report.numbers(
        {"qa": {"none": [PLAIN], "x": [DRAFTED]}, "rag": {"none": [PLAIN], "x": [DRAFTED]}}
    )
    assert list(found) == ["qa", "rag", "all"]
    assert found["all"]["x"]["prompts"] == 2
    assert found["qa"]["x"] == {
        "prompts": 1,
        "rounds": 2,
        "tokens": 5,
        "drafted": 6,
        "tokens_per_verify": 2.0,
        "accepted_at": [0.5, 0.5],
        "tokens_per_s": 2.0,
        "plain_tokens_per_s": 1.0,
        "speed_up": 2.0,
        "whole_speed_up": 1.667,
        "outside_share": 0.25,
        "round_ms": 1000.0,
        "same_text_share": 1.0,
    }
    assert found["qa"]["none"]["speed_up"] == 1.0


def test_the_speed_up_is_the_median_of_the_prompts_own_ratios() -> None:
    slow = [replace(PLAIN, decode_s=seconds) for seconds in (1.0, 10.0, 3.0)]
    fast = [replace(PLAIN, decode_s=seconds) for seconds in (0.5, 10.0, 1.0)]
    assert spec_report.numbers({"qa": {"none": slow, "x": fast}})["qa"]["x"]["speed_up"] == 2.0


def test_the_table_names_every_category_and_algorithm() -> None:
    shown = spec_report.text(spec_report.numbers({"qa": {"none": [PLAIN], "x": [DRAFTED]}}))
    assert "  qa         1  1.00  2.00\n  all        1  1.00  2.00\n" in shown
    assert "25.0 %" in shown


def test_a_model_inside_a_model_is_timed_once() -> None:
    times = iter([10.0, 13.0])
    clock = ForwardClock(lambda: next(times))
    inner = clock.timed(lambda x: x + 1)
    assert clock.timed(lambda x: 2 * inner(x))(3) == 8
    assert clock.seconds == 3.0


@pytest.mark.parametrize("name", NAMES[4:])
def test_every_matrix_of_the_two_models_counts_as_theirs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a draft that none of the bundled heads is: its time is no bookkeeping."""
    engine = make_engine(drafter(name).make())
    outside: list[Linear] = []
    product = Linear.__call__
    with forward_clock() as clock:

        def call(self: Linear, x_TI: torch.Tensor) -> torch.Tensor:
            if not clock._is_inside:
                outside.append(self)
            return product(self, x_TI)

        monkeypatch.setattr(Linear, "__call__", call)
        run(engine, [make_request("r", prompt_of(33), max_tokens=12)])
    assert outside == []
    assert engine.counters.drafted > 0


def test_the_models_are_as_before_after_measuring() -> None:
    before = [vars(owner)[name] for owner, name in ENTRY_POINTS]
    with forward_clock():
        assert all(
            vars(owner)[name] is not old for (owner, name), old in zip(ENTRY_POINTS, before, strict=True)
        )
    assert [vars(owner)[name] for owner, name in ENTRY_POINTS] == before


def test_every_algorithm_answers_every_prompt_with_the_same_text() -> None:
    settings = SpecBench(prompts="f", algorithms="ngram:num_draft_tokens=3", dtype="float32", threads=1)
    engines: dict[str, BuiltEngine] = {
        one.label: build_engine(
            replace(spec.engine_settings(settings, one, tiny_folder()), kv_memory_mib=1), clock=perf_counter
        )
        for one in settings.contenders
    }
    prompts = {"qa": [(5, 6, 7, 5, 6, 7, 5, 6), (9, 8, 9, 8, 9)]}
    found = spec.measure(engines, prompts, max_tokens=12)
    numbers = spec_report.numbers(found)["qa"]
    drafted = found["qa"]["ngram:num_draft_tokens=3"]
    assert numbers["none"]["tokens_per_verify"] == 1.0
    assert [one.tokens for one in drafted] == [one.tokens for one in found["qa"]["none"]]
    assert all(len(one.tokens) <= 1 + sum(one.accepted) + len(one.accepted) for one in drafted)
    assert all(0 < one.forward_s < one.decode_s for one in drafted)
