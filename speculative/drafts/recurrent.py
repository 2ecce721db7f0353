"""Drafting with a network that reads the target's hidden states and then its own: the EAGLE family.

Owns the draft's KV in step with the target's, and each request's state between rounds. Must never know
what the network computes.

Draft slot p holds the pair (hidden at p, token at p + 1), so draft and target share slots and pages, and
`observe` can write every committed slot as soon as the token after it is known; while a request may not
draft, that waits (`speculative.drafts.backlog`). What the last pair predicts, and its recurrent hidden,
start the next proposal; drafted tokens go to scratch slots after it.

Shapes: `B` requests, `K` candidates or beams, `R` wanted rows, `T` packed rows, `E` hidden width.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from engine.batch import ForwardOutput, Span
from engine.models.model import Model
from engine.pool import PagePool
from engine.randomness import Coins
from engine.request import Request
from speculative.drafts.backlog import Backlog, Reading
from speculative.drafts.chain_draws import ChainDraws, draws_drafts
from speculative.drafts.extension import extension_of
from speculative.drafts.head import DraftHead, Floats, Ids, best
from speculative.drafts.reach import within_reach
from speculative.drafts.scratch import ScratchRows
from speculative.drafts.shape import STATE_WIDTH, TreeShape
from speculative.growth import Growth
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed

HANDOFF = ("topk_p", "topk_index", "hidden")


class DraftNetwork(Protocol):
    """A draft bound to its target. `forward` writes the rows' draft KV and returns wanted rows only."""

    @property
    def head(self) -> DraftHead: ...

    @property
    def hidden_size(self) -> int: ...

    def fuse(self, captured: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """The network's input hidden, of rows of the target layers it asked for."""
        ...

    def forward(self, spans: Sequence[Span], hidden_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(recurrent hidden `[R, E]`, logits `[R, V]` over the draft's vocabulary) of the logit rows."""
        ...

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        """The logits that `forward` gave along with these recurrent hiddens."""
        ...


class RecurrentDraft(Protocol):
    """An algorithm of the family, before and after it meets its target."""

    @property
    def shape(self) -> TreeShape: ...

    @property
    def needs(self) -> DraftNeeds:
        """Without `hidden_layers`, which may depend on the target, and without the shape's numbers."""
        ...

    def layer_ids(self, model: Model) -> tuple[int, ...]: ...

    def build(self, model: Model, pool: PagePool) -> DraftNetwork:
        """Raises ValueError naming the tensor or field that does not fit."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """What the pair at the last committed slot predicts; ids are the draft's, best first.

    logits_V: kept only where drafts are drawn from them; None after a handoff, which does not carry them.
    """

    p_K: Floats
    draft_ids_K: Ids
    hidden_E: torch.Tensor
    logits_V: torch.Tensor | None = None


class RecurrentProposer:
    """Invariant: a state belongs to a request seen and not forgotten, as of its last committed slot."""

    def __init__(self, draft: RecurrentDraft) -> None:
        self._draft = draft
        self._shape = draft.shape
        self.needs = _needs_of(draft.needs, draft.shape, layer_ids=())
        self._states: dict[Request, _State] = {}
        self._coins: Coins | None = None
        self._resting: frozenset[Request] = frozenset()  # of those last proposed for

    def draw_drafts(self, coins: Coins) -> None:
        if self._shape.topk != 1:
            raise ValueError(f"topk must be 1 where drafts are drawn, got {self._shape.topk}")
        self._coins = coins

    def bind(self, model: Model, pool: PagePool) -> None:
        self._target_vocab_size = model.config.vocab_size
        self.needs = _needs_of(self._draft.needs, self._shape, layer_ids=self._draft.layer_ids(model))
        self._network = self._draft.build(model, pool)
        self._page_size = pool.layout.page_size
        self._backlog = Backlog(self._page_size)
        self._device = model.device
        self._dtype = model.dtype
        self._width = min(STATE_WIDTH, self._network.head.vocab_size)
        if self._shape.topk > self._width:
            raise ValueError(
                f"topk must be at most the draft's vocabulary {self._width}, got {self._shape.topk}"
            )

    def admit(self, request: Request, seed: Seed | None) -> None:
        if seed is not None:
            self._states[request] = self._restored(seed)

    def seed(self, request: Request) -> Seed:
        state = self._states.get(request)
        if state is None:
            return Seed()
        return Seed(
            tensors={
                "topk_p": torch.from_numpy(state.p_K),
                "topk_index": torch.from_numpy(state.draft_ids_K),
                "hidden": state.hidden_E,
            }
        )

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)
        self._backlog.forget(request)

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        self._resting = frozenset(
            request for request, limit in zip(requests, limits, strict=True) if limit <= 0
        )
        self._read(self._backlog.take([request for request in requests if request not in self._resting]))
        drafting = [
            (request, min(limit, self._shape.max_tokens))
            for request, limit in zip(requests, limits, strict=True)
            if limit > 0 and request in self._states
        ]
        drafted: dict[Request, Proposal] = {}
        if drafting:
            # No node lies deeper than there are tokens to select, so further steps would change nothing.
            num_steps = min(self._shape.num_steps, max(limit for _, limit in drafting))
            draws = self._new_draws()
            growth = self._grow([request for request, _ in drafting], num_steps, draws)
            for index, (request, limit) in enumerate(drafting):
                chosen = growth.select(index, limit)
                q_KV = draws.q_KV(request, len(chosen.token_ids)) if draws is not None else None
                drafted[request] = Proposal(
                    token_ids=chosen.token_ids, parents=chosen.parents, ranks=chosen.ranks, q_KV=q_KV
                )
        return [drafted.get(request, Proposal()) for request in requests]

    @torch.inference_mode()
    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        extensions = [found for advance in advances if (found := extension_of(advance)) is not None]
        if extensions:
            self._read(self._backlog.put(extensions, output.hidden, resting=self._resting))

    def _read(self, reading: Reading | None) -> None:
        """Write the draft's KV of these slots, and keep what the last pair of each request predicts."""
        if reading is None:
            return
        spans = [
            within_reach(span, request, self._page_size)
            for request, span in zip(reading.requests, reading.spans, strict=True)
        ]
        hidden_RE, logits_RV = self._network.forward(spans, self._network.fuse(reading.captured))
        ended = [request for request, span in zip(reading.requests, spans, strict=True) if span.logit_rows]
        if not ended:
            return
        p_RK, ids_RK = best(logits_RV, self._width)
        for row, request in enumerate(ended):
            is_drawn = self._coins is not None and draws_drafts(request)
            self._states[request] = _State(
                p_K=p_RK[row].copy(),
                draft_ids_K=ids_RK[row].copy(),
                hidden_E=hidden_RE[row].clone(),
                logits_V=logits_RV[row].clone() if is_drawn else None,
            )

    def _new_draws(self) -> ChainDraws | None:
        if self._coins is None:
            return None
        return ChainDraws(
            self._coins,
            target_ids_V=self._network.head.target_ids_V,
            target_vocab_size=self._target_vocab_size,
        )

    def _first(self, requests: Sequence[Request], draws: ChainDraws | None) -> tuple[Floats, Ids]:
        """Candidates below the root, as `best` has them; drawn where the request samples."""
        states, width = [self._states[request] for request in requests], self._shape.topk
        p_BK = np.stack([state.p_K[:width] for state in states])
        ids_BK = np.stack([state.draft_ids_K[:width] for state in states])
        sampling = [index for index, request in enumerate(requests) if draws_drafts(request)]
        if draws is None or not sampling:
            return p_BK, ids_BK
        logits_SV = torch.stack([self._logits(states[index]) for index in sampling])
        ids_BK[sampling, 0] = draws.draw([requests[index] for index in sampling], logits_SV, step=0)
        p_BK[sampling] = 1.0
        return p_BK, ids_BK

    def _logits(self, state: _State) -> torch.Tensor:
        return self._network.logits(state.hidden_E[None])[0] if state.logits_V is None else state.logits_V

    def _grow(self, requests: Sequence[Request], num_steps: int, draws: ChainDraws | None) -> Growth:
        width, head = self._shape.topk, self._network.head
        p_BK, ids_BK = self._first(requests, draws)
        growth = Growth(p_BK, head.to_target(ids_BK))
        if num_steps == 1:
            return growth
        rows = ScratchRows(requests, width=width, page_size=self._page_size)
        beams = growth.beams()
        hidden_BE = torch.stack([self._states[request].hidden_E for request in requests])
        hidden_BKE = hidden_BE[:, None].expand(-1, width, -1)
        for step in range(1, num_steps):
            spans, hidden_TE = rows.add(beams, hidden_BKE)
            recurrent_RE, logits_RV = self._network.forward(spans, hidden_TE)
            p_RK, ids_RK = best(logits_RV, width)
            if draws is not None:
                _redraw_(draws, requests, logits_RV, step=step, p_RK=p_RK, ids_RK=ids_RK)
            shape = (len(requests), width, width)
            beams = growth.expand(p_RK.reshape(shape), head.to_target(ids_RK).reshape(shape))
            recurrent_BKE = recurrent_RE.view(len(requests), width, -1)
            sources_BK = torch.from_numpy(beams.sources_BK).to(recurrent_BKE.device)
            hidden_BKE = torch.take_along_dim(recurrent_BKE, sources_BK[:, :, None], dim=1)
        return growth

    def _restored(self, seed: Seed) -> _State:
        wanted = {
            "topk_p": ((self._width,), torch.float32),
            "topk_index": ((self._width,), torch.int64),
            "hidden": ((self._network.hidden_size,), self._dtype),
        }
        for name, (shape, dtype) in wanted.items():
            tensor = seed.tensors[name]
            if (tuple(tensor.shape), tensor.dtype) != (shape, dtype):
                raise ValueError(
                    f"handoff tensor {name} must be {dtype} of shape {shape},"
                    f" got {tensor.dtype} of {tuple(tensor.shape)}"
                )
        draft_ids_K = seed.tensors["topk_index"].numpy()
        is_known = draft_ids_K.min() >= 0 and draft_ids_K.max() < self._network.head.vocab_size
        if not is_known or len(np.unique(draft_ids_K)) != len(draft_ids_K):  # siblings of a tree are distinct
            raise ValueError(
                f"handoff tensor topk_index must hold distinct draft ids, got {draft_ids_K.tolist()}"
            )
        p_K = seed.tensors["topk_p"].numpy()
        if (p_K < 0).any():  # a tree takes for granted that no child is likelier than its parent
            raise ValueError(f"handoff tensor topk_p must hold probabilities, got {p_K.tolist()}")
        return _State(
            p_K=p_K,
            draft_ids_K=draft_ids_K,
            hidden_E=seed.tensors["hidden"].to(self._device),
        )


def _redraw_(
    draws: ChainDraws,
    requests: Sequence[Request],
    logits_RV: torch.Tensor,
    *,
    step: int,
    p_RK: Floats,
    ids_RK: Ids,
) -> None:
    """One candidate per row. Where it is drawn its score is 1, so that a chain is cut at its end only."""
    ids: list[int] = ids_RK[:, 0].tolist()
    draws.redraw_(ids, requests, logits_RV, step=step)
    ids_RK[:, 0] = ids
    p_RK[[draws_drafts(request) for request in requests]] = 1.0


def _needs_of(needs: DraftNeeds, shape: TreeShape, *, layer_ids: tuple[int, ...]) -> DraftNeeds:
    """What the whole algorithm needs, given what the draft itself does."""
    return DraftNeeds(
        max_draft_tokens=shape.max_tokens,
        num_scratch_slots=shape.num_scratch_slots,
        num_lookahead_tokens=1,
        hidden_layers=layer_ids,
        draft_kv=needs.draft_kv,
        handoff=HANDOFF,
        prefill_identity=needs.prefill_identity,
        draft=needs.draft,
        draft_weights=needs.draft_weights,
    )
