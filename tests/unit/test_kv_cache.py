"""Pages: exact ids, orders and owners on tiny pools."""

import random

import pytest

from engine.errors import OutOfPages
from engine.kv_cache import KvCache
from engine.pages import Owner, PageLedger
from engine.params import SamplingParams
from engine.request import Request


def make_cache(num_pages: int = 8, page_size: int = 4) -> KvCache:
    return KvCache(num_pages=num_pages, page_size=page_size, fingerprint="model")


def make_request(key: str, prompt: list[int], *, salt: str = "") -> Request:
    return Request(
        key=key,
        prompt_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(seed=0, max_tokens=8),
        cache_salt=salt,
    )


def prefill(cache: KvCache, request: Request) -> None:
    cache.attach_prefix(request)
    cache.grow(request, len(request.prompt_ids) + 1)
    request.num_committed = len(request.prompt_ids)
    cache.publish(request)


def test_freed_page_is_handed_out_last() -> None:
    ledger = PageLedger(3)
    assert ledger.take(2, Owner.REQUEST, "a") == [0, 1]
    ledger.release([0], Owner.REQUEST, "a")
    assert ledger.take(2, Owner.LEASE, "b") == [2, 0]


def test_page_moves_only_from_its_owner() -> None:
    ledger = PageLedger(2)
    ledger.take(1, Owner.REQUEST, "a")
    with pytest.raises(AssertionError, match="belongs to"):
        ledger.release([0], Owner.REQUEST, "b")


def test_too_large_allocation_changes_nothing() -> None:
    cache = make_cache(num_pages=2)
    request = make_request("a", [1, 2, 3])
    cache.attach_prefix(request)
    with pytest.raises(OutOfPages, match="3 pages wanted, 2 available"):
        cache.grow(request, 9)
    assert request.pages == []
    assert cache.num_available == 2
    assert cache.problems([request]) == []


def test_second_request_shares_the_full_pages_of_the_first() -> None:
    cache = make_cache()
    first = make_request("a", list(range(10)))
    prefill(cache, first)
    assert first.pages == [0, 1, 2]
    second = make_request("b", [*range(8), 99, 98])
    prefill(cache, second)
    assert second.pages == [0, 1, 3]
    assert second.num_cached_tokens == 8
    assert cache.problems([first, second]) == []


def test_whole_cached_prompt_leaves_its_last_token_to_compute() -> None:
    cache = make_cache()
    first = make_request("a", list(range(8)))
    prefill(cache, first)
    second = make_request("b", list(range(8)))
    cache.attach_prefix(second)
    assert second.num_committed == 4


def test_equal_content_computed_twice_stays_private_and_is_freed() -> None:
    cache = make_cache()
    first, second = make_request("a", list(range(5))), make_request("b", list(range(5)))
    for request in (first, second):
        cache.attach_prefix(request)
        cache.grow(request, 6)
    for request in (first, second):
        request.num_committed = 5
        cache.publish(request)
    assert cache.problems([first, second]) == []
    cache.release(second)
    assert cache.problems([first]) == []
    third = make_request("c", list(range(5)))
    cache.attach_prefix(third)
    assert third.pages == [0]


def test_salt_separates_equal_prompts() -> None:
    cache = make_cache()
    prefill(cache, make_request("a", list(range(10))))
    assert cache.cached_pages(list(range(10)), "") == 2
    assert cache.cached_pages(list(range(10)), "tenant") == 0


def test_idle_cached_pages_are_evicted_tail_first() -> None:
    cache = make_cache(num_pages=4)
    first = make_request("a", list(range(10)))
    prefill(cache, first)
    cache.release(first)
    assert cache.num_available == 4
    other = make_request("b", [50] * 9)
    cache.attach_prefix(other)
    cache.grow(other, 12)
    assert cache.cached_pages(list(range(10)), "") == 1
    assert cache.problems([other]) == []


def test_lease_becomes_the_requests_after_its_cached_pages() -> None:
    cache = make_cache()
    first = make_request("a", list(range(10)))
    prefill(cache, first)
    second = make_request("b", list(range(10)))
    cache.attach_prefix(second)
    leased = cache.lease("t", 1)
    assert cache.problems([first, second]) == []
    cache.lease_to_request("t", second)
    assert second.pages == [0, 1, *leased]
    assert cache.problems([first, second]) == []


def test_quarantined_pages_are_not_available_until_released() -> None:
    cache = make_cache(num_pages=3)
    cache.lease("t", 2)
    cache.quarantine("t")
    assert (cache.num_available, cache.num_quarantined) == (1, 2)
    assert cache.problems([]) == []
    cache.release_quarantine("t")
    assert (cache.num_available, cache.num_quarantined) == (3, 0)


@pytest.mark.parametrize("seed", range(3))
def test_books_balance_under_random_traffic(seed: int) -> None:
    rng = random.Random(seed)
    cache = make_cache(num_pages=40)
    live: list[Request] = []
    for number in range(400):
        prompt = [rng.randrange(2) for _ in range(rng.randrange(1, 30))]
        request = make_request(f"r{number}", prompt, salt=rng.choice(["", "x"]))
        try:
            prefill(cache, request)
            live.append(request)
        except OutOfPages:
            cache.release(request)
        while live and rng.random() < 0.6:
            cache.release(live.pop(rng.randrange(len(live))))
        assert cache.problems(live) == []
    for request in live:
        cache.release(request)
    assert cache.num_available == 40


def test_a_page_whose_contents_depend_on_later_tokens_is_shared_only_where_those_agree() -> None:
    cache = KvCache(num_pages=16, page_size=4, fingerprint="model", lookahead=1)
    first = make_request("a", [1, 2, 3, 4, 5, 6, 7, 8])
    cache.attach_prefix(first)
    cache.grow(first, 8)
    first.num_committed = 8
    cache.publish(first)
    assert first.num_published_pages == 1  # nothing is known to follow the second page yet
    first.tokens.append(9)
    cache.publish(first)
    assert first.num_published_pages == 2
    assert cache.cached_pages([1, 2, 3, 4, 5, 6, 7, 8, 9], "") == 2
    assert cache.cached_pages([1, 2, 3, 4, 5, 6, 7, 8, 10], "") == 1
    assert cache.cached_pages([1, 2, 3, 4, 5, 6, 7, 8], "") == 1
    assert cache.cached_pages([1, 2, 3, 4, 10], "") == 0


def test_pages_with_and_without_a_drafts_kv_are_never_the_same() -> None:
    cache = make_cache(num_pages=16)
    prompt = list(range(20))
    complete, partial = make_request("complete", prompt), make_request("partial", prompt)
    partial.draft_start = 12
    for request in (complete, partial):
        prefill(cache, request)
        assert request.num_cached_tokens == 0
    assert set(complete.pages).isdisjoint(partial.pages)
    for request, start, found in ((complete, 0, 16), (partial, 12, 12), (partial, 8, 8)):
        again = make_request("again", prompt)
        again.draft_start = start
        cache.attach_prefix(again)  # no page from `draft_start` on: those are written for each request alone
        assert again.pages == request.pages[: found // 4]
        cache.release(again)
    salted = make_request("salted", prompt, salt="\1")
    cache.attach_prefix(salted)
    assert salted.pages == []
    assert cache.problems([complete, partial]) == []
