"""The native Llama family (Llama, Mistral, Qwen2, Qwen3 dense) over a page pool.

Owns the order of operations of a forward pass. Must never know which request a row belongs to, nor
how attention finds its context (`engine.attention`).

Shapes: `T` packed rows, `H` heads, `D` head dim, `E` hidden width, `R` wanted rows, `V` vocabulary.
"""

from collections.abc import Mapping, Sequence

import torch
import torch.nn.functional as F

from engine.attention import AttentionBackend, AttentionPlan
from engine.batch import ForwardBatch, ForwardOutput, Span
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.rope import RotaryEmbedding, rotate_
from engine.models.weights import LayerWeights, ModelWeights
from engine.pool import PagePool


class LlamaModel:
    """One model whose KV lies in the regions of `pool_name`. Weights never change."""

    def __init__(
        self,
        config: ModelConfig,
        weights: ModelWeights,
        *,
        attention: AttentionBackend,
        pool_name: str = "target",
    ) -> None:
        self.config = config
        self.weights = weights
        self.pool_name = pool_name
        self.dtype = weights.embedding_VE.dtype
        self.device = weights.embedding_VE.device
        self._attention = attention
        self._rope = RotaryEmbedding(
            config.rope, head_dim=config.head_dim, dtype=self.dtype, device=self.device
        )

    @property
    def embedding_VE(self) -> torch.Tensor:
        return self.weights.embedding_VE

    @property
    def head(self) -> Linear:
        return self.weights.head

    def final_norm(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        config = self.config
        return F.rms_norm(hidden_TE, (config.hidden_size,), self.weights.final_norm_E, config.rms_norm_eps)

    @torch.inference_mode()
    def forward(self, batch: ForwardBatch, pool: PagePool) -> ForwardOutput:
        """One pass over the packed rows of all spans; see `engine.batch` for the meaning of a span."""
        token_ids_T = _packed([span.token_ids for span in batch.spans], self.device)
        positions_T = _packed([span.positions for span in batch.spans], self.device)
        rotation = self._rope.rows(positions_T)
        plans = self._plans(batch.spans, pool)
        hidden_TE = F.embedding(token_ids_T, self.weights.embedding_VE)
        captured: dict[int, torch.Tensor] = {}
        for index, layer in enumerate(self.weights.layers):
            if index in batch.hidden_layers:
                captured[index] = hidden_TE.clone()
            kv_pair = pool.kv_pair(self.pool_name, index)
            plan = plans[self.config.windows[index]]
            self._attention_block(hidden_TE, layer, rotation, plan, kv_pair)
            self._mlp_block(hidden_TE, layer)
        if self.config.num_layers in batch.hidden_layers:
            captured[self.config.num_layers] = hidden_TE.clone()
        return ForwardOutput(logits_RV=self._logits(hidden_TE, batch.spans), hidden=captured)

    def _plans(self, spans: Sequence[Span], pool: PagePool) -> Mapping[int | None, AttentionPlan]:
        page_size = pool.layout.page_size
        return {
            window: self._attention.plan(
                spans, page_size=page_size, window=window, dtype=self.dtype, device=self.device
            )
            for window in set(self.config.windows)
        }

    def _attention_block(
        self,
        hidden_TE: torch.Tensor,
        layer: LayerWeights,
        rotation: tuple[torch.Tensor, torch.Tensor],
        plan: AttentionPlan,
        kv_P2SHD: torch.Tensor,
    ) -> None:
        """hidden += attention(norm(hidden))"""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        x_TE = F.rms_norm(hidden_TE, (config.hidden_size,), layer.input_norm_E, config.rms_norm_eps)
        qkv_THD = layer.qkv(x_TE).view(len(x_TE), -1, config.head_dim)
        qk_THD = qkv_THD[:, :num_rotated]
        if layer.qk_norm_HD is not None:
            normed_THD = F.rms_norm(qk_THD, (config.head_dim,), None, config.rms_norm_eps)
            torch.mul(normed_THD, layer.qk_norm_HD, out=qk_THD)
        rotate_(qk_THD, *rotation)
        attended_TA = plan.attend(
            qkv_THD[:, : config.num_heads],
            qkv_THD[:, config.num_heads :].unflatten(1, (2, config.num_kv_heads)),
            kv_P2SHD,
        )
        hidden_TE.add_(layer.output(attended_TA))

    def _mlp_block(self, hidden_TE: torch.Tensor, layer: LayerWeights) -> None:
        """hidden += down(silu(gate(norm(hidden))) * up(norm(hidden)))"""
        config = self.config
        x_TE = F.rms_norm(hidden_TE, (config.hidden_size,), layer.post_norm_E, config.rms_norm_eps)
        gate_TM, up_TM = layer.gate_up(x_TE).chunk(2, dim=1)
        hidden_TE.add_(layer.down(F.silu(gate_TM).mul_(up_TM)))

    def _logits(self, hidden_TE: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
        rows: list[int] = []
        start = 0
        for span in spans:
            rows.extend(start + row for row in span.logit_rows)
            start += len(span.token_ids)
        if not rows:
            return torch.empty(0, self.config.vocab_size, dtype=torch.float32, device=self.device)
        wanted_RE = hidden_TE if len(rows) == start else hidden_TE[torch.tensor(rows, device=self.device)]
        return self.weights.head(self.final_norm(wanted_RE)).float()


def _packed(parts: Sequence[Sequence[int]], device: torch.device) -> torch.Tensor:
    return torch.tensor([value for part in parts for value in part], dtype=torch.int64, device=device)
