"""Worked examples of the EAGLE digest on the product's own code, where no other module's tests have them.

G1, G3: test_growth, test_tree. G2, G3: test_accept. G4, G5: test_accept_rules. G6: test_randomness.
G11: test_count_budget. Here: G2 through the loop, G3's mask, G4's laws, G7, G8, G10, G12.
"""

from collections.abc import Mapping, Sequence

import pytest
import torch

from engine.attention_mask import SpanMask, visible
from engine.batch import ForwardBatch, ForwardOutput, Span
from engine.kv_cache import KvCache
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from speculative.accept import Acceptance, walk
from speculative.accept_rules import target_only
from speculative.drafts.extension import extension_of
from speculative.drafts.modules import _Window
from speculative.drafts.recurrent import RecurrentProposer
from speculative.drafts.scratch import ScratchRows
from speculative.drafts.shape import TreeShape
from speculative.growth import Beams, Growth
from speculative.ngram import NgramConfig, NgramProposer
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed
from speculative.registry import create_proposer
from speculative.tree import Tree, build
from tests.conformance.test_loop import prompt_of
from tests.engines import VOCAB_SIZE, make_engine, make_request, tiny_model
from tests.tiny_drafts import tiny_draft
from tests.unit.test_growth import floats, ids, tree_of, worked_example

SMALL = Proposal(token_ids=(1, 2, 3, 7), parents=(0, 0, 1, 3))
LARGE = Proposal(token_ids=(1, 2, 3, 4, 5, 7, 9), parents=(0, 0, 1, 1, 2, 3, 5))


class ScriptedModel:
    """Says at each wanted row of the n-th forward what `script[n]` holds; writes every row's place as KV."""

    def __init__(self, script: Sequence[Sequence[int]]) -> None:
        self._script = list(script)
        self.batches: list[ForwardBatch] = []
        like = tiny_model().model
        self.config: ModelConfig = like.config
        self.embedding_VE, self.head = like.embedding_VE, like.head
        self.dtype, self.device = like.dtype, like.device

    def final_norm(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, batch: ForwardBatch, pool: PagePool) -> ForwardOutput:
        self.batches.append(batch)
        for span in batch.spans:
            for row in range(len(span.token_ids)):
                slot = span.num_committed + row
                place = span.pages[slot // pool.layout.page_size], slot % pool.layout.page_size
                for layer in range(self.config.num_layers):
                    pool.kv_pair("target", layer)[place[0], :, place[1]] = float(
                        place[0] * pool.layout.page_size + place[1]
                    )
        said = torch.tensor(self._script.pop(0))
        return ForwardOutput(logits_RV=torch.nn.functional.one_hot(said, VOCAB_SIZE).float())


class GivenProposer:
    """Proposes what it is given, in turn, and keeps what it is told."""

    def __init__(self, *rounds: Sequence[Proposal]) -> None:
        self.needs = DraftNeeds(max_draft_tokens=8)
        self._rounds = list(rounds)
        self.advances: list[Advance] = []

    def bind(self, model: Model, pool: PagePool) -> None:
        pass

    def admit(self, request: Request, seed: Seed | None) -> None:
        pass

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return list(self._rounds.pop(0))

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        self.advances = list(advances)

    def seed(self, request: Request) -> Seed:
        raise NotImplementedError

    def forget(self, request: Request) -> None:
        pass


# ---- G2


@pytest.mark.parametrize(
    ("proposal", "argmax", "nodes", "emitted", "kept"),
    [
        (SMALL, (1, 3, 6, 7, 5), (0, 1, 3, 4), (1, 3, 7, 5), [100, 101, 103, 104]),
        (SMALL, (1, 8, 6, 7, 5), (0, 1), (1, 8), [100, 101]),
        (SMALL, (2, 3, 4, 7, 5), (0, 2), (2, 4), [100, 102]),
        (SMALL, (6, 3, 4, 7, 5), (0,), (6,), [100]),
        (SMALL, (1, 3, 6, 2, 5), (0, 1, 3), (1, 3, 2), [100, 101, 103]),
        (LARGE, (2, 3, 5, 7, 0, 9, 4, 1), (0, 2, 5, 7), (2, 5, 9, 1), [100, 102, 105, 107]),
    ],
)
def test_eagle_g2_a_round_walks_commits_and_moves_kv_through_the_loop(
    proposal: Proposal, argmax: Sequence[int], nodes: Sequence[int], emitted: Sequence[int], kept: list[int]
) -> None:
    """Root 9 at L = 7 in the window of slots 100, 101, ...; `kept` holds what stands at 100 and on after it.

    The digest pads `predict`; we keep the emitted tokens alone.
    """
    proposer, model = GivenProposer([proposal]), ScriptedModel([(9,), argmax])
    engine = make_engine(proposer, model=model, page_size=1)
    engine.cache.grow(make_request("neighbour", [1]), 93)
    request = make_request("r", [1, 2, 3, 4, 5, 6, 8])
    engine.add(request)
    assert engine.step().progress[0].tokens == (9,)
    assert request.num_committed == 7
    (progress,) = engine.step().progress
    assert progress.tokens == tuple(emitted)
    assert (progress.num_accepted, progress.num_drafted) == (len(nodes) - 1, len(proposal.token_ids))
    assert request.num_committed == 7 + len(nodes)
    assert len(request.tokens) == request.num_committed + 1
    assert request.pages[7 : 7 + len(argmax)] == list(range(100, 100 + len(argmax)))
    assert tuple(proposer.advances[0].accepted_nodes) == tuple(nodes)
    for layer in range(model.config.num_layers):
        found_P = engine.pool.kv_pair("target", layer)[100 : 100 + len(kept), 0, 0, 0, 0]
        assert found_P.int().tolist() == kept


def test_eagle_g2_the_walk_of_eight_nodes() -> None:
    assert walk(build(9, LARGE), (2, 3, 5, 7, 0, 9, 4, 1)) == Acceptance((0, 2, 5, 7), (2, 5, 9, 1))


# ---- G3: the full mask of two requests


def span_of(tree: Tree, committed: int) -> Span:
    return Span(
        token_ids=tree.token_ids,
        num_committed=committed,
        pages=range(99),
        positions=tree.positions(committed),
        logit_rows=range(tree.num_nodes),
        parents=tree.span_parents,
    )


def test_eagle_g3_the_full_mask_of_two_requests() -> None:
    """64 cells in all, request 1 from the 28th on; ours are one mask per request, never laid end to end."""
    tree = tree_of(9, worked_example()[0].select(0, 3))
    spans = [span_of(tree, committed) for committed in (3, 5)]
    seen = [visible(SpanMask.of(span, window=None), 0, span.num_committed + 4) for span in spans]
    assert [mask.size for mask in seen] == [28, 36]
    rows = ["".join(str(int(cell)) for cell in row) for row in seen[0].tolist()]
    assert rows == ["1111000", "1111100", "1111010", "1111101"]
    assert [*spans[0].positions, *spans[1].positions] == [3, 4, 4, 5, 5, 6, 6, 7]


# ---- G4: laws


G4_P: Mapping[int, Mapping[int, float]] = {
    0: {1: 0.5, 2: 0.2, 6: 0.3},
    1: {3: 0.4, 4: 0.1, 8: 0.5},
    2: {5: 0.6, 6: 0.4},
    3: {7: 0.25, 0: 0.75},
    4: {5: 1.0},
}


def g4_law(threshold: float) -> list[float]:
    p_NV = torch.zeros(5, 10, dtype=torch.float64)
    for node, row in G4_P.items():
        p_NV[node, list(row)] = torch.tensor(list(row.values()), dtype=torch.float64)
    counts = [0] * 10
    for step in range(1000):
        outcome = target_only(
            build(9, SMALL),
            p_NV,
            coins=[(step + 0.5) / 1000] * 5,
            final_coin=0.5,
            lossy_accept_threshold=threshold,
        )
        counts[outcome.token_ids[0]] += 1
    return [count / 1000 for count in counts]


def test_eagle_g4_first_token_laws_at_both_thresholds() -> None:
    assert g4_law(1.0) == [0, 0.5, 0.2, 0, 0, 0, 0.3, 0, 0, 0]
    assert g4_law(0.5) == [0, 1.0, 0, 0, 0, 0, 0, 0, 0, 0]


def test_eagle_g4_duplicated_siblings_are_refused_and_one_of_them_has_the_right_law() -> None:
    with pytest.raises(ValueError, match=r"token_ids\[1\] repeats a sibling: 0 below node 0"):
        build(9, Proposal(token_ids=(0, 0, 0), parents=(0, 0, 0)))
    tree = build(9, Proposal(token_ids=(0,), parents=(0,)))
    p_NV = torch.tensor([[0.3, 0.7]] * 2, dtype=torch.float64)
    firsts = [
        target_only(tree, p_NV, coins=[(step + 0.5) / 1000, 0.0], final_coin=0.5).token_ids[0]
        for step in range(1000)
    ]
    assert (firsts.count(0), firsts.count(1)) == (300, 700)


# ---- G7: where our allocation differs from the digest's, what ours must guarantee


@pytest.mark.parametrize(
    ("num_steps", "topk", "width", "page_size", "num_slots"),
    [(3, 1, 4, 1, 4), (3, 1, 4, 64, 4), (5, 4, 8, 1, 16), (5, 4, 8, 16, 16), (3, 2, 5, 4, 5)],
)
def test_eagle_g7_a_round_allocates_for_its_tree_and_no_more(
    num_steps: int, topk: int, width: int, page_size: int, num_slots: int
) -> None:
    """The digest reserves 4, 4, 20, 128, 16: a column per branch and step, whole pages per branch, twice
    over for its overlap. We draft all branches in one span behind a mask, a step less (its candidates come
    with the last round), and know what is committed: the wider of tree and scratch, on any page size."""
    shape = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": width - 1}
    assert TreeShape(**shape).num_scratch_slots == topk * (num_steps - 1)
    proposer = create_proposer("eagle", {"draft": str(tiny_draft("eagle")), **shape})
    engine = make_engine(proposer, page_size=page_size, num_pages=400)
    request = make_request("r", prompt_of(33), max_tokens=40)
    engine.add(request)
    engine.step()
    while request.num_outputs < 20:
        committed = request.num_committed
        engine.step()
        assert len(request.pages) == -(-(committed + num_slots) // page_size)
    while engine.requests():
        engine.step()
    assert engine.counters.accepted < engine.counters.drafted
    assert engine.cache.num_available == engine.cache.num_pages


def test_eagle_g7_ngram_allocates_its_width_on_any_page_size() -> None:
    """(1, 10, 12, 16) -> 12."""
    needs = create_proposer("ngram", {"num_draft_tokens": 11, "branches": 10}).needs
    assert max(1 + needs.max_draft_tokens, needs.num_scratch_slots) == 12


@pytest.mark.parametrize(
    ("committed", "allocated", "reserve", "page_size", "after"),
    [(100, 96, 8, 16, 112), (100, 112, 8, 16, 112), (103, 112, 8, 1, 112), (0, 0, 8, 4, 8)],
)
def test_eagle_g7_growth_is_to_whole_pages_and_only_what_is_missing(
    committed: int, allocated: int, reserve: int, page_size: int, after: int
) -> None:
    """Rejected slots stay with the request and are written over: nothing is given back between rounds."""
    cache = KvCache(num_pages=200, page_size=page_size, fingerprint="g7")
    request = make_request("r", [1])
    cache.grow(request, allocated)
    assert len(request.pages) * page_size == allocated
    before = list(request.pages)
    cache.grow(request, committed + reserve)
    assert len(request.pages) * page_size == after
    assert request.pages[: len(before)] == before
    assert cache.num_pages - cache.num_available == len(request.pages)
    assert cache.problems([request]) == []
    cache.release(request)
    assert cache.num_available == cache.num_pages


@pytest.mark.parametrize(
    ("committed", "topk", "num_steps", "page_size"), [(6, 2, 3, 1), (6, 2, 3, 4), (8, 2, 3, 4), (10, 3, 5, 4)]
)
def test_eagle_g7_branches_touch_scratch_slots_alone_and_see_the_prefix_tail_in_place(
    committed: int, topk: int, num_steps: int, page_size: int
) -> None:
    """The digest gives every branch whole pages and copies the tail of the prefix into each. Ours lie side
    by side after L: no slot below L changes, none of another page, and the drafts are page size 1's."""
    shape = {"num_steps": num_steps, "topk": topk, "num_draft_tokens": 12}
    proposals = []
    for size in (page_size, 1):
        proposer = create_proposer("eagle", {"draft": str(tiny_draft("eagle")), **shape})
        assert isinstance(proposer, RecurrentProposer)
        engine = make_engine(proposer, page_size=size, num_pages=64)
        request = make_request("r", prompt_of(committed), max_tokens=40)
        engine.add(request)
        engine.step()
        assert request.num_committed == committed
        num_scratch = topk * (num_steps - 1)
        engine.cache.grow(request, committed + num_scratch)
        before_PX = engine.pool.storage.view(64, size, -1).clone()
        proposals += proposer.propose([request], [12])
        changed = changed_slots(engine.pool, before_PX)
        slots = range(committed, committed + num_scratch)
        assert changed == {(request.pages[slot // size], slot % size) for slot in slots}
    assert proposals[0] == proposals[1]
    assert len(proposals[0].token_ids) == min(12, topk + (num_steps - 1) * topk**2)


def changed_slots(pool: PagePool, before_PX: torch.Tensor) -> set[tuple[int, int]]:
    """(page, offset) of every slot of which any layer's K or V is no longer what it was."""
    old = PagePool(pool.layout, pool.num_pages, pool.device)
    old.storage.copy_(before_PX.reshape(-1))
    found: set[tuple[int, int]] = set()
    for region in pool.layout.regions:
        ours, theirs = (each.kv_pair(region.pool, region.layer) for each in (pool, old))
        for page, _, offset, *_ in (ours != theirs).nonzero().tolist():
            found.add((page, offset))
    return found


def test_eagle_g7_each_step_of_a_growth_writes_its_own_slots() -> None:
    """The digest's columns of step s are [s, 3 + s] of 6; ours lie step by step, so a step is one block."""
    request = make_request("r", [1] * 6)
    request.num_committed, request.pages = 6, [0, 1, 2]
    growth = Growth(floats([[0.6, 0.3]]), ids([[1, 2]]))
    beams = [growth.beams(), growth.expand(floats([[[0.5, 0.2], [0.7, 0.1]]]), ids([[[3, 4], [5, 6]]]))]
    rows = scratch_rows(request, beams)
    assert rows == [([6, 7], [6, 6]), ([8, 9], [7, 7])]


def scratch_rows(request: Request, beams: Sequence[Beams]) -> list[tuple[list[int], list[int]]]:
    """(slots, positions) of the rows whose logits each step wants."""
    rows = ScratchRows([request], width=2, page_size=4)
    found = []
    for step in beams:
        ((span,), _) = rows.add(step, torch.zeros(1, 2, 8))
        wanted = list(span.logit_rows)
        found.append(([span.num_committed + row for row in wanted], [span.positions[row] for row in wanted]))
    return found


# ---- G8


def test_eagle_g8_draft_extension_feeds_the_accepted_rows_and_selects_the_last() -> None:
    """The digest feeds all four rows and lets the next round write over slot 23; we feed those that stand."""
    d1, d2, bonus = 31, 32, 33
    request = make_request("r", [1] * 20)
    request.tokens += [30, d1, d2, bonus]
    request.num_committed = 23
    found = extension_of(
        Advance(
            request=request, rows=(0, 4), accepted_nodes=(0, 1, 2), token_ids=(d1, d2, bonus), is_prompt=False
        )
    )
    assert found is not None
    assert list(found.rows) == [0, 1, 2]
    assert list(found.span.token_ids) == [d1, d2, bonus]
    assert list(found.span.positions) == [20, 21, 22]
    assert found.span.num_committed == 20
    assert list(found.span.logit_rows) == [2]


def test_eagle_g8_a_prompt_is_drafted_one_token_ahead() -> None:
    """[a, b, c, d] and sampled e: the draft reads [b, c, d, e]; of an unfinished prompt its next token."""
    request = make_request("r", [11, 12, 13, 14])
    request.tokens.append(15)
    request.num_committed = 4
    whole = Advance(request=request, rows=(0, 4), accepted_nodes=range(4), token_ids=(15,), is_prompt=True)
    found = extension_of(whole)
    assert found is not None
    assert list(found.span.token_ids) == [12, 13, 14, 15]
    assert list(found.span.logit_rows) == [3]
    request = make_request("r", [11, 12, 13, 14])
    request.num_committed = 2
    first = Advance(request=request, rows=(0, 2), accepted_nodes=range(2), token_ids=(13,), is_prompt=True)
    found = extension_of(first)
    assert found is not None
    assert list(found.span.token_ids) == [12, 13]
    assert list(found.span.logit_rows) == []


def test_eagle_g8_later_modules_read_the_drafts_of_the_earlier_ones() -> None:
    """Rotate [11, 12, 13]: +50 -> [12, 13, 50]; +51 -> [13, 50, 51]. The digest pads a fourth, unused row."""
    request = make_request("r", [1])
    request.pages = [0]
    window = _Window(
        request=request, start=0, hidden_NE=torch.zeros(3, 8), tokens=[10, 11, 12, 13], is_prompt=False
    )
    found = [list(window.span(0).token_ids)]
    for module, drafted in enumerate((50, 51), start=1):
        window.tokens.append(drafted)
        found.append(list(window.span(module).token_ids))
    assert found == [[11, 12, 13], [12, 13, 50], [13, 50, 51]]


# ---- G10: our index is of the request's own text and takes the likeliest continuation, the latest first

HISTORY = [*range(1, 11), 0, 1, 2, 3, 44, 55, 66, 77, 88, 99, 100, 0]


def ngram_paths(tokens: Sequence[int], *, limit: int = 7, **options: int) -> set[tuple[int, ...]]:
    proposer, request = (
        NgramProposer(NgramConfig(num_draft_tokens=12, **options)),
        make_request("r", [*tokens]),
    )
    proposer.admit(request, None)
    (proposal,) = proposer.propose([request], [limit])
    return set(build(0, proposal).paths) - {()}


def test_eagle_g10_both_continuations_are_merged_below_the_root() -> None:
    """The digest fills seven nodes: 4; 4-5; 4-5-6; 44; 44-55; 44-55-66; 44-55-66-77. We draft of them what
    is likely to pay at first, and pad nothing."""
    assert ngram_paths([*HISTORY, 1, 2, 3], branches=2) == {
        (44,),
        (44, 55),
        (44, 55, 66),
        (4,),
        (4, 5),
    }


def test_eagle_g10_a_longer_match_is_a_chain_and_no_match_is_nothing() -> None:
    assert ngram_paths([*HISTORY, 3, 44], branches=8) == {(55,), (55, 66), (55, 66, 77)}
    assert ngram_paths([*HISTORY, 3, 6, 999], branches=8) == set()


def test_eagle_g10_frequent_continuations_all_find_a_place() -> None:
    """[1,2,3] twice, [1,2,4], [1,2,3,5], [9,2,7]; query [1,2]: the digest drafts {3, 3-5, 4, 7}."""
    text = [1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 3, 5, 0, 9, 2, 7, 0, 1, 2]
    found = ngram_paths(text, limit=8, branches=4, min_ngram=1)
    assert found >= {(3,), (3, 5), (4,), (7,)}
    assert {path[0] for path in found} == {3, 4, 7}


# ---- G12


def test_eagle_g12_a_ragged_batch_is_packed_row_after_row() -> None:
    """Widths [3, 1, 2]: rows [0, 3, 4, 6]. The digest rounds six rows up to a bucket of 8 for its graphs;
    we compute six."""
    rounds = [
        [Proposal(token_ids=(1, 2), parents=(0, 1)), Proposal(), Proposal(token_ids=(3,), parents=(0,))]
    ]
    proposer = GivenProposer(*rounds)
    model = ScriptedModel([(9, 9, 9), (1, 2, 5, 8, 7, 6)])
    engine = make_engine(proposer, model=model)
    for key in "abc":
        engine.add(make_request(key, [1, 2]))
    engine.step()
    progress = engine.step().progress
    verify = model.batches[1]
    assert [len(span.token_ids) for span in verify.spans] == [3, 1, 2]
    assert [list(span.logit_rows) for span in verify.spans] == [[0, 1, 2], [0], [0, 1]]
    assert [advance.rows for advance in proposer.advances] == [(0, 3), (3, 4), (4, 6)]
    assert [each.tokens for each in progress] == [(1, 2, 5), (8,), (7,)]
    assert [each.num_accepted for each in progress] == [2, 0, 0]
