"""Drafting with a chain of modules, each trained to predict one token further ahead.

Owns the modules' KV and each request's drafts between rounds. Must never know what a module computes.

Slot p of module j holds what it made of (the output of module j - 1 at p, token p + 1 + j); module 0 reads
the target's hidden. The last tokens of that are drafts when a round ends, so the last slots are computed
again once the true ones are known: the target's hidden of those slots is kept until then. Pages are
shared only once nothing in them rests on a draft (`num_lookahead_tokens`).

Where drafts are drawn, those at the end of a prompt are the likeliest all the same: the handoff carries
tokens, not what they were drawn from.

Shapes: `M` modules, `N` rows of a request, `T` packed rows, `E` hidden width, `K` drafts, `V` vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from engine.batch import ForwardOutput, Span
from engine.models.model import Model
from engine.pool import PagePool
from engine.randomness import Coins
from engine.request import Request
from speculative.drafts.chain_draws import ChainDraws
from speculative.drafts.reach import within_reach
from speculative.drafts.shape import TreeShape
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed


class DraftModule(Protocol):
    """One module bound to its target; see `speculative.mtp.MtpModule`."""

    @property
    def hidden_size(self) -> int: ...

    def fuse(self, captured: Mapping[int, torch.Tensor]) -> torch.Tensor: ...

    def run(self, spans: Sequence[Span], hidden_TE: torch.Tensor) -> torch.Tensor: ...

    def predict(self, out_RE: torch.Tensor) -> torch.Tensor: ...


class ModuleDraft(Protocol):
    """The modules before they meet their target."""

    @property
    def num_modules(self) -> int: ...

    @property
    def shape(self) -> TreeShape: ...

    @property
    def needs(self) -> DraftNeeds: ...

    def layer_ids(self, model: Model) -> tuple[int, ...]: ...

    def build_all(self, model: Model, pool: PagePool) -> Sequence[DraftModule]: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class _State:
    """drafts: one token per module, none before the prompt's end. hidden_NE: the target's, of the last
    committed slots whose rows must be computed again. q_KV: what the drafts were drawn from, if they were."""

    drafts: tuple[int, ...]
    hidden_NE: torch.Tensor
    q_KV: torch.Tensor | None = None


@dataclass(slots=True, kw_only=True)
class _Window:
    """The slots of one request that one `observe` computes, from `start` on.

    tokens: those known, then the drafts as the modules make them.
    """

    request: Request
    start: int
    hidden_NE: torch.Tensor
    tokens: list[int]
    is_prompt: bool

    def span(self, module: int) -> Span:
        """The rows whose token for this module is known."""
        first = self.start + 1 + module
        token_ids = self.tokens[first : first + len(self.hidden_NE)]
        return Span(
            token_ids=token_ids,
            num_committed=self.start,
            pages=self.request.pages,
            positions=range(self.start, self.start + len(token_ids)),
            logit_rows=(),
        )


class ModuleChainProposer:
    """Invariant: a state belongs to a request seen and not forgotten, as of its last committed slot."""

    def __init__(self, draft: ModuleDraft) -> None:
        self._draft = draft
        self._num_modules = draft.num_modules
        self.needs = self._needs(layer_ids=())
        self._states: dict[Request, _State] = {}
        self._coins: Coins | None = None

    def draw_drafts(self, coins: Coins) -> None:
        self._coins = coins

    def _needs(self, *, layer_ids: tuple[int, ...]) -> DraftNeeds:
        needs = self._draft.needs
        return DraftNeeds(
            max_draft_tokens=min(self._num_modules, self._draft.shape.num_draft_tokens),
            num_lookahead_tokens=self._num_modules + 1,
            hidden_layers=layer_ids,
            draft_kv=needs.draft_kv,
            handoff=("drafts", "hidden"),
            prefill_identity=needs.prefill_identity,
            draft=needs.draft,
            draft_weights=needs.draft_weights,
        )

    def bind(self, model: Model, pool: PagePool) -> None:
        self.needs = self._needs(layer_ids=self._draft.layer_ids(model))
        self._modules = self._draft.build_all(model, pool)
        self._model = model
        self._page_size = pool.layout.page_size

    def admit(self, request: Request, seed: Seed | None) -> None:
        if seed is not None:
            self._states[request] = self._restored(seed)

    def seed(self, request: Request) -> Seed:
        state = self._states.get(request)
        if state is None or not state.drafts:
            return Seed()
        return Seed(
            tensors={"drafts": torch.tensor(state.drafts, dtype=torch.int64), "hidden": state.hidden_NE}
        )

    def forget(self, request: Request) -> None:
        self._states.pop(request, None)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        proposals = []
        for request, limit in zip(requests, limits, strict=True):
            state = self._states.get(request)
            count = min(limit, self.needs.max_draft_tokens)
            drafts = () if state is None else state.drafts[:count]
            q_KV = None if state is None or state.q_KV is None or not drafts else state.q_KV[: len(drafts)]
            proposals.append(Proposal(token_ids=drafts, parents=tuple(range(len(drafts))), q_KV=q_KV))
        return proposals

    @torch.inference_mode()
    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        windows = [
            self._window(advance, output)
            for advance in advances
            if advance.accepted_nodes and advance.token_ids
        ]
        if not windows:
            return
        hiddens = [window.hidden_NE for window in windows]
        draws = self._new_draws()
        for index in range(self._num_modules):
            hiddens = self._run(index, windows, hiddens, draws)
        for window in windows:
            q_KV = draws.q_KV(window.request, self._num_modules) if draws is not None else None
            self._states[window.request] = self._state(window, q_KV)

    def _new_draws(self) -> ChainDraws | None:
        if self._coins is None:
            return None
        return ChainDraws(self._coins, target_ids_V=None, target_vocab_size=self._model.config.vocab_size)

    def _window(self, advance: Advance, output: ForwardOutput) -> _Window:
        request = advance.request
        rows = torch.tensor([advance.rows[0] + node for node in advance.accepted_nodes])
        picked = {layer: hidden_TE[rows.to(hidden_TE.device)] for layer, hidden_TE in output.hidden.items()}
        hidden_NE = self._modules[0].fuse(picked)
        state = self._states.get(request)
        if state is not None:
            hidden_NE = torch.cat((state.hidden_NE, hidden_NE))
        return _Window(
            request=request,
            start=request.num_committed - len(hidden_NE),
            hidden_NE=hidden_NE,
            tokens=list(request.tokens),
            is_prompt=advance.is_prompt,
        )

    def _run(
        self,
        index: int,
        windows: Sequence[_Window],
        hiddens: Sequence[torch.Tensor],
        draws: ChainDraws | None,
    ) -> list[torch.Tensor]:
        """One module over every window: its output rows, and one more token where the prompt has ended."""
        module = self._modules[index]
        spans = [within_reach(window.span(index), window.request, self._page_size) for window in windows]
        counts = [len(span.token_ids) for span in spans]
        used = [spans[i] for i, count in enumerate(counts) if count]
        if not used:
            return [hidden[:0] for hidden in hiddens]
        out_TE = module.run(used, torch.cat([h[:count] for h, count in zip(hiddens, counts, strict=True)]))
        outs = list(out_TE.split(counts))
        ended = [i for i, window in enumerate(windows) if window.request.is_prompt_done]
        if ended:
            logits_RV = module.predict(torch.stack([outs[i][-1] for i in ended]))
            _append_drafts(index, [windows[i] for i in ended], logits_RV, draws)
        return outs

    def _state(self, window: _Window, q_KV: torch.Tensor | None) -> _State:
        """Keep what rests on tokens not known yet, and one row more: a page that a prefill node sent before
        the first token was known lacks that."""
        request = window.request
        num_kept = request.num_committed - (len(request.tokens) - 1 - self._num_modules)
        num_kept = max(0, min(num_kept, len(window.hidden_NE)))
        return _State(
            drafts=tuple(window.tokens[len(request.tokens) :]),
            hidden_NE=window.hidden_NE[len(window.hidden_NE) - num_kept :].clone(),
            q_KV=q_KV,
        )

    def _restored(self, seed: Seed) -> _State:
        drafts, hidden_NE = seed.tensors["drafts"], seed.tensors["hidden"]
        width = self._modules[0].hidden_size
        if tuple(drafts.shape) != (self._num_modules,) or drafts.dtype != torch.int64:
            raise ValueError(f"handoff tensor drafts must be {self._num_modules} ids, got {drafts.tolist()}")
        is_matrix = hidden_NE.dim() == 2 and hidden_NE.shape[1] == width
        if not is_matrix or len(hidden_NE) > self._num_modules or hidden_NE.dtype != self._model.dtype:
            raise ValueError(
                f"handoff tensor hidden must be at most {self._num_modules} rows of {width} of"
                f" {self._model.dtype}, got shape {tuple(hidden_NE.shape)} of {hidden_NE.dtype}"
            )
        vocab_size = self._model.config.vocab_size
        token_ids = [int(token_id) for token_id in drafts.tolist()]
        if not all(0 <= token_id < vocab_size for token_id in token_ids):
            raise ValueError(f"handoff tensor drafts must hold ids below {vocab_size}, got {token_ids}")
        return _State(
            drafts=tuple(token_ids),
            hidden_NE=hidden_NE.to(device=self._model.device, dtype=self._model.dtype),
        )


def _append_drafts(
    step: int, windows: Sequence[_Window], logits_RV: torch.Tensor, draws: ChainDraws | None
) -> None:
    """One more token for each window, drawn where `draws` is there and the request samples."""
    drafted: list[int] = logits_RV.argmax(dim=1).tolist()
    running = [row for row, window in enumerate(windows) if not window.is_prompt]
    if draws is not None and running:
        ids = [drafted[row] for row in running]
        draws.redraw_(ids, [windows[row].request for row in running], logits_RV[running], step=step)
        for row, token_id in zip(running, ids, strict=True):
            drafted[row] = token_id
    for window, token_id in zip(windows, drafted, strict=True):
        window.tokens.append(token_id)
