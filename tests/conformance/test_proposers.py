"""What every speculative algorithm owes the loop, shown on the ones that need no model of their own."""

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from engine.batch import ForwardOutput
from engine.params import SamplingParams
from engine.request import Request
from engine.sampling import Row, draw
from engine.sampling_state import SamplingState
from speculative.accept import truncate, walk
from speculative.proposer import Advance, Proposal, Proposer, Seed
from speculative.registry import CATALOGUE, create_proposer
from speculative.tree import build

VOCAB_SIZE = 13

Case = tuple[str, Mapping[str, object]]

CASES: list[Case] = [
    ("none", {}),
    ("ngram", {}),
    ("ngram", {"min_ngram": 1, "branches": 4, "num_draft_tokens": 12}),
    ("ngram", {"num_draft_tokens": 1, "min_ngram": 1}),
]
every_proposer = pytest.mark.parametrize(("name", "options"), CASES)


def request_with(
    rng: random.Random, *, seed: int = 0, max_tokens: int = 60, num_symbols: int = 5, **options: Any
) -> Request:
    prompt = tuple(rng.randrange(num_symbols) for _ in range(rng.randrange(2, 40)))
    sampling = SamplingParams(seed=seed, max_tokens=max_tokens, **options)
    return Request(key=object(), prompt_ids=prompt, num_prompt_tokens=len(prompt), sampling=sampling)


class LoopingModel:
    """Logits of a random bigram table, sharp enough that texts repeat."""

    def __init__(self, seed: int) -> None:
        self._table = 4 * torch.randn(VOCAB_SIZE, VOCAB_SIZE, generator=torch.Generator().manual_seed(seed))

    def logits(self, tokens: Sequence[int]) -> torch.Tensor:
        return self._table[tokens[-1]]


class Round:
    """Plays the loop for requests that a fake target decodes."""

    def __init__(self, proposer: Proposer, model: LoopingModel, requests: Sequence[Request]) -> None:
        self._proposer = proposer
        self._model = model
        self.running = list(requests)
        self.num_correct_drafts = 0
        self._states = {
            request: SamplingState(
                request.sampling,
                tokens=request.tokens,
                num_prompt_tokens=request.num_prompt_tokens,
                vocab_size=VOCAB_SIZE,
            )
            for request in requests
        }
        for request in requests:
            proposer.admit(request, None)

    def step(self) -> None:
        limits = [r.sampling.max_tokens - r.num_outputs - 1 for r in self.running]
        proposals = self._proposer.propose(self.running, limits)
        assert len(proposals) == len(self.running)
        advances, logits_RV = [], list[torch.Tensor]()
        for request, proposal, limit in zip(list(self.running), proposals, limits, strict=True):
            assert len(proposal.token_ids) <= min(limit, self._proposer.needs.max_draft_tokens)
            advances.append(self._advance(request, proposal, first_row=len(logits_RV)))
            logits_RV += [self._model.logits([request.tokens[-1]])] * (len(proposal.token_ids) + 1)
        self._proposer.observe(advances, ForwardOutput(logits_RV=torch.stack(logits_RV)))

    def _advance(self, request: Request, proposal: Proposal, first_row: int) -> Advance:
        tree = build(request.tokens[-1], proposal)
        state = self._states[request]
        logits_NV = torch.stack([self._model.logits([*request.tokens, *path]) for path in tree.paths])
        outcome = walk(tree, draw(logits_NV, [Row(state, path) for path in tree.paths]).token_ids)
        ending = truncate(outcome.token_ids, params=request.sampling, num_outputs=request.num_outputs)
        self.num_correct_drafts += outcome.num_correct_drafts
        request.tokens += ending.token_ids
        state.advance(ending.token_ids)
        if ending.finish_reason:
            self.running.remove(request)
            self._proposer.forget(request)
        return Advance(
            request=request,
            rows=(first_row, first_row + tree.num_nodes),
            accepted_nodes=outcome.nodes,
            token_ids=ending.token_ids,
            is_prompt=False,
        )


def decode(name: str, options: Mapping[str, object], requests: Sequence[Request]) -> int:
    """Run all to their end; how many drafts stood."""
    loop = Round(create_proposer(name, options), LoopingModel(seed=4), requests)
    while loop.running:
        loop.step()
    return loop.num_correct_drafts


SAMPLINGS: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.9},
    {"temperature": 0.0, "frequency_penalty": 0.7},
    {"temperature": 0.8, "top_p": 0.9, "repetition_penalty": 1.1, "presence_penalty": 0.2},
    {"temperature": 0.0, "min_tokens": 20, "stop_token_ids": (0, 1, 2)},
    {"temperature": 0.0, "banned_sequences": ((0, 1), (3,), (2, 4, 5))},
]


@every_proposer
@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_the_text_is_that_of_plain_decoding(
    name: str, options: Mapping[str, object], sampling: dict[str, Any]
) -> None:
    for seed in range(6):
        print(f"seed {seed}")
        plain = request_with(random.Random(seed), seed=seed, **sampling)
        speculated = request_with(random.Random(seed), seed=seed, **sampling)
        assert decode("none", {}, [plain]) == 0
        decode(name, options, [speculated])
        assert speculated.tokens == plain.tokens


@every_proposer
def test_neighbours_do_not_change_a_text(name: str, options: Mapping[str, object]) -> None:
    alone = [request_with(random.Random(seed), seed=seed) for seed in range(6)]
    together = [request_with(random.Random(seed), seed=seed) for seed in range(6)]
    for request in alone:
        decode(name, options, [request])
    decode(name, options, together)
    assert [request.tokens for request in together] == [request.tokens for request in alone]


@every_proposer
def test_a_text_that_repeats_is_accepted_where_anything_is_drafted(
    name: str, options: Mapping[str, object]
) -> None:
    drafts = create_proposer(name, options).needs.max_draft_tokens > 0
    request = request_with(random.Random(2), max_tokens=200, temperature=0.0)
    assert (decode(name, options, [request]) > 90) == drafts


@every_proposer
def test_every_proposal_is_a_tree_within_its_limit(name: str, options: Mapping[str, object]) -> None:
    rng, proposer = random.Random(8), create_proposer(name, options)
    requests = [request_with(rng, num_symbols=3) for _ in range(30)]
    for request in requests:
        proposer.admit(request, None)
    for _ in range(20):
        limits = [rng.randrange(0, 20) for _ in requests]
        for request, limit, proposal in zip(
            requests, limits, proposer.propose(requests, limits), strict=True
        ):
            build(request.tokens[-1], proposal)
            assert len(proposal.token_ids) <= min(limit, proposer.needs.max_draft_tokens)
            request.tokens += [rng.randrange(3) for _ in range(rng.randrange(1, 4))]


@every_proposer
def test_a_proposal_depends_on_the_tokens_alone(name: str, options: Mapping[str, object]) -> None:
    first, second = (create_proposer(name, options) for _ in range(2))
    mine, same, other = (request_with(random.Random(seed), num_symbols=3) for seed in (1, 1, 2))
    first.admit(mine, None)
    second.admit(other, None)
    second.admit(same, Seed())
    assert first.propose([mine], [8]) == second.propose([other, same], [8, 8])[1:]


@every_proposer
def test_a_forgotten_request_leaves_nothing_behind(name: str, options: Mapping[str, object]) -> None:
    rng, proposer = random.Random(3), create_proposer(name, options)
    request = request_with(rng, num_symbols=3)
    proposer.admit(request, None)
    fresh = proposer.propose([request], [8])
    request.tokens += [0, 1, 0, 1]
    proposer.propose([request], [8])
    proposer.forget(request)
    request.tokens = list(request.prompt_ids)
    proposer.admit(request, None)
    assert proposer.propose([request], [8]) == fresh


@every_proposer
def test_a_prefill_node_may_observe_seed_and_forget_what_it_never_decodes(
    name: str, options: Mapping[str, object]
) -> None:
    proposer, request = create_proposer(name, options), request_with(random.Random(4))
    advance = Advance(request=request, rows=(0, 2), accepted_nodes=(0, 1), token_ids=(3,), is_prompt=True)
    proposer.observe([advance], ForwardOutput(logits_RV=torch.zeros(1, VOCAB_SIZE)))
    assert set(proposer.seed(request).tensors) <= set(proposer.needs.handoff)
    proposer.forget(request)
    assert proposer.propose([], []) == []


# ---- the catalogue


def test_every_algorithm_without_a_model_is_tested_here() -> None:
    assert {name for name, _ in CASES} == {"none", "ngram"}
    assert {name for name, _ in CASES} <= set(CATALOGUE)


def test_plain_decoding_needs_nothing() -> None:
    needs = create_proposer("none", {}).needs
    assert needs.max_draft_tokens == 0
    assert (needs.hidden_layers, needs.draft_kv, needs.handoff, needs.prefill_identity) == ((), (), (), "")


def test_an_ngram_proposer_needs_nothing_of_the_prefill_node() -> None:
    needs = create_proposer("ngram", {"num_draft_tokens": 5}).needs
    assert needs.max_draft_tokens == 5
    assert (needs.hidden_layers, needs.draft_kv, needs.handoff, needs.prefill_identity) == ((), (), (), "")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("eagle9", {}, r"speculative algorithm must be one of \[.*'ngram'.*\], got 'eagle9'"),
        (
            "ngram",
            {"num_tokens": 3},
            r"ngram has no option 'num_tokens' \(value 3\); it has \[.*branches.*\]",
        ),
        ("none", {"branches": 1}, "none has no option 'branches'"),
        ("ngram", {"branches": 0}, r"branches must be a whole number in \[1, 256\], got 0"),
    ],
)
def test_an_unknown_name_or_option_is_refused(name: str, options: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_proposer(name, options)
