"""S03 and S04 of the reports from the field: stops inside accepted runs, by HTTP, on real engines."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import httpx
import msgspec
import pytest
import tokenizers
from tokenizers import decoders, models

from engine.request import Request
from router.text.model_text import ModelText
from router.text.tokenizer import Tokenizer
from speculative.ngram import NgramConfig, NgramProposer
from speculative.proposer import Proposer
from tests.conformance.test_loop import reference
from tests.engines import VOCAB_SIZE
from tests.fakes_dispatch import http_app, record
from tests.fakes_proposers import BushyProposer, SureProposer
from tests.simulation.cluster import MAX_MODEL_LEN, SimConfig, running_cluster
from tests.simulation.virtual_loop import run_virtual

Json = dict[str, Any]

NUM_TOKENS = 64
NUM_DRAFTS = 8
PROMPT = [120, 94, 128, 127, 62, 174, 76] * 2  # of its continuation the first 26 tokens are all new


@cache
def text() -> ModelText:
    """Every id is two letters, so that two tokens make a stop that may also begin in mid-token."""
    letters = "abcdefghijklmnop"
    pieces = [one + other for one in letters for other in letters]
    backend = tokenizers.Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, []))
    backend.decoder = decoders.ByteLevel()
    return ModelText(Tokenizer(backend), template=None)


def said(num_tokens: int = NUM_TOKENS) -> list[int]:
    return list(reference(tuple(PROMPT), NUM_TOKENS))[:num_tokens]


def text_of(ids: Sequence[int]) -> str:
    return text().tokenizer.decode(list(ids))


def truth(request: Request, count: int) -> list[int]:
    done = len(request.tokens) - len(request.prompt_ids)
    return said()[done : done + count]


DRAFTS: Mapping[str, Callable[[], Proposer]] = {
    "ngram": lambda: NgramProposer(NgramConfig(num_draft_tokens=NUM_DRAFTS)),
    "sure": lambda: SureProposer(truth, vocab_size=VOCAB_SIZE, num_draft_tokens=NUM_DRAFTS, seed=0),
    "bushy": lambda: BushyProposer(truth, vocab_size=VOCAB_SIZE, num_draft_tokens=NUM_DRAFTS, seed=0),
}
every_draft = pytest.mark.parametrize("draft", DRAFTS)


async def whole(client: httpx.AsyncClient, body: Json) -> Json:
    response = await client.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    answer: Json = response.json()
    return answer


async def streamed(client: httpx.AsyncClient, body: Json) -> Json:
    """Put together; nothing of a choice may follow its finish reason."""
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await client.post("/v1/completions", json={**body, **options})
    lines = [line for line in response.text.split("\n") if line]
    assert lines.pop() == "data: [DONE]"
    answer: Json = {"text": "", "token_ids": [], "tokens": [], "finish_reason": None}
    usage: Json = {}
    for line in lines:
        chunk = msgspec.json.decode(line.removeprefix("data: "))
        usage = chunk["usage"] or usage
        for part in chunk["choices"]:
            assert answer["finish_reason"] is None
            answer["text"] += part["text"]
            answer["token_ids"] += part.get("token_ids", [])
            answer["tokens"] += (part["logprobs"] or {"tokens": []})["tokens"]
            answer["finish_reason"] = part["finish_reason"]
    logprobs = {"tokens": answer.pop("tokens")}
    return {"choices": [{**answer, "logprobs": logprobs}], "usage": usage}


def ask(draft: str, bodies: Sequence[Json]) -> tuple[list[tuple[Json, Json]], dict[str, float]]:
    """(streamed, whole) answer to each body through P, D and router, and what D counted."""
    config = SimConfig(draft=DRAFTS[draft], engine={"D": {"num_pages": 600}, "P": {"num_pages": 600}})

    async def main() -> tuple[list[tuple[Json, Json]], dict[str, float]]:
        async with running_cluster(config) as cluster:
            await cluster.until_ready(1)
            node = record(model="tiny", vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN, eos_token_ids=())
            app = http_app(cluster.dispatcher, text(), node=node)
            transport = httpx.ASGITransport(app=app)
            at_once = asyncio.Semaphore(8)

            async def both(client: httpx.AsyncClient, body: Json) -> tuple[Json, Json]:
                common = {"prompt": PROMPT, "temperature": 0, "return_token_ids": True, "logprobs": 1}
                async with at_once:
                    return await streamed(client, common | body), await whole(client, common | body)

            async with httpx.AsyncClient(
                transport=transport, base_url="http://router", timeout=None
            ) as client:
                answers = await asyncio.gather(*(both(client, body) for body in bodies))
            await cluster.at_rest()
            return answers, dict(cluster.nodes["D0"].status.counters)

    return run_virtual(main())


def check(answers: tuple[Json, Json], ids: Sequence[int], shown: str, reason: str) -> None:
    for answer in answers:
        (choice,) = answer["choices"]
        found = (choice["token_ids"], choice["text"], choice["finish_reason"])
        assert found == (list(ids), shown, reason)
        assert len(choice["logprobs"]["tokens"]) == answer["usage"]["completion_tokens"] == len(ids)


@every_draft
def test_s03_a_stop_string_inside_an_accepted_chain_ends_ids_text_logprobs_and_usage(draft: str) -> None:
    """S = text of g[j..j+1] for j = 1..24 where it does not occur earlier, streamed and whole."""
    full = text_of(said())
    stops = {j: text_of(said()[j : j + 2]) for j in range(1, 25)}
    stops = {j: stop for j, stop in stops.items() if full.index(stop) == 2 * j}
    assert len(stops) == 24
    answers, counters = ask(draft, [{"stop": [stop], "max_tokens": NUM_TOKENS} for stop in stops.values()])
    for (j, stop), both in zip(stops.items(), answers, strict=True):
        check(both, said(j + 2), full[: full.index(stop)], "stop")
    assert counters["accepted_tokens"] > 200 or draft == "ngram"  # which finds no new tokens in the text


def unseen() -> list[int]:
    """Places 1..10 of tokens that are not seen before, nor their text across two tokens."""
    full = text_of(said())
    return [s for s in range(1, 11) if full.index(text_of(said()[s : s + 1])) == 2 * s]


@pytest.mark.parametrize("field", ["stop_token_ids", "stop"])
@every_draft
def test_s04_a_stop_and_the_cap_in_one_round_end_at_whichever_is_first(draft: str, field: str) -> None:
    """Caps from the stop's own place to a round later, and one short of the stop."""
    places = unseen()
    assert len(places) == 10
    cases = [(s, cap) for s in places for cap in (s, s + 1, s + 4, s + NUM_DRAFTS + 1)]
    stops = {s: [said()[s]] if field == "stop_token_ids" else [text_of(said()[s : s + 1])] for s in places}
    answers, _ = ask(draft, [{field: stops[s], "max_tokens": cap} for s, cap in cases])
    for (s, cap), both in zip(cases, answers, strict=True):
        if cap == s:
            check(both, said(s), text_of(said(s)), "length")
        else:
            check(both, said(s + 1), text_of(said(s)), "stop")


@every_draft
def test_s04_max_tokens_is_exact_for_every_count_of_two_rounds(draft: str) -> None:
    counts = range(1, 2 * (NUM_DRAFTS + 1) + 2)
    answers, _ = ask(draft, [{"max_tokens": count} for count in counts])
    for count, both in zip(counts, answers, strict=True):
        check(both, said(count), text_of(said(count)), "length")
