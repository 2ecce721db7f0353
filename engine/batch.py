"""One forward pass as plain data: what the runner is asked and what it returns.

Shapes: `T` packed rows of all spans, `S` spans, `P` pages, `V` vocabulary, `E` hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """The rows one request contributes to a forward.

    Row i writes its KV at slot `num_committed + i` of the request (page `pages[slot // page_size]`)
    and attends to slots [0, num_committed) plus the rows of this span that `parents` makes its
    ancestors, itself included. `parents` None means a plain causal run (prompt chunk, chain or a
    single token): row i sees rows 0..i. Otherwise parents[0] == -1 and parents[i] < i. In a
    bidirectional span (a block drafter's block) every row sees every row.

    positions: one per row, the absolute place used for rotary embedding.
    logit_rows: rows whose logits are wanted.
    """

    token_ids: Sequence[int]
    num_committed: int
    pages: Sequence[int]
    positions: Sequence[int]
    logit_rows: Sequence[int]
    parents: Sequence[int] | None = None
    is_bidirectional: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardBatch:
    """Spans in order, packed row after row. `hidden_layers` are indices as in Hugging Face
    `hidden_states` (0 = embedding, i = output of layer i - 1 before the final norm)."""

    spans: Sequence[Span]
    hidden_layers: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ForwardOutput:
    """logits_RV: float32, one row per wanted row, in span order. hidden[i]: `[T, E]` of layer i."""

    logits_RV: torch.Tensor
    hidden: Mapping[int, torch.Tensor] = field(default_factory=dict)
