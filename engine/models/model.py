"""The seam between the runner and whatever computes a forward pass."""

from typing import Protocol

import torch

from engine.batch import ForwardBatch, ForwardOutput
from engine.linear import Linear
from engine.models.config import ModelConfig
from engine.pool import PagePool


class Model(Protocol):
    """A decoder whose KV lies in a page pool. Called from the engine thread only."""

    @property
    def config(self) -> ModelConfig: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def embedding_VE(self) -> torch.Tensor: ...

    @property
    def head(self) -> Linear: ...

    def final_norm(self, hidden_TE: torch.Tensor) -> torch.Tensor:
        """What the head reads, of rows of the last hidden layer; new memory."""
        ...

    def forward(self, batch: ForwardBatch, pool: PagePool) -> ForwardOutput:
        """Write the KV of every row into `pool`; return wanted logits and hidden layers."""
        ...
