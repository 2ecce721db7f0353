"""Rotary position embedding: frequencies of a config, and the rotation.

Shapes: `T` rows, `H` heads, `D` head dim. Pairs are (i, i + D/2), as in Hugging Face checkpoints.
"""

import math

import torch

from engine.models.config import RopeConfig


class RotaryEmbedding:
    """The inverse frequencies of one model on one device."""

    def __init__(self, rope: RopeConfig, *, head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
        self._frequencies = inverse_frequencies(rope, head_dim).to(device)
        self._dtype = dtype

    def rows(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of the rows, each `[T, 1, D]`: first half of sin negated (see `rotate_`)."""
        angles = positions_T.to(torch.float32).unsqueeze(1) * self._frequencies
        cos, sin = angles.cos().to(self._dtype), angles.sin().to(self._dtype)
        return torch.cat((cos, cos), dim=1).unsqueeze(1), torch.cat((-sin, sin), dim=1).unsqueeze(1)


def rotate_(x_THD: torch.Tensor, cos_T1D: torch.Tensor, sin_T1D: torch.Tensor) -> None:
    """Rotate in place: x * cos + (x2, x1) * (-sin, sin), which is x * cos + (-x2, x1) * sin."""
    swapped = x_THD.roll(x_THD.shape[-1] // 2, dims=-1)
    x_THD.mul_(cos_T1D).addcmul_(swapped, sin_T1D)


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> torch.Tensor:
    """`[D / 2]` float32. llama3: Llama 3.1's piecewise interpolation by wavelength."""
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return frequencies / rope.factor
    if rope.kind == "llama3":
        return _llama3(frequencies, rope)
    return frequencies


def _llama3(frequencies: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    wavelengths = 2 * math.pi / frequencies
    low_wavelength = rope.original_max_len / rope.low_freq_factor
    high_wavelength = rope.original_max_len / rope.high_freq_factor
    smooth = (rope.original_max_len / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    between = (1 - smooth) * frequencies / rope.factor + smooth * frequencies
    scaled = torch.where(wavelengths > low_wavelength, frequencies / rope.factor, between)
    return torch.where(wavelengths < high_wavelength, frequencies, scaled)
