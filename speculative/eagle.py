"""EAGLE (1 and 2): one layer over the target's last hidden state and the next token's embedding.

Owns the network and its tensors. Must never know KV slots or how drafts are selected
(`speculative.drafts.recurrent`). Head and vocabulary are the target's, or a part of it: the ids of a hot
token map.

Shapes: `T` packed rows, `E` hidden width, `V` draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from engine.batch import Span
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.pool import PagePool
from speculative.drafts import names
from speculative.drafts.config import check_same, flag, layer_config
from speculative.drafts.folder import TensorReader, load_torch, open_draft
from speculative.drafts.head import DraftHead, Ids
from speculative.drafts.layer import DraftRows, kv_spec, logit_rows, packed_ids, read_layer
from speculative.drafts.recurrent import RecurrentProposer
from speculative.drafts.shape import TreeShape
from speculative.proposer import DraftNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class EagleConfig(TreeShape):
    """draft: folder of the head. token_map: torch file with the target ids the draft may propose; empty:
    all."""

    draft: str
    token_map: str = ""


class EagleProposer(RecurrentProposer):
    """Drafts with an EAGLE head."""

    def __init__(self, config: EagleConfig) -> None:
        super().__init__(EagleDraft(config))


class EagleDraft:
    """A head on disk, checked against its config; `build` checks it against the target."""

    def __init__(self, config: EagleConfig) -> None:
        self.shape: TreeShape = config
        self._folder = open_draft(config.draft, _rename)
        self._layers = layer_config(self._folder.config)
        self._hot_ids = _hot_ids(config.token_map) if config.token_map else None
        hot_ids = None if self._hot_ids is None else self._hot_ids.tolist()
        self.needs = DraftNeeds(
            draft_kv=(kv_spec(self._layers),),
            prefill_identity="eagle",
            draft=self._folder.name,
            draft_weights=self._folder.fingerprint(self._layers, hot_ids),
        )

    def layer_ids(self, model: Model) -> tuple[int, ...]:
        return (model.config.num_layers,)

    def build(self, model: Model, pool: PagePool) -> "EagleNetwork":
        check_same("hidden_size", self._layers.hidden_size, model.config.hidden_size)
        check_same("vocab_size", self._layers.vocab_size, model.config.vocab_size)
        reader = self._folder.reader(dtype=model.dtype, device=model.device)
        network = EagleNetwork(
            reader,
            model,
            config=self._layers,
            rows=DraftRows(self._layers, pool, dtype=model.dtype, device=model.device),
            needs_fc_bias=flag(self._folder.config, "bias"),
            head=_head(model, self._hot_ids),
        )
        reader.finish()
        return network


class EagleNetwork:
    """fc over (embedding, hidden), then decoder layers, the first without its input norm; no final norm."""

    def __init__(
        self,
        reader: TensorReader,
        model: Model,
        *,
        config: ModelConfig,
        rows: DraftRows,
        needs_fc_bias: bool,
        head: DraftHead,
    ) -> None:
        width = config.hidden_size
        self.head = head
        self.hidden_size = width
        self._model = model
        self._rows = rows
        embedding_VE = reader.take_if(names.EMBEDDING, (config.vocab_size, width))
        self._embedding_VE = model.embedding_VE if embedding_VE is None else embedding_VE
        has_bias = needs_fc_bias or reader.has("fc.bias")
        bias_E = reader.take("fc.bias", (width,)) if has_bias else None
        self._fc = Linear(reader.take("fc.weight", (width, 2 * width)), bias_E)
        self._layers = [
            read_layer(reader, f"layers.{index}.", config, has_input_norm=index > 0)
            for index in range(config.num_layers)
        ]

    def fuse(self, captured: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What the target's head reads: its last hidden after the final norm."""
        return self._model.final_norm(captured[self._model.config.num_layers])

    def forward(self, spans: Sequence[Span], hidden_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        this = self._rows.start(spans)
        embedded_TE = F.embedding(self._rows.ids(packed_ids(spans)), self._embedding_VE)
        out_TE = self._fc(torch.cat((embedded_TE, hidden_TE), dim=1))
        for index, layer in enumerate(self._layers):
            out_TE = layer.forward(out_TE, this, self._rows.kv(index))
        out_RE = out_TE[self._rows.ids(logit_rows(spans))]
        return out_RE, self.logits(out_RE)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden_RE)


def _rename(name: str) -> str | None:
    """A head's own `lm_head` is a copy of the target's, which is used instead."""
    canonical = names.eagle(name)
    return None if canonical == names.HEAD else canonical


def _hot_ids(path: str) -> Ids:
    """The ids of a hot token map. Raises ValueError when the file holds none or an id twice."""
    if not Path(path).is_file():
        raise ValueError(f"token_map must be a torch file with token ids, got {path!r}")
    ids: Ids = torch.as_tensor(load_torch(Path(path))).to(torch.int64).flatten().numpy()
    if not len(ids) or ids.min() < 0 or len(np.unique(ids)) != len(ids):
        raise ValueError(f"token_map must hold distinct token ids, got {len(ids)} in {path!r}")
    return ids


def _head(model: Model, hot_ids: Ids | None) -> DraftHead:
    if hot_ids is None:
        return DraftHead(head=model.head, target_ids_V=None)
    if hot_ids.max() >= model.config.vocab_size:
        raise ValueError(f"token_map must hold ids below {model.config.vocab_size}, got {hot_ids.max()}")
    rows_V = torch.from_numpy(hot_ids).to(model.device)
    return DraftHead(head=model.head.rows(rows_V), target_ids_V=hot_ids)
