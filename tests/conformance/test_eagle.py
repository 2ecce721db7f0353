"""EAGLE, EAGLE-3 and MTP through the loop and across the handoff: the text is plain decoding's, the draft KV
is that of a fresh prefill, and a pair drafts and accepts exactly as one node does."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from engine.batch import ForwardBatch, Span
from engine.pool import PagePool
from engine.request import Request
from speculative.drafts.recurrent import RecurrentProposer
from speculative.loop import EngineLoop
from speculative.proposer import Proposer, Seed
from speculative.registry import create_proposer
from tests.conformance.test_loop import LENGTHS, SAMPLINGS, prompt_of, reference
from tests.draft_claims import kv_of_slots
from tests.engines import VOCAB_SIZE, make_engine, make_request, run, tokens_of
from tests.node_pair import NodePair
from tests.tiny_drafts import tiny_draft

CHAIN: Mapping[str, Any] = {"num_steps": 3}
TREE: Mapping[str, Any] = {"num_steps": 3, "topk": 4, "num_draft_tokens": 10}
HEADS = ("eagle", "eagle3", "eagle3_variants", "mtp", "mtp_qwen", "mtp_chain")
CASES = [(head, CHAIN) for head in HEADS] + [(head, TREE) for head in HEADS if head != "mtp_chain"]


def heads(cases: Sequence[tuple[str, Mapping[str, Any]]]) -> pytest.MarkDecorator:
    ids = [f"{head}-{'tree' if shape is TREE else 'chain'}" for head, shape in cases]
    return pytest.mark.parametrize(("head", "shape"), cases, ids=ids)


every_head = heads(CASES)
# test_every_proposer and test_every_pair hold the other heads to the same.
other_head = heads(
    [
        (head, shape)
        for head, shape in CASES
        if "_" in head.replace("mtp_chain", "") or (head, shape) in [("eagle3", CHAIN), ("mtp", CHAIN)]
    ]
)


def options_of(head: str, shape: Mapping[str, Any]) -> dict[str, Any]:
    return {"draft": str(tiny_draft(head)), **shape}


def proposer(head: str, shape: Mapping[str, Any]) -> Proposer:
    return create_proposer(head.split("_")[0], options_of(head, shape))


def rounds_of(
    engine: EngineLoop, requests: list[Request]
) -> dict[str, list[tuple[int, tuple[int, ...], int, int]]]:
    """(first index, ids, drafted, accepted) of every report, as `NodePair.rounds` has them."""
    found: dict[str, list[tuple[int, tuple[int, ...], int, int]]] = {}
    for key, history in run(engine, requests).items():
        found[key], index = [], 0
        for progress in history:
            if progress.tokens:
                found[key].append((index, progress.tokens, progress.num_drafted, progress.num_accepted))
                index += len(progress.tokens)
    return found


# ---- lossless


@pytest.mark.parametrize("page_size", [1, 4, 16])
@every_head
def test_greedy_equals_transformers_at_every_border(
    head: str, shape: Mapping[str, Any], page_size: int
) -> None:
    engine = make_engine(proposer(head, shape), page_size=page_size, num_pages=4000 // page_size)
    requests = [make_request(f"r{n}", prompt_of(n)) for n in LENGTHS]
    random.Random(page_size).shuffle(requests)
    history = run(engine, requests)
    for request in requests:
        assert tuple(tokens_of(history[str(request.key)])) == reference(request.prompt_ids, 12), request.key
    assert engine.counters.accepted >= 20


@other_head
def test_page_16_drafts_and_accepts_as_page_1_does(head: str, shape: Mapping[str, Any]) -> None:
    found = [
        rounds_of(
            make_engine(proposer(head, shape), page_size=page_size, num_pages=3000 // page_size),
            [make_request(f"r{n}", prompt_of(n)) for n in LENGTHS],
        )
        for page_size in (1, 16)
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
@pytest.mark.parametrize(("head", "shape"), [("eagle3", TREE), ("eagle", CHAIN), ("mtp_chain", CHAIN)])
def test_a_seeded_text_does_not_depend_on_the_draft(
    head: str, shape: Mapping[str, Any], sampling: dict[str, object]
) -> None:
    def text(proposed: Proposer | None, neighbours: int) -> list[int]:
        requests = [
            make_request(f"n{i}", prompt_of(10 + i, seed=i), seed=i, max_tokens=24, **sampling)
            for i in range(neighbours)
        ]
        requests.insert(neighbours // 2, make_request("r", prompt_of(37), seed=11, max_tokens=24, **sampling))
        return tokens_of(run(make_engine(proposed), requests)["r"])

    plain = text(None, 0)
    assert [text(proposer(head, shape), 0), text(proposer(head, shape), 7)] == [plain] * 2


@every_head
@pytest.mark.parametrize("max_tokens", [1, 2, 3, 7])
def test_max_tokens_is_exact(head: str, shape: Mapping[str, Any], max_tokens: int) -> None:
    history = run(
        make_engine(proposer(head, shape)), [make_request("r", prompt_of(33), max_tokens=max_tokens)]
    )["r"]
    assert tuple(tokens_of(history)) == reference(tuple(prompt_of(33)), max_tokens)
    assert history[-1].finish_reason == "length"


@every_head
def test_stop_token_inside_an_accepted_run_ends_it_there(head: str, shape: Mapping[str, Any]) -> None:
    whole = reference(tuple(prompt_of(129)), 12)
    for stop in whole:
        request = make_request("r", prompt_of(129), stop_token_ids=(stop,))
        history = run(make_engine(proposer(head, shape)), [request])["r"]
        assert tuple(tokens_of(history)) == whole[: whole.index(stop) + 1]


@every_head
def test_short_of_pages_it_drafts_less_and_says_the_same(head: str, shape: Mapping[str, Any]) -> None:
    requests = [make_request(f"r{i}", prompt_of(9, seed=i), max_tokens=12) for i in range(3)]
    engine = make_engine(proposer(head, shape), page_size=4, num_pages=12, reserve_tokens=1)
    for request in requests:
        engine.add(request)
    done: dict[object, list[int]] = {}
    while engine.requests():
        for progress in engine.step().progress:
            done.setdefault(progress.request.key, []).extend(progress.tokens)
        assert engine.cache.problems(engine.requests()) == []
    for request in requests:
        text = tuple(done.get(request.key, ()))
        assert text == reference(request.prompt_ids, 12)[: len(text)]
    assert engine.cache.num_available == 12


# ---- draft KV


@pytest.mark.parametrize("page_size", [1, 16])
@other_head
def test_compacted_kv_is_that_of_a_fresh_prefill(head: str, shape: Mapping[str, Any], page_size: int) -> None:
    for length in (33, 64, 129):
        engine = make_engine(proposer(head, shape), page_size=page_size, num_pages=1200 // page_size)
        request = make_request("r", prompt_of(length), max_tokens=12)
        engine.add(request)
        while request.num_outputs < 10:
            engine.step()
        # The last slots of later modules rest on tokens that are drafts as yet.
        count = request.num_committed - 3
        fresh = make_engine(proposer(head, shape), page_size=page_size, num_pages=1200 // page_size)
        again = make_request("a", request.tokens[: request.num_committed], max_tokens=2)
        fresh.add(again)
        while again.num_outputs < 1:
            fresh.step()
        for ours, theirs in zip(
            kv_of_slots(engine.pool, request, count).values(),
            kv_of_slots(fresh.pool, again, count).values(),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@every_head
def test_prefix_hits_draft_and_accept_as_a_cold_prompt_does(head: str, shape: Mapping[str, Any]) -> None:
    """Also where the token after the shared pages differs: their last slot depends on it."""
    shared = prompt_of(64)
    prompts = {f"{tail}-{n}": [*shared[:n], tail] for tail in (7, 8) for n in (16, 32, 63, 64)}
    cold = {
        key: rounds_of(make_engine(proposer(head, shape)), [make_request(key, prompt)])[key]
        for key, prompt in prompts.items()
    }
    engine = make_engine(proposer(head, shape), num_pages=600)
    for key, prompt in prompts.items():
        request = make_request(key, prompt)
        assert rounds_of(engine, [request])[key] == cold[key], key
    for key, prompt in prompts.items():
        request = make_request(key, prompt)
        assert rounds_of(engine, [request])[key] == cold[key], key
        assert request.num_cached_tokens >= 12


# ---- the tree attends to true ancestors


def chain_probabilities(
    drafting: RecurrentProposer, request: Request, pool: PagePool, path: Sequence[int]
) -> dict[int, float]:
    """Probability of each target token after `path`, drafted as a chain of its own in scratch slots."""
    state, network = drafting._states[request], drafting._network
    hidden_1E = state.hidden_E[None]
    logits_RV = torch.empty(0)
    for depth, token_id in enumerate(path):
        slot = request.num_committed + depth
        span = Span(
            token_ids=(token_id,), num_committed=slot, pages=request.pages, positions=(slot,), logit_rows=(0,)
        )
        hidden_1E, logits_RV = network.forward([span], hidden_1E)
    p_V = logits_RV[0].softmax(dim=0)
    ids = network.head.to_target(torch.arange(len(p_V)).numpy())
    return dict(zip(ids.tolist(), p_V.tolist(), strict=True))


@pytest.mark.parametrize("head", ["eagle", "eagle3", "eagle3_variants", "mtp"])
@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_a_tree_is_what_beams_drafted_one_by_one_would_be(head: str, page_size: int) -> None:
    width, num_steps, num_tokens = 4, 4, 20
    drafting = proposer(head, {"num_steps": num_steps, "topk": width, "num_draft_tokens": num_tokens})
    assert isinstance(drafting, RecurrentProposer)
    engine = make_engine(drafting, page_size=page_size, num_pages=1200 // page_size)
    requests = [make_request(f"r{n}", prompt_of(n), max_tokens=40) for n in (5, 16, 33)]
    for request in requests:
        engine.add(request)
    while any(request.num_outputs < 4 for request in requests):
        engine.step()
    for request in requests:
        engine.cache.grow(request, request.num_committed + drafting.needs.num_scratch_slots)
    proposals = drafting.propose(requests, [num_tokens] * 3)
    for request, proposal in zip(requests, proposals, strict=True):
        state = drafting._states[request]
        ids = drafting._network.head.to_target(state.draft_ids_K)[:width]
        pool: list[tuple[tuple[int, ...], float]] = [
            ((int(t),), float(p)) for t, p in zip(ids, state.p_K, strict=False)
        ]
        beams = list(pool)
        for _ in range(num_steps - 1):
            found: list[tuple[tuple[int, ...], float]] = []
            for path, score in beams:
                after = chain_probabilities(drafting, request, engine.pool, path)
                best = sorted(after.items(), key=lambda item: -item[1])[:width]
                found += [((*path, t), score * p) for t, p in best]
            pool += found
            beams = sorted(found, key=lambda item: -item[1])[:width]
        expected = {path for path, _ in sorted(pool, key=lambda item: -item[1])[:num_tokens]}
        paths: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(proposal.token_ids, proposal.parents, strict=True):
            paths.append((*paths[parent], token_id))
        assert set(paths[1:]) == expected


@pytest.mark.parametrize(("head", "shape"), [("eagle3", TREE), ("eagle3", CHAIN), ("mtp_chain", CHAIN)])
def test_a_lower_limit_keeps_the_best_of_the_same_proposal(head: str, shape: Mapping[str, Any]) -> None:
    drafting = proposer(head, shape)
    engine = make_engine(drafting)
    request = make_request("r", prompt_of(33), max_tokens=40)
    engine.add(request)
    engine.step()
    engine.cache.grow(request, request.num_committed + 16)

    def paths(limit: int) -> set[tuple[int, ...]]:
        (proposal,) = drafting.propose([request], [limit])
        assert len(proposal.token_ids) == min(limit, drafting.needs.max_draft_tokens)
        found: list[tuple[int, ...]] = [()]
        for token_id, parent in zip(proposal.token_ids, proposal.parents, strict=True):
            found.append((*found[parent], token_id))
        return set(found[1:])

    for limit in range(drafting.needs.max_draft_tokens):
        assert paths(limit) < paths(limit + 1)


# ---- across the handoff


@other_head
def test_a_pair_drafts_and_accepts_round_by_round_as_one_node(head: str, shape: Mapping[str, Any]) -> None:
    lengths = [n for n in LENGTHS if n < 300]
    alone = make_engine(proposer(head, shape), num_pages=1200)
    colocated = rounds_of(alone, [make_request(f"r{n}", prompt_of(n)) for n in lengths])
    pair = NodePair(
        algorithm=head.split("_")[0],
        draft_options=options_of(head, shape),
        prefill_options={"num_pages": 1200, "chunk_tokens": 16},
        decode_options={"num_pages": 1200},
    )
    assert pair.refused == []
    for turn in range(2):  # cold, then with prefix hits on both sides
        tids = {n: pair.submit(f"{turn}-{n}", prompt_of(n)) for n in lengths}
        pair.run()
        for n, tid in tids.items():
            assert pair.rounds(tid) == colocated[f"r{n}"], (turn, n)
        assert pair.is_at_rest()
    assert pair.decode.status().counters["seedless_joins"] == 0


@every_head
def test_without_a_seed_the_first_round_drafts_nothing_and_the_second_drafts_again(
    head: str, shape: Mapping[str, Any]
) -> None:
    engine = make_engine(proposer(head, shape))
    prompt = prompt_of(33)
    request = make_request("r", prompt)
    engine.cache.grow(request, 34)
    prefill(engine, request)
    request.num_committed = 33
    engine.join(request, first_token=reference(tuple(prompt), 1)[0], seed=None)
    drafted = [engine.step().progress[0].num_drafted for _ in range(2)]
    assert drafted[0] == 0
    assert drafted[1] > 0
    while engine.requests():
        engine.step()
    assert tuple(request.tokens[33:]) == reference(tuple(prompt), 12)


def prefill(engine: EngineLoop, request: Request) -> None:
    """The target's KV of the prompt, as a transfer would have brought it."""
    span = Span(
        token_ids=request.prompt_ids,
        num_committed=0,
        pages=request.pages,
        positions=range(len(request.prompt_ids)),
        logit_rows=(),
    )
    engine._model.forward(ForwardBatch(spans=[span]), engine.pool)
    draft = [region for region in engine.pool.layout.regions if region.pool == "draft"]
    for region in draft:
        engine.pool.kv_pair("draft", region.layer).zero_()


@every_head
def test_a_seed_that_does_not_fit_is_refused_by_the_tensor_s_name(
    head: str, shape: Mapping[str, Any]
) -> None:
    engine = make_engine(proposer(head, shape))
    request = make_request("r", prompt_of(9))
    engine.add(request, hold=True)
    engine.step()
    good = engine.seed(request)
    assert set(good.tensors) == set(engine.proposer.needs.handoff)
    spoilt = [(name, tensor[..., :-1]) for name, tensor in good.tensors.items()]
    values = {
        "topk_p": torch.neg,
        "topk_index": lambda ids_K: ids_K + VOCAB_SIZE,
        "drafts": lambda ids_K: ids_K + VOCAB_SIZE,
        "hidden": torch.Tensor.double,
    }
    spoilt += [(name, spoil(good.tensors[name])) for name, spoil in values.items() if name in good.tensors]
    if "topk_index" in good.tensors:
        spoilt.append(("topk_index", torch.zeros_like(good.tensors["topk_index"])))  # all the same
    for name, tensor in spoilt:
        bad = Seed(tensors={**good.tensors, name: tensor})
        with pytest.raises(ValueError, match=f"handoff tensor {name} must"):
            engine.proposer.admit(make_request("other", prompt_of(9)), bad)
    engine.release("r")


@every_head
def test_both_nodes_of_a_pair_agree_on_what_the_draft_needs(head: str, shape: Mapping[str, Any]) -> None:
    needs = make_engine(proposer(head, shape)).proposer.needs
    assert needs.prefill_identity == head.split("_")[0]
    assert needs.draft == head
    assert len(needs.draft_weights) == 32
    assert [spec.pool for spec in needs.draft_kv] == ["draft"]
    other = proposer(head, {"num_steps": 2}).needs
    assert (other.draft_weights, other.handoff, other.draft_kv) == (
        needs.draft_weights,
        needs.handoff,
        needs.draft_kv,
    )
