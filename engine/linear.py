"""A product with a fixed weight, and how the weight lies in memory.

On CPU oneDNN lays a weight out once in the order in which its kernels read it; `F.linear` would do so in
every call. Must never know what is multiplied.

Shapes: `T` rows, `I` input width, `O` output width.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

# The number of rows the layout is made for. Apart from a single one in float32, all give the same layout.
_ROWS = 16


class Linear:
    """x -> x W^T + b. The weight is held once, packed or as it came, and never changes."""

    def __init__(self, weight_OI: torch.Tensor, bias_O: torch.Tensor | None = None) -> None:
        self.bias_O = bias_O
        self.num_outputs = weight_OI.shape[0]
        self._multiply = _packed_product(weight_OI)
        self._weight = weight_OI if self._multiply is None else _packed(weight_OI)

    def __call__(self, x_TI: torch.Tensor) -> torch.Tensor:
        """`[T, O]`, new memory."""
        if self._multiply is None:
            return F.linear(x_TI, self._weight, self.bias_O)
        result_TO: torch.Tensor = self._multiply(x_TI, self._weight, self.bias_O, "none", (), "")
        return result_TO

    def weight_OI(self) -> torch.Tensor:
        """In plain order, bit for bit what came; new memory where it is packed."""
        return self._weight if self._multiply is None else self._weight.to_dense()

    def rows(self, wanted: slice | torch.Tensor) -> "Linear":
        """The product with these rows of weight and bias alone, which are copied."""
        bias_O = None if self.bias_O is None else self.bias_O[wanted].clone()
        return Linear(self.weight_OI()[wanted].clone(), bias_O)


def _packed_product(weight_OI: torch.Tensor) -> Callable[..., Any] | None:
    """oneDNN's product with a packed weight, where there is one for this device and dtype."""
    if weight_OI.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    is_supported = weight_OI.dtype == torch.float32 or (
        weight_OI.dtype == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
    )
    product: Callable[..., Any] = torch.ops.mkldnn._linear_pointwise.default
    return product if is_supported else None


def _packed(weight_OI: torch.Tensor) -> torch.Tensor:
    packed: torch.Tensor = torch.ops.mkldnn._reorder_linear_weight(weight_OI, _ROWS)
    return packed
