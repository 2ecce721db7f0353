"""Who runs next, and how many prompt tokens each computes."""

import pytest

from engine.admission import EngineLimits
from engine.kv_cache import KvCache
from engine.params import SamplingParams
from engine.request import Request
from engine.scheduler import Scheduler, SchedulerLimits


def make(num_pages: int = 16, **limits: int) -> tuple[KvCache, Scheduler]:
    cache = KvCache(num_pages=num_pages, page_size=4, fingerprint="model")
    return cache, Scheduler(cache, SchedulerLimits(**limits))


def request(key: str, length: int, priority: int = 0) -> Request:
    return Request(
        key=key,
        prompt_ids=tuple(100 * ord(key) + i for i in range(length)),
        num_prompt_tokens=length,
        sampling=SamplingParams(seed=0, max_tokens=4),
        priority=priority,
    )


def test_chunk_budget_is_shared_oldest_first() -> None:
    _, scheduler = make(chunk_tokens=10)
    for key, length in (("a", 7), ("b", 8), ("c", 2)):
        scheduler.add(request(key, length))
    scheduler.admit()
    assert [(item.key, count) for item, count in scheduler.chunks()] == [("a", 7), ("b", 3)]
    assert scheduler.queued_tokens == 17


def test_request_waits_until_its_whole_prompt_fits() -> None:
    cache, scheduler = make(num_pages=4, max_running=8)
    first, second = request("a", 11), request("b", 5)
    scheduler.add(first)
    scheduler.add(second)
    assert [item.key for item in scheduler.admit()] == ["a"]
    assert scheduler.admit() == []
    assert cache.problems(scheduler.requests()) == []
    scheduler.remove("a")
    cache.release(first)
    assert [item.key for item in scheduler.admit()] == ["b"]


def test_a_later_request_does_not_overtake_one_that_waits_for_pages() -> None:
    _, scheduler = make(num_pages=4)
    for key, length in (("a", 7), ("b", 11), ("c", 1)):
        scheduler.add(request(key, length))
    assert [item.key for item in scheduler.admit()] == ["a"]


def test_youngest_is_the_last_admitted() -> None:
    _, scheduler = make()
    for key in ("a", "b"):
        scheduler.add(request(key, 2))
    scheduler.admit()
    assert scheduler.youngest().key == "b"


def test_the_most_urgent_request_starts_first_and_the_least_urgent_is_given_up_first() -> None:
    _, scheduler = make(max_running=3, num_pages=64)
    for key, priority in (("a", 0), ("b", 5), ("c", -1), ("d", 5), ("e", 0)):
        scheduler.add(request(key, 2, priority))
    assert [item.key for item in scheduler.admit()] == ["c", "a", "e"]
    scheduler.remove("c")
    scheduler.remove("e")
    assert [item.key for item in scheduler.admit()] == ["b", "d"]
    assert scheduler.youngest().key == "d"
    scheduler.remove("d")
    assert scheduler.youngest().key == "b"
    scheduler.remove("b")
    assert scheduler.youngest().key == "a"


def test_an_urgent_prompt_is_computed_before_one_that_has_begun() -> None:
    _, scheduler = make(chunk_tokens=4, num_pages=64)
    scheduler.add(request("a", 9))
    scheduler.admit()
    scheduler.add(request("b", 3, priority=-1))
    scheduler.admit()
    assert [(item.key, count) for item, count in scheduler.chunks()] == [("b", 3), ("a", 1)]


def test_max_running_holds() -> None:
    _, scheduler = make(max_running=1)
    scheduler.add(request("a", 2))
    scheduler.add(request("b", 2))
    assert len(scheduler.admit()) == 1
    assert (scheduler.num_running, scheduler.num_waiting) == (1, 1)


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ((1, 2, 70), {}, r"prompt_ids must be in \[0, 64\), got 70"),
        ((1, -2), {}, r"prompt_ids must be in \[0, 64\), got -2"),
        ((1,), {"stop_token_ids": (64,)}, r"stop_token_ids must be in \[0, 64\), got 64"),
        ((1,), {"logit_bias": ((99, 1.0),)}, r"logit_bias must be in \[0, 64\), got 99"),
        ((1,) * 20, {"max_tokens": 13}, r"is 33, more than max_model_len \(32\)"),
    ],
)
def test_impossible_request_is_refused_by_name(prompt: tuple[int, ...], params: dict, message: str) -> None:
    limits = EngineLimits(max_model_len=32, vocab_size=64, num_pages=8, page_size=4)
    sampling = SamplingParams(**{"seed": 0, "max_tokens": 4, **params})
    with pytest.raises(ValueError, match=message):
        limits.check(prompt, len(prompt), sampling)
