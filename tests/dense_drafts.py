"""Heads and modules by their definition: whole texts, plain products of the checkpoint's tensors, no cache.

Must share nothing with the product's networks. Each drafts a chain below the last token of a text.

Shapes: `T` rows (row p pairs the hidden at p with the token after it), `E` hidden width, `V` vocabulary.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tests.tiny_drafts import HEAD_DIM, Tensors

THETA = 10000.0
EPS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a draft may read of it. `hidden`: of all rows of a text what enters each layer, and what leaves
    the last; `normed_TE`: what the head reads."""

    embedding_VE: torch.Tensor
    head_VE: torch.Tensor
    hidden: Sequence[torch.Tensor]
    normed_TE: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What an EAGLE-3 config says; `taps` are `hidden_states` indices."""

    taps: Sequence[int]
    num_layers: int = 1
    norm_before_residual: bool = False
    norm_output: bool = False


class Dense:
    """Tensors by name, as the checkpoint has them; `gain` is added to what a norm multiplies with."""

    def __init__(self, tensors: Tensors, *, gain: float = 0.0) -> None:
        self.tensors = tensors
        self._gain = gain

    def linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        bias = self.tensors.get(f"{name}.bias", torch.zeros(()))
        return x @ self.tensors[f"{name}.weight"].T + bias

    def norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        scaled = x * (x.pow(2).mean(dim=-1, keepdim=True) + EPS).rsqrt()
        return scaled * (self.tensors[f"{name}.weight"] + self._gain)

    def attention(self, prefix: str, x_TX: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            self.linear(x_TX, f"{prefix}self_attn.{name}_proj").view(len(x_TX), -1, HEAD_DIM)
            for name in "qkv"
        )
        if f"{prefix}self_attn.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{prefix}self_attn.q_norm"), self.norm(k, f"{prefix}self_attn.k_norm")
        q, k = rotated(q), rotated(k)
        k, v = (each.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for each in (k, v))
        scores = torch.einsum("thd,shd->hts", q, k) / HEAD_DIM**0.5
        is_later = torch.ones(len(x_TX), len(x_TX), dtype=torch.bool).triu(1)
        attended = torch.einsum("hts,shd->thd", scores.masked_fill(is_later, -torch.inf).softmax(dim=2), v)
        return self.linear(attended.flatten(1), f"{prefix}self_attn.o_proj")

    def mlp(self, prefix: str, x_TE: torch.Tensor) -> torch.Tensor:
        normed = self.norm(x_TE, f"{prefix}post_attention_layernorm")
        gated = F.silu(self.linear(normed, f"{prefix}mlp.gate_proj")) * self.linear(
            normed, f"{prefix}mlp.up_proj"
        )
        return x_TE + self.linear(gated, f"{prefix}mlp.down_proj")

    def layer(self, prefix: str, x_TE: torch.Tensor, *, is_normed: bool = True) -> torch.Tensor:
        read = self.norm(x_TE, f"{prefix}input_layernorm") if is_normed else x_TE
        return self.mlp(prefix, x_TE + self.attention(prefix, read))


def rotated(x_THD: torch.Tensor) -> torch.Tensor:
    frequencies = THETA ** (-2.0 * torch.arange(HEAD_DIM // 2) / HEAD_DIM)
    angles = (torch.arange(len(x_THD))[:, None] * frequencies)[:, None]
    low, high = x_THD.chunk(2, dim=-1)
    return torch.cat(
        (low * angles.cos() - high * angles.sin(), high * angles.cos() + low * angles.sin()), dim=-1
    )


class RecurrentReference(ABC):
    """A network that reads its own hidden of the row before."""

    @abstractmethod
    def fused(self, target: Target) -> torch.Tensor:
        """What it reads of the target's rows."""

    @abstractmethod
    def run(
        self, target: Target, hidden_TE: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Its own hidden and its logits of every row."""

    def ids_of(self, draft_id: int) -> int:
        return draft_id

    def draft(self, target: Target, tokens: Sequence[int], count: int) -> list[int]:
        """Below the last of `tokens`, of which the target has read all others."""
        hidden_TE, drafts = self.fused(target), list[int]()
        for _ in range(count):
            ids = torch.tensor([*tokens[1:], *drafts])
            out_TE, logits_TV = self.run(target, hidden_TE, ids)
            drafts.append(self.ids_of(int(logits_TV[-1].argmax())))
            hidden_TE = torch.cat((hidden_TE, out_TE[-1:]))
        return drafts


class Eagle(RecurrentReference):
    def __init__(self, tensors: Tensors) -> None:
        self._dense = Dense(tensors)

    def fused(self, target: Target) -> torch.Tensor:
        return target.normed_TE

    def run(
        self, target: Target, hidden_TE: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        mixed = self._dense.linear(torch.cat((target.embedding_VE[ids], hidden_TE), dim=1), "fc")
        out = self._dense.layer("layers.0.", mixed, is_normed=False)
        for index in range(1, len({name.split(".")[1] for name in self._dense.tensors if "layers." in name})):
            out = self._dense.layer(f"layers.{index}.", out)
        return out, out @ target.head_VE.T


class Eagle3(RecurrentReference):
    def __init__(self, tensors: Tensors, variant: Variant) -> None:
        self._dense = Dense({name.replace("midlayer.", "layers.0."): each for name, each in tensors.items()})
        self._variant = variant

    def fused(self, target: Target) -> torch.Tensor:
        dense, parts = self._dense, [target.hidden[tap] for tap in self._variant.taps]
        if "fc_norm.0.weight" in dense.tensors:
            parts = [dense.norm(part, f"fc_norm.{index}") for index, part in enumerate(parts)]
        joined = torch.cat(parts, dim=1)
        if "input_norm.weight" in dense.tensors:
            joined = dense.norm(joined, "input_norm")
        return dense.linear(joined, "fc")

    def run(
        self, target: Target, hidden_TE: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dense, tensors = self._dense, self._dense.tensors
        embedded = tensors.get("embed_tokens.weight", target.embedding_VE)[ids]
        normed = dense.norm(hidden_TE, "layers.0.hidden_norm")
        residual = normed if self._variant.norm_before_residual else hidden_TE
        read = torch.cat((dense.norm(embedded, "layers.0.input_layernorm"), normed), dim=1)
        out = dense.mlp("layers.0.", residual + dense.attention("layers.0.", read))
        for index in range(1, self._variant.num_layers):
            out = dense.layer(f"layers.{index}.", out)
        last = dense.norm(out, "norm")
        return last if self._variant.norm_output else out, last @ tensors.get(
            "lm_head.weight", target.head_VE
        ).T

    def ids_of(self, draft_id: int) -> int:
        offsets = self._dense.tensors.get("d2t")
        return draft_id if offsets is None else draft_id + int(offsets[draft_id])


class Module(RecurrentReference):
    """One MTP module under DeepSeek's names, or Qwen3-Next's renamed to them."""

    def __init__(self, tensors: Tensors, prefix: str = "model.layers.3.", *, gain: float = 0.0) -> None:
        self._dense = Dense(tensors, gain=gain)
        self._prefix = prefix

    def fused(self, target: Target) -> torch.Tensor:
        return target.normed_TE

    def layer(self, target: Target, hidden_TE: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        dense, prefix = self._dense, self._prefix
        embedded = dense.norm(target.embedding_VE[ids], f"{prefix}enorm")
        mixed = dense.linear(
            torch.cat((embedded, dense.norm(hidden_TE, f"{prefix}hnorm")), dim=1), f"{prefix}eh_proj"
        )
        return dense.layer(prefix, mixed)

    def read(self, target: Target, out_TE: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        normed = self._dense.norm(out_TE, f"{self._prefix}shared_head.norm")
        return normed, normed @ target.head_VE.T

    def run(
        self, target: Target, hidden_TE: torch.Tensor, ids: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return self.read(target, self.layer(target, hidden_TE, ids))


class ModuleChain:
    """Module j reads what module j - 1 made of a row, and the token j + 1 after it: known, or a draft."""

    def __init__(self, tensors: Tensors, *, num_modules: int) -> None:
        self._modules = [Module(tensors, f"model.layers.{3 + index}.") for index in range(num_modules)]

    def draft(self, target: Target, tokens: Sequence[int], count: int) -> list[int]:
        hidden_TE, drafts = target.normed_TE, list[int]()
        for index, module in enumerate(self._modules[:count]):
            text = [*tokens, *drafts]
            hidden_TE = module.layer(
                target, hidden_TE, torch.tensor(text[1 + index : 1 + index + len(hidden_TE)])
            )
            drafts.append(int(module.read(target, hidden_TE)[1][-1].argmax()))
        return drafts


def without_qwen_names(tensors: Mapping[str, torch.Tensor]) -> Tensors:
    """Qwen3-Next's names as DeepSeek's, the values as they are."""
    renames = {
        "mtp.pre_fc_norm_embedding.weight": "enorm.weight",
        "mtp.pre_fc_norm_hidden.weight": "hnorm.weight",
        "mtp.fc.weight": "eh_proj.weight",
        "mtp.norm.weight": "shared_head.norm.weight",
    }
    return {
        f"model.layers.3.{renames.get(name, name.removeprefix('mtp.layers.0.'))}": each
        for name, each in tensors.items()
    }
