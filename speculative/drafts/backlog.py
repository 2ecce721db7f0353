"""What a draft has yet to read of the target: hidden states of requests that draft nothing for now.

Owns those rows until they are due: before the request drafts again, or at once where they complete a page,
as others may share it. So while nothing is drafted the draft runs once a page and not once a round. Must
never know networks or states.

Shapes: `T` packed rows, `E` hidden width.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch

from engine.batch import Span
from engine.request import Request
from speculative.drafts.extension import Extension, captured_rows

Captured = Mapping[int, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What the draft reads now: a span of each request, and their packed rows by target layer."""

    requests: Sequence[Request]
    spans: Sequence[Span]
    captured: Captured


@dataclass(frozen=True, slots=True)
class _Kept:
    """The target's rows of a request's committed slots from `start` on, in order."""

    start: int
    parts: Sequence[Captured]


class Backlog:
    """Invariant: of each request kept here, the draft has read every committed slot before `start`."""

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._kept: dict[Request, _Kept] = {}

    def put(
        self, extensions: Sequence[Extension], hidden: Captured, *, resting: Set[Request]
    ) -> Reading | None:
        """Take a forward's rows; returns those to be read now, with what was kept before them."""
        captured = captured_rows(extensions, hidden)
        if not self._kept and resting.isdisjoint([extension.request for extension in extensions]):
            return Reading(
                requests=[extension.request for extension in extensions],
                spans=[extension.span for extension in extensions],
                captured=captured,
            )
        due: list[Request] = []
        first = 0
        for extension in extensions:
            request, stop = extension.request, first + len(extension.rows)
            part = {layer: hidden_TE[first:stop].clone() for layer, hidden_TE in captured.items()}
            first = stop
            kept = self._kept.get(request, _Kept(extension.span.num_committed, ()))
            self._kept[request] = _Kept(kept.start, (*kept.parts, part))
            completes_page = request.num_committed // self._page_size > kept.start // self._page_size
            if request not in resting or completes_page:
                due.append(request)
        return self.take(due)

    def take(self, requests: Sequence[Request]) -> Reading | None:
        """Everything kept of these, to be read now."""
        behind = [request for request in requests if request in self._kept]
        if not behind:
            return None
        spans: list[Span] = []
        parts: list[Captured] = []
        for request in behind:
            kept = self._kept.pop(request)
            parts += kept.parts
            spans.append(_span(request, kept))
        layers = {layer: torch.cat([part[layer] for part in parts]) for layer in parts[0]}
        return Reading(requests=behind, spans=spans, captured=layers)

    def forget(self, request: Request) -> None:
        self._kept.pop(request, None)


def _span(request: Request, kept: _Kept) -> Span:
    """Each slot pairs its hidden state with the token after it; the last may draw."""
    num_rows = sum(len(next(iter(part.values()))) for part in kept.parts)
    first = kept.start + 1
    return Span(
        token_ids=request.tokens[first : first + num_rows],
        num_committed=kept.start,
        pages=request.pages,
        positions=range(kept.start, kept.start + num_rows),
        logit_rows=(num_rows - 1,) if request.is_prompt_done else (),
    )
