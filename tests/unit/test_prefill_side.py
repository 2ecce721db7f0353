"""The prefill node's transfers: every state against every event, and what leaves when."""

from collections.abc import Callable

import pytest

from kv_transfer import errors
from kv_transfer.actions import (
    CancelWrite,
    ClosePeer,
    Fail,
    HandoverDone,
    PrefillAction,
    Refuse,
    ReleasePages,
    Send,
    StopCompute,
    Write,
)
from kv_transfer.early import EarlyReserves
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import (
    CancelTransfer,
    Drained,
    Final,
    Handoff,
    Planned,
    Renew,
    Reserve,
    TransferFailed,
)
from kv_transfer.outgoing import MAX_WRITE_PAGES
from kv_transfer.prefill_side import PrefillTransfers
from kv_transfer.prefill_transfer import PrefillState, PrefillTimeouts
from kv_transfer.transport import Completed, Ready, WriteHandle

D, OTHER = Incarnation("d"), Incarnation("other")
TID = TransferId("r", 0)
HANDOFF = Handoff(first_token=7, num_tokens=40)
TIMEOUTS = PrefillTimeouts(reserve_s=20, write_s=4, drain_s=3)
RESERVE = Reserve(tid=TID, page_ids=(8, 9, 4), skip_tokens=0, deadline_s=6.0)
PAGES = (1, 2, 3)
RELEASE, STOP = ReleasePages(tid=TID), StopCompute(tid=TID)
DRAINED = Send(peer=D, message=Drained(tid=TID))
OVER = "it is over on the prefill node"


CHUNK, LAST = Completed(), Completed()


def no_checksum(peer: Incarnation, page_id: int) -> int:
    raise AssertionError(f"page {page_id} was summed")


def machine(
    *,
    page_checksum: Callable[[Incarnation, int], int] = no_checksum,
    has_checksums: bool = False,
    early: EarlyReserves | None = None,
) -> PrefillTransfers:
    transfers = PrefillTransfers(page_size=16, page_checksum=page_checksum, timeouts=TIMEOUTS, early=early)
    transfers.peer_ready(D, has_checksums=has_checksums)
    return transfers


def submit(transfers: PrefillTransfers, *, deadline: float = 100.0) -> list[PrefillAction]:
    return transfers.submit(TID, peer=D, num_prompt_tokens=40, deadline=deadline, now=0.0)


def reserve(transfers: PrefillTransfers, *, now: float = 0.0) -> list[PrefillAction]:
    return transfers.reserve(D, RESERVE, now=now)


def chunk(transfers: PrefillTransfers, num_tokens: int = 20, *, now: float = 0.0) -> list[PrefillAction]:
    pages = PAGES[: -(-num_tokens // 16)]
    return transfers.computed(TID, num_tokens=num_tokens, pages=pages, event=CHUNK, now=now)


def last_chunk(transfers: PrefillTransfers, *, now: float = 0.0) -> list[PrefillAction]:
    return transfers.computed(TID, num_tokens=40, pages=PAGES, event=LAST, handoff=HANDOFF, now=now)


def write(start: int, stop: int) -> Write:
    ready = Ready(
        tid=TID, start=start, local_pages=PAGES[start:stop], remote_pages=RESERVE.page_ids[start:stop]
    )
    return Write(peer=D, pages=ready)


def handle(start: int, stop: int) -> WriteHandle:
    return WriteHandle(number=start, peer=D, tid=TID, start=start, stop=stop)


def final(*ranges: tuple[int, int], checksums: tuple[int, ...] | None = None) -> Send:
    return Send(peer=D, message=Final(tid=TID, ranges=ranges, handoff=HANDOFF, checksums=checksums))


def failed(code: str, reason: str) -> Send:
    return Send(peer=D, message=TransferFailed(tid=TID, code=code, reason=reason))


def report(code: str, reason: str) -> Fail:
    return Fail(tid=TID, code=code, retryable=code in errors.RETRYABLE, reason=reason)


FIRST, REST = handle(0, 1), handle(1, 3)


def in_state(state: PrefillState, *, is_writing: bool = False) -> PrefillTransfers:
    """A machine whose TID (3 pages) has just come into this state, at time 0."""
    transfers = machine()
    submit(transfers)
    if state is PrefillState.COMPUTING and is_writing:
        reserve(transfers)
    if state in (PrefillState.FLUSHING, PrefillState.CANCELLING):
        reserve(transfers)
        chunk(transfers)
        transfers.wrote(FIRST)
    if state is PrefillState.COMPUTING and is_writing:
        chunk(transfers)
        transfers.wrote(FIRST)
    if state in (PrefillState.WAIT_RESERVE, PrefillState.FLUSHING):
        last_chunk(transfers)
    if state is PrefillState.FLUSHING:
        transfers.wrote(REST)
    if state is PrefillState.CANCELLING:
        transfers.cancel(TID, now=0.0)
    assert transfers.state(TID) is state
    return transfers


# -- the way it should go


def test_pages_leave_while_later_chunks_are_computed_and_the_partial_page_leaves_last() -> None:
    transfers = machine()
    assert submit(transfers) == []
    assert reserve(transfers) == []
    assert transfers.planned(TID, num_tokens=40, now=0.0) == [
        Send(peer=D, message=Planned(tid=TID, num_tokens=40))
    ]
    assert chunk(transfers, 15) == []
    assert chunk(transfers, 20, now=1.0) == [write(0, 1)]
    transfers.wrote(FIRST)
    assert chunk(transfers, 31) == []
    assert transfers.write_done(FIRST, now=2.0) == []
    assert last_chunk(transfers, now=3.0) == [write(1, 3), final((0, 3))]
    transfers.wrote(REST)
    assert transfers.write_done(REST, now=4.0) == [
        HandoverDone(tid=TID, num_pages=3, transfer_s=3.0),
        RELEASE,
    ]
    assert transfers.state(TID) is None
    assert transfers.next_deadline is None
    assert not transfers.faults


def test_a_late_reserve_sends_everything_computed_so_far_in_one_write() -> None:
    transfers = in_state(PrefillState.COMPUTING)
    chunk(transfers, 20)
    chunk(transfers, 36)
    assert reserve(transfers) == [write(0, 2)]
    waiting = in_state(PrefillState.WAIT_RESERVE)
    assert reserve(waiting) == [write(0, 3), final((0, 3))]
    assert waiting.state(TID) is PrefillState.FLUSHING


def test_a_long_prompt_whose_reserve_is_late_leaves_in_several_writes_and_each_moves_the_deadline() -> None:
    transfers, num_pages = machine(), 2 * MAX_WRITE_PAGES + 1
    pages = tuple(range(num_pages))
    transfers.submit(TID, peer=D, num_prompt_tokens=16 * num_pages, deadline=1000.0, now=0.0)
    handoff = Handoff(first_token=7, num_tokens=16 * num_pages)
    last = {"num_tokens": 16 * num_pages, "pages": pages, "event": LAST, "handoff": handoff}
    assert transfers.computed(TID, now=0.0, **last) == []  # type: ignore[arg-type]
    whole = Reserve(tid=TID, page_ids=pages, skip_tokens=0, deadline_s=6.0)
    *writes, end = transfers.reserve(D, whole, now=0.0)
    spans = [(one.pages.start, one.pages.stop) for one in writes if isinstance(one, Write)]
    assert spans == [(0, 256), (256, 512), (512, 513)]
    assert end == Send(peer=D, message=Final(tid=TID, ranges=((0, num_pages),), handoff=handoff))
    for start, stop in spans:
        transfers.wrote(handle(start, stop))
    for now, (start, stop) in zip((3.0, 6.0, 9.0), spans, strict=True):
        assert transfers.tick(now) == []
        actions = transfers.write_done(handle(start, stop), now=now)
    assert actions == [HandoverDone(tid=TID, num_pages=num_pages, transfer_s=9.0), RELEASE]


def test_a_write_carries_the_event_of_the_latest_chunk_it_contains() -> None:
    first, second = Completed(), Completed()
    transfers = in_state(PrefillState.COMPUTING)
    transfers.computed(TID, num_tokens=16, pages=PAGES, event=first, now=0.0)
    transfers.computed(TID, num_tokens=32, pages=PAGES, event=second, now=0.0)
    (action,) = reserve(transfers)
    assert isinstance(action, Write)
    assert action.pages.event is second


def test_pages_the_decode_node_holds_are_not_sent() -> None:
    transfers = in_state(PrefillState.COMPUTING)
    skipping = Reserve(tid=TID, page_ids=(8, 9), skip_tokens=16, deadline_s=6.0)
    assert transfers.reserve(D, skipping, now=0.0) == []
    assert chunk(transfers, 20) == []
    ready = Ready(tid=TID, start=1, local_pages=(2, 3), remote_pages=(8, 9))
    assert last_chunk(transfers) == [Write(peer=D, pages=ready), final((1, 3))]


def test_a_full_hit_of_the_decode_node_is_handed_over_without_a_write() -> None:
    transfers = machine()
    transfers.submit(TID, peer=D, num_prompt_tokens=32, deadline=100.0, now=0.0)
    transfers.reserve(D, Reserve(tid=TID, page_ids=(), skip_tokens=32, deadline_s=6.0), now=0.0)
    handoff = Handoff(first_token=7, num_tokens=32)
    done = transfers.computed(TID, num_tokens=32, pages=(1, 2), event=LAST, handoff=handoff, now=0.0)
    assert done == [
        Send(peer=D, message=Final(tid=TID, ranges=(), handoff=handoff)),
        HandoverDone(tid=TID, num_pages=0, transfer_s=0.0),
        RELEASE,
    ]


def test_with_checksums_final_waits_for_the_last_write() -> None:
    transfers = machine(page_checksum=lambda _, page_id: 10 * page_id, has_checksums=True)
    submit(transfers)
    reserve(transfers)
    assert last_chunk(transfers) == [write(0, 3)]
    transfers.wrote(FIRST)
    assert transfers.write_done(FIRST, now=0.0) == [
        final((0, 3), checksums=(10, 20, 30)),
        HandoverDone(tid=TID, num_pages=3, transfer_s=0.0),
        RELEASE,
    ]


# -- every state against every event

EVENTS: dict[str, Callable[[PrefillTransfers], list[PrefillAction]]] = {
    "planned": lambda transfers: transfers.planned(TID, num_tokens=8, now=0.0),
    "reserve": reserve,
    "computed": chunk,
    "computed last": last_chunk,
    "finished_early": lambda transfers: transfers.finished_early(TID, now=0.0),
    "write_done": lambda transfers: transfers.write_done(FIRST, now=0.0),
    "write_failed": lambda transfers: transfers.write_failed(FIRST, reason="broken", now=0.0),
    "cancel": lambda transfers: transfers.cancel(TID, now=0.0),
    "cancel_transfer": lambda transfers: transfers.cancel_transfer(D, CancelTransfer(tid=TID), now=0.0),
    "fail": lambda transfers: transfers.fail(TID, code=errors.OVERLOADED, reason="full", now=0.0),
    "peer_lost": lambda transfers: transfers.peer_lost(D, reason="gone"),
}
C, W, F, X = PrefillState
CANCELLED = (errors.CANCELLED, "cancelled by the router")
BY_PEER = (errors.PEER_CANCELLED, "cancelled by the decode node")
FULL = (errors.OVERLOADED, "full")
BROKEN = (errors.WRITE_FAILED, "broken")
EARLY = (errors.FINISHED, "ended with its first token")
LOST = report(errors.PEER_LOST, "gone")
FAULT = "fault"
CUT_FIRST, CUT_REST = CancelWrite(handle=FIRST), CancelWrite(handle=REST)
OUTCOMES: dict[tuple[PrefillState, str], tuple[list[PrefillAction] | str, PrefillState | None]] = {
    (C, "planned"): ([Send(peer=D, message=Planned(tid=TID, num_tokens=8))], C),
    (C, "reserve"): ([], C),
    (C, "computed"): ([], C),
    (C, "computed last"): ([], W),
    (C, "finished_early"): ([failed(*EARLY), DRAINED, RELEASE], None),
    (C, "write_done"): ([], C),
    (C, "write_failed"): ([], C),
    (C, "cancel"): ([report(*CANCELLED), STOP, failed(*CANCELLED), DRAINED, RELEASE], None),
    (C, "cancel_transfer"): ([report(*BY_PEER), STOP, failed(*BY_PEER), DRAINED, RELEASE], None),
    (C, "fail"): ([report(*FULL), STOP, failed(*FULL), DRAINED, RELEASE], None),
    (C, "peer_lost"): ([LOST, STOP, RELEASE], None),
    (W, "planned"): (FAULT, None),
    (W, "reserve"): ([write(0, 3), final((0, 3))], F),
    (W, "computed"): (FAULT, None),
    (W, "computed last"): (FAULT, None),
    (W, "finished_early"): (FAULT, None),
    (W, "write_done"): ([], W),
    (W, "write_failed"): ([], W),
    (W, "cancel"): ([report(*CANCELLED), failed(*CANCELLED), DRAINED, RELEASE], None),
    (W, "cancel_transfer"): ([report(*BY_PEER), failed(*BY_PEER), DRAINED, RELEASE], None),
    (W, "fail"): ([report(*FULL), failed(*FULL), DRAINED, RELEASE], None),
    (W, "peer_lost"): ([LOST, RELEASE], None),
    (F, "planned"): (FAULT, X),
    (F, "reserve"): (FAULT, X),
    (F, "computed"): (FAULT, X),
    (F, "computed last"): (FAULT, X),
    (F, "finished_early"): (FAULT, X),
    (F, "write_done"): ([], F),
    (F, "write_failed"): ([report(*BROKEN), CUT_REST, failed(*BROKEN)], X),
    (F, "cancel"): ([report(*CANCELLED), CUT_FIRST, CUT_REST, failed(*CANCELLED)], X),
    (F, "cancel_transfer"): ([report(*BY_PEER), CUT_FIRST, CUT_REST, failed(*BY_PEER)], X),
    (F, "fail"): ([report(*FULL), CUT_FIRST, CUT_REST, failed(*FULL)], X),
    (F, "peer_lost"): ([LOST], None),
    (X, "planned"): ([], X),
    (X, "reserve"): (FAULT, X),
    (X, "computed"): ([], X),
    (X, "computed last"): ([], X),
    (X, "finished_early"): ([], X),
    (X, "write_done"): ([DRAINED, RELEASE], None),
    (X, "write_failed"): ([DRAINED, RELEASE], None),
    (X, "cancel"): ([], X),
    (X, "cancel_transfer"): ([], X),
    (X, "fail"): ([], X),
    (X, "peer_lost"): ([], None),
}


def fault_actions(event: str, state: PrefillState) -> list[PrefillAction]:
    why = (errors.PROTOCOL, f"{event} in {state}")
    if state is X:
        return []
    cuts: list[PrefillAction] = [CUT_FIRST, CUT_REST] if state is F else []
    end: list[PrefillAction] = [] if state is F else [DRAINED, RELEASE]
    return [report(*why), *cuts, failed(*why), *end]


@pytest.mark.parametrize("event", EVENTS)
@pytest.mark.parametrize("state", PrefillState)
def test_every_event_in_every_state_does_what_the_table_says(state: PrefillState, event: str) -> None:
    transfers = in_state(state)
    actions = EVENTS[event](transfers)
    expected, after = OUTCOMES[state, event]
    if expected == FAULT:
        name = event.removesuffix(" last")
        expected = fault_actions(name, state)
        assert transfers.faults == {f"{name} in {state}": 1}
    else:
        assert not transfers.faults
    assert (actions, transfers.state(TID)) == (expected, after)


@pytest.mark.parametrize("event", ["cancel", "cancel_transfer", "fail", "finished_early", "write_failed"])
def test_pages_under_a_write_are_held_until_it_settles(event: str) -> None:
    transfers = in_state(PrefillState.COMPUTING, is_writing=True)
    actions = EVENTS[event](transfers)
    if event == "write_failed":
        assert actions == [report(*BROKEN), STOP, failed(*BROKEN), DRAINED, RELEASE]
        return
    assert CUT_FIRST in actions
    assert not {DRAINED, RELEASE} & set(actions)
    assert transfers.write_done(FIRST, now=0.0) == [DRAINED, RELEASE]


@pytest.mark.parametrize("event", [event for event in EVENTS if event not in ("reserve", "cancel_transfer")])
def test_nothing_is_said_about_a_transfer_that_is_over_or_unknown(event: str) -> None:
    assert EVENTS[event](machine()) == []
    ended = in_state(PrefillState.WAIT_RESERVE)
    ended.cancel(TID, now=0.0)
    assert EVENTS[event](ended) == []
    assert not ended.faults


@pytest.mark.parametrize("state", PrefillState)
def test_a_stranger_cannot_move_anothers_transfer(state: PrefillState) -> None:
    transfers = in_state(state)
    transfers.peer_ready(OTHER, has_checksums=False)
    assert transfers.reserve(OTHER, RESERVE, now=0.0) == []
    assert transfers.cancel_transfer(OTHER, CancelTransfer(tid=TID), now=0.0) == []
    assert transfers.peer_lost(OTHER, reason="gone") == []
    assert transfers.state(TID) is state
    assert transfers.faults.total() == 2


def test_a_second_reserve_is_a_fault() -> None:
    transfers = in_state(PrefillState.COMPUTING)
    reserve(transfers)
    assert report(errors.PROTOCOL, "reserve in computing") in reserve(transfers)


@pytest.mark.parametrize(
    ("page_ids", "skip_tokens", "fault"),
    [
        ((1, 2), 0, "reserve of 2 pages for 3"),
        ((1, 2, 2), 0, "reserve of 3 pages for 3"),
        ((1, 2, 3), 16, "reserve of 3 pages for 2"),
        ((1, 2, 3), 8, "reserve skips 8 tokens"),
        ((), 64, "reserve skips 64 tokens"),
        ((1, 2, 3, 4), -16, "reserve skips -16 tokens"),
    ],
)
def test_a_reserve_that_does_not_fit_the_prompt_is_a_fault(
    page_ids: tuple[int, ...], skip_tokens: int, fault: str
) -> None:
    transfers = in_state(PrefillState.COMPUTING)
    wrong = Reserve(tid=TID, page_ids=page_ids, skip_tokens=skip_tokens, deadline_s=6.0)
    why = (errors.PROTOCOL, f"{fault} in computing")
    assert transfers.reserve(D, wrong, now=0.0) == [report(*why), STOP, failed(*why), DRAINED, RELEASE]
    assert transfers.faults == {"reserve that does not fit in computing": 1}  # a label: no numbers in it


# -- ids before their submit and after their end


def test_a_reserve_before_its_submit_waits_for_it() -> None:
    transfers = machine()
    assert reserve(transfers) == []
    assert transfers.next_deadline == 6.0
    assert submit(transfers) == []
    assert chunk(transfers) == [write(0, 1)]
    assert transfers.tick(50.0) == []


def test_an_early_reserve_ends_at_its_own_deadline_unless_renewed() -> None:
    transfers = machine()
    reserve(transfers)
    assert transfers.renew(D, Renew(tids=(TID, TransferId("x", 0))), now=4.0) == []
    assert transfers.tick(9.9) == []
    assert transfers.tick(10.0) == [failed(errors.RESERVE_TIMEOUT, OVER), DRAINED]
    assert transfers.tick(11.0) == []
    (refused,) = submit(transfers)
    assert refused == Refuse(
        tid=TID, code=errors.RESERVE_TIMEOUT, retryable=True, reason="it is over already"
    )


def test_early_reserves_are_bounded_per_peer() -> None:
    transfers = machine(early=EarlyReserves(max_per_peer=1))
    transfers.reserve(D, Reserve(tid=TransferId("x", 0), page_ids=(), skip_tokens=0, deadline_s=6), now=0.0)
    assert reserve(transfers) == [failed(errors.OVERLOADED, OVER), DRAINED]


def test_a_second_early_reserve_ends_the_transfer() -> None:
    transfers = machine()
    reserve(transfers)
    assert reserve(transfers) == [failed(errors.PROTOCOL, OVER), DRAINED]
    assert transfers.faults == {"second reserve": 1}
    assert [type(action) for action in submit(transfers)] == [Refuse]


def test_an_early_reserve_of_another_peer_does_not_serve_a_submit() -> None:
    transfers = machine()
    transfers.peer_ready(OTHER, has_checksums=False)
    transfers.reserve(OTHER, RESERVE, now=0.0)
    submit(transfers)
    assert chunk(transfers) == []


def test_an_early_reserve_goes_with_its_peer() -> None:
    transfers = machine()
    reserve(transfers)
    assert transfers.peer_lost(D, reason="gone") == []
    assert transfers.next_deadline is None


@pytest.mark.parametrize("has_reserve", [False, True])
def test_a_cancel_before_the_submit_is_drained_at_once_and_remembered(has_reserve: bool) -> None:
    transfers = machine()
    if has_reserve:
        reserve(transfers)
    assert transfers.cancel_transfer(D, CancelTransfer(tid=TID), now=0.0) == [DRAINED]
    (refused,) = submit(transfers)
    assert refused == Refuse(tid=TID, code=errors.PEER_CANCELLED, retryable=True, reason="it is over already")
    assert transfers.next_deadline is None


def test_a_reserve_for_a_transfer_given_up_is_told_why_and_drained() -> None:
    transfers = in_state(PrefillState.COMPUTING)
    transfers.finished_early(TID, now=0.0)
    assert reserve(transfers) == [failed(errors.FINISHED, OVER), DRAINED]
    assert transfers.cancel_transfer(D, CancelTransfer(tid=TID), now=0.0) == [DRAINED]


def test_after_the_handover_a_cancel_is_drained_and_a_reserve_is_a_fault() -> None:
    transfers = in_state(PrefillState.FLUSHING)
    transfers.write_done(FIRST, now=0.0)
    transfers.write_done(REST, now=0.0)
    assert transfers.cancel_transfer(D, CancelTransfer(tid=TID), now=0.0) == [DRAINED]
    assert reserve(transfers) == []
    assert transfers.faults == {"reserve after the end": 1}


def test_to_a_peer_that_is_not_connected_nothing_is_said_until_it_asks() -> None:
    transfers = PrefillTransfers(page_size=16, page_checksum=no_checksum, timeouts=TIMEOUTS)
    submit(transfers)
    assert transfers.cancel(TID, now=0.0) == [report(*CANCELLED), STOP, RELEASE]
    transfers.peer_ready(D, has_checksums=False)
    assert reserve(transfers) == [failed(errors.CANCELLED, OVER), DRAINED]


@pytest.mark.parametrize("state", PrefillState)
def test_a_second_submit_is_refused_and_changes_nothing(state: PrefillState) -> None:
    transfers = in_state(state)
    refuse = Refuse(tid=TID, code=errors.DUPLICATE, retryable=False, reason=f"{TID} was submitted before")
    assert submit(transfers) == [refuse]
    assert transfers.state(TID) is state


def test_a_submit_of_a_transfer_handed_over_is_refused_as_a_duplicate() -> None:
    transfers = in_state(PrefillState.FLUSHING)
    transfers.write_done(FIRST, now=0.0)
    transfers.write_done(REST, now=0.0)
    (refused,) = submit(transfers)
    assert isinstance(refused, Refuse)
    assert refused.code == errors.DUPLICATE


# -- writes and deadlines


def test_a_write_whose_transfer_is_gone_is_cancelled_and_its_settling_ignored() -> None:
    transfers = in_state(PrefillState.COMPUTING)
    reserve(transfers)
    chunk(transfers)
    transfers.peer_lost(D, reason="gone")
    assert transfers.wrote(FIRST) == [CUT_FIRST]
    assert transfers.write_failed(FIRST, reason="closed", now=0.0) == []


@pytest.mark.parametrize(
    ("state", "deadline", "why"),
    [
        (PrefillState.COMPUTING, 100.0, (errors.DEADLINE, "out of time in computing")),
        (PrefillState.WAIT_RESERVE, 20.0, (errors.RESERVE_TIMEOUT, "out of time in wait_reserve")),
        (PrefillState.FLUSHING, 4.0, (errors.WRITE_TIMEOUT, "out of time in flushing")),
    ],
)
def test_every_wait_ends_at_its_deadline(state: PrefillState, deadline: float, why: tuple[str, str]) -> None:
    transfers = in_state(state)
    assert transfers.next_deadline == deadline
    assert transfers.tick(deadline - 0.1) == []
    actions = transfers.tick(deadline)
    assert actions[0] == report(*why)
    assert failed(*why) in actions
    assert (RELEASE in actions) is (state is not PrefillState.FLUSHING)


def test_a_settled_write_moves_the_write_deadline() -> None:
    transfers = in_state(PrefillState.FLUSHING)
    transfers.write_done(FIRST, now=3.0)
    assert transfers.next_deadline == 7.0


def test_writes_done_in_time_but_noticed_late_hand_over() -> None:
    transfers = in_state(PrefillState.FLUSHING)
    transfers.write_done(FIRST, now=50.0)
    done = transfers.write_done(REST, now=50.0)
    assert done == [HandoverDone(tid=TID, num_pages=3, transfer_s=50.0), RELEASE]
    assert transfers.tick(50.0) == []


def test_a_write_that_does_not_settle_costs_the_peer_its_connection_and_keeps_the_pages_until_then() -> None:
    transfers = in_state(PrefillState.CANCELLING)
    close = ClosePeer(peer=D, reason=f"a write of {TID} does not settle")
    assert transfers.tick(2.9) == []
    assert transfers.tick(3.0) == [close]
    assert transfers.tick(6.0) == [close]
    assert transfers.peer_lost(D, reason="torn down") == []
    assert transfers.next_deadline is None
    assert transfers.is_writing
    assert transfers.write_failed(FIRST, reason="peer closed", now=7.0) == [RELEASE]
    assert not transfers.is_writing


def test_pages_of_a_lost_peers_writes_are_released_when_the_last_of_them_settles() -> None:
    transfers = in_state(PrefillState.FLUSHING)
    assert transfers.peer_lost(D, reason="gone") == [LOST]
    transfers.peer_ready(D, has_checksums=False)
    assert [type(action) for action in submit(transfers)] == [Refuse]
    assert transfers.tick(1000.0) == []
    assert transfers.write_failed(REST, reason="closed", now=1000.0) == []
    assert transfers.write_failed(REST, reason="closed", now=1000.0) == []
    assert transfers.write_done(FIRST, now=1001.0) == [RELEASE]
    assert not transfers.is_writing
