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

# (tensor of the module) by the names of either layout; what is left belongs to the decoder layer.
_OWN_NAMES: Mapping[str, str] = {
    "enorm.weight": "embedding_norm",
    "hnorm.weight": "hidden_norm",
    "eh_proj.weight": "mix",
    "shared_head.norm.weight": "norm",
}
_MTP_NAMES: Mapping[str, str] = {
    "mtp.pre_fc_norm_embedding.weight": "0.embedding_norm",
    "mtp.pre_fc_norm_hidden.weight": "0.hidden_norm",
    "mtp.fc.weight": "0.mix",
    "mtp.norm.weight": "0.norm",
}
_SHARED = re.compile(r"(^|\.)(embed_tokens\.weight|shared_head\.head\.weight|rotary_emb\.inv_freq)$")
_LAYER = re.compile(r"^(?:model\.)?layers\.(\d+)\.(.+)$")


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
        self._is_gemma_norm = any(name.startswith("mtp.") for name in stored.tensors)
        self._folder = _modules_of(stored)
        self._config = layer_config(stored.config)
        self.num_modules = len({name.split(".")[0] for name in self._folder.tensors})
        self.needs = DraftNeeds(
            draft_kv=(kv_spec(self._config, num_layers=self.num_modules),),
            prefill_identity="mtp",
            draft=stored.name,
            draft_weights=self._folder.fingerprint(self._config, self._is_gemma_norm),
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
        offset = 1.0 if self._is_gemma_norm else 0.0
        modules = [
            MtpModule(reader, model, index=index, config=self._config, rows=rows, norm_offset=offset)
            for index in range(self.num_modules)
        ]
        reader.finish()
        return modules


class MtpModule:
    """norm(layer(mix(norm(embedding), norm(hidden)))): what the head reads, and the recurrent hidden."""

    def __init__(
        self,
        reader: TensorReader,
        model: Model,
        *,
        index: int,
        config: ModelConfig,
        rows: DraftRows,
        norm_offset: float,
    ) -> None:
        width = config.hidden_size
        self.hidden_size = width
        self.head = DraftHead(head=model.head, target_ids_V=None)
        self._model = model
        self._rows = rows
        self._index = index
        self._eps = config.rms_norm_eps
        self._embedding_norm_E = reader.take(f"{index}.embedding_norm", (width,)) + norm_offset
        self._hidden_norm_E = reader.take(f"{index}.hidden_norm", (width,)) + norm_offset
        self._mix = Linear(reader.take(f"{index}.mix", (width, 2 * width)))
        self._layer = read_layer(reader, f"{index}.layer.", config, norm_offset=norm_offset)
        self._norm_E = reader.take(f"{index}.norm", (width,)) + norm_offset

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


def _modules_of(folder: DraftFolder) -> DraftFolder:
    """The tensors of the modules as "index.tensor"; the target's own, where the folder has them, are left
    out. Raises ValueError when there is no module."""
    if any(name.startswith("mtp.") for name in folder.tensors):
        named = {
            _qwen_name(name): tensor for name, tensor in folder.tensors.items() if name.startswith("mtp.")
        }
    else:
        named = _deepseek_modules(folder.tensors)
    if not named:
        raise ValueError(f"draft {folder.name}: the checkpoint lacks eh_proj.weight and mtp.fc.weight")
    return replace(folder, tensors=named)


def _qwen_name(name: str) -> str:
    if name in _MTP_NAMES:
        return _MTP_NAMES[name]
    return name.replace("mtp.layers.0.", "0.layer.") if name.startswith("mtp.layers.0.") else f"0.{name}"


def _deepseek_modules(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Modules are the layers that mix; the target's layers, before them, do not."""
    found = [(int(m[1]), m[2], name) for name in tensors if (m := _LAYER.match(name))]
    layers = sorted({layer for layer, rest, _ in found if rest == "eh_proj.weight"})
    index_of = {layer: index for index, layer in enumerate(layers)}
    return {
        f"{index_of[layer]}.{_OWN_NAMES.get(rest, f'layer.{rest}')}": tensors[name]
        for layer, rest, name in found
        if layer in index_of
    }
