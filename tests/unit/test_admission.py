"""Who starts next, who is sent away, and what is told to them: the queue before the nodes."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from router.admission import Admission, Claim, QueueConfig
from router.dispatch import DispatchConfig
from router.errors import (
    ContextTooLong,
    DeadlineExceeded,
    NoDecodePages,
    NoReadyPair,
    QueueFull,
    QueueTimeout,
    RouterDraining,
)
from router.stats import RouterStats
from router.tenants import tenant_of, weights_of
from router.waiting import Waiting
from tests.fakes_nodes import Cluster, Reader, a_request, cluster, reading, settle, virtual
from wire.records import Load
from wire.work import Finished, Tokens


class Line:
    """A queue and the tasks that stand in it; `started` names them in the order in which they started."""

    def __init__(self, group: asyncio.TaskGroup, config: QueueConfig) -> None:
        self.stats = RouterStats()
        self.admission = Admission(config, stats=self.stats)
        self.started: list[str] = []
        self.errors: dict[str, Exception] = {}
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._claims: dict[str, Claim] = {}
        self._group = group

    async def arrive(self, *names: str, **fields: Any) -> None:
        """Requests named by tenant and number, such as "a1"."""
        for name in names:
            values: dict[str, Any] = {
                "tenant": name[0],
                "priority": 0,
                "cost": 10,
                "num_bytes": 4,
                "deadline": 1000.0,
                "has_room": lambda: True,
            }
            self._claims[name] = Claim(**values | fields)
            self.tasks[name] = self._group.create_task(self._stand(name))
            await settle()

    async def leave(self, *names: str, used: int = 10) -> None:
        for name in names:
            self.admission.leave(self._claims[name], used=used)
            await settle()

    async def serve_all(self) -> list[str]:
        """Let what runs go, one after the other, until nothing waits; the order in which the rest started."""
        num_before = len(self.started)
        running = [name for name in self.started if name not in self.errors][-1:]
        while self.admission.num_waiting:
            await self.leave(running.pop())
            running = self.started[-1:]
        return self.started[num_before:]

    async def _stand(self, name: str) -> None:
        try:
            await self.admission.enter(self._claims[name])
        except (QueueFull, QueueTimeout, NoDecodePages, DeadlineExceeded) as error:
            self.errors[name] = error
        else:
            self.started.append(name)


@asynccontextmanager
async def a_line(**config: Any) -> AsyncIterator[Line]:
    async with asyncio.TaskGroup() as group:
        line = Line(group, QueueConfig(**{"max_in_flight": 1} | config))
        yield line
        for task in line.tasks.values():
            task.cancel()
        await settle()
        assert line.admission.num_waiting == 0


@virtual
async def test_one_tenant_is_served_in_order_of_arrival() -> None:
    async with a_line() as line:
        await line.arrive("a1", "a2", "a3")
        assert line.started == ["a1"]
        assert await line.serve_all() == ["a2", "a3"]


@virtual
async def test_a_lower_priority_number_goes_first_whoever_asks() -> None:
    async with a_line() as line:
        await line.arrive("a0")
        await line.arrive("a1", "b1", priority=5)
        await line.arrive("b2", priority=-1)
        await line.arrive("a2", priority=0)
        assert await line.serve_all() == [
            "b2",
            "a2",
            "b1",
            "a1",
        ]  # of the last two, a was served twice already


@virtual
async def test_a_tenant_that_floods_the_queue_delays_the_others_by_one_turn_only() -> None:
    async with a_line() as line:
        await line.arrive("a1", "a2", "a3", "a4", "a5", "b1", "c1", "b2")
        assert await line.serve_all() == ["b1", "c1", "a2", "b2", "a3", "a4", "a5"]


@virtual
async def test_shares_follow_the_weights() -> None:
    async with a_line(weights={"b": 3.0}) as line:
        await line.arrive("z0")
        await line.arrive(*(f"a{i}" for i in range(1, 5)), cost=30)
        await line.arrive(*(f"b{i}" for i in range(1, 10)), cost=30)
        order = await line.serve_all()
    # Until the heavier one has nothing left, three of its requests start for one of the other's.
    assert [sum(name[0] == "b" for name in order[start : start + 4]) for start in (0, 4, 8)] == [3, 3, 3]


@virtual
async def test_a_tenant_is_charged_what_it_used_not_what_it_might_have() -> None:
    async with a_line() as line:
        await line.arrive("z0")
        await line.arrive("a1", "a2", cost=1000)
        await line.arrive("b1", "b2", cost=50)
        await line.leave("z0")
        assert line.started[-1] == "a1"
        await line.leave("a1", used=5)  # it might have come to 1000
        assert line.started[-1] == "b1"
        await line.leave("b1", used=50)
        assert line.started[-1] == "a2"


@virtual
async def test_who_was_away_has_saved_nothing_up() -> None:
    async with a_line() as line:
        await line.arrive("a1", "a2", "a3", "a4")
        await line.leave("a1")
        await line.leave("a2")  # a has been served while b was away
        await line.arrive("b1", "b2", "b3")
        assert await line.serve_all() == ["b1", "a4", "b2", "b3"]


@virtual
async def test_more_than_may_wait_are_sent_away_with_a_time_to_come_back() -> None:
    async with a_line(max_queue=2, retry_after_s=3.0) as line:
        await line.arrive("a1", "a2", "a3", "a4")
        error = line.errors["a4"]
        assert isinstance(error, QueueFull)
        assert (error.http_status, error.code, error.retry_after_s) == (429, "queue_full", 3.0)
        assert "1 requests are in flight and 2 wait" in str(error)
        assert line.admission.num_waiting == 2


@virtual
async def test_prompts_that_wait_are_bounded_in_bytes() -> None:
    async with a_line(max_queue_bytes=100) as line:
        await line.arrive("a1", num_bytes=1000)  # it need not wait
        await line.arrive("a2", num_bytes=60)
        await line.arrive("b1", num_bytes=101)
        await line.arrive("a3", num_bytes=60)
        await line.arrive("a4", num_bytes=40)
        assert sorted(line.errors) == ["a3", "b1"]
        assert line.stats.snapshot()["paceline_router_queue_bytes"] == 100.0
        assert line.stats.snapshot()["paceline_router_queue_requests"] == 2.0


@virtual
async def test_a_full_queue_gives_the_place_of_the_least_important_to_a_more_important_one() -> None:
    async with a_line(max_queue=2) as line:
        await line.arrive("a1")
        await line.arrive("a2", priority=3)
        await line.arrive("a3", priority=3)
        await line.arrive("a4", priority=1)
        assert list(line.errors) == ["a3"]
        await line.arrive("a5", priority=4)
        assert list(line.errors) == ["a3", "a5"]
        assert await line.serve_all() == ["a4", "a2"]


@virtual
async def test_a_full_queue_takes_the_place_of_the_tenant_that_has_most_of_it() -> None:
    async with a_line(max_queue=3) as line:
        await line.arrive("a1", "a2", "a3", "a4", "b1")
        assert list(line.errors) == ["a4"]
        await line.arrive("b2")  # a and b wait twice each: the newcomer's tenant gains nothing more
        assert len(line.errors) == 2


@virtual
async def test_nobody_waits_longer_than_allowed() -> None:
    async with a_line(max_queue_s=5.0) as line:
        await line.arrive("a1", "a2")
        await line.arrive("a3", deadline=2.0)
        await asyncio.sleep(2.5)
        assert isinstance(line.errors["a3"], DeadlineExceeded)
        await asyncio.sleep(3.0)
        error = line.errors["a2"]
        assert isinstance(error, QueueTimeout)
        assert (error.http_status, error.code, error.retry_after_s) == (429, "queue_timeout", 1.0)
        assert line.admission.num_waiting == 0


@virtual
async def test_the_time_to_come_back_grows_with_the_queue() -> None:
    async with a_line(max_queue=8, max_queue_s=100.0) as line:
        await line.arrive(*(f"a{i}" for i in range(9)))
        for index in range(4):
            await asyncio.sleep(2.0)
            await line.leave(f"a{index}")
        await line.arrive(*(f"b{i}" for i in range(5)))
        refused = [error for error in line.errors.values() if isinstance(error, QueueFull)]
        assert [error.retry_after_s for error in refused] == [pytest.approx(16.0)]  # 8 before it, 2 s each


@virtual
async def test_one_that_finds_no_room_holds_back_those_behind_it() -> None:
    room: set[str] = set()
    async with a_line(max_in_flight=8) as line:
        await line.arrive("a1", has_room=lambda: "large" in room)
        await line.arrive("a2")
        assert line.started == []
        room.add("large")
        line.admission.wake()
        await settle()
        assert line.started == ["a1", "a2"]


@virtual
async def test_those_behind_one_that_gave_up_go_on() -> None:
    async with a_line(max_in_flight=8, max_queue_s=5.0) as line:
        await line.arrive("a1", has_room=lambda: False)
        await line.arrive("b1", has_room=lambda: False)
        await asyncio.sleep(1.0)
        await line.arrive("a2", "b2")
        assert line.started == []
        line.tasks["a1"].cancel()
        await settle()
        assert line.started == ["a2"]
        await asyncio.sleep(4.5)
        error = line.errors["b1"]
        assert isinstance(error, NoDecodePages)
        assert (error.http_status, error.code) == (429, "no_decode_pages")
        assert line.started == ["a2", "b2"]


@virtual
async def test_one_that_leaves_as_its_turn_comes_gives_its_slot_on() -> None:
    async with a_line() as line:
        await line.arrive("a1", "a2", "a3")
        line.admission.leave(line._claims["a1"], used=0)
        line.tasks["a2"].cancel()  # its turn has come, but it has not run since
        await settle()
        assert line.started == ["a1", "a3"]
        assert line.admission.num_running == 1


# the same in front of nodes

ONE_AT_A_TIME = DispatchConfig(queue=QueueConfig(max_in_flight=1))


async def finish(made: Cluster, number: int) -> None:
    """P does all of request number `number`, counted by arrival, which has one token."""
    tid = made["p1"].submits[number].tid
    made["p1"].emit(Tokens(tid=tid, first_index=0, ids=(1,)), Finished(tid=tid, reason="length"))
    await settle()


@virtual
async def test_requests_over_the_bound_wait_and_their_wait_is_in_the_timings() -> None:
    async with cluster(dispatch=ONE_AT_A_TIME) as made:
        async with reading(made, a_request(1)), reading(made, a_request(2, max_tokens=1)) as second:
            assert [submit.prompt_ids for submit in made["p1"].submits] == [(1,)]
            assert (made.dispatcher.num_in_flight, made.dispatcher.num_queued) == (1, 1)
            await asyncio.sleep(2.0)
            made["d1"].finish("length")
            made["p1"].tokens(0, 10)
            await settle()
            assert [submit.prompt_ids for submit in made["p1"].submits] == [(1,), (2,)]
            assert made["p1"].submits[1].deadline_s == 598.0
            await finish(made, 1)
            assert second.outcome.timings.queue_s == 2.0
        assert made.counted("queue_seconds_count") == 1.0


@virtual
async def test_the_queue_puts_the_more_urgent_request_first_and_tells_the_nodes() -> None:
    async with (
        cluster(dispatch=ONE_AT_A_TIME) as made,
        reading(made, a_request(1, max_tokens=1)),
        reading(made, a_request(2, priority=1)),
        reading(made, a_request(3, priority=-1)),
    ):
        await finish(made, 0)
        assert [(one.prompt_ids, one.priority) for one in made["p1"].submits] == [((1,), 0), ((3,), -1)]


@virtual
async def test_leaving_the_queue_leaves_nothing_behind() -> None:
    async with cluster(dispatch=ONE_AT_A_TIME) as made:
        async with reading(made, a_request(1)):
            async with reading(made, a_request(2)):
                assert made.dispatcher.num_queued == 1
            await settle()
            assert made.dispatcher.num_queued == 0
        await settle()
        assert made.dispatcher.num_in_flight == 0
        assert len(made["p1"].submits) == 1


@virtual
async def test_a_draining_router_serves_those_who_wait_before_it_is_drained() -> None:
    async with (
        cluster(dispatch=ONE_AT_A_TIME) as made,
        reading(made, a_request(1, max_tokens=1)) as first,
        reading(made, a_request(2, max_tokens=1)) as second,
    ):
        drained = asyncio.ensure_future(made.dispatcher.drain())
        await settle()
        assert isinstance(await _refusal(made, a_request(3)), RouterDraining)
        await finish(made, 0)
        was_drained = drained.done()
        await finish(made, 1)
        assert (first.outcome.reason, second.outcome.reason) == ("length", "length")
        assert (was_drained, drained.done()) == (False, True)


@virtual
async def test_a_request_that_no_node_could_ever_hold_is_refused_for_good() -> None:
    loads = {"d1": Load(free_pages=10, total_pages=10), "d2": Load(free_pages=20, total_pages=20)}
    async with cluster("p1 d1 d2", loads=loads) as made:
        error = await _refusal(made, a_request(1, max_tokens=320))
        assert isinstance(error, ContextTooLong)
        assert (error.http_status, error.param, error.retry_after_s) == (400, "max_tokens", None)
        assert "at least 21 pages" in str(error)
        async with reading(made, a_request(1, max_tokens=319)):
            assert [len(made[name].submits) for name in ("p1", "d1", "d2")] == [1, 0, 1]
        assert made.counted("requests_total{outcome=context_length_exceeded}") == 1.0


@virtual
async def test_a_request_waits_until_a_decode_node_could_hold_it() -> None:
    loads = {"d1": Load(free_pages=3, total_pages=100, running=4)}
    async with cluster(loads=loads) as made, reading(made, a_request(1, max_tokens=63)):
        assert made["d1"].submits == []
        assert made.dispatcher.num_queued == 1
        made.registry.update("d1", load=Load(free_pages=4, total_pages=100, running=3))
        await settle()
        assert len(made["d1"].submits) == 1
        async with reading(made, a_request(2, max_tokens=1)):
            assert len(made["d1"].submits) == 1  # the pages are promised to the first


@virtual
async def test_a_request_without_room_is_refused_at_once_where_nobody_may_wait() -> None:
    loads = {"d1": Load(free_pages=3, total_pages=100, running=4)}
    no_queue = DispatchConfig(queue=QueueConfig(max_queue=0))
    async with cluster(dispatch=no_queue, loads=loads) as made:
        error = await _refusal(made, a_request(1, max_tokens=63))
        assert isinstance(error, NoDecodePages)
        assert (error.http_status, error.code, error.retry_after_s) == (429, "no_decode_pages", 1.0)
        async with reading(made, a_request(1, max_tokens=47)) as reader:
            assert reader.error is None


@virtual
async def test_an_answer_is_not_counted_on_to_fill_its_cap() -> None:
    loads = {"d1": Load(free_pages=33, total_pages=1000, running=4)}
    async with cluster(loads=loads) as made, reading(made, a_request(1, max_tokens=4000)):
        assert len(made["d1"].submits) == 1


@virtual
async def test_a_node_with_nothing_to_do_is_asked_whatever_it_said() -> None:
    loads = {"d1": Load(free_pages=0, total_pages=100)}
    async with cluster(loads=loads) as made, reading(made, a_request(1)):
        assert len(made["d1"].submits) == 1


@virtual
async def test_pages_of_a_request_that_ended_are_counted_before_the_node_tells() -> None:
    async with (
        cluster(loads={"d1": Load(free_pages=40, total_pages=100, running=1)}) as made,
        reading(made, a_request(1, max_tokens=512)),
    ):
        made.registry.update("d1", load=Load(free_pages=7, total_pages=100, running=2))
        await settle()
        async with reading(made, a_request(2, max_tokens=512)):
            assert len(made["d1"].submits) == 1
            made["p1"].tokens(0, 10)
            made["d1"].tokens(1, *range(11, 522))
            made["d1"].finish("length")
            await settle()
            assert len(made["d1"].submits) == 2


@virtual
async def test_those_who_wait_outlast_a_pair_that_restarts_but_nobody_new_joins_them() -> None:
    async with (
        cluster(dispatch=ONE_AT_A_TIME) as made,
        reading(made, a_request(1)) as first,
        reading(made, a_request(2)) as second,
    ):
        made["d1"].break_off()
        await settle()
        assert isinstance(await _refusal(made, a_request(3)), NoReadyPair)
        assert (first.error, second.error) == (None, None)
        await asyncio.sleep(1.0)  # the link is back and has proved itself
        assert [one.tid.attempt for one in made["d1"].submits if one.tid.request_id == "r1"] == [1, 2]
        assert made.dispatcher.num_queued == 1


@virtual
async def test_a_router_full_of_one_tenant_serves_another_next() -> None:
    async with (
        cluster(dispatch=ONE_AT_A_TIME) as made,
        reading(made, a_request(1, max_tokens=1, tenant="a")),
        reading(made, a_request(2, tenant="a")),
        reading(made, a_request(3, tenant="b")),
    ):
        await finish(made, 0)
        assert [one.prompt_ids for one in made["p1"].submits] == [(1,), (3,)]


def test_a_tenant_is_the_api_keys_name_unless_a_header_is_configured_to_tell() -> None:
    headers = {"x-team": "blue", "x-long": "b" * 200}
    names = ("", "X-Team", "x-long", "x-none")
    tenants = [tenant_of(headers, tenant_header=name, user="key-1") for name in names]
    assert tenants == ["key-1", "blue", "b" * 128, ""]


def test_weights_are_read_by_name() -> None:
    assert weights_of("a=2, b=0.5") == {"a": 2.0, "b": 0.5}
    assert weights_of("") == {}
    for text in ("a", "a=0", "=1", "a=x", "a=inf"):
        with pytest.raises(ValueError, match="tenant_weights must be name=weight"):
            weights_of(text)


def test_keys_bring_their_weights_along_where_they_are_the_tenants() -> None:
    of_keys = {"a": 2.0, "b": 3.0}
    assert Waiting().weights(of_keys) == of_keys
    assert Waiting(tenant_weights="a=1,c=4").weights(of_keys) == {"a": 1.0, "b": 3.0, "c": 4.0}
    assert Waiting(tenant_header="x-team", tenant_weights="c=4").weights(of_keys) == {"c": 4.0}


async def _refusal(made: Cluster, request: Any) -> Exception | None:
    reader = Reader(made.dispatcher, request)
    await reader.run()
    return reader.error
