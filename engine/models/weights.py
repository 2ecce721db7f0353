"""The tensors of a Llama-family model, fused as the forward wants them. Plain data.

Shapes: `V` vocabulary, `E` hidden width, `D` head dim.
"""

from dataclasses import dataclass

import torch

from engine.linear import Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWeights:
    """One decoder layer. `qkv`: q, k and v side by side; `gate_up`: gate, then up.

    `qk_norm_HD`: q's norm for each head, then k's for each KV head.
    """

    input_norm_E: torch.Tensor
    qkv: Linear
    qk_norm_HD: torch.Tensor | None
    output: Linear
    post_norm_E: torch.Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWeights:
    """A whole model. Where the checkpoint ties them, `head` is made of the values of `embedding_VE`."""

    embedding_VE: torch.Tensor
    layers: tuple[LayerWeights, ...]
    final_norm_E: torch.Tensor
    head: Linear
