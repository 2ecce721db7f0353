"""The round loop: whatever is drafted, and whoever runs beside it, the text is plain decoding's."""

import random
from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.request import Request
from speculative.proposer import Proposer
from speculative.registry import create_proposer
from tests.engines import VOCAB_SIZE, make_engine, make_request, run, tiny_folder, tokens_of
from tests.fakes_proposers import BushyProposer

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300)


def prompt_of(length: int, *, seed: int = 0) -> list[int]:
    """Half random, half repeating, so that drafts are accepted as well as rejected."""
    rng = random.Random(f"{length} {seed}")
    head = [rng.randrange(3, VOCAB_SIZE) for _ in range(length)]
    motif = head[: max(1, length // 5)]
    return (head[: length // 2] + motif * 10)[:length] or head


@cache
def reference(prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
    """Greedy continuation by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    with torch.inference_mode():
        ids = model.generate(
            torch.tensor([prompt]),
            max_new_tokens=max_tokens,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
    return tuple(ids[0, len(prompt) :].tolist())


def greedy_truth(request: Request, count: int) -> list[int]:
    done = len(request.tokens) - len(request.prompt_ids)
    return list(reference(request.prompt_ids, request.sampling.max_tokens)[done : done + count])


def proposer(name: str, *, seed: int = 0) -> Proposer:
    if name == "bushy":
        return BushyProposer(greedy_truth, vocab_size=VOCAB_SIZE, num_draft_tokens=7, seed=seed)
    return create_proposer(name, {} if name == "none" else {"num_draft_tokens": 6})


PROPOSERS = ("none", "ngram", "bushy")


@pytest.mark.parametrize("page_size", [1, 4, 16])
@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_equals_transformers_at_every_border(name: str, page_size: int) -> None:
    engine = make_engine(proposer(name), page_size=page_size, num_pages=4000 // page_size, chunk_tokens=64)
    requests = [make_request(f"r{n}", prompt_of(n)) for n in LENGTHS]
    random.Random(page_size).shuffle(requests)
    history = run(engine, requests)
    for request in requests:
        assert tuple(tokens_of(history[str(request.key)])) == reference(request.prompt_ids, 12), request.key


@pytest.mark.parametrize("name", PROPOSERS)
def test_prefix_hits_change_nothing(name: str) -> None:
    engine = make_engine(proposer(name), page_size=4, num_pages=600)
    for turn in range(2):
        requests = [make_request(f"t{turn}r{n}", prompt_of(n)) for n in (5, 33, 64, 129)]
        history = run(engine, requests)
        for request in requests:
            assert tuple(tokens_of(history[str(request.key)])) == reference(request.prompt_ids, 12)
        hits = [request.num_cached_tokens for request in requests]
        assert hits == ([0, 0, 0, 0] if turn == 0 else [4, 32, 60, 128])


SAMPLINGS = {
    "plain": {"temperature": 1.0},
    "filtered": {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02},
    "penalised": {
        "temperature": 0.7,
        "presence_penalty": 0.8,
        "frequency_penalty": 0.5,
        "repetition_penalty": 1.2,
    },
    "greedy penalised": {"temperature": 0.0, "frequency_penalty": 1.5, "repetition_penalty": 1.3},
    "banned": {"temperature": 0.7, "banned_sequences": tuple((a, b) for a in range(50) for b in range(50))},
    "biased": {
        "temperature": 1.0,
        "logit_bias": ((7, 4.0), (9, -100.0)),
        "min_tokens": 6,
        "stop_token_ids": (7,),
    },
}


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_same_seed_same_text_alone_in_company_and_speculated(sampling: dict[str, object]) -> None:
    prompt = prompt_of(37)

    def solo(name: str) -> list[int]:
        request = make_request("r", prompt, seed=11, max_tokens=24, **sampling)
        return tokens_of(run(make_engine(proposer(name)), [request])["r"])

    def crowded(name: str) -> list[int]:
        requests = [
            make_request(f"n{i}", prompt_of(10 + i, seed=i), seed=i, max_tokens=24, **sampling)
            for i in range(7)
        ]
        requests.insert(3, make_request("r", prompt, seed=11, max_tokens=24, **sampling))
        return tokens_of(run(make_engine(proposer(name)), requests)["r"])

    plain = solo("none")
    assert 1 <= len(plain) <= 24
    assert [solo("ngram"), crowded("none"), crowded("ngram")] == [plain] * 3


def test_a_deep_right_draft_is_accepted_whole_and_a_wrong_one_costs_nothing() -> None:
    engine = make_engine(proposer("bushy", seed=3))
    request = make_request("r", prompt_of(20), max_tokens=60)
    history = run(engine, [request])["r"]
    assert tuple(tokens_of(history)) == reference(request.prompt_ids, 60)
    accepted = sum(progress.num_accepted for progress in history)
    assert accepted > 10
    assert len(history) == 60 - accepted
    assert engine.counters.accepted == accepted == sum(engine.counters.accepted_at)


@pytest.mark.parametrize("name", PROPOSERS)
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7, 15])
def test_max_tokens_is_exact(name: str, max_tokens: int) -> None:
    request = make_request("r", prompt_of(33), max_tokens=max_tokens)
    history = run(make_engine(proposer(name)), [request])["r"]
    assert tuple(tokens_of(history)) == reference(request.prompt_ids, max_tokens)
    assert [progress.finish_reason for progress in history[:-1]] == [None] * (len(history) - 1)
    assert history[-1].finish_reason == "length"


@pytest.mark.parametrize("index", range(10))
def test_stop_token_inside_an_accepted_run_ends_it_there(index: int) -> None:
    whole = reference(tuple(prompt_of(20)), 24)
    stop = whole[index]
    first = whole.index(stop)
    for name in PROPOSERS:
        request = make_request("r", prompt_of(20), max_tokens=24, stop_token_ids=(stop,))
        engine = make_engine(proposer(name, seed=index))
        history = run(engine, [request])["r"]
        assert tuple(tokens_of(history)) == whole[: first + 1]
        assert (history[-1].finish_reason, history[-1].stop_token_id) == ("stop", stop)
        assert engine.counters.output_tokens == first + 1


def test_preempted_request_leaves_no_page_and_the_oldest_finishes() -> None:
    engine = make_engine(proposer("bushy"), page_size=4, num_pages=14, max_running=4, reserve_tokens=1)
    requests = [make_request(f"r{i}", prompt_of(9, seed=i), max_tokens=30) for i in range(3)]
    for request in requests:
        engine.add(request)
    preempted: list[Request] = []
    done: dict[object, list[int]] = {}
    while engine.requests():
        result = engine.step()
        preempted += result.preempted
        for progress in result.progress:
            done.setdefault(progress.request.key, []).extend(progress.tokens)
        assert engine.cache.problems(engine.requests()) == []
    assert requests[0] not in preempted
    assert preempted
    for request in requests:
        text = tuple(done[request.key])
        assert text == reference(request.prompt_ids, 30)[: len(text)]
        assert (request in preempted) == (len(text) < 30)
    assert engine.cache.num_available == 14


@pytest.mark.parametrize("steps", range(6))
def test_released_in_any_phase_leaves_no_page_and_is_forgotten_once(steps: int) -> None:
    fake = proposer("bushy")
    assert isinstance(fake, BushyProposer)
    engine = make_engine(fake, chunk_tokens=16)
    for i in range(3):
        engine.add(make_request(f"r{i}", prompt_of(33, seed=i)))
    for _ in range(steps):
        engine.step()
    for i in range(3):
        engine.release(f"r{i}")
    engine.release("r0")
    assert engine.requests() == []
    assert engine.cache.problems([]) == []
    assert engine.cache.num_available == engine.cache.num_pages
    assert sorted(map(str, fake.forgotten)) == ["r0", "r1", "r2"]
    assert fake.live == set()


def test_held_request_keeps_its_pages_after_the_first_token() -> None:
    engine = make_engine()
    request = make_request("r", prompt_of(20))
    engine.add(request, hold=True)
    (progress,) = engine.step().progress
    assert progress.tokens == reference(request.prompt_ids, 12)[:1]
    assert engine.step().progress == ()
    assert len(request.pages) == 6
    assert engine.requests() == [request]
    engine.release("r")
    assert engine.cache.num_available == engine.cache.num_pages


def test_logprobs_follow_the_accepted_path() -> None:
    plain = run(make_engine(), [make_request("r", prompt_of(20), max_tokens=20, logprobs=3)])["r"]
    bushy = run(
        make_engine(proposer("bushy")), [make_request("r", prompt_of(20), max_tokens=20, logprobs=3)]
    )["r"]
    expected = [entry for progress in plain for entry in progress.logprobs or ()]
    found = [entry for progress in bushy for entry in progress.logprobs or ()]
    assert len(found) == len(expected) == 20
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        assert [token for token, _ in ours.top] == [token for token, _ in theirs.top]
