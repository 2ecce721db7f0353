"""The tensors of a Llama-family model, fused as the forward wants them. Plain data.

Shapes: `V` vocabulary, `E` hidden width, `D` head dim, `F` = (heads + 2 * KV heads) * D rows of
fused q, k, v in that order, `A` = heads * D, `M` intermediate width, `G` = 2 * M (gate, then up).
"""

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. `qk_norm_HD`: q's norm for each head, then k's for each KV head."""

    input_norm_E: torch.Tensor
    qkv_FE: torch.Tensor
    qkv_bias_F: torch.Tensor | None
    qk_norm_HD: torch.Tensor | None
    output_EA: torch.Tensor
    output_bias_E: torch.Tensor | None
    post_norm_E: torch.Tensor
    gate_up_GE: torch.Tensor
    down_EM: torch.Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A whole model. `head_VE` is `embedding_VE` itself where the checkpoint ties them."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_E: torch.Tensor
    head_VE: torch.Tensor
