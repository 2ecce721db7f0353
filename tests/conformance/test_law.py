"""Sampling with drafts has the target's law: tokens 2 and 3 of many seeds against the exact distribution.

Field report S08 (d). The same computed exactly, for every acceptance rule: `test_law_exhaustive.py`.
"""

from collections import Counter
from collections.abc import Mapping

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from engine.request import Request
from speculative.proposer import Proposer
from speculative.registry import create_proposer
from tests.engines import VOCAB_SIZE, make_engine, make_request, tiny_folder
from tests.fakes_proposers import BushyProposer

NUM_SEEDS = 3000
TEMPERATURE = 1.5
FAVOURED = (7, 8, 9)  # a bias leaves these, so that looking back in the prompt pays
PROMPT = [7, 8, 9, 9, 7, 8, 8, 7, 9, 7, 8, 9, 8, 7]
ALPHA = 1e-4  # of a false alarm; the seeds are fixed, so a pass is for good


def next_law(model: torch.nn.Module, ids: list[int]) -> Mapping[int, float]:
    """The target's law after `ids`: temperature, and nothing but the favoured tokens; by transformers."""
    with torch.inference_mode():
        logits = model(torch.tensor([ids])).logits[0, -1].double() / TEMPERATURE
    return dict(zip(FAVOURED, logits[list(FAVOURED)].softmax(-1).tolist(), strict=True))


def exact_law(depth: int) -> Mapping[tuple[int, ...], float]:
    """Probability of every run of `depth` tokens after PROMPT."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    runs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(depth):
        runs = {
            (*run, token): mass * p
            for run, mass in runs.items()
            for token, p in next_law(model, [*PROMPT, *run]).items()
        }
    return runs


def likely_next(request: Request, count: int) -> list[int]:
    """A fixed guess: some drafts stand, most do not."""
    return [request.tokens[-1], *PROMPT][:count]


def proposer(name: str) -> Proposer:
    if name == "bushy":
        return BushyProposer(likely_next, vocab_size=VOCAB_SIZE, num_draft_tokens=5, seed=1)
    return create_proposer(name, {} if name == "none" else {"num_draft_tokens": 4, "min_ngram": 1})


def sampled(name: str) -> tuple[Counter[tuple[int, ...]], int, int]:
    engine = make_engine(proposer(name), num_pages=2000, max_running=64, chunk_tokens=1024)
    for seed in range(NUM_SEEDS):
        engine.add(
            make_request(
                f"{seed}",
                PROMPT,
                seed=seed,
                temperature=TEMPERATURE,
                max_tokens=3,
                logit_bias=tuple((token, 100.0) for token in FAVOURED),
            )
        )
    texts: dict[object, list[int]] = {}
    while engine.requests():
        for progress in engine.step().progress:
            texts.setdefault(progress.request.key, []).extend(progress.tokens)
    return Counter(map(tuple, texts.values())), engine.counters.drafted, engine.counters.accepted


@pytest.mark.parametrize("name", ["none", "ngram", "bushy"])
def test_tokens_two_and_three_have_the_targets_law(name: str) -> None:
    law = exact_law(3)
    counts, num_drafted, num_accepted = sampled(name)
    assert sum(counts.values()) == NUM_SEEDS
    assert set(counts) <= set(law)
    if name != "none":
        assert num_drafted > 500
        assert 0 < num_accepted < num_drafted
    for index in (1, 2):
        expected: Counter[int] = Counter()
        for run, mass in law.items():
            expected[run[index]] += mass * NUM_SEEDS  # type: ignore[assignment]
        found: Counter[int] = Counter()
        for run, count in counts.items():
            found[run[index]] += count
        frequent = [token for token, mean in expected.items() if mean >= 5]
        rare = NUM_SEEDS - sum(expected[token] for token in frequent)
        observed = [found[token] for token in frequent]
        wanted = [float(expected[token]) for token in frequent]
        if rare >= 5:
            observed.append(NUM_SEEDS - sum(observed))
            wanted.append(float(rare))
        else:
            scale = sum(observed) / sum(wanted)
            wanted = [mean * scale for mean in wanted]
        assert chisquare(observed, wanted).pvalue > ALPHA, (name, index)
