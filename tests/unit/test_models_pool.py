"""The pool's memory: bytes, views and moved rows."""

import pytest
import torch

from engine.layout import KvLayout, PoolSpec, build_layout
from engine.pool import PagePool

CPU = torch.device("cpu")


def two_models() -> KvLayout:
    return build_layout(
        page_size=4,
        dtype="bfloat16",
        pools=[
            PoolSpec(pool="target", num_layers=3, num_kv_heads=2, head_dim=8),
            PoolSpec(pool="draft", num_layers=1, num_kv_heads=1, head_dim=5),
        ],
    )


def test_views_lie_in_the_page_where_the_layout_says() -> None:
    layout = two_models()
    pool = PagePool(layout, 6, CPU)
    for number, region in enumerate(layout.regions):
        view = pool.kv(region.pool, region.layer)[0 if region.kind == "k" else 1]
        assert view.shape == (6, 4, region.num_heads, region.head_dim)
        view[5] = number + 1
    for number, region in enumerate(layout.regions):
        count = 4 * region.num_heads * region.head_dim
        raw = bytes(pool.page(5)[region.offset : region.offset + 2 * count])
        assert torch.equal(
            torch.frombuffer(bytearray(raw), dtype=torch.bfloat16),
            torch.full((count,), number + 1.0).bfloat16(),
        )
    assert bytes(pool.buffer[: 5 * layout.page_bytes]) == bytes(5 * layout.page_bytes)


def test_buffer_starts_at_a_memory_page_and_covers_the_pool() -> None:
    layout = two_models()
    pool = PagePool(layout, 6, CPU)
    assert pool.address % 4096 == 0
    assert pool.buffer.nbytes == 6 * layout.page_bytes
    pool.buffer[layout.page_bytes] = 7
    assert pool.page(1)[0] == 7
    assert int(pool.storage[layout.page_bytes]) == 7


def test_moved_rows_carry_every_region_and_read_before_they_write() -> None:
    pool = PagePool(two_models(), 3, CPU)
    pool.storage.copy_(
        torch.randint(
            0, 120, pool.storage.shape, generator=torch.Generator().manual_seed(1), dtype=torch.uint8
        )
    )
    before = {key: pool.kv_pair(*key).clone() for key in (("target", 0), ("target", 2), ("draft", 0))}
    pool.move_rows(torch.tensor([5, 9]), torch.tensor([4, 5]))  # slot 5 is both a source and a target
    for key, old in before.items():
        new = pool.kv_pair(*key)
        assert torch.equal(new[1, :, 0], old[1, :, 1])
        assert torch.equal(new[1, :, 1], old[2, :, 1])
        assert torch.equal(new[0], old[0])
        assert torch.equal(new[1, :, 2:], old[1, :, 2:])


@pytest.mark.parametrize("page_id", [-1, 3])
def test_a_page_outside_the_pool_is_refused(page_id: int) -> None:
    pool = PagePool(two_models(), 3, CPU)
    with pytest.raises(ValueError, match=f"page_id must be in \\[0, 3\\), got {page_id}"):
        pool.page(page_id)
