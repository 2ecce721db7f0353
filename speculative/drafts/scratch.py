"""The rows of a growing draft: which scratch slots they write and which earlier rows they see.

Owns parents and slots of drafted rows. Must never know scores or networks.

Shapes: `B` requests, `K` beams, `N` rows so far, `E` hidden width.
"""

from collections.abc import Sequence

import torch

from engine.batch import Span
from engine.request import Request
from speculative.drafts.reach import within_reach
from speculative.growth import Beams


class ScratchRows:
    """The rows of a growing draft in scratch slots.

    A chain adds one row per step. A tree feeds all its rows again, as rows of earlier steps must not be
    seen but by their descendants, and only rows of one span can hide from each other.
    """

    def __init__(self, requests: Sequence[Request], *, width: int, page_size: int) -> None:
        self._requests = requests
        self._page_size = page_size
        self._width = width
        self._num_steps = 0
        self._token_ids: list[list[int]] = [[] for _ in requests]
        self._parents: list[list[int]] = [[] for _ in requests]
        self._hidden_BNE: torch.Tensor | None = None

    def add(self, beams: Beams, hidden_BKE: torch.Tensor) -> tuple[list[Span], torch.Tensor]:
        """(spans that want the new rows' logits, packed input hidden)"""
        step, self._num_steps = self._num_steps, self._num_steps + 1
        if self._width == 1:
            return self._chain(step, beams), hidden_BKE.flatten(0, 1)
        first_parent = (step - 1) * self._width
        for index in range(len(self._requests)):
            self._token_ids[index] += beams.token_ids_BK[index].tolist()
            sources = beams.sources_BK[index].tolist()
            self._parents[index] += [-1 if source < 0 else first_parent + source for source in sources]
        earlier = [] if self._hidden_BNE is None else [self._hidden_BNE]
        self._hidden_BNE = torch.cat([*earlier, hidden_BKE], dim=1)
        return [self._tree(index) for index in range(len(self._requests))], self._hidden_BNE.flatten(0, 1)

    def _chain(self, step: int, beams: Beams) -> list[Span]:
        return [
            within_reach(
                Span(
                    token_ids=(int(token_id),),
                    num_committed=request.num_committed + step,
                    pages=request.pages,
                    positions=(request.num_committed + step,),
                    logit_rows=(0,),
                ),
                request,
                self._page_size,
            )
            for request, token_id in zip(self._requests, beams.token_ids_BK[:, 0], strict=True)
        ]

    def _tree(self, index: int) -> Span:
        request, num_rows = self._requests[index], len(self._token_ids[index])
        span = Span(
            token_ids=tuple(self._token_ids[index]),
            num_committed=request.num_committed,
            pages=request.pages,
            positions=[request.num_committed + row // self._width for row in range(num_rows)],
            logit_rows=range(num_rows - self._width, num_rows),
            parents=tuple(self._parents[index]),
        )
        return within_reach(span, request, self._page_size)
