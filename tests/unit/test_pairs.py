"""Readiness: canaries through every pair, refusals, the breaker, and what /ready shows."""

import asyncio

import pytest

from kv_transfer import errors
from router.dispatch import DispatchConfig
from router.pairs import PairConfig
from tests.fakes_nodes import a_request, cluster, reading, settle, virtual
from wire.work import Event, Failed, Finished, NodeRef, Rejected, Submit, Tokens, TransferId

REFUSAL = "refused at handshake: page_size: '16' here, '32' there"


def _refuse(submit: Submit) -> tuple[Event, ...]:
    return (Failed(tid=submit.tid, code="pair_refused", retryable=False, reason=REFUSAL),)


def _say_nothing(_submit: Submit) -> tuple[Event, ...]:
    return ()


def _hand_over(submit: Submit) -> tuple[Event, ...]:
    return Tokens(tid=submit.tid, first_index=0, ids=(7,)), Finished(tid=submit.tid, reason="handed_over")


def _go_on(submit: Submit) -> tuple[Event, ...]:
    return Tokens(tid=submit.tid, first_index=1, ids=(8,)), Finished(tid=submit.tid, reason="length")


def _go_on_seedless(submit: Submit) -> tuple[Event, ...]:
    end = Finished(tid=submit.tid, reason="length", seedless="draft: 'a' here, '' there")
    return Tokens(tid=submit.tid, first_index=1, ids=(8,)), end


def _refuse_d2(submit: Submit) -> tuple[Event, ...]:
    assert submit.peer is not None
    return _refuse(submit) if submit.peer.address == "d2" else _hand_over(submit)


def _fail(submit: Submit) -> tuple[Event, ...]:
    return (Failed(tid=submit.tid, code="write_failed", retryable=True, reason="no route"),)


@virtual
async def test_a_pair_is_ready_after_a_real_generation_has_passed_through_it() -> None:
    async with cluster() as made:
        [to_prefill], [to_decode] = made["p1"].canaries, made["d1"].canaries
        assert to_prefill.tid == to_decode.tid == TransferId("canary-c1", 1)
        assert to_prefill.prompt_ids == (1, 2, 3, 4)
        assert (to_prefill.sampling.max_tokens, to_prefill.sampling.temperature) == (2, 0.0)
        assert to_prefill.cache_salt == "canary-c1"
        assert to_prefill.peer == NodeRef(address="d1", incarnation=made["d1"].record.incarnation)
        assert to_decode.peer == NodeRef(address="p1", incarnation=made["p1"].record.incarnation)
        assert made.pairs.is_ready
        assert made.pairs.report() == {
            "ready": True,
            "pairs": [{"prefill": "p1", "decode": "d1", "state": "ready", "reason": ""}],
            "nodes": [_node("decode", "d1"), _node("prefill", "p1")],
        }
        assert made.counted("ready_pairs") == 1.0


def _node(role: str, name: str) -> dict[str, object]:
    load = {"free_pages": 1000, "total_pages": 1000, "running": 0, "waiting": 0, "queued_tokens": 0}
    return {
        "role": role,
        "address": name,
        "incarnation": f"{name}-inc",
        "model": "m",
        "link": "open",
        "draining": False,
        "load": load,
    }


@virtual
async def test_nothing_is_ready_while_the_canary_is_on_its_way() -> None:
    async with cluster("p1") as made:
        d = made.registry.add("d1")
        d.on_canary = _say_nothing
        await settle()
        assert made.states() == {("p1", "d1"): "probing"}
        assert not made.pairs.is_ready
        canary = d.canaries[0].tid
        d.emit(Tokens(tid=canary, first_index=1, ids=(8,)), Finished(tid=canary, reason="length"))
        await settle()
        assert made.states() == {("p1", "d1"): "ready"}


@virtual
async def test_a_pair_without_a_seed_is_ready_and_says_so() -> None:
    async with cluster("p1") as made:
        d1 = made.registry.add("d1")
        d1.on_canary = _go_on_seedless
        await settle()
        assert made.states() == {("p1", "d1"): "ready"}
        assert made.pairs.report()["pairs"][0]["reason"] == "seedless, draft: 'a' here, '' there"
        assert len(d1.canaries) == 1


@virtual
async def test_a_refused_pair_is_shown_with_its_reason_and_never_used() -> None:
    async with cluster("p1 d1") as made:
        made["p1"].on_canary = _refuse_d2
        d2 = made.registry.add("d2")
        await settle()
        assert made.states() == {("p1", "d1"): "ready", ("p1", "d2"): "refused"}
        assert made.pairs.report()["pairs"][1]["reason"] == f"p1: {REFUSAL}"
        await asyncio.sleep(600.0)
        assert len(d2.canaries) == 1
        for _ in range(3):
            async with reading(made, a_request()):
                pass
        assert (len(made["d1"].submits), len(d2.submits)) == (3, 0)


@virtual
async def test_a_refused_pair_is_tried_again_only_as_another_incarnation() -> None:
    async with cluster("p1 d1") as made:
        made["p1"].on_canary = _refuse_d2
        d2 = made.registry.add("d2")
        await settle()
        d2.break_off()
        await asyncio.sleep(60.0)
        assert made.states()["p1", "d2"] == "refused"
        made["p1"].on_canary = _hand_over
        made.registry.remove("d2")
        again = made.registry.add("d2", incarnation="d2-again")
        await settle()
        assert made.states()["p1", "d2"] == "ready"
        assert len(again.canaries) == 1


@virtual
async def test_a_refusal_of_a_users_request_retires_the_pair_too() -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request()) as reader:
        made["p1"].emit(
            Rejected(tid=TransferId("r1", 1), code="incompatible", retryable=False, reason=REFUSAL)
        )
        await settle()
        assert made.states() == {("p1", "d1"): "refused", ("p1", "d2"): "ready"}
        assert len(made["d2"].submits) == 1
        assert reader.error is None


@virtual
async def test_a_failed_canary_is_repeated_with_growing_pauses_and_its_reason_shown() -> None:
    async with cluster("p1") as made:
        d = made.registry.add("d1")
        d.on_canary = _fail
        await settle()
        assert made.pairs.report()["pairs"][0] == {
            "prefill": "p1",
            "decode": "d1",
            "state": "failed",
            "reason": "no route",
        }
        for wait_s, canaries in ((0.4, 1), (0.2, 2), (0.8, 2), (0.2, 3)):
            await asyncio.sleep(wait_s)
            assert len(d.canaries) == canaries
        d.on_canary = _go_on
        await asyncio.sleep(3.0)
        assert made.states() == {("p1", "d1"): "ready"}
        assert made.counted("canaries_total{outcome=failed}") == 3.0


@virtual
async def test_a_canary_without_an_answer_times_out() -> None:
    async with cluster("p1", pairs=PairConfig(canary_timeout_s=2.0)) as made:
        made.registry.add("d1").on_canary = _say_nothing
        await asyncio.sleep(2.1)
        assert made.pairs.report()["pairs"][0]["reason"] == "no answer to the canary in 2 s"


@virtual
async def test_repeated_node_faults_send_a_pair_back_to_its_canary() -> None:
    config = PairConfig(breaker_faults=2)
    async with cluster(pairs=config, dispatch=DispatchConfig(max_attempts=2)) as made:
        made["d1"].on_canary = _say_nothing
        async with reading(made, a_request()):
            made["d1"].emit(_fault(1))
            await settle()
            assert made.states() == {("p1", "d1"): "ready"}
            await asyncio.sleep(1.0)
            made["d1"].emit(_fault(2))
            await settle()
            assert made.states() == {("p1", "d1"): "probing"}
            assert made.pairs.report()["pairs"][0]["reason"] == "2 faults in a row, last: page 3"
            assert not made.pairs.is_ready
            assert len(made["d1"].canaries) == 2


@virtual
async def test_one_incident_that_breaks_many_requests_counts_once() -> None:
    config = PairConfig(breaker_faults=2)
    async with cluster(pairs=config, dispatch=DispatchConfig(max_attempts=2)) as made:
        async with reading(made, a_request()), reading(made, a_request()), reading(made, a_request()):
            for number in (1, 2, 3):
                made["d1"].emit(_fault(1, request=f"r{number}"))
            await settle()
            assert made.states() == {("p1", "d1"): "ready"}


@virtual
async def test_refused_requests_full_nodes_and_cancels_do_not_count_as_faults() -> None:
    config = PairConfig(breaker_faults=1)
    async with cluster(pairs=config, dispatch=DispatchConfig(max_attempts=2)) as made:
        for code, retryable in (("bad_value", False), ("overloaded", True), ("queue_timeout", True)):
            async with reading(made, a_request()):
                for node in (made["p1"], made["d1"]):
                    tid = node.submits[-1].tid
                    node.emit(Rejected(tid=tid, code=code, retryable=retryable, reason=""))
                await settle()
        assert made.states() == {("p1", "d1"): "ready"}


WANTED_OR_LOAD = ("cancelled", "duplicate", "peer_cancelled", "queue_timeout", "overloaded", "deadline")
OF_THE_REQUEST = ("bad_logits", "no_token")


@pytest.mark.parametrize("code", sorted(errors.CODES))
@virtual
async def test_only_what_speaks_against_the_nodes_trips_the_breaker_and_its_canary_closes_it(
    code: str,
) -> None:
    config = PairConfig(breaker_faults=1)
    async with cluster(pairs=config, dispatch=DispatchConfig(max_attempts=1)) as made:
        async with reading(made, a_request()):
            is_retryable = code in errors.RETRYABLE
            made["d1"].emit(Failed(tid=TransferId("r1", 1), code=code, retryable=is_retryable, reason=""))
            await settle()
        num_canaries = len(made["d1"].canaries)
        if code == "incompatible":
            assert made.states() == {("p1", "d1"): "refused"}
        elif code in (*WANTED_OR_LOAD, *OF_THE_REQUEST):
            assert num_canaries == 1
        else:
            assert num_canaries == 2  # it proved itself again, without a restart
            assert made.states() == {("p1", "d1"): "ready"}


@virtual
async def test_a_pair_whose_canary_fails_after_its_faults_comes_back_when_one_passes() -> None:
    async with cluster(pairs=PairConfig(breaker_faults=1)) as made:
        node, passes = made["d1"], made["d1"].on_canary
        node.on_canary = lambda submit: (
            Failed(tid=submit.tid, code="checksum", retryable=True, reason="page 3"),
        )
        async with reading(made, a_request()):
            node.emit(_fault(1))
            await asyncio.sleep(3.0)
            assert made.states() == {("p1", "d1"): "failed"}
            node.on_canary = passes
            await asyncio.sleep(10.0)
            assert made.states() == {("p1", "d1"): "ready"}
            assert node.submits[-1].tid == TransferId("r1", 2)  # who waited goes on


@virtual
async def test_a_success_in_between_forgives_earlier_faults() -> None:
    async with cluster(pairs=PairConfig(breaker_faults=2)) as made:
        for number in range(1, 4):
            async with reading(made, a_request(max_tokens=1)):
                made["d1"].emit(_fault(1, request=f"r{number}"))
                await asyncio.sleep(1.0)
                tid = made["p1"].submits[-1].tid
                assert tid == TransferId(f"r{number}", 2)
                made["p1"].emit(Tokens(tid=tid, first_index=0, ids=(10,)), Finished(tid=tid, reason="length"))
                await settle()
        assert made.states() == {("p1", "d1"): "ready"}


def _fault(attempt: int, *, request: str = "r1") -> Failed:
    return Failed(tid=TransferId(request, attempt), code="checksum", retryable=True, reason="page 3")


@virtual
async def test_a_draining_node_gets_nothing_new_and_keeps_what_it_has() -> None:
    async with cluster("p1 d1 d2") as made, reading(made, a_request(max_tokens=1)) as reader:
        assert len(made["d1"].submits) == 1
        made.registry.update("d1", is_draining=True)
        await settle()
        assert made.states() == {("p1", "d1"): "draining", ("p1", "d2"): "ready"}
        for _ in range(2):
            async with reading(made, a_request()):
                pass
        assert (len(made["d1"].submits), len(made["d2"].submits)) == (1, 2)
        made["p1"].tokens(0, 10)
        made["p1"].finish("length")
        await settle()
        assert reader.outcome.decode_node == "d1"


@virtual
async def test_a_pair_whose_link_broke_proves_itself_again() -> None:
    async with cluster() as made:
        made["d1"].die()
        await settle()
        [pair] = made.pairs.report()["pairs"]
        assert (pair["state"], pair["reason"]) == ("waiting", "d1: stream reset")
        assert not made.pairs.is_ready
        made["d1"].is_up = True
        await asyncio.sleep(10.0)
        assert made.states() == {("p1", "d1"): "ready"}
        assert len(made["d1"].canaries) == 2


@virtual
async def test_nodes_of_different_models_are_a_pair_that_is_refused_like_any_other() -> None:
    async with cluster("p1 d1") as made:
        made["p1"].on_canary = _refuse_d2
        made.registry.add("d2", model="other")
        await settle()
        assert made.states() == {("p1", "d1"): "ready", ("p1", "d2"): "refused"}


@virtual
async def test_ready_needs_the_configured_number_of_nodes() -> None:
    async with cluster("p1 d1", pairs=PairConfig(min_decode=2)) as made:
        assert not made.pairs.is_ready
        made.registry.add("d2")
        await settle()
        assert made.pairs.is_ready


@virtual
async def test_a_hello_of_another_incarnation_opens_no_link() -> None:
    async with cluster("p1") as made:
        d = made.registry.add("d1", incarnation="old")
        d.hello = type(d.hello)(incarnation=made["p1"].record.incarnation, role="decode")
        await settle()
        [pair] = made.pairs.report()["pairs"]
        assert pair["state"] == "waiting"
        assert pair["reason"].startswith("d1: expected a hello of ('decode', 'old'), got WorkHello(")
