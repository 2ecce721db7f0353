"""Proposers that know, or get wrong on purpose, what comes next: they exercise every shape of a round."""

import random
from collections.abc import Callable, Sequence

from engine.batch import ForwardOutput
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed

Continuation = Callable[[Request, int], list[int]]
"""The next `count` tokens that plain decoding would emit for this request."""


class BushyProposer:
    """Hides the true continuation, up to a random depth, in a random tree of wrong branches.

    A tree is a function of the request's text and seed and of the limit, so that it does not depend on
    company, pages or node.
    """

    def __init__(
        self, continuation: Continuation, *, vocab_size: int, num_draft_tokens: int, seed: int
    ) -> None:
        self.needs = DraftNeeds(max_draft_tokens=num_draft_tokens)
        self._continuation = continuation
        self._vocab_size = vocab_size
        self._seed = seed
        self.live: set[object] = set()
        self.forgotten: list[object] = []

    def bind(self, model: Model, pool: PagePool) -> None:
        pass

    def admit(self, request: Request, seed: Seed | None) -> None:
        self.live.add(request.key)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        return [self._tree(request, limit) for request, limit in zip(requests, limits, strict=True)]

    def _tree(self, request: Request, limit: int) -> Proposal:
        rng = random.Random(f"{self._seed} {request.sampling.seed} {request.tokens} {limit}")
        budget = rng.randint(0, limit)
        truth = self._continuation(request, budget)[: rng.randint(0, budget)]
        tokens: list[int] = []
        parents: list[int] = []
        used: set[tuple[int, int]] = set()
        tip = 0
        while len(tokens) < budget:
            wants_truth = bool(truth) and rng.random() < 0.6
            parent = tip if wants_truth else rng.randint(0, len(tokens))
            token = truth[0] if wants_truth else rng.randrange(self._vocab_size)
            if (parent, token) in used or (parent == tip and not wants_truth and truth and token == truth[0]):
                continue
            used.add((parent, token))
            tokens.append(token)
            parents.append(parent)
            if wants_truth:
                truth = truth[1:]
                tip = len(tokens)
        return Proposal(token_ids=tuple(tokens), parents=tuple(parents))

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        for advance in advances:
            assert len(advance.token_ids) >= 1
            assert advance.rows[1] - advance.rows[0] >= len(advance.accepted_nodes)

    def seed(self, request: Request) -> Seed:
        return Seed()

    def forget(self, request: Request) -> None:
        self.forgotten.append(request.key)
        self.live.discard(request.key)


class SureProposer(BushyProposer):
    """Chains of the true continuation: every draft stands."""

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        chains = [
            self._continuation(request, min(limit, self.needs.max_draft_tokens))
            for request, limit in zip(requests, limits, strict=True)
        ]
        return [Proposal(token_ids=tuple(chain), parents=tuple(range(len(chain)))) for chain in chains]
