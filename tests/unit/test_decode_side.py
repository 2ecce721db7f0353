"""The decode node's transfers: every state against every event, and what is held when."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from kv_transfer import errors
from kv_transfer.actions import (
    ClosePeer,
    DecodeAction,
    Fail,
    HandedOver,
    Join,
    QuarantinePages,
    Refuse,
    ReleasePages,
    ReleaseQuarantine,
    Send,
)
from kv_transfer.decode_side import DecodeTransfers
from kv_transfer.decode_transfer import DecodeState, DecodeTimeouts
from kv_transfer.ended import EndedTransfers
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import CancelTransfer, Final, Handoff, Planned, Reserve, TransferFailed

P, OTHER = Incarnation("p"), Incarnation("other")
TID = TransferId("r", 0)
HANDOFF = Handoff(first_token=7, num_tokens=40)
TIMEOUTS = DecodeTimeouts(queue_s=5, prefill_s=20, progress_s=4, drain_s=3, quarantine_s=9)
CANCEL = Send(peer=P, message=CancelTransfer(tid=TID))
RELEASE = ReleasePages(tid=TID)


def no_checksum(peer: Incarnation, page_id: int) -> int:
    raise AssertionError(f"page {page_id} was summed")


def machine(
    *, page_checksum: Callable[[Incarnation, int], int] = no_checksum, has_checksums: bool = False
) -> DecodeTransfers:
    transfers = DecodeTransfers(page_size=16, page_checksum=page_checksum, timeouts=TIMEOUTS)
    transfers.peer_ready(P, has_checksums=has_checksums)
    return transfers


def submit(transfers: DecodeTransfers, *, deadline: float = 100.0) -> list[DecodeAction]:
    return transfers.submit(TID, peer=P, num_prompt_tokens=40, deadline=deadline, now=0.0)


def grant(transfers: DecodeTransfers, *, now: float = 0.0) -> list[DecodeAction]:
    return transfers.granted(TID, page_ids=(8, 9, 4), skip_tokens=0, now=now)


def final(*ranges: tuple[int, int], num_tokens: int = 40, checksums: tuple[int, ...] | None = None) -> Final:
    handoff = Handoff(first_token=7, num_tokens=num_tokens)
    return Final(tid=TID, ranges=ranges, handoff=handoff, checksums=checksums)


def failure(code: str, reason: str) -> Fail:
    return Fail(tid=TID, code=code, retryable=code in errors.RETRYABLE, reason=reason)


def in_state(state: DecodeState) -> DecodeTransfers:
    """A machine whose TID (3 pages) has just come into this state, at time 0."""
    transfers = machine()
    submit(transfers)
    if state is not DecodeState.QUEUED:
        grant(transfers)
    if state is DecodeState.RECEIVING:
        transfers.landed(P, TID, start=0, stop=1, now=0.0)
    if state in (DecodeState.CANCELLING, DecodeState.QUARANTINED):
        transfers.cancel(TID, now=0.0)
    if state is DecodeState.QUARANTINED:
        transfers.tick(3.0)
    assert transfers.state(TID) is state
    return transfers


# -- the way it should go


def test_a_granted_request_reserves_receives_and_joins_with_its_pages() -> None:
    transfers = machine()
    assert submit(transfers) == []
    assert transfers.grantable() == [TID]
    assert grant(transfers, now=1.0) == [
        Send(peer=P, message=Reserve(tid=TID, page_ids=(8, 9, 4), skip_tokens=0, deadline_s=20.0))
    ]
    assert transfers.planned(P, Planned(tid=TID, num_tokens=40)) == []
    assert transfers.landed(P, TID, start=0, stop=2, now=2.0) == []
    assert transfers.landed(P, TID, start=2, stop=3, now=3.0) == []
    assert transfers.final(P, final((0, 3)), now=3.5) == [
        Join(tid=TID, handoff=HANDOFF, page_ids=(8, 9, 4), skip_tokens=0, transfer_s=1.5)
    ]
    assert transfers.state(TID) is None
    assert transfers.next_deadline is None
    assert not transfers.faults


def test_final_may_come_first_and_ranges_in_any_order_and_twice() -> None:
    transfers = in_state(DecodeState.RESERVED)
    assert transfers.final(P, final((2, 3), (0, 2)), now=1.0) == []
    assert transfers.landed(P, TID, start=2, stop=3, now=1.0) == []
    assert transfers.landed(P, TID, start=2, stop=3, now=1.0) == []
    assert transfers.landed(P, TID, start=1, stop=2, now=1.0) == []
    joined = transfers.landed(P, TID, start=0, stop=2, now=2.0)
    assert [type(action) for action in joined] == [Join]
    assert transfers.landed(P, TID, start=0, stop=2, now=2.0) == []
    assert not transfers.faults


def test_pages_held_already_are_neither_leased_nor_expected() -> None:
    transfers = machine()
    submit(transfers)
    assert transfers.granted(TID, page_ids=(5,), skip_tokens=32, now=0.0) == [
        Send(peer=P, message=Reserve(tid=TID, page_ids=(5,), skip_tokens=32, deadline_s=20.0))
    ]
    transfers.landed(P, TID, start=2, stop=3, now=0.0)
    assert transfers.final(P, final((2, 3)), now=0.0) == [
        Join(tid=TID, handoff=HANDOFF, page_ids=(5,), skip_tokens=32, transfer_s=0.0)
    ]


def test_a_full_local_hit_joins_on_final_alone() -> None:
    transfers = machine()
    transfers.submit(TID, peer=P, num_prompt_tokens=32, deadline=100.0, now=0.0)
    transfers.granted(TID, page_ids=(), skip_tokens=32, now=0.0)
    joined = transfers.final(P, final(num_tokens=32), now=0.0)
    assert [type(action) for action in joined] == [Join]


def test_nothing_is_granted_before_the_peer_is_connected() -> None:
    transfers = DecodeTransfers(page_size=16, page_checksum=no_checksum, timeouts=TIMEOUTS)
    submit(transfers)
    assert transfers.grantable() == []
    assert grant(transfers) == [RELEASE]
    transfers.peer_ready(P, has_checksums=False)
    assert transfers.grantable() == [TID]
    assert [type(action) for action in grant(transfers)] == [Send]


def test_a_grant_for_a_request_that_is_over_is_handed_back() -> None:
    transfers = in_state(DecodeState.QUEUED)
    transfers.cancel(TID, now=0.0)
    assert grant(transfers) == [RELEASE]


@pytest.mark.parametrize(
    ("page_ids", "skip_tokens"), [((1, 2), 0), ((1, 2, 3), 16), ((1, 2, 3), 8), ((), 64)]
)
def test_a_wrong_number_of_pages_is_refused_by_name(page_ids: tuple[int, ...], skip_tokens: int) -> None:
    with pytest.raises(ValueError, match=r"(page_ids|skip_tokens) must be"):
        in_state(DecodeState.QUEUED).granted(TID, page_ids=page_ids, skip_tokens=skip_tokens, now=0.0)


# -- every state against every event


def protocol_end(event: str, state: DecodeState) -> list[DecodeAction]:
    failed = failure(errors.PROTOCOL, f"{event} in {state}")
    return [failed] if state is DecodeState.QUEUED else [CANCEL, failed]


EVENTS: dict[str, Callable[[DecodeTransfers], list[DecodeAction]]] = {
    "granted": grant,
    "planned": lambda transfers: transfers.planned(P, Planned(tid=TID, num_tokens=40)),
    "landed": lambda transfers: transfers.landed(P, TID, start=0, stop=1, now=0.0),
    "final": lambda transfers: transfers.final(P, final((0, 3)), now=0.0),
    "failed": lambda transfers: transfers.failed(
        P, TransferFailed(tid=TID, code=errors.WRITE_FAILED, reason="broken"), now=0.0
    ),
    "finished": lambda transfers: transfers.failed(P, TransferFailed(tid=TID, code=errors.FINISHED), now=0.0),
    "drained": lambda transfers: transfers.drained(P, TID, now=0.0),
    "cancel": lambda transfers: transfers.cancel(TID, now=0.0),
    "peer_lost": lambda transfers: transfers.peer_lost(P, reason="gone"),
}
Q, R, V, C, X = DecodeState
CANCELLED = failure(errors.CANCELLED, "cancelled by the router")
BROKEN = failure(errors.WRITE_FAILED, "write_failed on the prefill node: broken")
LOST = failure(errors.PEER_LOST, "gone")
FAULT = "fault"
OUTCOMES: dict[tuple[DecodeState, str], tuple[list[DecodeAction] | str, DecodeState | None]] = {
    (Q, "granted"): (
        [Send(peer=P, message=Reserve(tid=TID, page_ids=(8, 9, 4), skip_tokens=0, deadline_s=20.0))],
        R,
    ),
    (Q, "planned"): ([], Q),
    (Q, "landed"): (FAULT, None),
    (Q, "final"): (FAULT, None),
    (Q, "failed"): ([BROKEN], None),
    (Q, "finished"): ([HandedOver(tid=TID)], None),
    (Q, "drained"): (FAULT, None),
    (Q, "cancel"): ([CANCELLED], None),
    (Q, "peer_lost"): ([LOST], None),
    (R, "granted"): (FAULT, C),
    (R, "planned"): ([], R),
    (R, "landed"): ([], V),
    (R, "final"): ([], V),
    (R, "failed"): ([BROKEN], C),
    (R, "finished"): ([HandedOver(tid=TID)], C),
    (R, "drained"): (FAULT, C),
    (R, "cancel"): ([CANCEL, CANCELLED], C),
    (R, "peer_lost"): ([LOST, RELEASE], None),
    (V, "granted"): (FAULT, C),
    (V, "planned"): ([], V),
    (V, "landed"): ([], V),
    (V, "final"): ([], V),
    (V, "failed"): ([BROKEN], C),
    (V, "finished"): ([HandedOver(tid=TID)], C),
    (V, "drained"): (FAULT, C),
    (V, "cancel"): ([CANCEL, CANCELLED], C),
    (V, "peer_lost"): ([LOST, RELEASE], None),
    (C, "granted"): (FAULT, C),
    (C, "planned"): ([], C),
    (C, "landed"): ([], C),
    (C, "final"): ([], C),
    (C, "failed"): ([], C),
    (C, "finished"): ([], C),
    (C, "drained"): ([RELEASE], None),
    (C, "cancel"): ([], C),
    (C, "peer_lost"): ([RELEASE], None),
    (X, "granted"): (FAULT, X),
    (X, "planned"): ([], X),
    (X, "landed"): ([], X),
    (X, "final"): ([], X),
    (X, "failed"): ([], X),
    (X, "finished"): ([], X),
    (X, "drained"): ([ReleaseQuarantine(tid=TID)], None),
    (X, "cancel"): ([], X),
    (X, "peer_lost"): ([ReleaseQuarantine(tid=TID)], None),
}


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", DecodeState)
def test_every_event_in_every_state_does_what_the_table_says(state: DecodeState, event: str) -> None:
    transfers = in_state(state)
    actions = EVENTS[event](transfers)
    expected, after = OUTCOMES[state, event]
    if expected == FAULT:
        is_ending = state in (C, X)
        expected = [] if is_ending else protocol_end(event, state)
        assert transfers.faults == {f"{event} in {state}": 1}
    else:
        assert not transfers.faults
    assert (actions, transfers.state(TID)) == (expected, after)


@pytest.mark.parametrize("event", EVENTS)
def test_nothing_is_said_about_a_transfer_that_is_over_or_unknown(event: str) -> None:
    expected = [RELEASE] if event == "granted" else []
    assert EVENTS[event](machine()) == expected
    ended = in_state(DecodeState.CANCELLING)
    ended.drained(P, TID, now=0.0)
    assert EVENTS[event](ended) == expected
    assert not ended.faults


@pytest.mark.parametrize(
    "event",
    [
        lambda transfers: transfers.landed(OTHER, TID, start=0, stop=1, now=0.0),
        lambda transfers: transfers.final(OTHER, final((0, 3)), now=0.0),
        lambda transfers: transfers.failed(OTHER, TransferFailed(tid=TID, code="x"), now=0.0),
        lambda transfers: transfers.drained(OTHER, TID, now=0.0),
        lambda transfers: transfers.planned(OTHER, Planned(tid=TID, num_tokens=1)),
        lambda transfers: transfers.peer_lost(OTHER, reason="gone"),
    ],
)
@pytest.mark.parametrize("state", DecodeState)
def test_a_stranger_cannot_move_anothers_transfer(
    state: DecodeState, event: Callable[[DecodeTransfers], list[DecodeAction]]
) -> None:
    transfers = in_state(state)
    assert event(transfers) == []
    assert transfers.state(TID) is state


@pytest.mark.parametrize(
    ("message", "fault"),
    [
        (final((0, 2)), "final short of the lease"),
        (final((0, 2), (1, 2)), "final short of the lease"),
        (final((0, 4)), "final outside the lease"),
        (final((1, 1), (0, 3)), "final outside the lease"),
        (final(*[(0, 1)] * 4), "final with more ranges than pages"),
        (final((0, 3), num_tokens=41), "final of another length"),
        (final((0, 3), checksums=(1, 2)), "final with the wrong number of checksums"),
    ],
)
def test_a_final_that_does_not_fit_the_lease_is_a_fault(message: Final, fault: str) -> None:
    transfers = in_state(DecodeState.RESERVED)
    assert transfers.final(P, message, now=0.0) == protocol_end(fault, DecodeState.RESERVED)
    assert transfers.faults == {f"{fault} in reserved": 1}


def test_a_second_final_is_a_fault() -> None:
    transfers = in_state(DecodeState.RECEIVING)
    transfers.final(P, final((0, 3)), now=0.0)
    assert transfers.final(P, final((0, 3)), now=0.0) == protocol_end("second final", DecodeState.RECEIVING)


@pytest.mark.parametrize(("start", "stop"), [(0, 4), (-1, 1), (2, 2), (3, 4)])
def test_landing_outside_the_lease_is_a_fault(start: int, stop: int) -> None:
    transfers = in_state(DecodeState.RESERVED)
    actions = transfers.landed(P, TID, start=start, stop=stop, now=0.0)
    assert actions == protocol_end("landed outside the lease", DecodeState.RESERVED)


@pytest.mark.parametrize("state", DecodeState)
def test_a_second_submit_is_refused_and_changes_nothing(state: DecodeState) -> None:
    transfers = in_state(state)
    refuse = Refuse(tid=TID, code=errors.DUPLICATE, retryable=False, reason=f"{TID} was submitted before")
    assert submit(transfers) == [refuse]
    assert transfers.state(TID) is state


def test_a_submit_of_an_ended_transfer_is_refused_and_of_the_next_attempt_is_not() -> None:
    transfers = in_state(DecodeState.QUEUED)
    transfers.cancel(TID, now=0.0)
    assert [type(action) for action in submit(transfers)] == [Refuse]
    again = TransferId(TID.request_id, 1)
    assert transfers.submit(again, peer=P, num_prompt_tokens=40, deadline=9.0, now=0.0) == []


@pytest.mark.parametrize(
    ("code", "action"),
    [
        (errors.FINISHED, HandedOver(tid=TID)),
        (
            errors.CANCELLED,
            Refuse(tid=TID, code=errors.CANCELLED, retryable=False, reason="cancelled on the prefill node"),
        ),
        (
            "odd",
            Refuse(tid=TID, code=errors.PEER_FAILED, retryable=True, reason="odd on the prefill node"),
        ),
    ],
)
def test_what_ended_on_the_prefill_node_before_its_submit_ends_with_it(
    code: str, action: DecodeAction
) -> None:
    transfers = machine()
    assert transfers.failed(P, TransferFailed(tid=TID, code=code), now=0.0) == []
    assert transfers.drained(P, TID, now=0.0) == []
    assert submit(transfers) == [action]
    (second,) = submit(transfers)
    assert isinstance(second, Refuse)
    assert second.code == errors.DUPLICATE


# -- deadlines


def test_without_a_session_in_time_the_peer_is_lost() -> None:
    timeouts = replace(TIMEOUTS, queue_s=9, session_s=3)
    transfers = DecodeTransfers(page_size=16, page_checksum=no_checksum, timeouts=timeouts)
    submit(transfers)
    assert transfers.tick(2.9) == []
    assert transfers.tick(3.0) == [failure(errors.PEER_LOST, "there is no session with the prefill node")]
    assert transfers.next_deadline is None


def test_a_session_that_comes_in_time_leaves_the_rest_of_the_queue_time_for_pages() -> None:
    timeouts = replace(TIMEOUTS, queue_s=9, session_s=3)
    transfers = DecodeTransfers(page_size=16, page_checksum=no_checksum, timeouts=timeouts)
    submit(transfers)
    transfers.peer_ready(OTHER, has_checksums=False)
    assert transfers.next_deadline == 3.0
    transfers.peer_ready(P, has_checksums=False)
    assert transfers.next_deadline == 9.0
    assert transfers.tick(9.0) == [
        Refuse(tid=TID, code=errors.QUEUE_TIMEOUT, retryable=True, reason="out of time in queued")
    ]


def test_queue_age_is_refused_not_failed() -> None:
    transfers = in_state(DecodeState.QUEUED)
    assert transfers.tick(4.9) == []
    assert transfers.tick(5.0) == [
        Refuse(tid=TID, code=errors.QUEUE_TIMEOUT, retryable=True, reason="out of time in queued")
    ]
    assert transfers.state(TID) is None


@pytest.mark.parametrize(
    ("state", "deadline", "code"),
    [
        (DecodeState.RESERVED, 20.0, errors.PREFILL_TIMEOUT),
        (DecodeState.RECEIVING, 20.0, errors.NO_PROGRESS),
    ],
)
def test_a_lease_out_of_time_is_reported_at_once_and_kept(
    state: DecodeState, deadline: float, code: str
) -> None:
    transfers = in_state(state)
    assert transfers.next_deadline == deadline
    assert transfers.tick(deadline - 0.1) == []
    assert transfers.tick(deadline) == [CANCEL, failure(code, f"out of time in {state}")]
    assert transfers.state(TID) is DecodeState.CANCELLING


def test_the_requests_own_deadline_bounds_every_wait() -> None:
    transfers = machine()
    submit(transfers, deadline=2.0)
    grant(transfers)
    assert transfers.tick(2.0) == [CANCEL, failure(errors.DEADLINE, "out of time in reserved")]


def test_progress_moves_the_deadline() -> None:
    transfers = in_state(DecodeState.RECEIVING)
    transfers.landed(P, TID, start=1, stop=2, now=3.0)
    assert transfers.next_deadline == 23.0


@pytest.mark.parametrize("state", [DecodeState.RESERVED, DecodeState.RECEIVING])
def test_steps_of_the_peers_engine_are_progress_until_final(state: DecodeState) -> None:
    transfers = in_state(state)
    transfers.peer_works(OTHER, now=4.0)
    assert transfers.next_deadline == 20.0
    transfers.peer_works(P, now=5.0)
    assert transfers.next_deadline == 25.0
    transfers.peer_works(P, now=90.0)
    assert transfers.next_deadline == 100.0  # the request's own
    transfers.final(P, final((0, 3)), now=90.0)
    transfers.peer_works(P, now=92.0)
    assert transfers.next_deadline == 94.0


@pytest.mark.parametrize("state", [DecodeState.QUEUED, DecodeState.CANCELLING, DecodeState.QUARANTINED])
def test_steps_of_the_peers_engine_prolong_no_other_wait(state: DecodeState) -> None:
    transfers = in_state(state)
    expected = transfers.next_deadline
    transfers.peer_works(P, now=2.0)
    assert transfers.next_deadline == expected


def test_once_final_has_come_pages_must_follow_one_another_faster() -> None:
    transfers = in_state(DecodeState.RECEIVING)
    transfers.final(P, final((0, 3)), now=3.0)
    assert transfers.next_deadline == 7.0
    transfers.landed(P, TID, start=1, stop=2, now=5.0)
    assert transfers.tick(8.9) == []
    assert transfers.tick(9.0) == [CANCEL, failure(errors.NO_PROGRESS, "out of time in receiving")]


def test_a_transfer_that_finished_in_time_but_is_noticed_late_joins() -> None:
    transfers = in_state(DecodeState.RECEIVING)
    transfers.landed(P, TID, start=1, stop=3, now=50.0)
    actions = transfers.final(P, final((0, 3)), now=50.0)
    assert [type(action) for action in actions] == [Join]
    assert transfers.tick(50.0) == []


def test_an_undrained_lease_goes_to_quarantine_and_then_costs_the_peer_its_connection() -> None:
    transfers = in_state(DecodeState.CANCELLING)
    assert transfers.tick(2.9) == []
    assert transfers.tick(3.0) == [QuarantinePages(tid=TID)]
    assert transfers.tick(11.9) == []
    close = ClosePeer(peer=P, reason=f"{TID} is not drained")
    assert transfers.tick(12.0) == [close]
    assert transfers.tick(21.0) == [close]
    assert transfers.peer_lost(P, reason="torn down") == [ReleaseQuarantine(tid=TID)]
    assert transfers.next_deadline is None


def test_no_event_but_drained_or_teardown_releases_a_cancelled_lease() -> None:
    transfers = in_state(DecodeState.RECEIVING)
    transfers.cancel(TID, now=0.0)
    transfers.landed(P, TID, start=1, stop=3, now=0.0)
    assert transfers.final(P, final((0, 3)), now=0.0) == []
    assert transfers.tick(1e6) == [QuarantinePages(tid=TID)]
    assert transfers.state(TID) is DecodeState.QUARANTINED


def test_one_stuck_peer_is_closed_once_per_tick_and_other_peers_are_left_alone() -> None:
    transfers = machine()
    transfers.peer_ready(OTHER, has_checksums=False)
    for attempt, peer in enumerate((P, P, OTHER)):
        tid = TransferId("r", attempt)
        transfers.submit(tid, peer=peer, num_prompt_tokens=1, deadline=100.0, now=0.0)
        transfers.granted(tid, page_ids=(attempt,), skip_tokens=0, now=0.0)
    for attempt in (0, 1):
        transfers.cancel(TransferId("r", attempt), now=0.0)
    transfers.tick(3.0)
    assert [type(action) for action in transfers.tick(12.0)] == [ClosePeer]
    lost = transfers.peer_lost(P, reason="torn down")
    assert lost == [ReleaseQuarantine(tid=TransferId("r", attempt)) for attempt in (0, 1)]
    assert transfers.state(TransferId("r", 2)) is DecodeState.RESERVED


# -- codes and checksums


def test_a_code_of_the_peers_own_becomes_peer_failed() -> None:
    transfers = in_state(DecodeState.QUEUED)
    failed = TransferFailed(tid=TID, code="odd", reason="why")
    assert transfers.failed(P, failed, now=0.0) == [
        failure(errors.PEER_FAILED, "odd on the prefill node: why")
    ]


def test_a_refused_peer_fails_what_waits_for_it() -> None:
    transfers = in_state(DecodeState.QUEUED)
    assert transfers.peer_lost(P, reason="page_size", code=errors.INCOMPATIBLE) == [
        failure(errors.INCOMPATIBLE, "page_size")
    ]


def test_our_own_failure_takes_the_same_way_as_a_cancel() -> None:
    transfers = in_state(DecodeState.RECEIVING)
    assert transfers.fail(TID, code=errors.OVERLOADED, reason="full", now=0.0) == [
        CANCEL,
        failure(errors.OVERLOADED, "full"),
    ]


def test_checksums_are_compared_page_by_page_in_the_order_of_the_ranges() -> None:
    transfers = machine(page_checksum=lambda _, page: {8: 80, 9: 90, 4: 40}[page], has_checksums=True)
    submit(transfers)
    grant(transfers)
    transfers.landed(P, TID, start=0, stop=3, now=0.0)
    actions = transfers.final(P, final((2, 3), (0, 2), checksums=(40, 80, 90)), now=0.0)
    assert [type(action) for action in actions] == [Join]


def test_a_corrupt_page_fails_the_transfer_retryably_and_holds_the_lease_until_drained() -> None:
    transfers = machine(page_checksum=lambda _, page: {8: 80, 9: 91, 4: 40}[page], has_checksums=True)
    submit(transfers)
    grant(transfers)
    transfers.landed(P, TID, start=0, stop=3, now=0.0)
    assert transfers.final(P, final((0, 3), checksums=(80, 90, 40)), now=0.0) == [
        CANCEL,
        Fail(tid=TID, code=errors.CHECKSUM, retryable=True, reason="page 1 differs from what was sent"),
    ]
    assert transfers.drained(P, TID, now=0.0) == [RELEASE]


def test_a_final_without_the_agreed_checksums_is_a_fault() -> None:
    transfers = machine(has_checksums=True)
    submit(transfers)
    grant(transfers)
    actions = transfers.final(P, final((0, 3)), now=0.0)
    assert actions == protocol_end("final without checksums", DecodeState.RESERVED)


# -- the memory of what is over


def test_the_memory_of_ended_transfers_is_bounded_per_peer_and_goes_with_the_peer() -> None:
    ended = EndedTransfers(max_per_peer=2, max_peers=2)
    first, second, third = (TransferId("r", attempt) for attempt in range(3))
    for tid in (first, second, third):
        ended.remember(P, tid, str(tid))
    ended.remember(OTHER, third, "another's")
    assert [ended.code(tid) for tid in (first, second, third)] == [None, "r#1", "r#2"]
    ended.remember(OTHER, first, "x")
    ended.drop(P)
    assert [ended.code(tid) for tid in (first, second, third)] == ["x", None, None]
    for name in ("a", "b"):
        ended.remember(Incarnation(name), TransferId(name, 0), name)
    assert ended.code(first) is None


def test_peers_that_never_came_back_are_forgotten_before_one_that_is_served_all_the_time() -> None:
    ended = EndedTransfers(max_per_peer=8, max_peers=2)
    ended.remember(P, TransferId("first", 0), errors.DONE)
    for number in range(5):
        ended.remember(Incarnation(f"ghost {number}"), TransferId("lost", number), errors.PEER_LOST)
        ended.remember(P, TransferId("served", number), errors.DONE)
    assert ended.code(TransferId("first", 0)) == errors.DONE
    assert ended.code(TransferId("lost", 3)) is None
    assert ended.code(TransferId("lost", 4)) == errors.PEER_LOST
