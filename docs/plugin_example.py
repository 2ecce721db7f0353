"""A worked example of a drafting plugin: guesses that the last token is said again. See plugins.md."""

from collections.abc import Sequence

from engine.batch import ForwardOutput
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed


class RepeatProposer:
    """Drafts a chain of `times` copies of the last token. Holds nothing of a request."""

    def __init__(self, *, times: int = 2) -> None:
        if not isinstance(times, int) or not 1 <= times <= 256:
            raise ValueError(f"times must be a whole number in [1, 256], got {times!r}")
        self.needs = DraftNeeds(max_draft_tokens=times)

    def bind(self, model: Model, pool: PagePool) -> None:
        """Nothing of the target is needed."""

    def admit(self, request: Request, seed: Seed | None) -> None:
        """Nothing is kept."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        """A chain: each node's parent is the node before it. A limit of 0 gives the root alone."""
        return [
            Proposal(token_ids=(request.tokens[-1],) * count, parents=tuple(range(count)))
            for request, limit in zip(requests, limits, strict=True)
            for count in [min(limit, self.needs.max_draft_tokens)]
        ]

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        """Nothing is learned."""

    def seed(self, request: Request) -> Seed:  # noqa: ARG002 - part of the seam
        return Seed()

    def forget(self, request: Request) -> None:
        """Nothing was kept."""
