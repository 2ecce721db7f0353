"""Which of a request's pages a draft may look at: those from `draft_start` on.

Owns the cut. Pages before it were written by a node that does not know this draft; rows keep their absolute
positions, so a draft sees its text without its beginning.
"""

from dataclasses import replace

from engine.batch import Span
from engine.request import Request


def within_reach(span: Span, request: Request, page_size: int) -> Span:
    """A span over all of the request's pages, as the draft may run it. Its rows lie past `draft_start`."""
    if not request.draft_start:
        return span
    assert span.num_committed >= request.draft_start, f"row {span.num_committed} of {request.key}"
    return replace(
        span,
        num_committed=span.num_committed - request.draft_start,
        pages=span.pages[request.draft_start // page_size :],
    )
