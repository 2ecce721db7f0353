"""The native models against transformers, row by row."""

import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from engine.batch import ForwardBatch, ForwardOutput, Span
from engine.loaders import LoadedModel, load_model
from engine.pool import PagePool
from tests.tiny_models import TINY_FAMILIES, build_tiny, pool_for, save_tiny

TOLERANCE = 2e-4
NUM_TOKENS = 140


class Tiny:
    """One family loaded natively, with transformers' logits and hidden states for one prompt."""

    def __init__(self, family: str, folder: Path) -> None:
        self.loaded: LoadedModel = load_model(save_tiny(family, folder), dtype="float32", device="cpu")
        self.oracle = build_tiny(family)
        self.ids = token_ids(NUM_TOKENS, seed=1)
        with torch.inference_mode():
            output = self.oracle(torch.tensor([self.ids]), output_hidden_states=True)
        self.logits_TV = output.logits[0]
        self.hidden = [hidden[0] for hidden in output.hidden_states]

    def run(self, pool: PagePool, *spans: Span, hidden_layers: tuple[int, ...] = ()) -> ForwardOutput:
        return self.loaded.model.forward(ForwardBatch(spans=spans, hidden_layers=hidden_layers), pool)


@pytest.fixture(scope="module", params=TINY_FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(request.param, tmp_path_factory.mktemp("models") / request.param)


def token_ids(count: int, *, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(256) for _ in range(count)]


def shuffled_pages(count: int, *, seed: int) -> list[int]:
    pages = list(range(256))
    random.Random(seed).shuffle(pages)
    return pages[:count]


def span(ids: Sequence[int], start: int, pages: Sequence[int]) -> Span:
    return Span(
        token_ids=ids,
        num_committed=start,
        pages=pages,
        positions=range(start, start + len(ids)),
        logit_rows=range(len(ids)),
    )


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    assert actual.shape == expected.shape
    assert float((actual - expected).abs().max()) <= TOLERANCE


@pytest.mark.parametrize("chunk", [NUM_TOKENS, 60, 7, 1])
def test_chunked_logits_equal_transformers(tiny: Tiny, chunk: int) -> None:
    pool, pages = pool_for(tiny.loaded), shuffled_pages(36, seed=2)
    for start in range(0, NUM_TOKENS, chunk):
        ids = tiny.ids[start : start + chunk]
        output = tiny.run(pool, span(ids, start, pages))
        assert_close(output.logits_RV, tiny.logits_TV[start : start + len(ids)])


def test_hidden_states_equal_transformers_before_the_final_norm(tiny: Tiny) -> None:
    output = tiny.run(
        pool_for(tiny.loaded), span(tiny.ids, 0, shuffled_pages(36, seed=3)), hidden_layers=(0, 1, 2, 3)
    )
    assert sorted(output.hidden) == [0, 1, 2, 3]
    for index in (0, 1, 2):
        assert_close(output.hidden[index], tiny.hidden[index])
    with torch.inference_mode():
        last_TE = tiny.oracle.get_decoder().norm(output.hidden[3])
    assert_close(last_TE, tiny.hidden[3])


def test_only_wanted_rows_get_logits(tiny: Tiny) -> None:
    pages = shuffled_pages(36, seed=4)
    wanted = Span(
        token_ids=tiny.ids, num_committed=0, pages=pages, positions=range(NUM_TOKENS), logit_rows=(3, 139)
    )
    output = tiny.run(pool_for(tiny.loaded), wanted)
    assert_close(output.logits_RV, tiny.logits_TV[[3, 139]])
    silent = Span(
        token_ids=tiny.ids, num_committed=0, pages=pages, positions=range(NUM_TOKENS), logit_rows=()
    )
    assert tiny.run(pool_for(tiny.loaded), silent).logits_RV.shape == (0, 256)


def test_a_mixed_batch_gives_each_request_its_own_logits(tiny: Tiny) -> None:
    """Prompt chunks and decode rows of different lengths, packed together, out of page order."""
    pool = pool_for(tiny.loaded)
    pages = shuffled_pages(216, seed=5)
    tables = [pages[i * 36 : (i + 1) * 36] for i in range(6)]
    starts = [0, 44, 13, 130, 2, 61]
    counts = [NUM_TOKENS, 1, 9, 1, 3, 70]
    for start, table in zip(starts, tables, strict=True):
        if start:
            tiny.run(pool, span(tiny.ids[:start], 0, table))
    spans = [
        span(tiny.ids[start : start + count], start, table)
        for start, count, table in zip(starts, counts, tables, strict=True)
    ]
    expected = torch.cat([tiny.logits_TV[s : s + c] for s, c in zip(starts, counts, strict=True)])
    assert_close(tiny.run(pool, *spans).logits_RV, expected)


def test_every_path_of_a_tree_equals_the_same_tokens_run_in_line(tiny: Tiny) -> None:
    parents = [-1, 0, 0, 1, 1, 2, 4, 6]
    drafted = token_ids(len(parents), seed=6)
    prefix = tiny.ids[:22]
    pool, pages = pool_for(tiny.loaded), shuffled_pages(36, seed=7)
    tiny.run(pool, span(prefix, 0, pages))
    paths = [path_to(parents, node) for node in range(len(parents))]
    tree = Span(
        token_ids=drafted,
        num_committed=len(prefix),
        pages=pages,
        positions=[len(prefix) + len(path) - 1 for path in paths],
        logit_rows=range(len(parents)),
        parents=parents,
    )
    logits = tiny.run(pool, tree).logits_RV
    for node, path in enumerate(paths):
        line = prefix + [drafted[i] for i in path]
        alone = tiny.run(pool_for(tiny.loaded), span(line, 0, shuffled_pages(36, seed=8)))
        assert_close(logits[node], alone.logits_RV[-1])


def test_write_back_of_an_accepted_path_continues_like_plain_decoding(tiny: Tiny) -> None:
    parents, path = [-1, 0, 0, 2], [0, 2, 3]
    prefix, drafted = tiny.ids[:18], [tiny.ids[18], 9, tiny.ids[19], tiny.ids[20]]
    pool, pages = pool_for(tiny.loaded), shuffled_pages(36, seed=9)
    tiny.run(pool, span(prefix, 0, pages))
    tree = Span(
        token_ids=drafted,
        num_committed=18,
        pages=pages,
        positions=[18, 19, 19, 20],
        logit_rows=range(4),
        parents=parents,
    )
    tiny.run(pool, tree)
    size = pool.layout.page_size
    slots = [pages[slot // size] * size + slot % size for slot in range(18, 22)]
    pool.move_rows(torch.tensor([slots[node] for node in path]), torch.tensor(slots[: len(path)]))
    output = tiny.run(pool, span(tiny.ids[21:23], 21, pages))
    assert_close(output.logits_RV, tiny.logits_TV[21:23])


def path_to(parents: Sequence[int], node: int) -> list[int]:
    path: list[int] = []
    while node >= 0:
        path.insert(0, node)
        node = parents[node]
    return path
