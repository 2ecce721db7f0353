"""Grammars across a prefill and a decode node: first token, re-dispatch, and the wait for a compilation."""

from collections.abc import Sequence
from concurrent.futures import Executor, Future
from typing import Any

import pytest

from engine.grammar_compiler import XGrammars
from kv_transfer.ids import TransferId
from tests.conformance.test_grammar import (
    MAX_TOKENS,
    NO_END,
    NO_PADDING,
    PLAIN,
    SAMPLED,
    SPECS,
    is_output,
    plain_text,
)
from tests.conformance.test_loop import prompt_of, reference
from tests.grammars import BYTES, EOS, byte_grammars
from tests.node_pair import LINK, NodePair
from wire.arrivals import COMPILE_LIMIT_S
from wire.host_events import LinkMessage
from wire.work import Accepted, Preempted, Rejected, SamplingParams, Submit, Tokens

CHOICE = SPECS["choice"].to_text()


class ByHand(Executor):
    """Jobs run when the test says so."""

    def __init__(self) -> None:
        self.jobs: list[tuple[Future[Any], Any, tuple[Any, ...]]] = []

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self.jobs.append((future, fn, args))
        return future

    def begin(self) -> None:
        for future, _, _ in self.jobs:
            future.set_running_or_notify_cancel()

    def finish(self) -> None:
        for future, fn, args in self.jobs:
            if future.running() or future.set_running_or_notify_cancel():
                future.set_result(fn(*args))
        self.jobs.clear()


def pair_of(executor: Executor | None = None, **options: Any) -> NodePair:
    grammars = byte_grammars()
    if executor is not None:
        grammars = XGrammars(BYTES, vocab_size=256, eos_token_ids=[EOS], executor=executor)
    prefill_options = {"grammars": grammars, **options.pop("prefill_options", {})}
    decode_options = {"grammars": grammars, **options.pop("decode_options", {})}
    return NodePair(prefill_options=prefill_options, decode_options=decode_options, **options)


def submit(
    pair: NodePair, key: str, kind: str, *, delivered: Sequence[int] = (), attempt: int = 1, **sampling: Any
) -> TransferId:
    bias = NO_END if kind == "json_object" else NO_PADDING
    params = {"seed": 5, "max_tokens": MAX_TOKENS, "stop_token_ids": (EOS,), "logit_bias": bias}
    return pair.submit(
        key,
        prompt_of(20),
        grammar=SPECS[kind].to_text(),
        delivered=delivered,
        attempt=attempt,
        **{**params, **sampling},
    )


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("algorithm", ["none", "ngram"])
def test_the_pair_gives_what_one_node_gives(algorithm: str, is_sampled: bool) -> None:
    pair = pair_of(algorithm=algorithm)
    sampling = SAMPLED if is_sampled else PLAIN
    tids = {kind: submit(pair, kind, kind, **sampling) for kind in SPECS}
    beside = pair.submit("n", prompt_of(33))
    pair.run()
    for kind, tid in tids.items():
        assert tuple(pair.tokens(tid)) == plain_text(kind, is_sampled), kind
        assert is_output(SPECS[kind], pair.tokens(tid), pair.ends(tid)[1])
    assert tuple(pair.tokens(beside)) == reference(tuple(prompt_of(33)), 12)
    assert pair.is_at_rest()


def test_the_first_token_follows_the_grammar_on_the_prefill_node() -> None:
    pair = pair_of()
    tid = submit(pair, "r", "choice", **PLAIN)
    pair.run()
    (first,) = [event for event in pair.events["P"] if isinstance(event, Tokens)]
    assert first.ids == plain_text("choice", False)[:1]
    assert first.ids[0] in b"an"
    assert first.ids[0] != reference(tuple(prompt_of(20)), 1)[0]
    assert pair.ends(tid) == ("handed_over", "stop")
    assert pair.prefill.status().counters["constrained_rows"] == 1


def test_an_output_that_ends_with_its_first_token_never_reaches_the_decode_node() -> None:
    pair = pair_of()
    tid = submit(pair, "r", "choice", delivered=b"no", attempt=2, **PLAIN)
    pair.run()
    assert [event.ids for event in pair.events["P"] if isinstance(event, Tokens)] == [(EOS,)]
    assert pair.ends(tid) == ("stop", "handed_over")


@pytest.mark.parametrize("is_sampled", [False, True], ids=["greedy", "sampled"])
def test_a_redispatched_request_ends_as_the_unbroken_one(is_sampled: bool) -> None:
    for kind in SPECS:
        expected = plain_text(kind, is_sampled)
        for cut in (1, len(expected) - 1):
            pair = pair_of(algorithm="ngram")
            sampling = SAMPLED if is_sampled else PLAIN
            tid = submit(pair, "r", kind, delivered=expected[:cut], attempt=2, **sampling)
            pair.run()
            reports = [one for events in pair.events.values() for one in events if isinstance(one, Tokens)]
            reports.sort(key=lambda one: one.first_index)
            assert {one.tid for one in reports} == {tid}
            assert [token_id for one in reports for token_id in one.ids] == list(expected[cut:])


def test_a_preempted_output_goes_on_elsewhere() -> None:
    """D runs out of pages; the router's next attempt carries what was delivered."""
    pair = pair_of(decode_options={"num_pages": 26, "reserve_tokens": 0})
    tids = {key: submit(pair, key, "json_object", **SAMPLED) for key in ("a", "b")}
    pair.run()
    expected = plain_text("json_object", True)
    assert len(expected) == MAX_TOKENS
    (preempted,) = [event for event in pair.events["D"] if isinstance(event, Preempted)]
    delivered = pair.tokens(preempted.tid)
    assert 1 < len(delivered) == preempted.next_index < MAX_TOKENS
    key = preempted.tid.request_id
    submit(pair, key, "json_object", delivered=delivered, attempt=2, **SAMPLED)
    pair.run()
    second = TransferId(key, 2)
    reports = [event for events in pair.events.values() for event in events if isinstance(event, Tokens)]
    reports = sorted((one for one in reports if one.tid == second), key=lambda one: one.first_index)
    later = [token_id for event in reports for token_id in event.ids]
    assert (*delivered, *later) == expected
    assert all(tuple(pair.tokens(tid)) == expected for tid in tids.values() if tid != preempted.tid)


def test_delivered_tokens_that_do_not_follow_are_refused() -> None:
    pair = pair_of()
    submit(pair, "r", "choice", delivered=b"ax", attempt=2, **PLAIN)
    pair.run()
    reasons = [event.reason for event in pair.events["P"] if isinstance(event, Rejected)]
    assert reasons == ["grammar: output 1, token 120, does not follow it"]


def test_a_bad_grammar_is_refused_by_both_and_disturbs_nobody() -> None:
    pair = pair_of()
    before = pair.submit("a", prompt_of(17))
    bad = pair.submit("bad", prompt_of(20), grammar='{"kind": "regex", "value": "[a"}')
    after = pair.submit("b", prompt_of(33))
    pair.run()
    reason = "grammar: regex cannot be used: Regex parsing error at position 3: Unclosed '['"
    refusal = Rejected(tid=bad, code="bad_grammar", retryable=False, reason=reason)
    for events in pair.events.values():
        assert [event for event in events if event.tid == bad] == [refusal]
    for tid, length in ((before, 17), (after, 33)):
        assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(length)), 12)
    assert pair.is_at_rest()
    assert [core.status().counters["rejected"] for core in (pair.prefill, pair.decode)] == [1, 1]


def test_others_run_to_their_end_while_a_grammar_is_compiled() -> None:
    pool = ByHand()
    pair = pair_of(pool)
    waiting = submit(pair, "r", "choice", **PLAIN)
    other = pair.submit("n", prompt_of(33))
    for _ in range(60):
        pair.step()
    assert pair.ends(other) == ("handed_over", "length")
    assert [event for event in pair.events["P"] if event.tid == waiting] == []
    assert not pair.prefill.status().is_idle
    assert not pair.decode.status().is_idle
    assert pair.prefill.status().load.waiting == pair.decode.status().load.waiting == 1
    pool.finish()
    pair.run()
    assert tuple(pair.tokens(waiting)) == plain_text("choice", False)
    assert pair.is_at_rest()


def test_one_node_may_compile_long_after_the_other() -> None:
    for is_prefill_slow in (False, True):
        pool = ByHand()
        slow = {"grammars": XGrammars(BYTES, vocab_size=256, eos_token_ids=[EOS], executor=pool)}
        pair = pair_of(prefill_options=slow) if is_prefill_slow else pair_of(decode_options=slow)
        tid = submit(pair, "r", "choice", **PLAIN)
        for _ in range(20):
            pair.step()
        pool.finish()
        pair.run()
        assert tuple(pair.tokens(tid)) == plain_text("choice", False)
        assert pair.is_at_rest()


def test_what_is_cancelled_while_its_grammar_is_compiled_is_forgotten() -> None:
    for end in ("cancel", "link"):
        pool = ByHand()
        pair = pair_of(pool)
        tid = submit(pair, "r", "choice", **PLAIN)
        pair.step()
        if end == "cancel":
            pair.cancel(tid)
        else:
            pair.lose_router()
        assert pair.prefill.status().is_idle
        assert pair.decode.status().is_idle
        assert [future.cancelled() for future, _, _ in pool.jobs] == [True, True]
        pair.run()
        assert pair.events == {"P": [], "D": []}


def test_a_tid_that_waits_is_not_taken_twice() -> None:
    pool = ByHand()
    pair = pair_of(pool)
    tid = submit(pair, "r", "choice", **PLAIN)
    submit(pair, "r", "choice", **PLAIN)
    codes = [event.code for event in pair.events["P"] if isinstance(event, Rejected)]
    assert codes == ["duplicate"]
    pool.finish()
    pair.run()
    assert [type(event) for event in pair.events["P"] if event.tid == tid].count(Accepted) == 1
    assert tuple(pair.tokens(tid)) == plain_text("choice", False)


@pytest.mark.parametrize(
    ("is_running", "deadline_s", "waited_s", "code", "retryable"),
    [
        (True, 1e6, COMPILE_LIMIT_S, "bad_grammar", False),
        (False, 1e6, COMPILE_LIMIT_S, "overloaded", True),
        (True, 3.0, 3.0, "deadline", False),
    ],
    ids=["it takes too long", "others take too long", "no time left"],
)
def test_the_wait_for_a_grammar_has_an_end(
    is_running: bool, deadline_s: float, waited_s: float, code: str, retryable: bool
) -> None:
    pool = ByHand()
    pair = pair_of(pool)
    tid = pair.submit("r", prompt_of(20), grammar=CHOICE, deadline_s=deadline_s)
    if is_running:
        pool.begin()
    pair.now = waited_s - 0.001
    pair.step()
    assert pair.ends(tid) == ("", "")
    pair.now = waited_s
    pair.step()
    refusals = [event for event in pair.events["P"] if isinstance(event, Rejected)]
    assert [(refusal.code, refusal.retryable) for refusal in refusals] == [(code, retryable)]
    assert pair.ends(tid) == (code, code)
    pair.run()
    assert pair.is_at_rest()


def test_ignore_eos_does_not_outlive_the_grammar() -> None:
    """Without the model's end-of-sequence token among the request's stop tokens."""
    pair = pair_of()
    tid = submit(pair, "r", "choice", stop_token_ids=(), **PLAIN)
    pair.run()
    assert tuple(pair.tokens(tid)) == plain_text("choice", False)
    assert pair.ends(tid) == ("handed_over", "stop")


def test_a_decode_node_alone_constrains_as_well() -> None:
    pair = pair_of()
    tid = TransferId("local", 1)
    message = Submit(
        tid=tid,
        prompt_ids=tuple(prompt_of(20)),
        num_prompt_tokens=20,
        sampling=SamplingParams(
            seed=5, max_tokens=MAX_TOKENS, temperature=0.0, stop_token_ids=(EOS,), logit_bias=NO_PADDING
        ),
        peer=None,
        deadline_s=1e6,
        grammar=CHOICE,
    )
    pair.decode.handle(LinkMessage(link=LINK, message=message), 0.0)
    pair.run()
    assert tuple(pair.tokens(tid)) == plain_text("choice", False)
    assert pair.is_at_rest()
