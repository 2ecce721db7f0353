"""Plain decoding as a proposer: it never drafts, so every round verifies the root alone.

Must never hold anything of a request.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from engine.batch import ForwardOutput
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed


@dataclass(frozen=True, slots=True, kw_only=True)
class NullConfig:
    """Plain decoding has no options."""


class NullProposer:
    """Stateless."""

    def __init__(self, config: NullConfig) -> None:  # noqa: ARG002 - part of the seam
        self.needs = DraftNeeds()

    def bind(self, model: Model, pool: PagePool) -> None:
        pass

    def admit(self, request: Request, seed: Seed | None) -> None:
        pass

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:  # noqa: ARG002 - part of the seam
        return [Proposal() for _ in requests]

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        pass

    def seed(self, request: Request) -> Seed:  # noqa: ARG002 - part of the seam
        return Seed()

    def forget(self, request: Request) -> None:
        pass
