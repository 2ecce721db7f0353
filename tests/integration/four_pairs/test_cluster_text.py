"""Text through the cluster is that of plain decoding, whatever pair it takes and whoever runs beside it."""

import asyncio
import random
from collections import Counter
from typing import Any

import pytest

from tests.integration.cluster import Json
from tests.integration.four_pairs.conftest import NUM_TOKENS, FourPairs
from tests.integration.reference import (
    CHATS,
    COUNTING,
    LENGTHS,
    TEXTS,
    Reference,
    chat_ids,
    prompt_of,
    text_of,
    tokenizer,
)

pytestmark = [pytest.mark.asyncio(loop_scope="session"), pytest.mark.model, pytest.mark.timeout(600)]

GREEDY: Json = {"temperature": 0, "ignore_eos": True, "return_token_ids": True, "max_tokens": NUM_TOKENS}
SAMPLED: Json = {"temperature": 0.9, "top_p": 0.95, "ignore_eos": True, "return_token_ids": True}
NUM_AT_ONCE = 8
ORDER_SEED = 11


def ids_of(answer: Json) -> list[list[int]]:
    return [choice["token_ids"] for choice in answer["choices"]]


async def greedy(
    pairs: FourPairs, reference: Reference, prompt: str | tuple[int, ...], ids: tuple[int, ...]
) -> Json:
    """One choice from each pair; all of them must be the reference."""
    body: Json = {"prompt": prompt, "n": 4, **GREEDY}
    answer = await pairs.router.complete(**body)
    expected = reference.ids(ids, NUM_TOKENS)
    assert ids_of(answer) == [expected] * 4, (prompt, text_of(expected))
    assert {choice["text"] for choice in answer["choices"]} == {text_of(expected)}
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    assert answer["usage"]["prompt_tokens"] == len(ids)
    assert answer["usage"]["completion_tokens"] == 4 * NUM_TOKENS
    return answer


async def greedy_chat(pairs: FourPairs, reference: Reference, question: str) -> Json:
    body: Json = {"messages": [{"role": "user", "content": question}], "n": 4, **GREEDY}
    answer = await pairs.router.chat(**body)
    expected = reference.ids(chat_ids(question), NUM_TOKENS)
    assert ids_of(answer) == [expected] * 4, (question, text_of(expected))
    assert {choice["message"]["content"] for choice in answer["choices"]} == {text_of(expected)}
    return answer


async def test_greedy_text_equals_transformers_on_every_pair_cold_and_cached(
    four_pairs: FourPairs, reference: Reference
) -> None:
    """20 prompts, 8 at once in random order, each on all four pairs at the same time."""
    at_once = asyncio.Semaphore(NUM_AT_ONCE)

    async def limited(work: Any) -> Json:
        async with at_once:
            answer: Json = await work
            return answer

    print("order seed", ORDER_SEED)
    rng = random.Random(ORDER_SEED)
    for turn in ("cold", "cached"):
        before = await counted(four_pairs)
        work = [greedy(four_pairs, reference, prompt_of(n), prompt_of(n)) for n in LENGTHS]
        work += [greedy(four_pairs, reference, text, tuple(tokenizer()(text).input_ids)) for text in TEXTS]
        work += [greedy_chat(four_pairs, reference, question) for question in CHATS]
        rng.shuffle(work)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(limited(one)) for one in work]
        after = await counted(four_pairs)
        grown = {name: after[name] - before[name] for name in after}
        assert {name: one["joined"] for name, one in grown.items()} == dict.fromkeys(after, 20), turn
        for name, one in grown.items():
            some_stand_some_fall = 0 < one["accepted_tokens"] < one["drafted_tokens"]
            assert some_stand_some_fall if name.startswith("ngram") else one["drafted_tokens"] == 0, grown
        usages = [task.result()["usage"] for task in tasks]
        hits = {usage["prompt_tokens"]: usage["prompt_tokens_details"]["cached_tokens"] for usage in usages}
        if turn == "cached":
            assert {n: hits[n] for n in LENGTHS} == {n: (n - 1) // 16 * 16 for n in LENGTHS}
        await four_pairs.settle()


async def counted(pairs: FourPairs) -> dict[str, Counter[str]]:
    """How many requests came to each decode node, and what became of its drafts."""
    nodes = [node for node in pairs.cluster.nodes.values() if node.role == "decode"]
    facts = ("joined", "drafted_tokens", "accepted_tokens")
    counters = {node.name: (await node.status()).counters for node in nodes}
    return {name: Counter({fact: int(found[fact]) for fact in facts}) for name, found in counters.items()}


async def test_each_pair_moves_pages_by_its_own_transport(
    four_pairs: FourPairs, reference: Reference
) -> None:
    ways: dict[str, Json] = {}
    for turn in range(4):
        answer = await four_pairs.router.complete(prompt=prompt_of(64), cache_salt=f"way {turn}", **GREEDY)
        assert ids_of(answer) == [reference.ids(prompt_of(64), NUM_TOKENS)]
        ways[answer["paceline"]["decode"]] = answer
    nodes = {node.address: node.name for node in four_pairs.cluster.nodes.values()}
    assert {nodes[address]: way["paceline"]["transport"] for address, way in ways.items()} == {
        "ngram-nixl": "nixl",
        "ngram-grpc": "grpc",
        "none-nixl": "nixl",
        "none-grpc": "grpc",
    }
    page_bytes = 16 * 30 * 2 * 3 * 64 * 4
    assert {way["paceline"]["kv_bytes"] for way in ways.values()} == {4 * page_bytes}
    drafted = {
        nodes[address]: way["metrics"]["speculative_decoding"]["num_drafted"] for address, way in ways.items()
    }
    assert drafted["none-nixl"] == drafted["none-grpc"] == 0
    assert drafted["ngram-nixl"] == drafted["ngram-grpc"] > 0
    await four_pairs.settle()


async def test_a_seed_draws_the_same_text_on_every_pair_and_colocated(four_pairs: FourPairs) -> None:
    body: Json = {"prompt": COUNTING, "seed": 2**64 - 1, "max_tokens": 12, **SAMPLED}
    texts: dict[str, list[int]] = {}
    for router in (four_pairs.router, four_pairs.colocated):
        for _ in range(4):
            answer = await router.complete(**body)
            where = answer["paceline"]
            texts[f"{where['prefill'] or 'colocated'} {where['decode']}"] = ids_of(answer)[0]
    assert len(texts) == 8
    assert len(set(map(tuple, texts.values()))) == 1, texts
    assert len(texts.popitem()[1]) == 12
    await four_pairs.settle()


async def test_a_seed_draws_the_same_text_alone_and_among_7_neighbours(four_pairs: FourPairs) -> None:
    body: Json = {"prompt": COUNTING, "seed": 3, "max_tokens": 12, **SAMPLED}
    neighbour: Json = {"prompt": prompt_of(33), "n": 4, "max_tokens": 16, **SAMPLED}
    alone = await four_pairs.router.complete(**body)
    async with asyncio.TaskGroup() as group:
        others = [group.create_task(four_pairs.router.complete(seed=8 * i, **neighbour)) for i in range(7)]
        crowded = [group.create_task(four_pairs.router.complete(**body)) for _ in range(4)]
    assert {tuple(ids_of(task.result())[0]) for task in crowded} == {tuple(ids_of(alone)[0])}
    assert len({task.result()["paceline"]["decode"] for task in crowded}) == 4
    drawn = {tuple(ids) for task in others for ids in ids_of(task.result())}
    assert len(drawn) > 14  # other seeds, other texts
    await four_pairs.settle()


async def test_bad_words_stay_out_and_the_text_is_the_same_on_every_pair(four_pairs: FourPairs) -> None:
    body: Json = {"prompt": TEXTS[0], "max_tokens": 24, "temperature": 0}
    plain = (await four_pairs.router.complete(**body))["choices"][0]["text"]
    words = sorted({word for word in plain.split() if word.isalpha()})
    assert words
    answers = [await four_pairs.router.complete(**body, bad_words=words) for _ in range(4)]
    assert len({answer["paceline"]["decode"] for answer in answers}) == 4
    (text,) = {answer["choices"][0]["text"] for answer in answers}
    assert not {word for word in text.split() if word in words}, (plain, text)
    await four_pairs.settle()
