"""On a GPU: the same logits and the same text as on the CPU."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.batch import ForwardBatch, Span
from tests.conformance.test_grammar import SPECS, constrained, plain_text
from tests.conformance.test_loop import LENGTHS, PROPOSERS, prompt_of, proposer, reference
from tests.engines import make_engine, make_request, run, tiny_folder, tiny_model, tokens_of
from tests.tiny_models import TINY_FAMILIES, pool_for


@pytest.mark.parametrize("family", TINY_FAMILIES)
def test_logits_equal_transformers(family: str) -> None:
    loaded = tiny_model(family, "cuda")
    pool = pool_for(loaded)
    prompt = prompt_of(33)
    span = Span(
        token_ids=prompt,
        num_committed=0,
        pages=range(9),
        positions=range(33),
        logit_rows=range(33),
    )
    ours = loaded.model.forward(ForwardBatch(spans=[span]), pool).logits_RV.cpu()
    oracle = AutoModelForCausalLM.from_pretrained(tiny_folder(family), dtype=torch.float32)
    with torch.inference_mode():
        theirs = oracle(torch.tensor([prompt])).logits[0]
    assert float((ours - theirs).abs().max()) <= 2e-4


@pytest.mark.parametrize("name", PROPOSERS)
def test_greedy_text_equals_the_cpu_reference(name: str) -> None:
    engine = make_engine(proposer(name), num_pages=1000, device="cuda")
    requests = [make_request(f"r{n}", prompt_of(n)) for n in LENGTHS]
    history = run(engine, requests)
    for request in requests:
        assert tuple(tokens_of(history[str(request.key)])) == reference(request.prompt_ids, 12), request.key


def test_seeded_text_equals_the_cpu() -> None:
    def text(device: str) -> list[int]:
        request = make_request("r", prompt_of(37), seed=5, temperature=0.9, top_p=0.9, max_tokens=24)
        return tokens_of(run(make_engine(proposer("ngram"), device=device), [request])["r"])

    assert text("cuda") == text("cpu")


@pytest.mark.parametrize("kind", SPECS)
def test_constrained_text_equals_the_cpu(kind: str) -> None:
    engine = make_engine(proposer("ngram"), device="cuda")
    neighbour = make_request("n", prompt_of(33))
    history = run(engine, [constrained("r", SPECS[kind]), neighbour])
    assert tuple(tokens_of(history["r"])) == plain_text(kind, False)
    assert tuple(tokens_of(history["n"])) == reference(neighbour.prompt_ids, 12)
