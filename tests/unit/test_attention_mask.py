"""Who sees whom: the rule that saves a mask agrees with the mask it saves."""

import random

from engine.attention_mask import SpanMask, visible
from engine.batch import Span


def span_of(rng: random.Random, kind: str) -> Span:
    num_rows = rng.randint(1, 4)
    return Span(
        token_ids=[1] * num_rows,
        num_committed=rng.randint(0, 12),
        pages=range(20),
        positions=range(num_rows),
        logit_rows=(0,),
        parents=[-1, *(rng.randrange(row) for row in range(1, num_rows))] if kind == "tree" else None,
        is_bidirectional=kind == "block",
    )


def test_sees_all_is_told_exactly_where_no_slot_is_hidden() -> None:
    seed = 11
    print(f"seed {seed}")
    rng = random.Random(seed)
    told = {(kind, is_all): 0 for kind in ("chain", "tree", "block") for is_all in (False, True)}
    for _ in range(3000):
        kind = rng.choice(["chain", "tree", "block"])
        span = span_of(rng, kind)
        mask = SpanMask.of(span, window=rng.choice([None, rng.randint(1, 16)]))
        first_slot = rng.randint(0, span.num_committed)
        end_slot = span.num_committed + len(span.token_ids) + rng.choice([0, 0, 1, 3])
        is_all = mask.sees_all(first_slot, end_slot)
        assert is_all == bool(visible(mask, first_slot, end_slot).all()), (span, mask.window, first_slot)
        told[kind, is_all] += 1
    assert min(told.values()) > 100, told
