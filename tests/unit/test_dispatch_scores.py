"""What a prompt's tokens scored on its way through the dispatcher: once, whole, before the first token."""

import asyncio
from dataclasses import replace

import pytest

from router.dispatch import DispatchConfig
from router.errors import TokenConflict
from router.merge import MergeFault, TokenMerger
from router.pairs import PairConfig
from router.requests import Delta
from tests.fakes_nodes import FakeNode, a_request, cluster, reading, settle, virtual
from wire.work import PromptLogprobs, Submit, TokenLogprob, Tokens, TransferId

TID = TransferId("r1", 1)
SCORES = tuple(TokenLogprob(-float(i), ((i, -0.5),)) for i in range(1, 5))


def scored(first_index: int, *scores: TokenLogprob, attempt: int = 1) -> PromptLogprobs:
    return PromptLogprobs(tid=TransferId("r1", attempt), first_index=first_index, logprobs=scores)


@virtual
async def test_only_the_prefill_node_is_asked_and_the_first_delta_has_the_answer() -> None:
    async with cluster() as made, reading(made, a_request(1, 2, 3, 4, 5, prompt_logprobs=1)) as reader:
        p, d = made["p1"], made["d1"]
        assert p.submits[0].sampling.prompt_logprobs == 1
        assert d.submits[0].sampling == replace(p.submits[0].sampling, prompt_logprobs=None)
        p.emit(scored(1, *SCORES[:3]))
        p.emit(scored(4, SCORES[3]), Tokens(tid=TID, first_index=0, ids=(10,)))
        p.finish("handed_over")
        d.tokens(1, 11)
        d.tokens(2, 12, 13)
        d.finish("length")
        await settle()
        deltas = [item for item in reader.items if isinstance(item, Delta)]
        assert [delta.prompt_logprobs for delta in deltas] == [SCORES, None, None]
        assert reader.outcome.reason == "length"


@virtual
async def test_a_decode_node_that_does_the_prompt_itself_is_asked() -> None:
    colocated = DispatchConfig(colocated=True)
    pairs = PairConfig(with_prefill=False, with_local=True)
    async with (
        cluster("d1", dispatch=colocated, pairs=pairs) as made,
        reading(made, a_request(1, 2, prompt_logprobs=0)) as reader,
    ):
        made["d1"].emit(scored(1, SCORES[0]), Tokens(tid=TID, first_index=0, ids=(1, 2, 3, 4)))
        made["d1"].finish("length")
        await settle()
        assert isinstance(reader.items[0], Delta)
        assert reader.items[0].prompt_logprobs == SCORES[:1]


@virtual
async def test_another_attempt_tells_again_what_is_missing_and_is_not_asked_for_what_is_known() -> None:
    async with (
        cluster("p1 p2 d1 d2") as made,
        reading(made, a_request(1, 2, 3, 4, 5, prompt_logprobs=1)) as reader,
    ):

        def asked(attempt: int) -> tuple[FakeNode, Submit]:
            """The prefill node of an attempt, and what it was sent."""
            nodes = [made[name] for name in ("p1", "p2")]
            (found,) = [
                (node, sent) for node in nodes for sent in node.submits if sent.tid.attempt == attempt
            ]
            return found

        node, submit = asked(1)
        node.emit(scored(1, *SCORES[:2]))
        await settle()
        node.break_off()
        await settle()
        node, submit = asked(2)
        assert submit.sampling.prompt_logprobs == 1
        node.emit(scored(1, *SCORES[:3], attempt=2), scored(4, SCORES[3], attempt=2))
        node.tokens(0, 10, attempt=2)
        await settle()
        node.break_off()
        await asyncio.sleep(5)
        _, submit = asked(3)
        assert (submit.sampling.prompt_logprobs, submit.prompt_ids) == (None, (1, 2, 3, 4, 5, 10))
        assert [item.prompt_logprobs for item in reader.items if isinstance(item, Delta)] == [SCORES]


@virtual
async def test_a_first_token_without_the_scores_is_a_fault() -> None:
    async with cluster() as made, reading(made, a_request(1, 2, 3, prompt_logprobs=1)) as reader:
        made["p1"].emit(scored(1, SCORES[0]))
        made["p1"].tokens(0, 10)
        await settle()
        assert isinstance(reader.error, TokenConflict)
        assert reader.items == []


@pytest.mark.parametrize(
    "events", [[scored(2, SCORES[0])], [scored(1, *SCORES)], [scored(1, SCORES[0]), scored(3, SCORES[0])]]
)
def test_scores_that_cannot_be_are_a_fault(events: list[PromptLogprobs]) -> None:
    merger = TokenMerger(max_tokens=4, num_scores=3)
    *good, bad = events
    for event in good:
        merger.score(event)
    with pytest.raises(MergeFault, match="prompt scores"):
        merger.score(bad)


def test_scores_nobody_asked_for_are_a_fault() -> None:
    with pytest.raises(MergeFault, match="prompt scores"):
        TokenMerger(max_tokens=4).score(scored(1, SCORES[0]))


def test_a_prompt_of_one_token_has_scores_without_being_told() -> None:
    merger = TokenMerger(max_tokens=4, num_scores=0)
    (delta,) = merger.add(Tokens(tid=TID, first_index=0, ids=(7,)))
    assert (merger.wants_scores, delta.prompt_logprobs) == (False, ())
