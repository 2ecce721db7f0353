"""EAGLE-3: one layer over the target's fused early, middle and late hidden states, with its own vocabulary.

Owns the network and its tensors in the official, SpecForge and speculators layouts. Must never know KV
slots or how drafts are selected (`speculative.drafts.recurrent`).

Shapes: `T` packed rows, `R` wanted rows, `E` hidden width, `V` draft vocabulary.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from engine.batch import Span
from engine.linear import Linear
from engine.models.config import ModelConfig, positive
from engine.models.model import Model
from engine.pool import PagePool
from speculative.drafts import names
from speculative.drafts.config import (
    check_same,
    default_layer_ids,
    eagle3_layer_ids,
    flag,
    is_speculators,
    layer_config,
)
from speculative.drafts.folder import TensorReader, open_draft
from speculative.drafts.head import DraftHead, read_embedding, read_target_ids
from speculative.drafts.layer import DraftRows, kv_spec, logit_rows, packed_ids, read_layer, rms_norm
from speculative.drafts.recurrent import RecurrentProposer
from speculative.drafts.shape import TreeShape
from speculative.proposer import DraftNeeds


@dataclass(frozen=True, slots=True, kw_only=True)
class Eagle3Config(TreeShape):
    """draft: folder of the head."""

    draft: str


class Eagle3Proposer(RecurrentProposer):
    """Drafts with an EAGLE-3 head."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(Eagle3Draft(config))


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadFacts:
    """What an EAGLE-3 config says about the head around its layers.

    layer_ids: None for the default of the target's depth. vocab_size: None for the target's.
    norm_before_residual: the first residual is the normalised hidden. norm_output: the recurrent hidden
    is the normalised output. norm_before_fc, fc_norm: the fused hiddens are normalised, whole or apart.
    """

    layers: ModelConfig
    layer_ids: tuple[int, ...] | None
    target_hidden_size: int
    vocab_size: int | None
    norm_before_residual: bool
    norm_output: bool
    norm_before_fc: bool
    fc_norm: bool
    has_fc_bias: bool


def head_facts(config: Mapping[str, Any]) -> HeadFacts:
    """Read `config.json`. Raises ValueError naming the field that cannot be honoured."""
    layers = layer_config(config)
    kind = config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ValueError(f"speculators_model_type must be 'eagle3' for this algorithm, got {kind!r}")
    if not flag(config, "use_aux_hidden_state", default=True):
        raise ValueError("use_aux_hidden_state must be true for EAGLE-3, got False")
    norm_output = flag(config, "norm_output")
    if "eagle_config" in config and not is_speculators(config):
        norm_output = False  # SpecForge's word for the norm before the head, which is always applied
    facts = HeadFacts(
        layers=layers,
        layer_ids=eagle3_layer_ids(config),
        target_hidden_size=positive(config, "target_hidden_size", layers.hidden_size),
        vocab_size=config.get("draft_vocab_size"),
        norm_before_residual=flag(config, "norm_before_residual"),
        norm_output=norm_output,
        norm_before_fc=flag(config, "norm_before_fc"),
        fc_norm=flag(config, "fc_norm") or flag(config, "use_aux_norm"),
        has_fc_bias=flag(config, "bias"),
    )
    if facts.norm_before_fc and facts.fc_norm:
        raise ValueError("norm_before_fc and fc_norm exclude each other, got both true")
    return facts


class Eagle3Draft:
    """A head on disk, checked against its config; `build` checks it against the target."""

    def __init__(self, config: Eagle3Config) -> None:
        self.shape: TreeShape = config
        self._folder = open_draft(config.draft, names.eagle)
        self._facts = head_facts(self._folder.config)
        self.needs = DraftNeeds(
            draft_kv=(kv_spec(self._facts.layers),),
            prefill_identity="eagle3",
            draft=self._folder.name,
            draft_weights=self._folder.fingerprint(self._facts),
        )

    def layer_ids(self, model: Model) -> tuple[int, ...]:
        num_layers = model.config.num_layers
        ids = self._facts.layer_ids or default_layer_ids(num_layers)
        if ids[-1] > num_layers or list(ids) != sorted(set(ids)):
            raise ValueError(
                f"eagle_aux_hidden_state_layer_ids must be hidden states of {num_layers} layers, got {ids}"
            )
        return ids

    def build(self, model: Model, pool: PagePool) -> "Eagle3Network":
        check_same("target_hidden_size", self._facts.target_hidden_size, model.config.hidden_size)
        check_same("vocab_size", self._facts.layers.vocab_size, model.config.vocab_size)
        reader = self._folder.reader(dtype=model.dtype, device=model.device)
        network = Eagle3Network(self._facts, reader, model, pool=pool, layer_ids=self.layer_ids(model))
        reader.finish()
        return network


class Eagle3Network:
    """See `HeadFacts` for the variants."""

    def __init__(
        self,
        facts: HeadFacts,
        reader: TensorReader,
        model: Model,
        *,
        pool: PagePool,
        layer_ids: tuple[int, ...],
    ) -> None:
        config = facts.layers
        width = config.hidden_size
        self._facts = facts
        self._eps = config.rms_norm_eps
        self._layer_ids = layer_ids
        self.hidden_size = width
        self._rows = DraftRows(config, pool, dtype=model.dtype, device=model.device)
        self._embedding_VE = read_embedding(reader, (config.vocab_size, width), model)
        self._read_fusion(reader, len(layer_ids) * facts.target_hidden_size)
        self._input_norm_E = reader.take("layers.0.input_layernorm.weight", (width,))
        self._hidden_norm_E = reader.take("layers.0.hidden_norm.weight", (width,))
        self._first = read_layer(reader, "layers.0.", config, input_size=2 * width, has_input_norm=False)
        self._others = [
            read_layer(reader, f"layers.{index}.", config) for index in range(1, config.num_layers)
        ]
        self._norm_E = reader.take("norm.weight", (width,))
        self.head = _head(reader, facts, model)

    def _read_fusion(self, reader: TensorReader, fused_size: int) -> None:
        facts, width = self._facts, self.hidden_size
        has_bias = facts.has_fc_bias or reader.has("fc.bias")
        bias_E = reader.take("fc.bias", (width,)) if has_bias else None
        self._fc = Linear(reader.take("fc.weight", (width, fused_size)), bias_E)
        self._fused_norm_X = reader.take("input_norm.weight", (fused_size,)) if facts.norm_before_fc else None
        self._fc_norms = [
            reader.take(f"fc_norm.{index}.weight", (facts.target_hidden_size,))
            for index in range(len(self._layer_ids) if facts.fc_norm else 0)
        ]

    def fuse(self, captured: Mapping[int, torch.Tensor]) -> torch.Tensor:
        parts = [captured[layer] for layer in self._layer_ids]
        if self._fc_norms:
            parts = [
                rms_norm(part, gain, self._eps) for part, gain in zip(parts, self._fc_norms, strict=True)
            ]
        fused_TX = torch.cat(parts, dim=1)
        if self._fused_norm_X is not None:
            fused_TX = rms_norm(fused_TX, self._fused_norm_X, self._eps)
        return self._fc(fused_TX)

    def forward(self, spans: Sequence[Span], hidden_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        this = self._rows.start(spans)
        ids_T = self._rows.ids(packed_ids(spans))
        embedded_TE = rms_norm(F.embedding(ids_T, self._embedding_VE), self._input_norm_E, self._eps)
        normed_TE = rms_norm(hidden_TE, self._hidden_norm_E, self._eps)
        residual_TE = normed_TE if self._facts.norm_before_residual else hidden_TE
        x_TX = torch.cat((embedded_TE, normed_TE), dim=1)
        out_TE = residual_TE + self._first.attention(x_TX, this, self._rows.kv(0))
        out_TE.add_(self._first.mlp(out_TE))
        for index, layer in enumerate(self._others, start=1):
            out_TE = layer.forward(out_TE, this, self._rows.kv(index))
        out_RE = out_TE[self._rows.ids(logit_rows(spans))]
        normed_RE = rms_norm(out_RE, self._norm_E, self._eps)
        return normed_RE if self._facts.norm_output else out_RE, self.head.logits(normed_RE)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        is_normed = self._facts.norm_output
        return self.head.logits(hidden_RE if is_normed else rms_norm(hidden_RE, self._norm_E, self._eps))


def _head(reader: TensorReader, facts: HeadFacts, model: Model) -> DraftHead:
    """The draft's own; without one the target's, which only a draft of its whole vocabulary may borrow."""
    target_vocab = model.config.vocab_size
    size = facts.vocab_size or target_vocab
    target_ids = read_target_ids(reader, size=size, target_vocab=target_vocab)
    if reader.has(names.HEAD):
        head = Linear(reader.take(names.HEAD, (size, facts.layers.hidden_size)))
    elif size == target_vocab and target_ids is None:
        check_same(f"hidden_size without {names.HEAD}", facts.layers.hidden_size, model.config.hidden_size)
        shape = (facts.layers.vocab_size, facts.layers.hidden_size)
        head = Linear(read_embedding(reader, shape, model)) if facts.layers.tie_embeddings else model.head
    else:
        raise ValueError(f"the draft's checkpoint lacks {names.HEAD}, which draft_vocab_size {size} needs")
    return DraftHead(head=head, target_ids_V=target_ids)
