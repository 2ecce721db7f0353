"""What every draft model owes the loop, as checks that the tests of each algorithm call."""

import random
from collections.abc import Callable, Mapping
from typing import Any

import torch

from engine.pool import PagePool
from engine.request import Request
from speculative.loop import EngineLoop
from speculative.policy import DraftPolicy
from speculative.progress import Progress
from speculative.proposer import Proposer
from tests.conformance.test_loop import LENGTHS, prompt_of, reference
from tests.engines import make_engine, make_request, run, tokens_of
from tests.node_pair import NodePair

Make = Callable[[], Proposer]
Rounds = list[tuple[tuple[int, ...], int, int]]


def rounds_of(history: list[Progress]) -> Rounds:
    """(tokens, drafted, accepted) of each step that emitted anything, the first token's included."""
    return [
        (progress.tokens, progress.num_drafted, progress.num_accepted)
        for progress in history
        if progress.tokens
    ]


def check_greedy(make: Make, *, page_size: int, chunk_tokens: int, max_running: int) -> EngineLoop:
    """Texts around page and chunk borders are those of transformers. Returns the engine, for its counts."""
    engine = make_engine(
        make(),
        page_size=page_size,
        num_pages=4000 // page_size,
        chunk_tokens=chunk_tokens,
        max_running=max_running,
    )
    requests = [make_request(f"r{n}", prompt_of(n)) for n in LENGTHS]
    random.Random(page_size).shuffle(requests)
    history = run(engine, requests)
    for request in requests:
        assert tuple(tokens_of(history[str(request.key)])) == reference(request.prompt_ids, 12), request.key
    return engine


def check_seeds(make: Make, sampling: Mapping[str, Any]) -> None:
    """Sampling with a seed gives the text of plain decoding, alone and in company."""
    prompt = prompt_of(37)
    wanted = {"seed": 11, "max_tokens": 24, **sampling}
    plain = tokens_of(run(make_engine(), [make_request("r", prompt, **wanted)])["r"])
    alone = tokens_of(run(make_engine(make()), [make_request("r", prompt, **wanted)])["r"])
    others = [make_request(f"n{i}", prompt_of(10 + i, seed=i), **{**wanted, "seed": i}) for i in range(7)]
    crowd = [*others[:3], make_request("r", prompt, **wanted), *others[3:]]
    assert [alone, tokens_of(run(make_engine(make()), crowd)["r"])] == [plain, plain]


def check_prefix_hits(make: Make, *, page_size: int) -> None:
    """A second turn finds its prompts' pages, and drafts and accepts as the first did, round by round."""
    engine = make_engine(make(), page_size=page_size, num_pages=2400 // page_size)
    turns = []
    for turn in range(2):
        requests = [make_request(f"t{turn}r{n}", prompt_of(n), max_tokens=20) for n in (5, 33, 64, 129)]
        history = run(engine, requests)
        turns.append([rounds_of(history[str(request.key)]) for request in requests])
        hits = [request.num_cached_tokens for request in requests]
        assert hits == [(n - 1) // page_size * page_size * turn for n in (5, 33, 64, 129)]
    assert turns[0] == turns[1]


def check_continued_text(make: Make, *, page_size: int) -> None:
    """A prompt that is an earlier request's whole text hits the pages decoding filled, and drafts as well
    over them as over a prompt computed here."""
    warm = make_engine(make(), page_size=page_size)
    first = make_request("first", prompt_of(30), max_tokens=19)
    run(warm, [first])
    longer = first.tokens
    request = make_request("again", longer, max_tokens=20)
    found = run(warm, [request])["again"]
    assert request.num_cached_tokens == len(longer) - 1 == 48  # its last page ends with its last round
    cold = run(make_engine(make(), page_size=page_size), [make_request("cold", longer, max_tokens=20)])
    assert rounds_of(found) == rounds_of(cold["cold"])


def check_stop(make: Make, index: int) -> None:
    whole = reference(tuple(prompt_of(20)), 24)
    first = whole.index(whole[index])
    request = make_request("r", prompt_of(20), max_tokens=24, stop_token_ids=(whole[index],))
    engine = make_engine(make())
    history = run(engine, [request])["r"]
    assert tuple(tokens_of(history)) == whole[: first + 1]
    assert engine.counters.output_tokens == first + 1
    # Drafts after the stop stood for nothing.
    assert sum(engine.counters.accepted_at) == engine.counters.accepted
    assert engine.counters.accepted == sum(progress.num_accepted for progress in history) <= first


def check_release(make: Make, steps: int) -> None:
    engine = make_engine(make(), chunk_tokens=16)
    for i in range(3):
        engine.add(make_request(f"r{i}", prompt_of(33, seed=i)))
    for _ in range(steps):
        engine.step()
    for i in range(3):
        engine.release(f"r{i}")
    assert engine.requests() == []
    assert engine.cache.problems([]) == []
    assert engine.cache.num_available == engine.cache.num_pages
    spared = make_request("spared", prompt_of(33, seed=1))  # over the pages the released ones left
    assert tuple(tokens_of(run(engine, [spared])["spared"])) == reference(spared.prompt_ids, 12)


def check_preemption(make: Make, *, page_size: int = 4, num_pages: int = 14) -> EngineLoop:
    """Short of pages, drafts are dropped before requests are; nothing leaks and no text changes. Returns
    the engine, for its counts."""
    engine = make_engine(make(), page_size=page_size, num_pages=num_pages, max_running=4, reserve_tokens=1)
    requests = [make_request(f"r{i}", prompt_of(9, seed=i), max_tokens=30) for i in range(3)]
    for request in requests:
        engine.add(request)
    preempted: list[Request] = []
    texts: dict[object, list[int]] = {request.key: [] for request in requests}
    while engine.requests():
        result = engine.step()
        preempted += result.preempted
        for progress in result.progress:
            texts[progress.request.key] += progress.tokens
        assert engine.cache.problems(engine.requests()) == []
    assert preempted
    assert requests[0] not in preempted
    for request in requests:
        text = tuple(texts[request.key])
        assert text == reference(request.prompt_ids, 30)[: len(text)]
        assert (request in preempted) == (len(text) < 30)
    assert engine.cache.num_available == num_pages
    return engine


def check_scratch_is_never_read_back(make: Make) -> None:
    """What a draft left in slots past the committed ones changes no later round."""
    histories = []
    for is_spoilt in (False, True):
        engine = make_engine(make(), page_size=4)
        request = make_request("r", prompt_of(22), max_tokens=30)
        engine.add(request)
        history: list[Progress] = []
        while engine.requests():
            history += engine.step().progress
            if is_spoilt and request.pages:
                spoil_after(engine, request)
        histories.append(rounds_of(history))
    assert histories[0] == histories[1]


def kv_of_slots(pool: PagePool, request: Request, count: int) -> dict[tuple[str, int], torch.Tensor]:
    """K and V of the request's first `count` slots, by (pool, layer), target and draft."""
    size = pool.layout.page_size
    page_T = torch.tensor([request.pages[slot // size] for slot in range(count)])
    offset_T = torch.arange(count) % size
    layers = {(region.pool, region.layer) for region in pool.layout.regions}
    return {layer: pool.kv_pair(*layer)[page_T, :, offset_T].clone() for layer in sorted(layers)}


def spoil_after(engine: EngineLoop, request: Request) -> None:
    size = engine.cache.page_size
    layers = [
        region.layer for region in engine.pool.layout.regions if (region.pool, region.kind) == ("draft", "k")
    ]
    for slot in range(request.num_committed, len(request.pages) * size):
        for layer in layers:
            engine.pool.kv_pair("draft", layer)[request.pages[slot // size], :, slot % size] = 1e4


def check_pair(
    algorithm: str,
    options: Mapping[str, object],
    make: Make,
    sampling: Mapping[str, Any] | None = None,
    *,
    policy: DraftPolicy | None = None,
) -> NodePair:
    """A pair's rounds are the colocated engine's, one by one: cold, then with prefix hits on P and D."""
    engine_options: dict[str, Any] = {"num_pages": 600, "chunk_tokens": 32}
    pair = NodePair(
        algorithm=algorithm,
        draft_options=options,
        prefill_options=engine_options,
        decode_options={**engine_options, "policy": policy},
    )
    wanted = {"max_tokens": 16, **(sampling or {})}
    lengths = (3, 16, 33, 64, 65, 129)
    colocated = {
        n: rounds_of(
            run(
                make_engine(make(), policy=policy, **engine_options),
                [make_request("r", prompt_of(n), **wanted)],
            )["r"]
        )
        for n in lengths
    }
    for turn in range(2):
        tids = {n: pair.submit(f"{turn}-{n}", prompt_of(n), **wanted) for n in lengths}
        pair.run()
        for n, tid in tids.items():
            found = [(ids, drafted, accepted) for _, ids, drafted, accepted in pair.rounds(tid)]
            assert found == colocated[n], (turn, n)
        assert pair.is_at_rest()
    return pair
