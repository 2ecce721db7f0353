"""The seam every speculative algorithm plugs into.

An algorithm is one file with a `Proposer`, and one line in `speculative/registry.py`. The loop, the
nodes and the transfer read only `DraftNeeds`; nothing outside tests names an algorithm.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch

from engine.batch import ForwardOutput
from engine.layout import PoolSpec
from engine.models.model import Model
from engine.pool import PagePool
from engine.randomness import Coins
from engine.request import Request


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftNeeds:
    """What an algorithm asks of the engine, the page layout and the handoff. Frozen data.

    max_draft_tokens: nodes of a proposal without the root; 0 is plain decoding.
    num_scratch_slots: slots from `num_committed` on that `propose` may write draft KV to.
    num_lookahead_tokens: tokens after a slot's own that its draft KV depends on; a prefix of pages is
        shared only between requests that agree on so many tokens more.
    hidden_layers: target layers to capture (indices as in `engine.batch.ForwardBatch`).
    draft_kv: regions added to every page after the target's, never to be read before `draft_start` of a
        request (`speculative.drafts.reach`).
    handoff: names of the tensors the handoff record carries.
    prefill_identity: empty when a prefill node needs nothing of the algorithm, else a text that
        must be equal on both sides of a pair.
    draft, draft_weights: name and fingerprint of the draft model, compared likewise; empty without one.
    """

    max_draft_tokens: int = 0
    num_scratch_slots: int = 0
    num_lookahead_tokens: int = 0
    hidden_layers: tuple[int, ...] = ()
    draft_kv: tuple[PoolSpec, ...] = ()
    handoff: tuple[str, ...] = ()
    prefill_identity: str = ""
    draft: str = ""
    draft_weights: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Drafted tokens of one request as a tree below the root (its last emitted token).

    Node 0 is the root; node i >= 1 is `token_ids[i - 1]` with parent `parents[i - 1]` < i.
    Siblings have distinct tokens. `q_KV` is the draft distribution each token was drawn from
    (`[K, V]` float32), or None when the tokens were chosen with certainty.

    ranks: of each token, 1 for the one that a limit of 1 would have left, and so on: with a lower limit the
    proposal would have been those within it. Empty: the tokens stand in that order. They serve to judge
    limits; a proposer that cannot say exactly may be off.
    """

    token_ids: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    ranks: tuple[int, ...] = ()
    q_KV: torch.Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Advance:
    """What one forward did for one request, told to the proposer after write-back.

    rows: half-open range of the request's rows in the packed forward output.
    accepted_nodes: committed nodes of the span in path order (a prompt chunk: all of its rows).
    token_ids: tokens now known to follow: for a chunk the next prompt token or the first output,
        for a round the emitted tokens.
    """

    request: Request
    rows: tuple[int, int]
    accepted_nodes: Sequence[int]
    token_ids: Sequence[int]
    is_prompt: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Seed:
    """The proposer's own named tensors for one request, carried by the handoff record."""

    tensors: Mapping[str, torch.Tensor] = field(default_factory=dict)


class Proposer(Protocol):
    """Drafts tokens for running requests. One instance per engine; called from the engine thread only."""

    @property
    def needs(self) -> DraftNeeds: ...

    def bind(self, model: Model, pool: PagePool) -> None:
        """Once, before anything else: the target, whose embedding and head a draft may share, and the pool
        with the regions of `needs.draft_kv`. Raises ValueError naming what of the target does not fit."""
        ...

    def admit(self, request: Request, seed: Seed | None) -> None:
        """A request starts decoding here. `seed` None: it was never prefilled here and none arrived."""
        ...

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        """One proposal per request, each of at most `limits[i]` tokens (0: root only)."""
        ...

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        """After every forward, prompt chunks included: extend draft KV, index tokens."""
        ...

    def seed(self, request: Request) -> Seed:
        """The tensors a decode node needs to continue this request; called once, after its prompt."""
        ...

    def forget(self, request: Request) -> None:
        """The request has left the engine, for whatever reason. Called exactly once per request seen."""
        ...


@runtime_checkable
class DrawingProposer(Proposer, Protocol):
    """One that can draw its drafts from its own distribution instead of choosing the likeliest."""

    def draw_drafts(self, coins: Coins) -> None:
        """Once, before `bind`: from now on the proposals of requests that sample are chains drawn from
        their `q_KV`. Coins: the draft stream at (seed, position of the round's root, step); none may be used
        for two rounds, because a draft that fell bears on what its round emitted.

        Raises ValueError naming the option that stands against it."""
        ...
