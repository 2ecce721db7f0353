"""STANDALONE: a whole small model drafts a chain of its own likeliest tokens.

Owns the draft model's KV in step with the target's: slot p holds token p in both. Must never know the
target's hidden states.

A round's accepted drafts were fed at the very slots they are committed to, so only the last of a chain that
stood whole is missing, and it is computed with the next root, or at once where that completes a page: a
page that others may share is never without the draft's KV.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.batch import ForwardBatch, ForwardOutput, Span
from engine.loaders import load_model
from engine.loaders.assemble import TensorSource, check_names
from engine.loaders.load import open_checkpoint
from engine.loaders.names import all_pieces
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.pool import PagePool
from engine.randomness import Coins
from engine.request import Request
from speculative.drafts.chain_draws import ChainDraws
from speculative.drafts.config import check_same
from speculative.drafts.layer import POOL, kv_spec
from speculative.drafts.reach import within_reach
from speculative.drafts.same_tokens import check_same_tokens
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed

_FINGERPRINT_SAMPLES = 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class StandaloneConfig:
    """draft: model folder or .gguf file. num_steps, num_draft_tokens: length of the chain, the smaller
    counts. target: the target's folder or file, whose tokens must be the draft's; empty: not compared."""

    draft: str
    num_steps: int = 4
    num_draft_tokens: int = 8
    target: str = ""

    def __post_init__(self) -> None:
        for name, value in (("num_steps", self.num_steps), ("num_draft_tokens", self.num_draft_tokens)):
            if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 64:
                raise ValueError(f"{name} must be a whole number in [1, 64], got {value!r}")

    @property
    def chain_len(self) -> int:
        return min(self.num_steps, self.num_draft_tokens)


class StandaloneProposer:
    """Invariant: slots [`draft_start`, `_filled[request]`) of a running request hold the draft's KV of its
    tokens, and cover every page the request may share."""

    def __init__(self, config: StandaloneConfig) -> None:
        self._config = config
        source = open_checkpoint(Path(config.draft))
        self._draft_config: ModelConfig = source.config()
        check_names(source, self._draft_config)
        if config.target:
            check_same_tokens(Path(config.draft), Path(config.target))
        self.needs = DraftNeeds(
            max_draft_tokens=config.chain_len,
            num_scratch_slots=config.chain_len,
            draft_kv=(kv_spec(self._draft_config),),
            prefill_identity="standalone",
            draft=Path(config.draft).name,
            draft_weights=_fingerprint(source, self._draft_config),
        )
        self._filled: dict[Request, int] = {}
        self._coins: Coins | None = None

    def draw_drafts(self, coins: Coins) -> None:
        self._coins = coins

    def bind(self, model: Model, pool: PagePool) -> None:
        check_same("vocab_size", self._draft_config.vocab_size, model.config.vocab_size)
        dtype = str(model.dtype).removeprefix("torch.")
        self._draft = load_model(self._config.draft, dtype=dtype, device=model.device, pool_name=POOL).model
        self._pool = pool

    def admit(self, request: Request, seed: Seed | None) -> None:  # noqa: ARG002 - part of the seam
        self._filled[request] = request.num_committed

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        lengths = {
            request: min(limit, self._config.chain_len)
            for request, limit in zip(requests, limits, strict=True)
            if limit > 0
        }
        return self._proposals(requests, lengths)

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:  # noqa: ARG002 - part of the seam
        spans = [span for advance in advances if (span := self._missing(advance)) is not None]
        if spans:
            self._draft.forward(ForwardBatch(spans=spans), self._pool)

    def seed(self, request: Request) -> Seed:  # noqa: ARG002 - part of the seam
        return Seed()

    def forget(self, request: Request) -> None:
        self._filled.pop(request, None)  # a prefill node forgets requests it never admitted

    def _proposals(self, requests: Sequence[Request], lengths: Mapping[Request, int]) -> list[Proposal]:
        """Each step feeds the last token of the chains that go on."""
        chains: dict[Request, list[int]] = {request: [] for request in lengths}
        draws = self._new_draws()
        for step in range(max(lengths.values(), default=0)):
            going_on = [request for request, length in lengths.items() if step < length]
            spans = [self._next(request, chains[request]) for request in going_on]
            logits_RV = self._draft.forward(ForwardBatch(spans=spans), self._pool).logits_RV
            token_ids = logits_RV.argmax(dim=1).tolist()
            if draws is not None:
                draws.redraw_(token_ids, going_on, logits_RV, step=step)
            for request, token_id in zip(going_on, token_ids, strict=True):
                chains[request].append(token_id)
        for request, length in lengths.items():
            self._filled[request] = request.num_committed + length
        return [_proposal(chains.get(request, []), draws, request) for request in requests]

    def _new_draws(self) -> ChainDraws | None:
        if self._coins is None:
            return None
        return ChainDraws(self._coins, target_ids_V=None, target_vocab_size=self._draft_config.vocab_size)

    def _next(self, request: Request, chain: Sequence[int]) -> Span:
        """What the draft has not seen of tokens and chain; its last row draws the next token."""
        if chain:
            return self._span(request, request.num_committed + len(chain), chain[-1:], is_drawn=True)
        start = self._filled[request]
        return self._span(request, start, request.tokens[start:], is_drawn=True)

    def _missing(self, advance: Advance) -> Span | None:
        """Committed tokens to feed now: a prompt chunk's, or those that complete a page of a round's."""
        request = advance.request
        end = request.num_committed
        if advance.is_prompt:
            start = end - len(advance.accepted_nodes)
            return self._span(request, start, request.prompt_ids[start:end], is_drawn=False)
        filled = min(self._filled[request], end)
        page_size = self._pool.layout.page_size
        if filled >= end // page_size * page_size:
            self._filled[request] = filled
            return None
        self._filled[request] = end
        return self._span(request, filled, request.tokens[filled:end], is_drawn=False)

    def _span(self, request: Request, start: int, token_ids: Sequence[int], *, is_drawn: bool) -> Span:
        count = len(token_ids)
        span = Span(
            token_ids=token_ids,
            num_committed=start,
            pages=request.pages,
            positions=range(start, start + count),
            logit_rows=(count - 1,) if is_drawn else (),
        )
        return within_reach(span, request, self._pool.layout.page_size)


def _proposal(chain: Sequence[int], draws: ChainDraws | None, request: Request) -> Proposal:
    q_KV = draws.q_KV(request, len(chain)) if draws is not None else None
    return Proposal(token_ids=tuple(chain), parents=tuple(range(len(chain))), q_KV=q_KV)


def _fingerprint(source: TensorSource, config: ModelConfig) -> str:
    """Equal for equal values (after rounding to bfloat16), rotation and windows, whatever the file."""
    digest = hashlib.blake2b(digest_size=16)
    rope = config.rope
    digest.update(f"{rope.kind} {rope.theta:.6g} {rope.factor:.6g} {config.windows}".encode())
    for piece in sorted(all_pieces(config), key=lambda piece: piece.name):
        flat = source.load(piece.name).flatten()
        sample = flat[:: max(1, flat.numel() // _FINGERPRINT_SAMPLES)].to(torch.bfloat16).view(torch.int16)
        digest.update(f"{piece.name} {piece.shape}".encode())
        digest.update(sample.contiguous().numpy().tobytes())
    return digest.hexdigest()
