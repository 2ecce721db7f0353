"""Field reports S06 (penalties and min_tokens under speculation) and S08 (seeds) as tests of the loop.

Elsewhere: that S06's repetition_penalty 0 answers 400, `integration/four_pairs/test_cluster_requests.py`;
S08 (d), the law of tokens two and three, `test_law.py` and `test_law_exhaustive.py`; S08 where drafts are
drawn, `test_acceptance.py`; that a request without a seed gets one of its own, `tests/unit/test_http.py`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch import ForwardOutput
from engine.models.model import Model
from engine.params import SamplingParams
from engine.pool import PagePool
from engine.request import Request
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed
from tests.conformance.test_loop import prompt_of, proposer
from tests.engines import make_engine, make_request, run, tiny_folder, tokens_of
from tests.unit import plain_rules

RIVER = [11, 12, 13] * 4
LENGTH = 40

PENALTIES: Mapping[str, Mapping[str, Any]] = {
    "frequency 0.7": {"frequency_penalty": 0.7},
    "frequency 2.0": {"frequency_penalty": 2.0},
    "presence 2.0": {"presence_penalty": 2.0},
    "repetition 1.3": {"repetition_penalty": 1.3},
    "min_tokens 20": {"min_tokens": 20},
}


class SureProposer:
    """Drafts the text that plain decoding gave, so that every draft must stand."""

    def __init__(self, text: Sequence[int]) -> None:
        self.needs = DraftNeeds(max_draft_tokens=7)
        self._text = text

    def bind(self, model: Model, pool: PagePool) -> None:
        pass

    def admit(self, request: Request, seed: Seed | None) -> None:
        pass

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return [
            Proposal(token_ids=tuple(drafts), parents=tuple(range(len(drafts))))
            for request, limit in zip(requests, limits, strict=True)
            for drafts in [self._text[request.num_outputs : request.num_outputs + limit]]
        ]

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        pass

    def seed(self, request: Request) -> Seed:
        return Seed()

    def forget(self, request: Request) -> None:
        pass


def by_plain_rules(outputs: Sequence[int], params: SamplingParams) -> list[int]:
    """The best token at each position after the same tokens: logits by transformers, the rest by lists."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    with torch.inference_mode():
        logits_TV = model(torch.tensor([[*RIVER, *outputs]])).logits[0, len(RIVER) - 1 : -1].tolist()
    best = []
    for index, logits in enumerate(logits_TV):
        scores = plain_rules.adjusted(logits, params, RIVER, list(outputs[:index]))
        best.append(plain_rules.distribution(scores, params).index(1.0))
    return best


@pytest.mark.parametrize("options", PENALTIES.values(), ids=PENALTIES)
def test_s06_penalties_and_min_tokens_count_every_accepted_token(options: Mapping[str, Any]) -> None:
    plain = tokens_of(run(make_engine(), [make_request("r", RIVER, max_tokens=LENGTH)])["r"])
    stops = (plain[4],) if "min_tokens" in options else ()

    def request() -> Request:
        return make_request("r", RIVER, max_tokens=LENGTH, stop_token_ids=stops, **options)

    expected = tokens_of(run(make_engine(), [request()])["r"])
    assert expected == by_plain_rules(expected, request().sampling)
    assert expected != plain[: len(expected)]
    assert len(expected) >= (20 if stops else LENGTH)
    engine = make_engine(SureProposer(expected))
    assert tokens_of(run(engine, [request()])["r"]) == expected
    assert engine.counters.accepted == engine.counters.drafted > len(expected) // 2


def test_s06_a_repetition_penalty_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match=r"repetition_penalty must be in \(0, 2\], got 0"):
        SamplingParams(seed=0, max_tokens=1, repetition_penalty=0.0)


@pytest.mark.parametrize("name", ["none", "ngram", "bushy"])
def test_s08_a_seed_gives_one_text_five_times_alone_and_among_seven(name: str) -> None:
    def text(num_neighbours: int) -> tuple[int, ...]:
        requests = [
            make_request(f"n{i}", prompt_of(8 + i, seed=i), seed=i, temperature=1.0, max_tokens=24)
            for i in range(num_neighbours)
        ]
        requests.insert(3, make_request("r", RIVER, seed=7, temperature=1.0, max_tokens=24))
        return tuple(tokens_of(run(make_engine(proposer(name)), requests)["r"]))

    alone = text(0)
    assert len(alone) == 24
    assert {text(0) for _ in range(4)} | {text(7)} == {alone}


def test_s08_forty_seeds_give_different_texts_none_of_them_greedy() -> None:
    engine = make_engine(proposer("ngram"), num_pages=600)
    texts = []
    for seed in range(40):  # one after the other, as they arrive
        request = make_request("r", RIVER, seed=seed, temperature=1.0, max_tokens=12)
        texts.append(tuple(tokens_of(run(engine, [request])["r"])))
    greedy = tuple(tokens_of(run(engine, [make_request("g", RIVER, max_tokens=12)])["g"]))
    assert len(set(texts)) > 36
    assert greedy not in texts
