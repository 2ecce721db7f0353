"""What must hold of every algorithm alike: lossless on random targets, no page leaked, the same rounds on
any page size, and KV that is that of a fresh prefill of the accepted text."""

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch

from engine.loaders import LoadedModel, load_model
from engine.request import Request
from speculative.loop import EngineLoop
from speculative.registry import CATALOGUE, create_proposer
from tests.conformance.test_loop import LENGTHS, prompt_of
from tests.draft_claims import check_preemption, check_release, check_stop, kv_of_slots, rounds_of
from tests.engines import make_engine, make_request, run, tokens_of
from tests.every_proposer import NAMES, TREE, drafter, every_drafter
from tests.scratch import new_folder
from tests.tiny_drafts import eagle3_config, eagle3_tensors, save_draft
from tests.tiny_models import save_tiny


def test_every_algorithm_of_the_catalogue_has_a_row_in_the_table() -> None:
    assert {drafter(name).algorithm for name in NAMES} == {*CATALOGUE, "bushy"}


# ---- greedy equals plain decoding


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Where and how 25 random prompts are decoded. Heads are fitted to the target llama 0 alone."""

    family: str
    seed: int
    batch: int
    page_size: int
    chunk_tokens: int

    def __str__(self) -> str:
        return f"{self.family}{self.seed} batch {self.batch} page {self.page_size} chunk {self.chunk_tokens}"


SHAPES = tuple(
    Shape(family=family, seed=seed, batch=batch, page_size=page_size, chunk_tokens=chunk_tokens)
    for batch, (family, seed, page_size, chunk_tokens) in enumerate(
        [
            ("llama", 0, 4, 7),
            ("llama", 0, 1, 16),
            ("llama", 1, 16, 64),
            ("llama", 0, 16, 33),
            ("mistral_window", 2, 4, 24),
            ("qwen3_tied", 3, 1, 64),
            ("llama", 0, 4, 64),
            ("llama", 0, 16, 20),
        ],
        start=1,
    )
)


@cache
def target(family: str, seed: int) -> LoadedModel:
    folder = save_tiny(family, new_folder(family), seed=seed)
    return load_model(folder, dtype="float32", device="cpu")


def prompts_of(shape: Shape) -> list[Request]:
    """Lengths next to multiples of the page and of the chunk, half of each prompt repeating; some of them
    the texts the heads are fitted to, which may meet in the cache."""
    rng = random.Random(str(shape))
    sizes = (shape.page_size, shape.chunk_tokens)
    borders = sorted(
        {max(1, size * times + off) for size in sizes for times in (1, 2, 3) for off in (-1, 0, 1)}
    )
    lengths = [rng.choice([length for length in borders if length < 70]) for _ in range(25)]
    return [
        make_request(f"{i}", prompt_of(length, seed=i if i % 4 else 0), max_tokens=rng.randrange(6, 14))
        for i, length in enumerate(lengths)
    ]


@cache
def plain(shape: Shape) -> dict[tuple[int, ...], list[int]]:
    """What plain decoding says to each prompt, each alone and its prompt in one piece."""
    engine = make_engine(
        family=shape.family,
        model=target(shape.family, shape.seed).model,
        max_running=1,
        page_size=16,
        chunk_tokens=512,
    )
    requests = prompts_of(shape)
    history = run(engine, requests)
    return {request.prompt_ids: tokens_of(history[str(request.key)]) for request in requests}


@every_drafter
def test_greedy_equals_plain_decoding_on_200_prompts_of_random_targets(name: str) -> None:
    num_prompts, num_accepted = 0, 0
    for shape in SHAPES:
        print(f"seed: {shape}")
        expected = plain(shape)

        def truth(request: Request, count: int, texts: dict = expected) -> list[int]:
            done = len(request.tokens) - len(request.prompt_ids)
            return list(texts[request.prompt_ids][done : done + count])

        engine = make_engine(
            drafter(name).make(truth),
            family=shape.family,
            model=target(shape.family, shape.seed).model,
            page_size=shape.page_size,
            num_pages=1600 // shape.page_size,
            max_running=shape.batch,
            chunk_tokens=shape.chunk_tokens,
        )
        requests = prompts_of(shape)
        history = run(engine, requests)
        found = {request.prompt_ids: tokens_of(history[str(request.key)]) for request in requests}
        assert found == expected, str(shape)
        num_prompts += len(requests)
        num_accepted += engine.counters.accepted
        assert engine.counters.accepted < engine.counters.drafted or name == "none", "nothing was rejected"
    assert num_prompts == 200
    assert (num_accepted >= 20) == (name != "none"), num_accepted


# ---- pages


@pytest.mark.parametrize("index", [0, 2, 5, 9])
@every_drafter
def test_no_page_leaks_after_a_stop_inside_a_round(name: str, index: int) -> None:
    check_stop(drafter(name).make, index)


@pytest.mark.parametrize("steps", range(6))
@every_drafter
def test_no_page_leaks_after_an_abort_in_any_phase(name: str, steps: int) -> None:
    check_release(drafter(name).make, steps)


@pytest.mark.parametrize(("page_size", "num_pages"), [(1, 56), (4, 14), (16, 4)])
@every_drafter
def test_no_page_leaks_when_requests_are_preempted_between_their_drafts(
    name: str, page_size: int, num_pages: int
) -> None:
    engine = check_preemption(drafter(name).make, page_size=page_size, num_pages=num_pages)
    assert (engine.counters.drafted > 0) == (name != "none")


@every_drafter
def test_rejected_drafts_leave_a_request_no_more_pages_than_its_next_round_needs(name: str) -> None:
    engine = make_engine(drafter(name).make(), page_size=4)
    needs = engine.proposer.needs
    most = max(1 + needs.max_draft_tokens, needs.num_scratch_slots)
    requests = [make_request(f"r{n}", prompt_of(n), max_tokens=20) for n in (5, 16, 33)]
    for request in requests:
        engine.add(request)
    while engine.requests():
        committed = {request: request.num_committed for request in requests}
        engine.step()
        for request in engine.requests():
            before = max(committed[request], len(request.prompt_ids))
            assert len(request.pages) <= engine.cache.pages_for(before + most), request.key
        assert engine.cache.problems(engine.requests()) == []
    assert engine.counters.accepted < engine.counters.drafted or name == "none"
    assert engine.cache.num_available == engine.cache.num_pages


# ---- the same rounds, the same KV


@every_drafter
def test_page_16_drafts_and_accepts_as_page_1_does(name: str) -> None:
    """Tokens, drafts and acceptance of every round; trees are four wide."""
    found = []
    for page_size in (1, 16):
        engine = make_engine(drafter(name).make(), page_size=page_size, num_pages=3000 // page_size)
        history = run(engine, [make_request(f"r{n}", prompt_of(n)) for n in LENGTHS])
        found.append({key: rounds_of(steps) for key, steps in history.items()})
    assert found[0] == found[1]


def decoded(engine: EngineLoop, request: Request, num_outputs: int) -> None:
    engine.add(request)
    while request.num_outputs < num_outputs:
        engine.step()


@pytest.mark.parametrize("page_size", [1, 16])
@every_drafter
def test_compacted_kv_is_that_of_a_fresh_prefill_of_the_accepted_text(name: str, page_size: int) -> None:
    """Target and draft, every layer; by the same product code, but in one forward and without a draft."""
    num_accepted = 0
    for length in (33, 64):
        engine, fresh = (
            make_engine(drafter(name).make(), page_size=page_size, num_pages=1600 // page_size)
            for _ in range(2)
        )
        request = make_request("r", prompt_of(length), max_tokens=30)
        decoded(engine, request, 22)
        num_accepted += engine.counters.accepted
        again = make_request("again", request.tokens[: request.num_committed], max_tokens=2)
        decoded(fresh, again, 1)
        assert fresh.counters.rounds == 0
        count = request.num_committed - 3  # the last slots of later modules rest on drafts as yet
        ours, theirs = (
            kv_of_slots(each.pool, which, count) for each, which in ((engine, request), (fresh, again))
        )
        assert ours.keys() == theirs.keys()
        for layer, kv in ours.items():
            torch.testing.assert_close(kv, theirs[layer], rtol=1e-4, atol=2e-4, msg=str(layer))
    assert (num_accepted > 0) == (name != "none")


def test_ancestor_closure_under_ties_of_a_head_that_cannot_choose() -> None:
    """All its candidates are equally likely: a selection that orders ties by chance loses ancestors."""
    tensors = eagle3_tensors()
    tensors["lm_head.weight"].zero_()
    folder = save_draft(new_folder("undecided"), eagle3_config(), tensors)
    proposer = create_proposer("eagle3", {"draft": str(folder), **TREE, "num_draft_tokens": 36})
    engine = make_engine(proposer)
    request = make_request("r", prompt_of(33), max_tokens=60)
    decoded(engine, request, 1)
    engine.cache.grow(request, request.num_committed + 40)
    whole: list[tuple[int, ...]] = []
    for limit in range(1, 37):
        (proposal,) = proposer.propose([request], [limit])
        paths: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(proposal.token_ids, proposal.parents, strict=True):
            paths.append((*paths[parent], token_id))
        assert len(set(paths)) == len(paths) == limit + 1
        assert set(whole) < set(paths)
        whole = paths
