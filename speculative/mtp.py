"""MTP / NEXTN: modules that a target was trained with to predict the tokens after the next.

Owns the module (mix of embedding and hidden, one decoder layer, norm) and its tensors in the DeepSeek and
Qwen3-Next layouts. Must never know KV slots. One module drafts as any head over hidden states does
(`speculative.drafts.recurrent`); several draft one token each (`speculative.drafts.modules`).

Embedding and head are the target's; a folder that also holds the target is fine.

Shapes: `T` packed rows, `R` wanted rows, `E` hidden width, `V` vocabulary.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from engine.batch import Span
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.model import Model
from engine.pool import PagePool
from speculative.drafts.config import check_same, layer_config
from speculative.drafts.folder import DraftFolder, TensorReader, open_draft
from speculative.drafts.head import DraftHead
from speculative.drafts.layer import DraftRows, kv_spec, packed_ids, read_layer, rms_norm
from speculative.drafts.layer import logit_rows as wanted_rows
from speculative.drafts.modules import ModuleChainProposer
from speculative.drafts.recurrent import RecurrentProposer
from speculative.drafts.shape import TreeShape
from speculative.proposer import DraftNeeds, Proposer

# Copies of what the target has.
_SHARED = re.compile(r"(^|\.)(embed_tokens\.weight|shared_head\.head\.weight|rotary_emb\.inv_freq)$")
_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.")
# What makes a layer a module. In a module that lacks one of them the others tell that it is missing.
_MARKS = ("enorm.weight", "hnorm.weight", "eh_proj.weight", "shared_head.norm.weight")
_TARGET = re.compile(r"^(model\.|language_model\.)*(layers\.\d+|norm|lm_head)\.")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleNames:
    """What the checkpoint calls the tensors of one module; `layer` is the prefix of its decoder layer's.

    norm_offset: what is added to every stored norm gain.
    """

    embedding_norm: str
    hidden_norm: str
    mix: str
    norm: str
    layer: str
    norm_offset: float = 0.0


_QWEN_NEXT = ModuleNames(
    embedding_norm="mtp.pre_fc_norm_embedding.weight",
    hidden_norm="mtp.pre_fc_norm_hidden.weight",
    mix="mtp.fc.weight",
    norm="mtp.norm.weight",
    layer="mtp.layers.0.",
    norm_offset=1.0,
)


def _deepseek(layer: str) -> ModuleNames:
    return ModuleNames(
        embedding_norm=f"{layer}enorm.weight",
        hidden_norm=f"{layer}hnorm.weight",
        mix=f"{layer}eh_proj.weight",
        norm=f"{layer}shared_head.norm.weight",
        layer=layer,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class MtpConfig(TreeShape):
    """draft: folder with the modules; several of them draft a chain of at most one token each."""

    draft: str


def create_mtp(config: MtpConfig) -> Proposer:
    """The proposer for the number of modules the folder holds."""
    draft = MtpDraft(config)
    if draft.num_modules == 1:
        return RecurrentProposer(draft)
    if config.topk != 1:
        raise ValueError(f"topk must be 1 for a draft of {draft.num_modules} modules, got {config.topk}")
    return ModuleChainProposer(draft)


class MtpDraft:
    """Modules on disk, checked against their config; `build` checks them against the target."""

    def __init__(self, config: MtpConfig) -> None:
        self.shape: TreeShape = config
        stored = open_draft(config.draft, _rename)
        self._modules = _modules_of(stored)
        self._folder = _without_target(stored, self._modules)
        self._config = layer_config(stored.config)
        self.num_modules = len(self._modules)
        _check_count(stored.config, self.num_modules)
        self.needs = DraftNeeds(
            draft_kv=(kv_spec(self._config, num_layers=self.num_modules),),
            prefill_identity="mtp",
            draft=stored.name,
            draft_weights=self._folder.fingerprint(self._config, self._modules),
        )

    def layer_ids(self, model: Model) -> tuple[int, ...]:
        return (model.config.num_layers,)

    def build(self, model: Model, pool: PagePool) -> "MtpModule":
        return self.build_all(model, pool)[0]

    def build_all(self, model: Model, pool: PagePool) -> list["MtpModule"]:
        check_same("hidden_size", self._config.hidden_size, model.config.hidden_size)
        check_same("vocab_size", self._config.vocab_size, model.config.vocab_size)
        reader = self._folder.reader(dtype=model.dtype, device=model.device)
        rows = DraftRows(self._config, pool, dtype=model.dtype, device=model.device)
        modules = [
            MtpModule(reader, model, names, index=index, config=self._config, rows=rows)
            for index, names in enumerate(self._modules)
        ]
        reader.finish()
        return modules


class MtpModule:
    """norm(layer(mix(norm(embedding), norm(hidden)))): what the head reads, and the recurrent hidden."""

    def __init__(
        self,
        reader: TensorReader,
        model: Model,
        names: ModuleNames,
        *,
        index: int,
        config: ModelConfig,
        rows: DraftRows,
    ) -> None:
        width = config.hidden_size
        self.hidden_size = width
        self.head = DraftHead(head=model.head, target_ids_V=None)
        self._model = model
        self._rows = rows
        self._index = index
        self._eps = config.rms_norm_eps
        self._embedding_norm_E = reader.take(names.embedding_norm, (width,)) + names.norm_offset
        self._hidden_norm_E = reader.take(names.hidden_norm, (width,)) + names.norm_offset
        self._mix = Linear(reader.take(names.mix, (width, 2 * width)))
        self._layer = read_layer(reader, names.layer, config, norm_offset=names.norm_offset)
        self._norm_E = reader.take(names.norm, (width,)) + names.norm_offset

    def fuse(self, captured: Mapping[int, torch.Tensor]) -> torch.Tensor:
        """What the target's head reads: its last hidden after the final norm."""
        return self._model.final_norm(captured[self._model.config.num_layers])

    def forward(self, spans: Sequence[Span], hidden_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out_RE = self.run(spans, hidden_TE)[self._rows.ids(wanted_rows(spans))]
        normed_RE = rms_norm(out_RE, self._norm_E, self._eps)
        return normed_RE, self.logits(normed_RE)

    def logits(self, hidden_RE: torch.Tensor) -> torch.Tensor:
        return self.head.logits(hidden_RE)

    def run(self, spans: Sequence[Span], hidden_TE: torch.Tensor) -> torch.Tensor:
        """The layer's output for every row, before the norm: the next module's hidden."""
        this = self._rows.start(spans)
        embedded_TE = F.embedding(self._rows.ids(packed_ids(spans)), self._model.embedding_VE)
        mixed_TX = torch.cat(
            (
                rms_norm(embedded_TE, self._embedding_norm_E, self._eps),
                rms_norm(hidden_TE, self._hidden_norm_E, self._eps),
            ),
            dim=1,
        )
        return self._layer.forward(self._mix(mixed_TX), this, self._rows.kv(self._index))

    def predict(self, out_RE: torch.Tensor) -> torch.Tensor:
        """Logits of the token after each row of `run`'s output."""
        return self.head.logits(rms_norm(out_RE, self._norm_E, self._eps))


def _rename(name: str) -> str | None:
    return None if _SHARED.search(name) else name


def _modules_of(folder: DraftFolder) -> tuple[ModuleNames, ...]:
    """Raises ValueError when the folder holds no module."""
    if any(name.startswith("mtp.") for name in folder.tensors):
        return (_QWEN_NEXT,)
    found = {match[0]: int(match[1]) for name in folder.tensors if (match := _LAYER.match(name))}
    marked = [layer for layer in found if any(f"{layer}{mark}" in folder.tensors for mark in _MARKS)]
    if not marked:
        raise ValueError(f"draft {folder.name}: the checkpoint lacks eh_proj.weight and mtp.fc.weight")
    return tuple(_deepseek(layer) for layer in sorted(marked, key=lambda layer: found[layer]))


def _without_target(folder: DraftFolder, modules: Sequence[ModuleNames]) -> DraftFolder:
    """The folder may hold the target as well: its head, its norm, and its layers, all before the modules."""
    first = _layer_number(modules[0].layer)
    own = tuple(module.layer for module in modules)

    def is_targets(name: str) -> bool:
        if not _TARGET.match(name) or name.startswith(own):
            return False
        return first is None or (number := _layer_number(name)) is None or number < first

    kept = {name: tensor for name, tensor in folder.tensors.items() if not is_targets(name)}
    return replace(folder, tensors=kept)


def _layer_number(name: str) -> int | None:
    """None for what is no layer of a target's numbering."""
    match = _LAYER.match(name)
    return int(match[1]) if match else None


def _check_count(config: Mapping[str, Any], num_modules: int) -> None:
    wanted = config.get("num_nextn_predict_layers")
    if wanted is not None and wanted != num_modules:
        raise ValueError(
            f"num_nextn_predict_layers must be the number of modules in the checkpoint, {num_modules},"
            f" got {wanted!r}"
        )
