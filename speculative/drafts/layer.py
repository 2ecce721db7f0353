"""The pieces draft networks are made of: one decoder layer, and what the layers of a forward share.

Owns the layer's arithmetic and the reading of its tensors. Must never know what is fed to it or what
becomes of its output.

Shapes: `T` packed rows, `H` heads, `D` head dim, `E` hidden width, `M` intermediate width, `X` width of the
attention's input, `A` of its output.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from engine.attention import AttentionPlan, TorchAttention
from engine.batch import Span
from engine.layout import PoolSpec
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.models.rope import RotaryEmbedding, rotate_
from engine.pool import PagePool
from speculative.drafts.folder import TensorReader

POOL = "draft"


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPass:
    """One forward's rotation and attention plan, used by every layer of it."""

    rotation: tuple[torch.Tensor, torch.Tensor]
    plan: AttentionPlan


class DraftRows:
    """Makes passes: where rows lie and what they see, for layers of one geometry."""

    def __init__(
        self, config: ModelConfig, pool: PagePool, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        if len(set(config.windows)) != 1:
            raise ValueError(f"layers of a draft must share one window, got {config.windows}")
        self._window = config.windows[0]
        self._rope = RotaryEmbedding(config.rope, head_dim=config.head_dim, dtype=dtype, device=device)
        self._attention = TorchAttention()
        self._pool = pool
        self._dtype = dtype
        self._device = device

    def start(self, spans: Sequence[Span]) -> DraftPass:
        return DraftPass(
            rotation=self._rope.rows(self.ids([position for span in spans for position in span.positions])),
            plan=self._attention.plan(
                spans,
                page_size=self._pool.layout.page_size,
                window=self._window,
                dtype=self._dtype,
                device=self._device,
            ),
        )

    def kv(self, layer: int) -> torch.Tensor:
        return self._pool.kv_pair(POOL, layer)

    def ids(self, values: Sequence[int]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self._device)


def kv_spec(config: ModelConfig, *, num_layers: int | None = None) -> PoolSpec:
    """The draft's regions of a page: one per layer of the draft."""
    return PoolSpec(
        pool=POOL,
        num_layers=num_layers or config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )


def packed_ids(spans: Sequence[Span]) -> list[int]:
    """The tokens of all spans, as packed rows."""
    return [token_id for span in spans for token_id in span.token_ids]


def logit_rows(spans: Sequence[Span]) -> list[int]:
    """The wanted rows of all spans, as packed rows."""
    rows: list[int] = []
    start = 0
    for span in spans:
        rows.extend(start + row for row in span.logit_rows)
        start += len(span.token_ids)
    return rows


def rms_norm(x_TE: torch.Tensor, gain_E: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x_TE, (x_TE.shape[-1],), gain_E, eps)


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftLayer:
    """One decoder layer. `input_norm_E` None: what the attention reads is its caller's affair."""

    config: ModelConfig
    qkv: Linear
    qk_norm_HD: torch.Tensor | None
    output: Linear
    post_norm_E: torch.Tensor
    gate_up: Linear
    down: Linear
    input_norm_E: torch.Tensor | None = None

    def attention(self, x_TX: torch.Tensor, this: DraftPass, kv_P2SHD: torch.Tensor) -> torch.Tensor:
        """Write the rows' K and V, attend: `[T, E]`, new memory."""
        config = self.config
        num_rotated = config.num_heads + config.num_kv_heads
        qkv_THD = self.qkv(x_TX).view(len(x_TX), -1, config.head_dim)
        qk_THD = qkv_THD[:, :num_rotated]
        if self.qk_norm_HD is not None:
            normed_THD = F.rms_norm(qk_THD, (config.head_dim,), None, config.rms_norm_eps)
            torch.mul(normed_THD, self.qk_norm_HD, out=qk_THD)
        rotate_(qk_THD, *this.rotation)
        attended_TA = this.plan.attend(
            qkv_THD[:, : config.num_heads],
            qkv_THD[:, config.num_heads :].unflatten(1, (2, config.num_kv_heads)),
            kv_P2SHD,
        )
        return self.output(attended_TA)

    def mlp(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """The gated MLP of the normalised rows, new memory."""
        x_TE = rms_norm(hidden_TE, self.post_norm_E, self.config.rms_norm_eps)
        gate_TM, up_TM = self.gate_up(x_TE).chunk(2, dim=1)
        return self.down(F.silu(gate_TM).mul_(up_TM))

    def forward(self, hidden_TE: torch.Tensor, this: DraftPass, kv_P2SHD: torch.Tensor) -> torch.Tensor:
        """An ordinary decoder layer, new memory; without an input norm the attention reads the rows as
        they are."""
        x_TE = hidden_TE
        if self.input_norm_E is not None:
            x_TE = rms_norm(hidden_TE, self.input_norm_E, self.config.rms_norm_eps)
        hidden_TE = hidden_TE + self.attention(x_TE, this, kv_P2SHD)
        return hidden_TE.add_(self.mlp(hidden_TE))


def read_layer(
    reader: TensorReader,
    prefix: str,
    config: ModelConfig,
    *,
    input_size: int | None = None,
    has_input_norm: bool = True,
    norm_offset: float = 0.0,
) -> DraftLayer:
    """The layer below `prefix` ("layers.0."). `norm_offset`: what is added to every stored norm gain.
    `input_size`: width of the attention's input where it is not the layer's own.

    Biases are taken where the checkpoint has them, and must be there where the config says so.
    """
    hidden, head_dim = config.hidden_size, config.head_dim
    num_rows = {
        "q_proj": config.num_heads * head_dim,
        "k_proj": config.num_kv_heads * head_dim,
        "v_proj": config.num_kv_heads * head_dim,
    }
    inner = config.intermediate_size
    attention, mlp = f"{prefix}self_attn.", f"{prefix}mlp."
    width = input_size or hidden
    return DraftLayer(
        config=config,
        qkv=Linear(
            torch.cat(
                [reader.take(f"{attention}{name}.weight", (rows, width)) for name, rows in num_rows.items()]
            ),
            _qkv_bias(reader, attention, num_rows, config),
        ),
        qk_norm_HD=_qk_norm(reader, attention, config, norm_offset),
        output=Linear(
            reader.take(f"{attention}o_proj.weight", (hidden, num_rows["q_proj"])),
            _output_bias(reader, f"{attention}o_proj.bias", config),
        ),
        post_norm_E=reader.take(f"{prefix}post_attention_layernorm.weight", (hidden,)) + norm_offset,
        gate_up=Linear(
            torch.cat(
                [reader.take(f"{mlp}{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")]
            )
        ),
        down=Linear(reader.take(f"{mlp}down_proj.weight", (hidden, inner))),
        input_norm_E=reader.take(f"{prefix}input_layernorm.weight", (hidden,)) + norm_offset
        if has_input_norm
        else None,
    )


def _qkv_bias(
    reader: TensorReader, prefix: str, num_rows: dict[str, int], config: ModelConfig
) -> torch.Tensor | None:
    names = {f"{prefix}{name}.bias": rows for name, rows in num_rows.items()}
    if not config.has_qkv_bias and not any(reader.has(name) for name in names):
        return None
    return torch.cat([reader.take(name, (rows,)) for name, rows in names.items()])


def _output_bias(reader: TensorReader, name: str, config: ModelConfig) -> torch.Tensor | None:
    if not config.has_output_bias and not reader.has(name):
        return None
    return reader.take(name, (config.hidden_size,))


def _qk_norm(
    reader: TensorReader, prefix: str, config: ModelConfig, norm_offset: float
) -> torch.Tensor | None:
    """q's norm for each head, then k's for each KV head."""
    heads = {f"{prefix}q_norm.weight": config.num_heads, f"{prefix}k_norm.weight": config.num_kv_heads}
    if not config.has_qk_norm and not any(reader.has(name) for name in heads):
        return None
    gains = [reader.take(name, (config.head_dim,)).expand(count, -1) for name, count in heads.items()]
    return torch.cat(gains) + norm_offset
