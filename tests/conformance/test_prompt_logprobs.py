"""What a prompt's own tokens scored, by transformers and through engine, pair and re-dispatch."""

from functools import cache

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.params import TokenLogprob
from engine.request import Request
from speculative.progress import Progress
from speculative.registry import create_proposer
from tests.conformance.test_loop import prompt_of, reference
from tests.engines import make_engine, make_request, run, tiny_folder, tokens_of
from tests.node_pair import NodePair
from wire.work import PromptInfo, PromptLogprobs, Tokens

TOP = 3


@cache
def truth(prompt: tuple[int, ...]) -> torch.Tensor:
    """Log-probabilities `[prompt - 1, V]` by transformers."""
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    with torch.inference_mode():
        return torch.log_softmax(model(torch.tensor([prompt])).logits[0, :-1], dim=-1)


def assert_true(scores: list[TokenLogprob], prompt: list[int], num_top: int = TOP) -> None:
    logprobs_SV = truth(tuple(prompt))
    assert len(scores) == len(prompt) - 1
    for row, (token_id, score) in enumerate(zip(prompt[1:], scores, strict=True)):
        assert score.logprob == pytest.approx(float(logprobs_SV[row, token_id]), abs=1e-4)
        best = logprobs_SV[row].topk(num_top) if num_top else None
        assert [i for i, _ in score.top] == ([] if best is None else best.indices.tolist())
        assert [v for _, v in score.top] == pytest.approx(
            [] if best is None else best.values.tolist(), abs=1e-4
        )


def scores_of(history: list[Progress]) -> list[TokenLogprob]:
    """All of a request's, each index once and in order."""
    found: list[TokenLogprob] = []
    for progress in history:
        if progress.prompt_logprobs:
            assert progress.first_scored == len(found) + 1
            found += progress.prompt_logprobs
    return found


@pytest.mark.parametrize(("chunk_tokens", "scored_tokens"), [(64, 512), (16, 512), (64, 5)])
def test_scores_are_those_of_transformers_and_change_no_token(chunk_tokens: int, scored_tokens: int) -> None:
    proposer = create_proposer("ngram", {"num_draft_tokens": 6})
    engine = make_engine(proposer, num_pages=600, chunk_tokens=chunk_tokens, scored_tokens=scored_tokens)
    scored = [make_request(f"s{n}", prompt_of(n), prompt_logprobs=TOP) for n in (1, 2, 16, 17, 65)]
    plain = [make_request(f"p{n}", prompt_of(n)) for n in (2, 33, 129)]
    history = run(
        engine, [request for pair in zip(scored, plain, strict=False) for request in pair] + scored[3:]
    )
    for request in [*scored, *plain]:
        assert tuple(tokens_of(history[str(request.key)])) == reference(request.prompt_ids, 12), request.key
    for request in scored:
        assert_true(scores_of(history[str(request.key)]), list(request.prompt_ids))
    for request in plain:
        assert scores_of(history[str(request.key)]) == []


def test_a_scored_prompt_is_computed_whole_though_it_is_cached_and_is_cached_for_others() -> None:
    engine = make_engine(num_pages=600)
    requests = [make_request("a", prompt_of(33)), make_request("b", prompt_of(33), prompt_logprobs=0)]
    requests += [make_request("c", prompt_of(33)), make_request("d", prompt_of(65), prompt_logprobs=0)]
    requests.append(make_request("e", prompt_of(65)))
    for request in requests:
        history = run(engine, [request])
        assert tuple(tokens_of(history[str(request.key)])) == reference(request.prompt_ids, 12)
        if request.sampling.prompt_logprobs is not None:
            assert_true(scores_of(history[str(request.key)]), list(request.prompt_ids), num_top=0)
    assert [request.num_cached_tokens for request in requests] == [0, 0, 32, 0, 64]


def test_a_further_attempt_scores_the_users_prompt_only() -> None:
    """Its prompt holds what was delivered before, which is no prompt of the user's."""
    prompt, delivered = prompt_of(20), reference(tuple(prompt_of(20)), 4)
    request = Request(
        key="again",
        prompt_ids=(*prompt, *delivered),
        num_prompt_tokens=len(prompt),
        sampling=make_request("x", prompt, prompt_logprobs=TOP).sampling,
    )
    history = run(make_engine(chunk_tokens=7), [request])
    assert_true(scores_of(history["again"]), prompt)
    assert tuple(delivered) + tuple(tokens_of(history["again"])) == reference(tuple(prompt), 12)


@pytest.mark.parametrize("max_tokens", [1, 5])
def test_the_prefill_node_tells_them_before_the_first_token(max_tokens: int) -> None:
    pair = NodePair(algorithm="ngram", prefill_options={"chunk_tokens": 16})
    for key in ("cold", "cached"):
        tid = pair.submit(key, prompt_of(40), max_tokens=max_tokens, prompt_logprobs=TOP)
        pair.run()
        assert tuple(pair.tokens(tid)) == reference(tuple(prompt_of(40)), max_tokens)
        told = [event for event in pair.events["P"] if event.tid == tid]
        kinds = [type(event) for event in told if isinstance(event, PromptInfo | PromptLogprobs | Tokens)]
        assert kinds == [PromptInfo, *[PromptLogprobs] * 3, Tokens]
        scored = [event for event in told if isinstance(event, PromptLogprobs)]
        assert [event.first_index for event in scored] == [1, 17, 33]
        assert_true([entry for event in scored for entry in event.logprobs], prompt_of(40))
        assert not any(isinstance(event, PromptLogprobs) for event in pair.events["D"])
    assert pair.is_at_rest()
