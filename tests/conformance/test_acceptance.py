"""Drafts drawn from q, through the loop: the target's law, one text per seed, and who may be asked for it."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from time import perf_counter
from typing import Any

import pytest
import torch
from scipy.stats import chisquare
from transformers import AutoModelForCausalLM

from engine.randomness import ACCEPT_STREAM, DRAFT_STREAM, TARGET_STREAM, uniforms
from engine.request import Request
from speculative.accept_rules import BLOCK, TOKEN_WISE
from speculative.build import build_engine
from speculative.drafts.chain_draws import ChainDraws
from speculative.loop import EngineLoop
from speculative.policy import DraftPolicy, policy_of, prepare
from speculative.proposer import DrawingProposer, Proposer
from speculative.registry import create_proposer
from speculative.settings import EngineSettings
from speculative.verify_drawn import VerifyDrawn
from tests.conformance.test_bad_logits import ERROR, SpoiltModel
from tests.conformance.test_eagle import options_of
from tests.conformance.test_loop import prompt_of, reference
from tests.draft_claims import check_pair
from tests.engines import (
    VOCAB_SIZE,
    make_engine,
    make_request,
    run,
    tiny_folder,
    tiny_model,
    tiny_settings,
    tokens_of,
)
from tests.tiny_block_drafts import dflash, standalone, standalone_folder

RULES = ("rejection", "block")
ALPHA = 1e-4  # of a false alarm; the seeds are fixed, so a pass is for good
# Every way of drawing a chain, and each rule with some: rules and drafters know nothing of one another.
CASES = [("eagle", "rejection"), ("eagle3", "block"), ("mtp_chain", "block"), ("standalone", "rejection")]
every_case = pytest.mark.parametrize(("head", "rule"), CASES)
every_rule = pytest.mark.parametrize("rule", RULES)


def proposer(head: str) -> Proposer:
    if head == "standalone":
        return standalone("noisy", num_steps=3)
    return create_proposer(head.split("_")[0], options_of(head, {"num_steps": 3}))


def policy(rule: str) -> DraftPolicy:
    return policy_of({"acceptance": rule}, max_draft_tokens=3, clock=perf_counter)


def engine_of(head: str, rule: str, **options: Any) -> EngineLoop:
    return make_engine(proposer(head), policy=policy(rule), **{"num_pages": 600, **options})


# ---- the law


NUM_SEEDS = 2000
WIDTH = 4  # top-k of the requests
DEPTH = 4


def exact_law(prompt: Sequence[int]) -> Mapping[tuple[int, ...], float]:
    """Probability of every run of DEPTH tokens at temperature 1 with top-k, by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    runs: dict[tuple[int, ...], float] = {(): 1.0}
    for _ in range(DEPTH):
        with torch.inference_mode():
            logits_RV = model(torch.tensor([[*prompt, *path] for path in runs])).logits[:, -1].double()
        best = logits_RV.topk(WIDTH)
        p_RK = best.values.softmax(-1).tolist()
        runs = {
            (*path, token): mass * p
            for (path, mass), ids, ps in zip(runs.items(), best.indices.tolist(), p_RK, strict=True)
            for token, p in zip(ids, ps, strict=True)
        }
    return runs


@pytest.mark.parametrize(("head", "rule"), [("standalone", "block"), ("eagle3", "rejection")])
def test_joint_law_of_four_tokens_is_the_targets(head: str, rule: str) -> None:
    prompt = prompt_of(5)
    law = exact_law(prompt)
    engine = engine_of(head, rule, num_pages=2000, max_running=128, chunk_tokens=2048)
    requests = [
        make_request(f"{seed}", prompt, seed=seed, temperature=1.0, top_k=WIDTH, max_tokens=DEPTH)
        for seed in range(NUM_SEEDS)
    ]
    counts = Counter(tuple(tokens_of(history)) for history in run(engine, requests).values())
    assert 0 < engine.counters.accepted < engine.counters.drafted
    assert set(counts) <= set(law)
    frequent = [path for path, p in law.items() if p * NUM_SEEDS >= 5]
    observed = [counts[path] for path in frequent]
    wanted = [law[path] * NUM_SEEDS for path in frequent]
    observed.append(NUM_SEEDS - sum(observed))
    wanted.append(NUM_SEEDS - sum(wanted))
    assert len(frequent) > 20
    assert chisquare(observed, wanted).pvalue > ALPHA


def test_drawn_drafts_stand_more_often_than_certain_ones() -> None:
    def share(rule: str) -> float:
        engine = engine_of("standalone", rule)
        run(
            engine,
            [
                make_request(f"{i}", prompt_of(9, seed=i), seed=i, temperature=1.0, max_tokens=30)
                for i in range(12)
            ],
        )
        return engine.counters.accepted / engine.counters.drafted

    exact, rejection, block = share("exact"), share("rejection"), share("block")
    assert exact < 0.2
    assert rejection > 0.5
    assert block > 0.5


def test_a_draft_that_is_the_target_always_stands() -> None:
    for rule in RULES:
        engine = make_engine(standalone("same"), policy=policy(rule))
        run(engine, [make_request("r", prompt_of(20), temperature=1.0, top_p=0.9, max_tokens=41)])
        assert engine.counters.accepted == engine.counters.drafted == 32


# ---- one text per seed


SAMPLING: Mapping[str, Any] = {
    "temperature": 0.8,
    "top_p": 0.95,
    "presence_penalty": 0.3,
    "min_tokens": 6,
    "stop_token_ids": (7,),
    "max_tokens": 24,
}


def crowd(middle: Request) -> list[Request]:
    """Among seven others of every kind: sampled, greedy, of other prompts."""
    others = [
        make_request(
            f"n{i}", prompt_of(5 + 4 * i, seed=i), **{**SAMPLING, "seed": i, "temperature": 0.4 * (i % 3)}
        )
        for i in range(7)
    ]
    return [*others[:3], middle, *others[3:]]


@every_case
def test_a_seeds_text_is_the_same_alone_in_company_and_over_any_pages_and_chunks(
    head: str, rule: str
) -> None:
    """Report S08, for drawn drafts: also twice alone."""

    def text(requests: list[Request], **options: int) -> list[int]:
        return tokens_of(run(engine_of(head, rule, **options), requests)["r"])

    def request() -> Request:
        return make_request("r", prompt_of(37), seed=11, **SAMPLING)

    alone = text([request()])
    assert len(alone) >= 6
    assert text([request()]) == alone
    assert text(crowd(request())) == alone
    assert text(crowd(request()), page_size=16, chunk_tokens=7, max_running=8) == alone


@every_case
def test_greedy_neighbours_of_drawn_chains_keep_their_texts(head: str, rule: str) -> None:
    greedy = make_request("r", prompt_of(37), max_tokens=12)
    history = run(engine_of(head, rule), crowd(greedy))
    assert tuple(tokens_of(history["r"])) == reference(tuple(prompt_of(37)), 12)


@every_case
def test_a_request_that_joins_again_goes_on_the_same_way_whoever_preempted_it(head: str, rule: str) -> None:
    """A text cut short goes on by its tokens and seed alone: here and there, in company and without."""
    first = make_request("r", prompt_of(20), seed=5, **SAMPLING)
    engine = engine_of(head, rule)
    engine.add(first)
    while first.num_outputs < 8:
        engine.step()
    engine.release("r")

    def again() -> Request:
        request = make_request("r", first.tokens, seed=5, **SAMPLING)
        request.num_prompt_tokens = 20
        return request

    rest = tokens_of(run(engine_of(head, rule), [again()])["r"])
    assert first.num_outputs + len(rest) == 24 or rest[-1] == 7
    assert tokens_of(run(engine, [again()])["r"]) == rest  # over the pages it left
    assert tokens_of(run(engine_of(head, rule), crowd(again()))["r"]) == rest


@pytest.mark.parametrize(("head", "rule"), [*CASES, ("mtp", "rejection")])
def test_a_pair_drafts_and_accepts_round_by_round_as_one_engine(head: str, rule: str) -> None:
    options: dict[str, Any] = {"num_steps": 3}
    options |= {"draft": str(standalone_folder("noisy"))} if head == "standalone" else options_of(head, {})
    sampling = {"temperature": 1.0, "top_k": 50, "seed": 3}
    pair = check_pair(head.split("_")[0], options, lambda: proposer(head), sampling, policy=policy(rule))
    assert pair.decode.status().counters["accepted_tokens"] > 3


# ---- coins


class Recorder:
    """The real coins, and who read which."""

    def __init__(self) -> None:
        self.read: dict[int, list[tuple[int, int, int]]] = {}

    def __call__(
        self,
        seeds: Sequence[int],
        positions: Sequence[int],
        stream: int,
        columns: Sequence[int] | None = None,
    ) -> torch.Tensor:
        for seed, position, column in zip(seeds, positions, columns or [0] * len(seeds), strict=True):
            self.read.setdefault(stream, []).append((seed, position, column))
        return uniforms(seeds, positions, stream, columns)


@every_case
def test_no_coin_bears_on_two_rounds(head: str, rule: str) -> None:
    """What a block emits depends on the drafts that fell, so the next round must draw by other coins."""
    coins, drafting = Recorder(), proposer(head)
    verify = VerifyDrawn({"rejection": TOKEN_WISE, "block": BLOCK}[rule], coins=coins)
    engine = make_engine(drafting, policy=DraftPolicy(verify=verify))
    assert isinstance(drafting, DrawingProposer)
    drafting.draw_drafts(coins)
    requests = [
        make_request(f"{i}", prompt_of(9 + i), seed=i, temperature=1.0, max_tokens=30) for i in range(3)
    ]
    history = run(engine, requests)
    for stream in (DRAFT_STREAM, ACCEPT_STREAM):
        assert len(coins.read[stream]) > 60
        assert len(set(coins.read[stream])) == len(coins.read[stream])
    if head != "mtp_chain":  # its first chain is certain, and looks at the target's coins ahead
        ends = []
        for request in requests:
            position = len(request.prompt_ids) - 1
            for progress in history[str(request.key)]:
                position += len(progress.tokens)
                ends.append((request.sampling.seed, position, 0))
        # The last round of a request may be cut before its last token.
        assert len(set(ends) - set(coins.read[TARGET_STREAM])) <= len(requests)
        assert len(set(coins.read[TARGET_STREAM])) == len(coins.read[TARGET_STREAM]) == len(ends)


# ---- what else a round owes


@every_rule
def test_log_probabilities_are_the_models_own(rule: str) -> None:
    engine = engine_of("standalone", rule)
    request = make_request("r", prompt_of(20), seed=2, temperature=1.0, top_k=30, max_tokens=20, logprobs=2)
    history = run(engine, [request])["r"]
    assert engine.counters.accepted > 0
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    with torch.inference_mode():
        logprobs_TV = model(torch.tensor([request.tokens])).logits[0].log_softmax(-1)
    found = [entry for progress in history for entry in progress.logprobs or ()]
    assert len(found) == 20
    for index, entry in enumerate(found):
        logprobs_V = logprobs_TV[19 + index]
        assert entry.logprob == pytest.approx(float(logprobs_V[request.tokens[20 + index]]), abs=1e-3)
        assert [p for _, p in entry.top] == pytest.approx(logprobs_V.topk(2).values.tolist(), abs=1e-3)


@every_rule
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_and_min_tokens_count_tokens_and_not_rounds(max_tokens: int, rule: str) -> None:
    stops = tuple(range(VOCAB_SIZE // 2))
    for seed in range(6):
        request = make_request(
            "r",
            prompt_of(9),
            seed=seed,
            temperature=1.0,
            max_tokens=9,
            min_tokens=max_tokens,
            stop_token_ids=stops,
        )
        history = run(engine_of("standalone", rule), [request])["r"]
        outputs = tokens_of(history)
        assert not set(outputs[: max_tokens - 1]) & set(stops)
        is_stop = [token in stops for token in outputs]
        assert is_stop == [False] * (len(outputs) - 1) + [history[-1].finish_reason == "stop"]
        short = make_request("s", prompt_of(9), seed=seed, temperature=1.0, max_tokens=max_tokens)
        assert len(tokens_of(run(engine_of("standalone", rule), [short])["s"])) == max_tokens


@every_rule
@pytest.mark.parametrize("num_steps", range(4))
def test_a_request_without_numbers_fails_and_its_neighbour_goes_on(num_steps: int, rule: str) -> None:
    model = SpoiltModel(tiny_model().model)
    engine = make_engine(proposer("standalone"), model=model, policy=policy(rule))
    doomed, spared = (
        make_request(key, prompt_of(20), seed=4, temperature=1.0, max_tokens=40) for key in "ab"
    )
    for request in (doomed, spared):
        engine.add(request)
    for _ in range(num_steps):
        engine.step()
    model.spoilt = doomed
    errors = []
    while engine.requests():
        errors += [(item.request.key, item.error) for item in engine.step().progress if item.error]
    assert errors == [("a", ERROR)]
    expected = run(
        engine_of("standalone", rule),
        [make_request("b", prompt_of(20), seed=4, temperature=1.0, max_tokens=40)],
    )
    assert spared.tokens[20:] == tokens_of(expected["b"])


def test_a_draft_without_numbers_is_certain_of_something_and_harms_nobody() -> None:
    request = make_request("r", [1, 2, 3], temperature=1.0)
    draws = ChainDraws(uniforms, target_ids_V=None, target_vocab_size=4)
    assert draws.draw([request], torch.full((1, 4), float("nan")), step=0) == [0]
    q_KV = draws.q_KV(request, 1)
    assert q_KV is not None
    assert q_KV.tolist() == [[1.0, 0.0, 0.0, 0.0]]


# ---- who may be asked


@pytest.mark.parametrize("name", ["none", "ngram", "dflash", "eagle-tree"])
def test_an_algorithm_that_cannot_draw_its_drafts_is_refused_by_the_options_name(name: str) -> None:
    makers: Mapping[str, Callable[[], Proposer]] = {
        "none": lambda: create_proposer("none", {}),
        "ngram": lambda: create_proposer("ngram", {}),
        "dflash": lambda: dflash("zlab"),
        "eagle-tree": lambda: create_proposer("eagle", options_of("eagle", {"topk": 4})),
    }
    message = (
        "acceptance 'block' does not fit: topk must be 1 where drafts are drawn, got 4"
        if name == "eagle-tree"
        else "acceptance must be exact for an algorithm that cannot draw its drafts .*, got 'block'"
    )
    with pytest.raises(ValueError, match=message):
        prepare(policy("block"), makers[name]())
    prepare(policy("exact"), makers[name]())


def settings(algorithm: str, draft: str, *, is_prefill_only: bool = False) -> EngineSettings:
    options = {"num_draft_tokens": 3, "acceptance": "block"}
    return tiny_settings(algorithm, draft, options, is_prefill_only=is_prefill_only)


def test_a_node_draws_its_drafts_when_the_option_says_so_and_does_not_start_where_it_cannot() -> None:
    built = build_engine(settings("standalone", str(standalone_folder("same"))), clock=perf_counter)
    run(built.loop, [make_request("r", prompt_of(20), temperature=1.0, max_tokens=33)])
    assert built.loop.counters.accepted == built.loop.counters.drafted == 24
    with pytest.raises(ValueError, match="acceptance must be exact for an algorithm that cannot draw"):
        build_engine(settings("ngram", ""), clock=perf_counter)
    build_engine(settings("ngram", "", is_prefill_only=True), clock=perf_counter)  # its pair may refuse
