"""A prompt computed on P and decoded on D is the prompt decoded in one place; nothing leaks, ever."""

import random
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest

from kv_transfer.ids import TransferId
from kv_transfer.messages import Final, Heartbeat, SemanticIdentity
from kv_transfer.transport import WriteHandle
from kv_transfer.transports.memory import Fault
from tests.conformance.test_loop import LENGTHS, SAMPLINGS, prompt_of, reference
from tests.engines import VOCAB_SIZE, make_engine, make_request, run, tokens_of
from tests.node_pair import IDENTITY, NodePair
from wire.host_events import PeerMessage
from wire.work import Finished, PromptInfo, Tokens


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
def test_text_through_the_pair_equals_transformers(algorithm: str) -> None:
    pair = NodePair(
        algorithm=algorithm, prefill_options={"num_pages": 600}, decode_options={"num_pages": 600}
    )
    lengths = list(LENGTHS)
    random.Random(7).shuffle(lengths)
    for turn in range(2):  # cold, then with prefix hits on both sides
        tids = {n: pair.submit(f"{turn}-{n}", prompt_of(n)) for n in lengths}
        pair.run()
        for n, tid in tids.items():
            assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(n)), 12), (turn, n)
            assert pair.ends(tid) == ("handed_over", "length")
        assert pair.is_at_rest()


def check_every_cut(sampling: Mapping[str, Any]) -> list[int]:
    """What one node gives, which the pair must give too, whole and after earlier attempts. Returns it."""
    options: dict[str, Any] = {"seed": 11, "max_tokens": 24, **sampling}
    expected = tokens_of(run(make_engine(), [make_request("r", prompt_of(37), **options)])["r"])
    pair = NodePair(algorithm="ngram", prefill_options={"num_pages": 600}, decode_options={"num_pages": 600})
    tids = {
        cut: pair.submit(f"from {cut}", prompt_of(37), delivered=expected[:cut], attempt=2, **options)
        for cut in (0, 1, 2, len(expected) // 2, len(expected) - 1)
    }
    pair.run()
    for cut, tid in tids.items():
        rounds = pair.rounds(tid)
        assert rounds[0][0] == cut
        assert [token_id for _, ids, _, _ in rounds for token_id in ids] == expected[cut:], cut
    return expected


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_what_shapes_an_answer_counts_what_was_said_before_the_handoff_and_by_earlier_attempts(
    sampling: dict[str, object],
) -> None:
    check_every_cut(sampling)


def test_a_banned_sequence_may_lie_across_the_handoff() -> None:
    """Each token of the plain text is forbidden after the one before it."""
    plain = reference(tuple(prompt_of(37)), 12)
    bans = tuple(pairwise(plain))
    first, second, *_ = check_every_cut({"temperature": 0.0, "banned_sequences": bans})
    assert first == plain[0]
    assert second != plain[1]


def test_first_token_comes_from_p_alone_and_index_one_from_d() -> None:
    pair = NodePair()
    pair.submit("r", prompt_of(20))
    pair.run()
    (first,) = [event for event in pair.events["P"] if isinstance(event, Tokens)]
    assert (first.first_index, len(first.ids)) == (0, 1)
    assert [event.first_index for event in pair.events["D"] if isinstance(event, Tokens)] == list(
        range(1, 12)
    )


def test_pages_leave_while_later_chunks_are_computed() -> None:
    timeline: list[tuple[int, int, int]] = []

    def note(handle: WriteHandle) -> Fault:
        timeline.append((handle.start, handle.stop, int(pair.prefill.status().counters["prompt_tokens"])))
        return Fault()

    pair = NodePair(faults=note, prefill_options={"chunk_tokens": 16})
    tid = pair.submit("r", prompt_of(66))
    pair.run()
    assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(66)), 12)
    # (first page, last page + 1, prompt tokens computed when it left)
    assert timeline == [(0, 4, 16), (4, 8, 32), (8, 12, 48), (12, 16, 64), (16, 17, 66)]


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_max_tokens_is_exact_across_the_handoff(max_tokens: int) -> None:
    pair = NodePair(algorithm="ngram")
    tid = pair.submit("r", prompt_of(17), max_tokens=max_tokens)
    pair.run()
    assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(17)), max_tokens)
    assert pair.ends(tid) == (("length", "handed_over") if max_tokens == 1 else ("handed_over", "length"))
    assert pair.is_at_rest()


def test_stop_on_the_first_token_leaves_nothing_on_d() -> None:
    first = reference(tuple(prompt_of(20)), 1)[0]
    pair = NodePair()
    tid = pair.submit("r", prompt_of(20), stop_token_ids=(first,))
    pair.run()
    assert pair.tokens(tid) == [first]
    assert pair.ends(tid) == ("stop", "handed_over")
    (end,) = [event for event in pair.events["P"] if isinstance(event, Finished)]
    assert end.stop_token_id == first
    assert pair.is_at_rest()


def test_prefix_hits_are_counted_and_not_sent_again() -> None:
    pair = NodePair()
    for turn in range(2):
        pair.submit(f"r{turn}", prompt_of(33))
        pair.run()
    cached = [event.cached_tokens for event in pair.events["P"] if isinstance(event, PromptInfo)]
    assert cached == [0, 32]
    sent = [event.kv_bytes for event in pair.events["P"] if isinstance(event, Finished)]
    received = [event.kv_bytes for event in pair.events["D"] if isinstance(event, Finished)]
    assert sent == received == [9 * sent[1], sent[1]]


@pytest.mark.parametrize("steps", range(9))
@pytest.mark.parametrize("delay_s", [0.0, 0.035])
def test_cancel_in_any_phase_frees_both_sides(steps: int, delay_s: float) -> None:
    pair = NodePair(faults=lambda _: Fault(delay_s=delay_s), prefill_options={"chunk_tokens": 16})
    doomed = pair.submit("doomed", prompt_of(50), max_tokens=40)
    spared = pair.submit("spared", prompt_of(31))
    for _ in range(steps):
        pair.step()
    pair.cancel(doomed)
    pair.run()
    assert tuple(pair.tokens(spared)) == reference(tuple(prompt_of(31)), 12)
    text = pair.tokens(doomed)
    assert tuple(text) == reference(tuple(prompt_of(50)), 40)[: len(text)]
    assert pair.is_at_rest()


@pytest.mark.parametrize("steps", range(9))
def test_loss_of_the_router_cancels_what_it_submitted(steps: int) -> None:
    pair = NodePair(prefill_options={"chunk_tokens": 16})
    pair.submit("a", prompt_of(50), max_tokens=40)
    for _ in range(steps):
        pair.step()
    pair.lose_router()
    pair.run()
    assert pair.is_at_rest()
    tid = pair.submit("b", prompt_of(20))
    pair.run()
    assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(20)), 12)


@pytest.mark.parametrize("steps", range(7))
def test_loss_of_the_session_fails_what_is_in_flight_and_the_pair_recovers(steps: int) -> None:
    pair = NodePair(prefill_options={"chunk_tokens": 16}, faults=lambda _: Fault(delay_s=0.015))
    tid = pair.submit("a", prompt_of(50), max_tokens=40)
    for _ in range(steps):
        pair.step()
    pair.disconnect()
    pair.run()
    assert pair.is_at_rest()
    assert pair.ends(tid)[1] in ("peer_lost", "length")
    text = pair.tokens(tid)
    assert tuple(text) == reference(tuple(prompt_of(50)), 40)[: len(text)]
    pair.connect()
    again = pair.submit("b", prompt_of(50))
    pair.run()
    assert tuple(pair.tokens(again)) == reference(tuple(prompt_of(50)), 12)


def test_late_write_of_a_cancelled_request_never_lands_in_anothers_page() -> None:
    def faults(handle: WriteHandle) -> Fault:
        is_late = handle.tid.request_id == "a"
        return Fault(delay_s=0.1, ignores_cancel=True) if is_late else Fault()

    pair = NodePair(faults=faults, decode_options={"num_pages": 20}, prefill_options={"chunk_tokens": 64})
    first = pair.submit("a", prompt_of(50), max_tokens=4)
    pair.step()
    pair.step()
    pair.cancel(first)
    second = pair.submit("b", prompt_of(50, seed=9), max_tokens=12)
    pair.run()
    assert tuple(pair.tokens(second)) == reference(tuple(prompt_of(50, seed=9)), 12)
    assert pair.is_at_rest()


@pytest.mark.parametrize(
    ("identity", "options", "refusal"),
    [
        (
            SemanticIdentity(model="other", revision="", weights="w", dtype="float32", tokenizer="t"),
            {},
            "model: 'other' here, 'tiny' there",
        ),
        (
            SemanticIdentity(model="tiny", revision="", weights="w", dtype="bfloat16", tokenizer="t"),
            {},
            "dtype: 'bfloat16' here, 'float32' there",
        ),
        (IDENTITY, {"page_size": 8}, "page_size: '8' here, '4' there"),
    ],
)
def test_pair_that_differs_is_refused_by_field_and_both_values(
    identity: SemanticIdentity, options: dict[str, int], refusal: str
) -> None:
    pair = NodePair(decode_options={"identity": identity, **options})
    assert refusal in pair.refused
    tid = pair.submit("r", prompt_of(5))
    assert pair.ends(tid) == ("pair_refused", "pair_refused")
    pair.run()
    assert pair.is_at_rest()


def test_handoff_that_cannot_be_fails_its_request_only() -> None:
    pair = NodePair()

    def lie(message: object) -> object:
        if isinstance(message, Final) and message.tid.request_id == "victim":
            return replace(message, handoff=replace(message.handoff, first_token=VOCAB_SIZE))
        return message

    pair.tamper = lie
    victim, other = pair.submit("victim", prompt_of(20)), pair.submit("other", prompt_of(31))
    pair.run()
    assert pair.ends(victim) == ("handed_over", "protocol")
    assert tuple(pair.tokens(other)) == reference(tuple(prompt_of(31)), 12)
    assert pair.is_at_rest()


def test_more_work_than_pages_waits_and_finishes() -> None:
    pair = NodePair(algorithm="ngram", decode_options={"num_pages": 24}, prefill_options={"num_pages": 30})
    tids = [pair.submit(f"r{i}", prompt_of(30, seed=i), max_tokens=8) for i in range(8)]
    pair.run()
    for i, tid in enumerate(tids):
        assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(30, seed=i)), 8)
        assert pair.ends(tid) == ("handed_over", "length")
    assert pair.is_at_rest()


def test_no_more_requests_decode_at_once_than_max_running() -> None:
    pair = NodePair(decode_options={"max_running": 2}, prefill_options={"num_pages": 400})
    tids = [pair.submit(f"r{i}", prompt_of(30, seed=i), max_tokens=8) for i in range(5)]
    most = 0
    while not (pair.prefill.status().is_idle and pair.decode.status().is_idle):
        pair.step()
        most = max(most, pair.decode.status().load.running)
    assert most == 2
    for i, tid in enumerate(tids):
        assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(30, seed=i)), 8)
    assert pair.is_at_rest()


def test_expired_request_fails_on_both_sides_and_frees_its_pages() -> None:
    pair = NodePair(prefill_options={"chunk_tokens": 16})
    tid = pair.submit("r", prompt_of(50), max_tokens=40, deadline_s=0.1)
    pair.run()
    assert pair.ends(tid)[1] == "deadline"
    assert pair.is_at_rest()


def test_unknown_peer_message_costs_the_session_not_the_node() -> None:
    pair = NodePair()
    pair.prefill.handle(
        PeerMessage(peer=pair.decode.hello().incarnation, message=Heartbeat(engine_step=1)), 0.0
    )
    pair.deliver()
    assert not pair.is_connected
    pair.connect()
    tid = TransferId("r", 1)
    pair.submit("r", prompt_of(9))
    pair.run()
    assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(9)), 12)
