"""What comes late, early or malformed costs one request at most, and never a node."""

import math
from dataclasses import replace
from typing import Any

import pytest

from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import Drained, Renew, Reserve
from tests.conformance.test_loop import prompt_of, reference
from tests.node_pair import LINK, NodePair
from wire.host_events import DropPeer, HostEvent, LinkMessage, PeerMessage
from wire.work import Failed, NodeRef, Rejected, SamplingParams, Submit

D = Incarnation("D")
STRAY = TransferId("stray", 1)
SUBMIT = Submit(
    tid=STRAY,
    prompt_ids=tuple(prompt_of(9)),
    num_prompt_tokens=9,
    sampling=SamplingParams(seed=0, max_tokens=4),
    peer=NodeRef(address="D", incarnation=D),
    deadline_s=60.0,
)


def reserve(*page_ids: int) -> PeerMessage:
    return PeerMessage(peer=D, message=Reserve(tid=STRAY, page_ids=page_ids, skip_tokens=0, deadline_s=9.0))


def check_still_works(pair: NodePair) -> None:
    pair.disconnect()
    pair.connect()
    tid = pair.submit("after", prompt_of(20))
    pair.run()
    assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(20)), 12)
    assert pair.is_at_rest()


@pytest.mark.parametrize("is_reserve_first", [False, True])
def test_reserve_of_a_peer_that_p_just_dropped_writes_nothing(is_reserve_first: bool) -> None:
    pair = NodePair()
    pair.fabric.cut(Incarnation("P"), D)
    pair.decode.step(pair.now)
    pair.prefill.step(pair.now)
    dropped = [output for output in pair.prefill.take_outputs() if isinstance(output, DropPeer)]
    assert [output.peer for output in dropped] == [D]
    # Its session has not closed yet: what D said before it noticed still comes in.
    events: list[HostEvent] = [LinkMessage(link=LINK, message=SUBMIT), reserve(1, 2, 3)]
    for event in reversed(events) if is_reserve_first else events:
        pair.prefill.handle(event, pair.now)
    for _ in range(5):
        pair.prefill.step(pair.now)
    check_still_works(pair)


def test_a_message_of_the_wrong_role_is_a_counted_fault_and_costs_the_session() -> None:
    pair = NodePair()
    for core, peer, message in (
        (pair.prefill, D, Drained(tid=STRAY)),
        (pair.decode, Incarnation("P"), Renew(tids=(STRAY,))),
    ):
        core.handle(PeerMessage(peer=peer, message=message), pair.now)
        dropped = [output for output in core.take_outputs() if isinstance(output, DropPeer)]
        assert [output.peer for output in dropped] == [peer]
        assert core.status().counters["transfer_faults/unexpected_message"] == 1
    check_still_works(pair)


def test_early_reserve_that_does_not_fit_ends_the_submit_at_once() -> None:
    pair = NodePair()
    pair.prefill.handle(reserve(1, 2), pair.now)
    pair.prefill.handle(LinkMessage(link=LINK, message=SUBMIT), pair.now)
    pair.deliver()
    assert pair.ends(STRAY)[0] == "protocol"
    (end,) = [event for event in pair.events["P"] if isinstance(event, Failed)]
    assert end.reason == "reserve of 2 pages for 3 in computing"
    check_still_works(pair)


@pytest.mark.parametrize(
    ("bad", "code", "reason"),
    [
        (
            {"grammar": "root ::= 'a'"},
            "bad_grammar",
            "grammar must be empty: this node does not constrain its output",
        ),
        ({"deadline_s": math.nan}, "invalid_request", "deadline_s must be finite, got nan"),
        ({"deadline_s": math.inf}, "invalid_request", "deadline_s must be finite, got inf"),
    ],
)
def test_submit_that_cannot_be_done_as_asked_is_refused_by_both(
    bad: dict[str, Any], code: str, reason: str
) -> None:
    pair = NodePair()
    for core in (pair.prefill, pair.decode):
        core.handle(LinkMessage(link=LINK, message=replace(SUBMIT, **bad)), pair.now)
    pair.deliver()
    refusal = Rejected(tid=STRAY, code=code, retryable=False, reason=reason)
    assert pair.events == {"P": [refusal], "D": [refusal]}
    assert pair.is_at_rest()
