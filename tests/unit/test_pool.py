"""The pool's views lie where the layout says, byte for byte."""

import torch

from engine.layout import PoolSpec, build_layout
from engine.pool import PagePool


def make_pool() -> PagePool:
    specs = [
        PoolSpec(pool="target", num_layers=2, num_kv_heads=2, head_dim=8),
        PoolSpec(pool="draft", num_layers=1, num_kv_heads=1, head_dim=16),
    ]
    return PagePool(build_layout(page_size=4, dtype="float32", pools=specs), 3, torch.device("cpu"))


def test_a_row_lies_in_its_region_of_its_page() -> None:
    pool = make_pool()
    for region in pool.layout.regions:
        k, v = pool.kv(region.pool, region.layer)
        view = k if region.kind == "k" else v
        view[1] = torch.arange(view[1].numel(), dtype=torch.float32).view(view[1].shape)
        begin = region.offset
        stored = pool.page(1)[begin : begin + view[1].numel() * 4].cast("f").tolist()
        assert stored == list(range(view[1].numel())), region.name
        view.zero_()
    assert not any(pool.buffer)


def test_pages_partition_the_buffer() -> None:
    pool = make_pool()
    pool.page(2)[:] = b"\x01" * pool.layout.page_bytes
    assert sum(pool.buffer) == pool.layout.page_bytes
    assert pool.address % 4096 == 0


def test_rows_move_in_every_region_even_when_sources_and_targets_overlap() -> None:
    pool = make_pool()
    for pair in (("target", 0), ("target", 1), ("draft", 0)):
        for view in pool.kv(*pair):
            view.view(3, 4, -1)[:] = torch.arange(12, dtype=torch.float32).view(3, 4, 1)
    pool.move_rows(torch.tensor([5, 6, 11]), torch.tensor([4, 5, 0]))
    for pair in (("target", 0), ("target", 1), ("draft", 0)):
        for view in pool.kv(*pair):
            assert view[..., 0, 0].flatten().tolist() == [11, 1, 2, 3, 5, 6, 6, 7, 8, 9, 10, 11]
