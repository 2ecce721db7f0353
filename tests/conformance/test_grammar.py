"""Whatever is drafted, and on whichever node: a constrained output follows its grammar, is the one that plain
decoding gives, and leaves everybody else alone."""

import json
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import cache, partial
from time import perf_counter
from typing import Any

import pytest

from engine.grammar import Words
from engine.grammar_spec import GrammarSpec
from engine.request import Request
from speculative.policy import policy_of
from speculative.proposer import Proposer
from speculative.registry import create_proposer
from tests.conformance.test_loop import prompt_of, reference
from tests.engines import VOCAB_SIZE, make_engine, make_request, run, tokens_of
from tests.fakes_grammar import ListMatcher
from tests.fakes_proposers import BushyProposer
from tests.grammars import EOS, matcher_of, spec_of
from tests.tiny_drafts import tiny_draft

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 6},
        "tags": {"type": "array", "items": {"enum": ["red", "green"]}, "minItems": 1, "maxItems": 2},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "tags", "ok"],
}
SPECS = {
    "json_schema": spec_of("json_schema", PERSON),
    "json_object": spec_of("json_object", ""),
    "regex": spec_of("regex", r"([a-f]{3}-[0-9]{2};){4}"),
    "ebnf": spec_of("ebnf", 'root ::= pair ("," pair){2}\npair ::= [a-z]{2} "=" [0-9]'),
    "choice": spec_of("choice", ["a long way round", "a long way home", "no"]),
}
PLAIN: dict[str, Any] = {"temperature": 0.0}
SAMPLED: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.4}
PROPOSERS = ("ngram", "bushy", "eagle")
MAX_TOKENS = 60
NO_PADDING = tuple((ord(space), -100.0) for space in " \t\r\n")
"""A random model has no reason to end what may go on ..."""

NO_END = (*NO_PADDING, (ord("}"), -100.0))
"""... nor to begin what may end at once."""


def constrained(
    key: str, spec: GrammarSpec, *, prompt: int = 20, emitted: Sequence[int] = (), **sampling: Any
) -> Request:
    bias = NO_END if spec.kind == "json_object" else NO_PADDING
    request = make_request(
        key,
        prompt_of(prompt),
        **{
            "max_tokens": MAX_TOKENS,
            "seed": 5,
            "stop_token_ids": (EOS,),
            "logit_bias": bias,
            **sampling,
        },
    )
    request.matcher = matcher_of(spec, emitted=bytes(emitted))
    return request


@cache
def plain_text(kind: str, is_sampled: bool, prompt: int = 20) -> tuple[int, ...]:
    """The output without drafting."""
    request = constrained("r", SPECS[kind], prompt=prompt, **(SAMPLED if is_sampled else PLAIN))
    return tuple(tokens_of(run(make_engine(), [request])["r"]))


def proposer(name: str, truth: Sequence[int] = ()) -> Proposer:
    if name == "bushy":

        def continuation(request: Request, count: int) -> list[int]:
            done = len(request.tokens) - len(request.prompt_ids)
            return list(truth[done : done + count])

        return BushyProposer(continuation, vocab_size=VOCAB_SIZE, num_draft_tokens=7, seed=len(truth))
    if name == "eagle":
        tree = {"num_steps": 3, "topk": 4, "num_draft_tokens": 10}
        return create_proposer("eagle", {"draft": str(tiny_draft("eagle")), **tree})
    return create_proposer(name, {"num_draft_tokens": 6})


def is_output(spec: GrammarSpec, ids: Sequence[int], reason: str | None) -> bool:
    """A complete output with its stop token, or the beginning of one that ran into max_tokens."""
    matcher = matcher_of(spec)
    return all(matcher.accept(token_id) for token_id in ids) and matcher.is_over == (reason == "stop")


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", SPECS)
def test_every_kind_holds_from_the_first_token_to_the_stop_token(kind: str, is_sampled: bool) -> None:
    request = constrained("r", SPECS[kind], **(SAMPLED if is_sampled else PLAIN))
    history = run(make_engine(), [request])["r"]
    ids, reason = tokens_of(history), history[-1].finish_reason
    assert is_output(SPECS[kind], ids, reason)
    if kind != "json_object":  # whose strings may go on for ever
        assert (reason, ids[-1], history[-1].stop_token_id) == ("stop", EOS, EOS)
    if kind == "json_schema":
        assert set(json.loads(bytes(ids[:-1]))) == {"name", "tags", "ok"}


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("name", PROPOSERS)
def test_drafting_changes_no_token_of_it(name: str, is_sampled: bool) -> None:
    drafted = accepted = 0
    for kind, spec in SPECS.items():
        expected = plain_text(kind, is_sampled)
        engine = make_engine(proposer(name, expected))
        request = constrained("r", spec, **(SAMPLED if is_sampled else PLAIN))
        assert tuple(tokens_of(run(engine, [request])["r"])) == expected, kind
        drafted += engine.counters.drafted
        accepted += engine.counters.accepted
    assert drafted > 0
    assert accepted > 20 or name != "bushy"  # what others draft, bytes of a random model seldom confirm


@pytest.mark.parametrize("name", ["none", "ngram", "bushy"])
def test_neighbours_are_served_as_if_it_were_not_there(name: str) -> None:
    """And no row but its own is masked, nor any matcher asked for them."""
    expected = plain_text("json_schema", False)
    engine = make_engine(None if name == "none" else proposer(name, expected))
    neighbours = [make_request(f"n{i}", prompt_of(12 + i), max_tokens=MAX_TOKENS) for i in range(3)]
    request = constrained("r", SPECS["json_schema"])
    history = run(engine, [neighbours[0], request, *neighbours[1:]])
    assert tuple(tokens_of(history["r"])) == expected
    for neighbour in neighbours:
        assert tuple(tokens_of(history[str(neighbour.key)])) == reference(neighbour.prompt_ids, MAX_TOKENS)
    own_rows = sum(1 + progress.num_drafted for progress in history["r"] if progress.tokens)
    assert engine.counters.constrained_rows == own_rows


def test_without_a_grammar_nothing_is_masked() -> None:
    engine = make_engine(create_proposer("ngram", {"num_draft_tokens": 6}))
    run(engine, [make_request(f"r{n}", prompt_of(n)) for n in (5, 20, 40)])
    assert engine.counters.rounds > 0
    assert engine.counters.constrained_rows == 0


def test_the_matcher_is_asked_once_for_each_node_that_can_stand() -> None:
    """Six tokens and a stop token, drafted or not: one mask each, however the rest of the tree looks."""
    text = [*b"abcdef", EOS]
    engine = make_engine(proposer("bushy", text))
    request = make_request("r", prompt_of(20), max_tokens=20, stop_token_ids=(EOS,))
    matcher = ListMatcher([text])
    request.matcher = matcher
    assert tokens_of(run(engine, [request])["r"]) == text
    num_taken_back = matcher.calls.count("rb")
    assert matcher.calls.count("fill") <= len(text) + num_taken_back
    # What ends the request is not stepped over any more.
    assert sum(call.startswith("acc") for call in matcher.calls) < len(text) + num_taken_back


class BreakingMatcher(ListMatcher):
    """Fails, as foreign code may, on its third mask."""

    def fill(self, words_NW: Words, row: int) -> None:
        if self.calls.count("fill") == 2:
            raise RuntimeError("no mask for this")
        super().fill(words_NW, row)


@pytest.mark.parametrize("has_threads", [False, True])
def test_a_matcher_that_breaks_costs_its_request_and_not_the_engine(has_threads: bool) -> None:
    engine = make_engine()
    request = make_request("r", prompt_of(20), max_tokens=20, stop_token_ids=(EOS,))
    request.matcher = BreakingMatcher([[*b"abcdef", EOS]])
    neighbour = make_request("n", prompt_of(9), max_tokens=MAX_TOKENS)
    with ThreadPoolExecutor(max_workers=1) as threads:
        if has_threads:
            engine.mask_on(threads)
        history = run(engine, [request, neighbour])
    assert [progress.error for progress in history["r"]] == ["", "", "no mask for this"]
    assert tuple(tokens_of(history["n"])) == reference(neighbour.prompt_ids, MAX_TOKENS)


def test_min_tokens_does_not_outlive_the_grammar() -> None:
    for kind, options, least in (("choice", PLAIN, 3), ("choice", SAMPLED, 3), ("regex", PLAIN, 29)):
        request = constrained("r", SPECS[kind], min_tokens=50, **options)
        history = run(make_engine(), [request])["r"]
        assert history[-1].finish_reason == "stop"
        assert least <= len(tokens_of(history)) < 50


def test_min_tokens_keeps_a_grammar_going_that_may_go_on() -> None:
    digits = spec_of("regex", r"[0-9]+")
    for min_tokens in (1, 9, 17):
        request = constrained("r", digits, min_tokens=min_tokens, max_tokens=40, logit_bias=((EOS, 100.0),))
        ids = tokens_of(run(make_engine(), [request])["r"])
        assert len(ids) == max(2, min_tokens + 1)
        assert ids[-1] == EOS


def test_a_stop_token_of_the_users_may_be_text_of_the_grammar() -> None:
    spec = spec_of("regex", r"[a-c]{5};[a-c]{5}")
    request = constrained("r", spec, stop_token_ids=(EOS, ord(";")))
    history = run(make_engine(), [request])["r"]
    assert (history[-1].finish_reason, history[-1].stop_token_id) == ("stop", ord(";"))
    assert len(tokens_of(history)) == 6


def test_logprobs_are_the_models_own() -> None:
    free = make_request("f", prompt_of(20), max_tokens=1, logprobs=3)
    bound = constrained("r", SPECS["choice"], max_tokens=1, logprobs=3)
    history = run(make_engine(), [free, bound])
    (free_step,), (bound_step,) = history["f"], history["r"]
    assert free_step.logprobs is not None
    assert bound_step.logprobs is not None
    assert bound_step.logprobs[0].top == free_step.logprobs[0].top
    assert bound_step.logprobs[0].logprob < free_step.logprobs[0].logprob


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("kind", SPECS)
def test_an_attempt_goes_on_where_the_last_one_ended(kind: str, is_sampled: bool) -> None:
    """As after a preemption or a node's death: prompt and outputs so far, the matcher replayed."""
    expected = plain_text(kind, is_sampled)
    for cut in {1, len(expected) // 2, len(expected) - 1}:
        request = constrained("r", SPECS[kind], emitted=expected[:cut], **(SAMPLED if is_sampled else PLAIN))
        request.prompt_ids += expected[:cut]
        request.tokens += expected[:cut]
        engine = make_engine(create_proposer("ngram", {"num_draft_tokens": 6}))
        assert tuple(tokens_of(run(engine, [request])["r"])) == expected[cut:]


def test_sampled_outputs_differ_by_seed_and_all_follow() -> None:
    requests = [constrained(f"r{seed}", SPECS["regex"], **SAMPLED | {"seed": seed}) for seed in range(12)]
    history = run(make_engine(create_proposer("ngram", {"num_draft_tokens": 6})), requests)
    texts = {bytes(tokens_of(one)) for one in history.values()}
    assert len(texts) == 12
    assert all(is_output(SPECS["regex"], text, "stop") for text in texts)


def test_drafts_that_stand_unasked_end_the_request_and_no_other() -> None:
    """Simulated acceptance emits drafts whatever the grammar says: that is an error, not a crash."""
    policy = policy_of({"simulate_acceptance": 3}, max_draft_tokens=7, clock=lambda: 0.0)
    engine = make_engine(proposer("bushy"), policy=policy)
    requests = [constrained("r", SPECS["choice"]), make_request("n", prompt_of(30), max_tokens=20)]
    history = run(engine, requests)
    assert len(tokens_of(history["n"])) == 20
    assert history["r"][-1].error.endswith("does not follow the request's grammar")


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_it_holds_where_drafts_are_drawn_without_it(rule: str) -> None:
    """The draft knows no grammar: most of what it draws falls, and nothing of that is emitted."""
    drafted = accepted = 0
    for kind in ("json_schema", "regex", "choice"):
        drafting = create_proposer("eagle", {"draft": str(tiny_draft("eagle")), "num_steps": 3})
        policy = policy_of({"acceptance": rule}, max_draft_tokens=3, clock=perf_counter)
        engine = make_engine(drafting, policy=policy)
        request, neighbour = (
            constrained("r", SPECS[kind], **SAMPLED),
            make_request("n", prompt_of(12), temperature=1.0, max_tokens=40),
        )
        history = run(engine, [request, neighbour])
        assert is_output(SPECS[kind], tokens_of(history["r"]), history["r"][-1].finish_reason)
        assert len(tokens_of(history["n"])) == 40
        drafted += sum(progress.num_drafted for progress in history["r"])
        accepted += sum(progress.num_accepted for progress in history["r"])
    assert drafted > accepted > 0


class Slow(Executor):
    """Jobs are done only when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Callable[[], Any]]] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, partial(fn, *args, **kwargs)))
        return future

    def finish(self) -> None:
        jobs, self.jobs = self.jobs, []
        for future, job in jobs:
            if future.set_running_or_notify_cancel():
                future.set_result(job())


@pytest.mark.parametrize("name", ["none", "ngram", "bushy", "eagle"])
def test_masks_that_take_long_are_waited_for_by_nobody_else(name: str) -> None:
    """The neighbours run to their end while there is no mask at all; then the output comes as ever."""
    expected = plain_text("json_schema", False)
    engine = make_engine(None if name == "none" else proposer(name, expected))
    threads = Slow()
    engine.mask_on(threads)
    neighbours = [make_request(f"n{i}", prompt_of(12 + i), max_tokens=MAX_TOKENS) for i in range(2)]
    request = constrained("r", SPECS["json_schema"])
    for one in (neighbours[0], request, neighbours[1]):
        engine.add(one)
    texts: dict[str, list[int]] = {"n0": [], "r": [], "n1": []}

    def step() -> None:
        for progress in engine.step().progress:
            texts[str(progress.request.key)] += progress.tokens
        assert engine.cache.problems(engine.requests()) == []

    while len(engine.requests()) > 1:
        step()
    assert texts["r"] == []
    for neighbour in neighbours:
        assert tuple(texts[str(neighbour.key)]) == reference(neighbour.prompt_ids, MAX_TOKENS)
    assert [engine.is_masking] == [True]
    for _ in range(1000):
        if not engine.requests():
            break
        step()
        threads.finish()
    assert tuple(texts["r"]) == expected
    assert engine.counters.stalled_rounds == 1
    assert [engine.is_masking] == [False]
    assert engine.cache.num_available == engine.cache.num_pages


def test_a_request_given_up_while_its_masks_are_made_leaves_nothing() -> None:
    engine = make_engine()
    threads = Slow()
    engine.mask_on(threads)
    engine.add(constrained("r", SPECS["choice"]))
    engine.step()
    was_masking = [engine.is_masking]
    engine.release("r")
    assert [*was_masking, engine.is_masking] == [True, False]
    threads.finish()
    assert engine.cache.num_available == engine.cache.num_pages


def test_masks_on_real_threads_give_the_same_text() -> None:
    for kind in SPECS:
        with ThreadPoolExecutor(max_workers=2) as threads:
            engine = make_engine(create_proposer("ngram", {"num_draft_tokens": 6}))
            engine.mask_on(threads)
            request = constrained("r", SPECS[kind], **SAMPLED)
            engine.add(request)
            ids: list[int] = []
            while engine.requests():
                ids += [token_id for one in engine.step().progress for token_id in one.tokens]
            assert tuple(ids) == plain_text(kind, True)
