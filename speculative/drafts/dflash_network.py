"""The block drafter's network: features of the target as context KV, and one pass over a block of masks.

Owns the network and its tensors in the z-lab and speculators layouts. Must never know requests, or what
becomes of the drafts. Context KV is a function of a feature and its position alone, never of a block.

Shapes: `T` packed rows, `R` wanted rows, `X` joined target hiddens, `E` hidden width, `V` draft vocabulary,
`K` KV heads, `D` head dim.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
import torch.nn.functional as F

from engine.batch import Span
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.models.rope import RotaryEmbedding, rotate_
from engine.pool import PagePool
from speculative.drafts import names
from speculative.drafts.config import check_same
from speculative.drafts.dflash_config import DflashFacts, LayerView
from speculative.drafts.folder import TensorReader
from speculative.drafts.head import DraftHead, read_embedding, read_target_ids
from speculative.drafts.layer import (
    DraftLayer,
    DraftPass,
    DraftRows,
    logit_rows,
    packed_ids,
    read_layer,
    rms_norm,
)

MASK_EMBEDDING = "mask_embedding"
_ENCODER_NAMES: Mapping[str, str] = {
    "encoder.fc.weight": "fc.weight",
    "encoder.output_norm_enc.weight": "hidden_norm.weight",
}


def tensor_name(name: str) -> str | None:
    """Canonical name of a checkpoint tensor; None for copies of the target's."""
    canonical = names.eagle(name)
    return None if canonical is None else _ENCODER_NAMES.get(canonical, canonical)


class DflashNetwork:
    """Bound to its target: embedding and head are the target's unless the checkpoint has its own."""

    def __init__(self, facts: DflashFacts, reader: TensorReader, model: Model, pool: PagePool) -> None:
        config = facts.layers
        width = config.hidden_size
        self._config = config
        self._layer_ids = facts.layer_ids
        self._mask_token_id = facts.mask_token_id
        self._pool = pool
        self._embedding_VE = read_embedding(reader, (config.vocab_size, width), model)
        self._mask_E = reader.take_if(MASK_EMBEDDING, (width,))
        self._fc = Linear(reader.take("fc.weight", (width, len(facts.layer_ids) * facts.target_hidden_size)))
        self._hidden_norm_E = reader.take("hidden_norm.weight", (width,))
        self._layers = [read_layer(reader, f"layers.{index}.", config) for index in range(config.num_layers)]
        self._kv_products = [layer.qkv.rows(_kv_rows(config)) for layer in self._layers]
        self._norm_E = reader.take("norm.weight", (width,))
        self.head = _head(reader, facts, model)
        self._views = facts.views
        self._rows = {
            view: DraftRows(
                replace(config, windows=(view.window,)), pool, dtype=model.dtype, device=model.device
            )
            for view in set(facts.views)
        }
        self._rope = RotaryEmbedding(
            config.rope, head_dim=config.head_dim, dtype=model.dtype, device=model.device
        )
        self._device = model.device

    def join(self, captured: Mapping[int, torch.Tensor], rows: Sequence[int]) -> torch.Tensor:
        """Features of packed rows of a target forward, `[T, X]`."""
        hiddens = [captured[layer] for layer in self._layer_ids]
        if list(rows) != list(range(len(hiddens[0]))):
            rows_T = self._ids(rows)
            hiddens = [hidden_TE[rows_T] for hidden_TE in hiddens]
        return torch.cat(hiddens, dim=1)

    def context(self, features_TX: torch.Tensor) -> torch.Tensor:
        """What every layer projects its context KV from, `[T, E]`."""
        return rms_norm(self._fc(features_TX), self._hidden_norm_E, self._config.rms_norm_eps)

    def context_kv(self, features_TX: torch.Tensor, positions: Sequence[int]) -> list[torch.Tensor]:
        """K and V of context tokens in each layer, `[T, 2, K, D]`."""
        context_TE = self.context(features_TX)
        rotation = self._rope.rows(self._ids(positions))
        return [
            _context_kv(layer, product(context_TE), rotation)
            for layer, product in zip(self._layers, self._kv_products, strict=True)
        ]

    def write_context(
        self, features_TX: torch.Tensor, positions: Sequence[int], slots: Sequence[int]
    ) -> None:
        """Put context KV into flat slots of the pool (page * page_size + offset)."""
        size = self._pool.layout.page_size
        page_T = self._ids([slot // size for slot in slots])
        offset_T = self._ids([slot % size for slot in slots])
        for index, kv_T2KD in enumerate(self.context_kv(features_TX, positions)):
            self._kv(index)[page_T, :, offset_T] = kv_T2KD

    def hidden(self, spans: Sequence[Span]) -> torch.Tensor:
        """What the head reads of the wanted rows, `[R, E]`; blocks attend to the context before them."""
        passes = {view: self._start(view, spans) for view in self._rows}
        ids_T = self._ids(packed_ids(spans))
        hidden_TE = F.embedding(ids_T, self._embedding_VE)
        if self._mask_E is not None:
            hidden_TE[ids_T == self._mask_token_id] = self._mask_E
        for index, (layer, view) in enumerate(zip(self._layers, self._views, strict=True)):
            hidden_TE = layer.forward(hidden_TE, passes[view], self._kv(index))
        hidden_RE = hidden_TE[self._ids(logit_rows(spans))]
        return rms_norm(hidden_RE, self._norm_E, self._config.rms_norm_eps)

    def draft(self, spans: Sequence[Span]) -> list[int]:
        """The target's id of the likeliest token at each wanted row."""
        best_R = self.head.logits(self.hidden(spans)).argmax(dim=1).cpu().numpy()
        return [int(token_id) for token_id in self.head.to_target(best_R)]

    def _start(self, view: LayerView, spans: Sequence[Span]) -> DraftPass:
        if not view.is_bidirectional:
            spans = [replace(span, is_bidirectional=False) for span in spans]
        return self._rows[view].start(spans)

    def _kv(self, layer: int) -> torch.Tensor:
        return self._rows[self._views[layer]].kv(layer)

    def _ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def _kv_rows(config: ModelConfig) -> slice:
    """The rows of `DraftLayer.qkv` that make K and V."""
    return slice(config.num_heads * config.head_dim, None)


def _context_kv(
    layer: DraftLayer, kv_TF: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:
    """K, normalised and rotated as in the layer, and V, of projections without the layer's input norm."""
    config = layer.config
    kv_T2KD = kv_TF.view(len(kv_TF), 2, config.num_kv_heads, config.head_dim)
    k_TKD = kv_T2KD[:, 0]
    if layer.qk_norm_HD is not None:
        normed_TKD = F.rms_norm(k_TKD, (config.head_dim,), None, config.rms_norm_eps)
        torch.mul(normed_TKD, layer.qk_norm_HD[config.num_heads :], out=k_TKD)
    rotate_(k_TKD, *rotation)
    return kv_T2KD


def _head(reader: TensorReader, facts: DflashFacts, model: Model) -> DraftHead:
    """The checkpoint's own; without one the target's, for a draft of its whole vocabulary only."""
    width, target_vocab = facts.layers.hidden_size, model.config.vocab_size
    target_ids = read_target_ids(reader, size=facts.vocab_size or target_vocab, target_vocab=target_vocab)
    size = target_vocab if target_ids is None else len(target_ids)
    if reader.has(names.HEAD) or target_ids is not None:
        return DraftHead(head=Linear(reader.take(names.HEAD, (size, width))), target_ids_V=target_ids)
    check_same(f"hidden_size without {names.HEAD}", width, model.config.hidden_size)
    return DraftHead(head=model.head, target_ids_V=None)


def check_target(facts: DflashFacts, model: Model) -> None:
    """Raises ValueError naming the field in which the draft does not fit the target."""
    config: ModelConfig = model.config
    check_same("vocab_size", facts.layers.vocab_size, config.vocab_size)
    check_same("target_hidden_size", facts.target_hidden_size, config.hidden_size)
    if facts.num_target_layers is not None:
        check_same("num_target_layers", facts.num_target_layers, config.num_layers)
    if facts.layer_ids[-1] >= config.num_layers:
        raise ValueError(
            f"the layers a dflash draft taps must be hidden states before the last of {config.num_layers},"
            f" got hidden states {facts.layer_ids}"
        )
    if facts.mask_token_id >= config.vocab_size:
        raise ValueError(
            f"mask_token_id must be below the target's vocab_size {config.vocab_size},"
            f" got {facts.mask_token_id}"
        )
