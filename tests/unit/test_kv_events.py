"""What a node says of its cached pages, and what a router makes of it: names, numbers, gaps, bounds."""

import asyncio
import random

import pytest

from engine.kv_cache import KvCache
from engine.page_hash import CacheChanges, PageHash
from engine.prefix_cache import MAX_CHANGES
from kv_transfer.ids import Incarnation
from router.dispatch import DispatchConfig
from router.pairs import PairConfig
from router.prefix_index import PrefixIndex
from tests.fakes_host import Cluster as Hosts
from tests.fakes_host import FakeNode, open_link
from tests.fakes_nodes import a_request, cluster, reading, settle, virtual
from tests.unit.test_kv_cache import make_cache, make_request, prefill
from wire.convert import pack_from_node, pack_to_node, unpack_from_node, unpack_to_node
from wire.gen import node_pb2
from wire.host_events import PagesChanged
from wire.kv_board import MAX_PENDING, PAGES_PER_MESSAGE, KvBoard
from wire.kv_events import KvSubscribe, KvUpdate
from wire.records import Load
from wire.work import WorkHello

HASHING = PageHash(fingerprint="model", page_size=4)
P, P2 = Incarnation("p1-inc"), Incarnation("p2-inc")


def name(number: int) -> bytes:
    return number.to_bytes(16, "big")


def digests(prompt: list[int], salt: str = "", hashing: PageHash = HASHING) -> list[bytes]:
    return list(hashing.chain(prompt, salt, max_pages=hashing.num_shareable(len(prompt))))


# the cache


def test_the_first_news_is_all_there_is_and_then_only_changes() -> None:
    cache = make_cache(num_pages=3)
    first = make_request("a", [1, 2, 3, 4, 5])
    prefill(cache, first)
    [page] = digests([1, 2, 3, 4, 5])
    assert cache.take_changes() == CacheChanges(stored=(page,), hashing=HASHING)
    assert cache.take_changes() is None
    cache.release(first)
    assert cache.take_changes() is None  # it stays cached
    second = make_request("b", [*range(10, 19)])
    prefill(cache, second)  # needs the page of the first
    assert cache.take_changes() == CacheChanges(stored=tuple(digests([*range(10, 19)])), removed=(page,))


def test_a_router_names_pages_as_the_cache_does_whatever_salt_and_lookahead() -> None:
    for lookahead in (0, 1, 3):
        hashing = PageHash(fingerprint="model", page_size=4, lookahead=lookahead)
        cache = KvCache(num_pages=32, page_size=4, fingerprint="model", lookahead=lookahead)
        prompt = list(range(1, 30))
        request = make_request("a", prompt, salt="s")
        cache.take_changes()
        prefill(cache, request)
        changes = cache.take_changes()
        assert changes is not None
        assert list(changes.stored) == digests(prompt, "s", hashing)
        assert set(digests(prompt, "", hashing)).isdisjoint(changes.stored)
        cache.release(request)
        again = make_request("b", prompt, salt="s")
        cache.attach_prefix(again)
        assert len(again.pages) == hashing.num_shareable(len(prompt))


def test_news_nobody_asks_for_is_bounded_and_replaced_by_all_there_is() -> None:
    cache = make_cache(num_pages=3, page_size=1)
    cache.take_changes()
    for number in range(MAX_CHANGES):
        request = make_request("a", [number, 0])
        prefill(cache, request)
        cache.release(request)
    changes = cache.take_changes()
    assert changes is not None
    assert changes.hashing is not None
    assert (len(changes.stored), changes.removed) == (2, ())


# the wire


def test_kv_messages_survive_the_wire() -> None:
    for update in (
        KvUpdate(previous=3, sequence=9, stored=(name(1), name(2)), removed=(name(3),)),
        KvUpdate(previous=0, sequence=0, hashing=PageHash(fingerprint="f", page_size=16, lookahead=1)),
    ):
        assert unpack_from_node(pack_from_node(update)) == update
    assert unpack_to_node(pack_to_node(KvSubscribe())) == KvSubscribe()
    hello = WorkHello(incarnation=P, role="prefill", has_kv_events=True)
    assert unpack_from_node(pack_from_node(hello)) == hello


def test_malformed_kv_updates_name_the_field() -> None:
    message = node_pb2.FromNode(kv_update=node_pb2.KvUpdate(stored=b"x" * 17))
    with pytest.raises(ValueError, match=r"kv_update.stored must be a multiple of 16 bytes long, got 17"):
        unpack_from_node(message)
    message = node_pb2.FromNode(kv_update=node_pb2.KvUpdate(hashing=node_pb2.PageHash()))
    with pytest.raises(ValueError, match=r"kv_update.hashing.page_size must be at least 1, got 0"):
        unpack_from_node(message)


# the node's side


@virtual
async def test_a_router_is_told_nothing_until_it_subscribes_then_all_then_changes() -> None:
    hosts = Hosts()
    async with FakeNode(hosts, "prefill", "p:1", P) as node:
        channel = await open_link(hosts, "p:1")
        node.driver.emit(PagesChanged(changes=CacheChanges(stored=(name(1),), hashing=HASHING)))
        node.driver.emit(PagesChanged(changes=CacheChanges(stored=(name(2),), removed=(name(1),))))
        await asyncio.sleep(1.0)
        await channel.send(KvSubscribe())
        assert await channel.receive() == KvUpdate(previous=0, sequence=2, stored=(name(2),), hashing=HASHING)
        node.driver.emit(PagesChanged(changes=CacheChanges(stored=(name(3), name(4)))))
        node.driver.emit(PagesChanged(changes=CacheChanges(removed=(name(3),))))
        await asyncio.sleep(1.0)
        assert await channel.receive() == KvUpdate(
            previous=2, sequence=4, stored=(name(4),), removed=(name(3),)
        )
        await channel.send(KvSubscribe())  # as after a gap
        again = await channel.receive()
        assert (set(again.stored), again.sequence, again.hashing) == ({name(2), name(4)}, 4, HASHING)


@virtual
async def test_a_large_cache_is_told_in_pieces_and_a_slow_router_everything_anew() -> None:
    board = KvBoard()
    board.take(CacheChanges(stored=tuple(map(name, range(PAGES_PER_MESSAGE + 1))), hashing=HASHING))
    feed, index = board.open(), PrefixIndex()
    feed.subscribe()
    first, second = feed._take()
    assert (len(first.stored), len(second.stored)) == (PAGES_PER_MESSAGE, 1)
    assert (second.previous, second.sequence, second.hashing) == (first.sequence, first.sequence, None)
    assert index.take(P, first)
    assert index.take(P, second)
    assert index.num_pages == PAGES_PER_MESSAGE + 1
    board.take(CacheChanges(stored=tuple(map(name, range(10**6, 10**6 + MAX_PENDING + 1)))))
    updates = list(feed._take())
    assert updates[0].hashing == HASHING
    assert sum(len(update.stored) for update in updates) == PAGES_PER_MESSAGE + 1 + MAX_PENDING + 1
    assert all(index.take(P, update) for update in updates)
    assert index.num_pages == len(board.pages)


def test_an_index_that_follows_any_traffic_equals_the_cache() -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    cache, board, index = make_cache(num_pages=24), KvBoard(), PrefixIndex()
    feed = board.open()
    feed.subscribe()
    live = []
    for turn in range(400):
        if rng.random() < 0.5 and cache.num_available > 6:
            request = make_request(str(turn), [rng.randrange(3) for _ in range(rng.randrange(1, 18))])
            prefill(cache, request)
            live.append(request)
        elif live:
            cache.release(live.pop(rng.randrange(len(live))))
        if (changes := cache.take_changes()) is not None:
            board.take(changes)
        if rng.random() < 0.3:
            for update in feed._take():
                assert index.take(P, update)
            assert index._known[P].pages == set(cache._prefix._by_digest) == set(board.pages)


# the index


def told(index: PrefixIndex, node: Incarnation, prompt: list[int], *, salt: str = "") -> None:
    update = KvUpdate(previous=0, sequence=1, stored=tuple(digests(prompt, salt)), hashing=HASHING)
    assert index.take(node, update)


@virtual
async def test_the_index_counts_the_leading_pages_a_node_has() -> None:
    index, prompt = PrefixIndex(), list(range(18))
    told(index, P, prompt)
    told(index, P2, prompt[:10])
    assert await index.cached(prompt, "") == {P: 16, P2: 8}
    assert await index.cached([*prompt[:6], 99, 98, 97], "") == {P: 4, P2: 4}
    assert await index.cached(prompt[:16], "") == {P: 12, P2: 8}  # one token is computed in any case
    assert await index.cached(prompt, "other salt") == {}
    page = digests(prompt)[0]
    assert index.take(P, KvUpdate(previous=1, sequence=2, removed=(page,)))
    assert await index.cached(prompt, "") == {P2: 8}  # a page without those before it is of no use


def test_a_missing_message_makes_the_index_forget_and_ask_again() -> None:
    index = PrefixIndex()
    told(index, P, list(range(9)))
    assert index.num_pages == 2
    assert not index.take(P, KvUpdate(previous=2, sequence=3, stored=(name(1),)))
    assert index.num_pages == 0
    assert not index.take(P, KvUpdate(previous=3, sequence=4))
    told(index, P, list(range(9)))
    assert index.num_pages == 2


def test_the_index_is_bounded() -> None:
    sizes: list[int] = []
    index = PrefixIndex(max_pages=3, on_size=sizes.append)
    told(index, P, list(range(9)))
    told(index, P2, list(range(100, 113)))
    assert (index.num_pages, max(sizes)) == (3, 3)
    index.forget(P)
    assert index.num_pages == 1


# the router


@virtual
async def test_a_router_follows_its_nodes_asks_again_after_a_gap_and_forgets_the_lost() -> None:
    async with cluster("p1 d1", has_index=True) as made:
        node, index = made["p1"], made.links.index
        assert index is not None
        assert node.num_subscribes == 1
        node.channels[-1].put(KvUpdate(previous=0, sequence=1, stored=(name(1),), hashing=HASHING))
        await settle()
        assert index.num_pages == 1
        node.channels[-1].put(KvUpdate(previous=5, sequence=6, stored=(name(2),)))
        await settle()
        assert (index.num_pages, node.num_subscribes) == (0, 2)
        node.channels[-1].put(KvUpdate(previous=6, sequence=6, stored=(name(1), name(2)), hashing=HASHING))
        await settle()
        assert made.counted("prefix_pages") == 2.0
        node.die()
        await settle()
        assert made.counted("prefix_pages") == 0.0


@virtual
async def test_the_prefix_policy_sends_a_prompt_where_its_pages_are_unless_too_much_waits_there() -> None:
    async with cluster("p1 p2 d1", dispatch=DispatchConfig(policy="prefix"), has_index=True) as made:
        prompt = list(range(65))
        stored = tuple(digests(prompt))
        made["p2"].channels[-1].put(KvUpdate(previous=0, sequence=1, stored=stored, hashing=HASHING))
        await settle()
        for _ in range(2):
            async with reading(made, a_request(*prompt)):
                pass
        assert [len(made[name].submits) for name in ("p1", "p2")] == [0, 2]
        assert made.counted("believed_cached_tokens_total") == 128.0
        made.registry.update("p2", load=Load(free_pages=1000, total_pages=1000, queued_tokens=65))
        await settle()
        async with reading(made, a_request(*prompt)):
            assert [len(made[name].submits) for name in ("p1", "p2")] == [1, 2]
        async with reading(made, a_request(*prompt, cache_salt="mine")):
            assert [len(made[name].submits) for name in ("p1", "p2")] == [2, 2]


@virtual
async def test_the_prefix_policy_prefers_a_decode_node_that_needs_fewer_pages_moved() -> None:
    async with cluster("p1 d1 d2", dispatch=DispatchConfig(policy="prefix"), has_index=True) as made:
        prompt = list(range(65))
        stored = tuple(digests(prompt))
        made["d2"].channels[-1].put(KvUpdate(previous=0, sequence=1, stored=stored, hashing=HASHING))
        await settle()
        async with reading(made, a_request(*prompt)):
            assert [len(made[name].submits) for name in ("d1", "d2")] == [0, 1]


@virtual
async def test_a_long_prompt_of_which_a_decode_node_lacks_little_stays_there() -> None:
    async with cluster(
        "p1 d1 d2",
        dispatch=DispatchConfig(local_prompt_tokens=8),
        pairs=PairConfig(with_local=True),
        has_index=True,
    ) as made:
        prompt = list(range(70))
        stored = tuple(digests(prompt[:66]))
        made["d2"].channels[-1].put(KvUpdate(previous=0, sequence=1, stored=stored, hashing=HASHING))
        await settle()
        async with reading(made, a_request(*prompt)):
            assert [submit.peer for submit in made["d2"].submits] == [None]
        assert made["p1"].submits == []
        async with reading(made, a_request(*prompt, *range(5))):  # 11 to compute
            assert len(made["p1"].submits) == 1
        assert made.counted("decisions_total{decision=local_cached,policy=least_load}") == 1.0


@virtual
async def test_a_router_that_looks_at_no_pages_is_told_of_none() -> None:
    async with cluster("p1 d1") as made:
        assert (made["p1"].num_subscribes, made.links.index) == (0, None)
