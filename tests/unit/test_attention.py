"""The torch attention backend against dense attention written out row by row."""

import random
from collections.abc import Sequence

import pytest
import torch

from engine.attention import TorchAttention
from engine.batch import Span
from engine.layout import PoolSpec, build_layout
from engine.pool import PagePool

NUM_KV_HEADS, GROUPS, HEAD_DIM, PAGE_SIZE = 2, 3, 16, 4


class Scene:
    """A pool and spans whose committed context is already in it; pages nobody owns hold rubbish."""

    def __init__(self, shapes: Sequence[tuple[int, int, str]], *, seed: int) -> None:
        """shapes: (num_committed, num_rows, "chain" or "tree") per span."""
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        spec = PoolSpec(pool="target", num_layers=2, num_kv_heads=NUM_KV_HEADS, head_dim=HEAD_DIM)
        layout = build_layout(page_size=PAGE_SIZE, dtype="float32", pools=[spec])
        self.pool = PagePool(layout, 1024, torch.device("cpu"))
        self.pool.storage.view(torch.float32).fill_(1e4)
        free = list(range(1024))
        self.random.shuffle(free)
        self.spans: list[Span] = []
        self.context_kv: list[torch.Tensor] = []
        for num_committed, num_rows, kind in shapes:
            pages = [free.pop() for _ in range(-(-(num_committed + num_rows) // PAGE_SIZE) + 1)]
            self.spans.append(self._span(num_committed, num_rows, kind, pages))
            self.context_kv.append(self._commit(num_committed, pages))
        num_rows = sum(len(span.token_ids) for span in self.spans)
        self.q_THD = self._randn(num_rows, NUM_KV_HEADS * GROUPS, HEAD_DIM)
        self.kv_T2KD = self._randn(num_rows, 2, NUM_KV_HEADS, HEAD_DIM)

    def attend(self, window: int | None) -> torch.Tensor:
        return attend(self.pool, self.spans, self.q_THD, self.kv_T2KD, window)

    def expected(self, window: int | None) -> torch.Tensor:
        rows: list[torch.Tensor] = []
        start = 0
        for span, context in zip(self.spans, self.context_kv, strict=True):
            stop = start + len(span.token_ids)
            kv_L2KD = torch.cat((context, self.kv_T2KD[start:stop]))
            for row in range(stop - start):
                seen = seen_slots(span, row, window)
                rows.append(dense_row(self.q_THD[start + row], kv_L2KD[seen]))
            start = stop
        return torch.stack(rows)

    def _randn(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator)

    def _span(self, num_committed: int, num_rows: int, kind: str, pages: list[int]) -> Span:
        parents = None
        if kind == "tree":
            parents = [-1, *(self.random.randrange(row) for row in range(1, num_rows))]
        return Span(
            token_ids=[0] * num_rows,
            num_committed=num_committed,
            pages=pages,
            positions=range(num_rows),
            logit_rows=(),
            parents=parents,
        )

    def _commit(self, count: int, pages: Sequence[int]) -> torch.Tensor:
        kv_L2KD = self._randn(count, 2, NUM_KV_HEADS, HEAD_DIM)
        pair = self.pool.kv_pair("target", 1)
        for slot in range(count):
            pair[pages[slot // PAGE_SIZE], :, slot % PAGE_SIZE] = kv_L2KD[slot]
        return kv_L2KD


def attend(
    pool: PagePool, spans: Sequence[Span], q_THD: torch.Tensor, kv_T2KD: torch.Tensor, window: int | None
) -> torch.Tensor:
    plan = TorchAttention().plan(
        spans, page_size=PAGE_SIZE, window=window, dtype=torch.float32, device=torch.device("cpu")
    )
    return plan.attend(q_THD, kv_T2KD, pool.kv_pair("target", 1))


def seen_slots(span: Span, row: int, window: int | None) -> list[int]:
    own: list[int] = []
    node = row
    while node >= 0:
        own.insert(0, span.num_committed + node)
        node = node - 1 if span.parents is None else span.parents[node]
    seen = [*range(span.num_committed), *own]
    return seen if window is None else seen[-window:]


def dense_row(q_HD: torch.Tensor, kv_L2KD: torch.Tensor) -> torch.Tensor:
    k_LHD, v_LHD = kv_L2KD.repeat_interleave(GROUPS, dim=2).unbind(1)
    weights_HL = torch.softmax(torch.einsum("hd,lhd->hl", q_HD, k_LHD) * HEAD_DIM**-0.5, dim=1)
    return torch.einsum("hl,lhd->hd", weights_HL, v_LHD).flatten()


SHAPES = {
    "one_decode_row": [(9, 1, "chain")],
    "decode_rows_of_one_length": [(300, 1, "chain"), (300, 1, "chain"), (300, 1, "chain")],
    "decode_rows_of_many_lengths": [(n, 1, "chain") for n in (3, 700, 0, 40, 44, 650, 41)],
    "one_tree": [(21, 7, "tree")],
    "trees_and_chains": [
        (200, 7, "tree"),
        (210, 5, "chain"),
        (190, 12, "tree"),
        (5, 1, "chain"),
        (0, 9, "tree"),
    ],
    "a_first_chunk_of_several_blocks": [(0, 300, "chain")],
    "a_later_chunk_of_several_blocks": [(133, 290, "chain")],
    "a_tree_of_several_blocks": [(77, 200, "tree")],
    "everything": [(0, 150, "chain"), (64, 1, "chain"), (31, 60, "tree"), (50, 6, "tree"), (99, 49, "chain")],
}


@pytest.mark.parametrize("window", [None, 1, 6, 50, 200])
@pytest.mark.parametrize("shapes", SHAPES.values(), ids=SHAPES.keys())
def test_rows_attend_to_their_context_and_ancestors_only(
    shapes: Sequence[tuple[int, int, str]], window: int | None
) -> None:
    scene = Scene(shapes, seed=7)
    torch.testing.assert_close(scene.attend(window), scene.expected(window), atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("seed", range(3))
def test_random_batches_attend_like_dense_attention(seed: int) -> None:
    picker = random.Random(seed)
    for _ in range(10):
        shapes = [
            (
                picker.choice([0, 3, 4, 60, 400]),
                picker.choice([1, 1, 2, 8, 50, 140]),
                picker.choice(["chain", "tree"]),
            )
            for _ in range(picker.randrange(1, 7))
        ]
        window = picker.choice([None, 3, 33])
        scene = Scene(shapes, seed=picker.randrange(2**32))
        torch.testing.assert_close(scene.attend(window), scene.expected(window), atol=2e-5, rtol=1e-4)


def test_kv_is_written_to_the_slots_of_the_rows_and_nowhere_else() -> None:
    scene = Scene([(6, 3, "chain"), (2, 1, "chain")], seed=1)
    before = scene.pool.kv_pair("target", 1).clone()
    scene.attend(None)
    first, second = scene.spans[0].pages, scene.spans[1].pages
    slots = [(first[1], 2), (first[1], 3), (first[2], 0), (second[0], 2)]
    for row, (page, offset) in enumerate(slots):
        before[page, :, offset] = scene.kv_T2KD[row]
    assert torch.equal(scene.pool.kv_pair("target", 1), before)
    assert bool((scene.pool.kv_pair("target", 0) == 1e4).all())


def test_a_request_attends_alike_alone_and_among_neighbours() -> None:
    shapes = [(40, 1, "chain"), (0, 100, "chain"), (500, 3, "tree"), (38, 4, "tree")]
    scene = Scene(shapes, seed=3)
    together = scene.attend(None)
    start = 0
    for span in scene.spans:
        stop = start + len(span.token_ids)
        alone = attend(scene.pool, [span], scene.q_THD[start:stop], scene.kv_T2KD[start:stop], None)
        torch.testing.assert_close(together[start:stop], alone, atol=1e-5, rtol=1e-5)
        start = stop
