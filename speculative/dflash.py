"""DFLASH: a whole block drafted in one pass that attends to the target's features as context.

Owns the draft KV in step with the target's: a slot's context KV is a function of the target's features
there, so what a page holds serves whoever shares it. While a request may not draft, writing that waits
(`speculative.drafts.backlog`). Must never know the network (`speculative.drafts.dflash_network`).

The block stands in the slots from `num_committed` on; what it writes there is scratch, overwritten by
`observe` where rows were accepted, and by the next block elsewhere.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from engine.batch import ForwardOutput, Span
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from speculative.drafts.backlog import Backlog, Reading
from speculative.drafts.dflash_config import dflash_facts
from speculative.drafts.dflash_network import MASK_EMBEDDING, DflashNetwork, check_target, tensor_name
from speculative.drafts.extension import Extension
from speculative.drafts.folder import DraftFolder, load_torch, open_draft
from speculative.drafts.layer import kv_spec
from speculative.drafts.reach import within_reach
from speculative.proposer import Advance, DraftNeeds, Proposal, Seed

_MASK_FILE = "mask_embedding.pt"


@dataclass(frozen=True, slots=True, kw_only=True)
class DflashConfig:
    """draft: folder of the drafter. num_draft_tokens: most tokens of a proposal; the block is drafted at
    its trained width all the same, and cut."""

    draft: str
    num_draft_tokens: int = 256

    def __post_init__(self) -> None:
        value = self.num_draft_tokens
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 256:
            raise ValueError(f"num_draft_tokens must be a whole number in [1, 256], got {value!r}")


class DflashProposer:
    """Drafts are a function of a request's last token and the pool; of requests that may not draft, it
    holds what the pool still lacks."""

    def __init__(self, config: DflashConfig) -> None:
        folder = open_draft(config.draft, tensor_name)
        self._facts = dflash_facts(folder.config)
        self._resting: frozenset[Request] = frozenset()  # of those last proposed for
        self._folder = _with_mask_embedding(folder, self._facts.mask_token_id)
        block_size = self._facts.block_size
        self.needs = DraftNeeds(
            max_draft_tokens=min(config.num_draft_tokens, block_size - 1),
            num_scratch_slots=block_size,
            hidden_layers=self._facts.layer_ids,
            draft_kv=(kv_spec(self._facts.layers),),
            prefill_identity="dflash",
            draft=folder.name,
            draft_weights=self._folder.fingerprint(self._facts),
        )

    def bind(self, model: Model, pool: PagePool) -> None:
        check_target(self._facts, model)
        reader = self._folder.reader(dtype=model.dtype, device=model.device)
        self._network = DflashNetwork(self._facts, reader, model, pool)
        reader.finish()
        self._page_size = pool.layout.page_size
        self._backlog = Backlog(self._page_size)

    def admit(self, request: Request, seed: Seed | None) -> None:
        pass

    @torch.inference_mode()
    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        counts = [min(limit, self.needs.max_draft_tokens) for limit in limits]
        self._resting = frozenset(
            request for request, count in zip(requests, counts, strict=True) if count <= 0
        )
        self._read(self._backlog.take([request for request in requests if request not in self._resting]))
        spans = [
            within_reach(self._block(request, count), request, self._page_size)
            for request, count in zip(requests, counts, strict=True)
            if count > 0
        ]
        if not spans:
            return [Proposal() for _ in requests]
        drafted = iter(self._network.draft(spans))
        return [_chain(drafted, count) for count in counts]

    @torch.inference_mode()
    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        extensions = [_extension(advance) for advance in advances if advance.accepted_nodes]
        if extensions:
            self._read(self._backlog.put(extensions, output.hidden, resting=self._resting))

    def _read(self, reading: Reading | None) -> None:
        if reading is None:
            return
        positions: list[int] = []
        slots: list[int] = []
        for request, span in zip(reading.requests, reading.spans, strict=True):
            positions += span.positions
            slots += [self._flat_slot(request, slot) for slot in span.positions]
        features_TX = self._network.join(reading.captured, range(len(slots)))
        self._network.write_context(features_TX, positions, slots)

    def seed(self, request: Request) -> Seed:  # noqa: ARG002 - part of the seam
        return Seed()

    def forget(self, request: Request) -> None:
        self._backlog.forget(request)

    def _block(self, request: Request, count: int) -> Span:
        """The last token and masks after it; row i is the draft of position num_committed + i."""
        width, start = self._facts.block_size, request.num_committed
        return Span(
            token_ids=(request.tokens[-1], *[self._facts.mask_token_id] * (width - 1)),
            num_committed=start,
            pages=request.pages,
            positions=range(start, start + width),
            logit_rows=range(1, 1 + count),
            is_bidirectional=True,
        )

    def _flat_slot(self, request: Request, slot: int) -> int:
        return request.pages[slot // self._page_size] * self._page_size + slot % self._page_size


def _extension(advance: Advance) -> Extension:
    request, count = advance.request, len(advance.accepted_nodes)
    start, stop = request.num_committed - count, request.num_committed
    return Extension(
        request=request,
        rows=[advance.rows[0] + node for node in advance.accepted_nodes],
        span=Span(
            token_ids=request.tokens[start:stop],
            num_committed=start,
            pages=request.pages,
            positions=range(start, stop),
            logit_rows=(),
        ),
    )


def _chain(drafted: Iterator[int], count: int) -> Proposal:
    count = max(count, 0)
    return Proposal(token_ids=tuple(next(drafted) for _ in range(count)), parents=tuple(range(count)))


def _with_mask_embedding(folder: DraftFolder, mask_token_id: int) -> DraftFolder:
    """A trained embedding of the mask, where the folder has one: the draft's alone, the target's table
    keeps its row."""
    path: Path = folder.path / _MASK_FILE
    if not path.is_file():
        return folder
    stored = load_torch(path)
    if not isinstance(stored, dict) or not isinstance(stored.get("embedding"), torch.Tensor):
        raise ValueError(f"{_MASK_FILE} must hold an embedding, got {type(stored).__name__} without one")
    if stored.get("mask_token_id", mask_token_id) != mask_token_id:
        raise ValueError(
            f"mask_token_id of {_MASK_FILE} must be the config's {mask_token_id},"
            f" got {stored['mask_token_id']}"
        )
    embedding_E = stored["embedding"].reshape(-1)
    return replace(folder, tensors={**folder.tensors, MASK_EMBEDDING: embedding_E})
