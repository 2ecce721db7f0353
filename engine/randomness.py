"""Counter-based random numbers: a pure function of (seed, position, stream, column), equal on every device.

Owns the hash and the streams. Must never hold state, nor know of batches, steps, nodes or text: that is
why a request draws the same tokens alone or among neighbours, with speculation or without, and after
it moved to another node.
"""

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray

# One stream per independent use of one (seed, position).
TARGET_STREAM = 0  # the token the target model emits at a position
DRAFT_STREAM = 1  # a token that a draft model proposes: position of the round's root, column = step
ACCEPT_STREAM = 2  # whether a drawn draft stands: position of the round's root, column = step
_NUM_STREAMS = 8  # room; each column has so many

# Keeps `uniform` apart from `coin`, which counts its columns from 0.
_FIRST_COLUMN = 1 << 31
_WORD = 0xFFFFFFFF

Words = NDArray[np.uint32]


class Coins(Protocol):
    """Where draws get their numbers from: `uniforms` below, or one whose numbers are known beforehand."""

    def __call__(
        self,
        seeds: Sequence[int],
        positions: Sequence[int],
        stream: int,
        columns: Sequence[int] | None = None,
    ) -> torch.Tensor: ...


def murmur3(words: Sequence[Words]) -> Words:
    """MurmurHash3 x86 32-bit, hash seed 0, of little-endian 32-bit words (each an equally long array)."""
    hash_R = np.zeros_like(words[0])
    for word_R in words:
        mixed_R = _rotate(word_R * np.uint32(0xCC9E2D51), 15) * np.uint32(0x1B873593)
        hash_R = _rotate(hash_R ^ mixed_R, 13) * np.uint32(5) + np.uint32(0xE6546B64)
    hash_R = hash_R ^ np.uint32(4 * len(words))
    hash_R = (hash_R ^ (hash_R >> np.uint32(16))) * np.uint32(0x85EBCA6B)
    hash_R = (hash_R ^ (hash_R >> np.uint32(13))) * np.uint32(0xC2B2AE35)
    return hash_R ^ (hash_R >> np.uint32(16))


def uniforms(
    seeds: Sequence[int], positions: Sequence[int], stream: int, columns: Sequence[int] | None = None
) -> torch.Tensor:
    """One number in [0, 1) with 53 random bits for each (seed, position, column). float64 `[R]`, CPU.

    seeds are unsigned 64-bit, positions unsigned 32-bit, columns below 2^26 (None: all 0).
    """
    columns_R = np.zeros(len(seeds), np.uint32) if columns is None else np.asarray(columns, np.uint32)
    words_R = np.uint32(_FIRST_COLUMN) + np.uint32(2) * (
        np.uint32(stream) + np.uint32(_NUM_STREAMS) * columns_R
    )
    high_R = _hash(seeds, positions, words_R).astype(np.uint64)
    low_R = _hash(seeds, positions, words_R + np.uint32(1)).astype(np.uint64)
    bits_R = (high_R << np.uint64(21)) | (low_R >> np.uint64(11))
    return torch.from_numpy(bits_R.astype(np.float64) * 2.0**-53)


def uniform(seed: int, position: int, stream: int) -> float:
    """`uniforms` for one (seed, position)."""
    return float(uniforms((seed,), (position,), stream)[0])


def coin(seed: int, position: int, column: int) -> float:
    """The seeded coin of existing systems: hash / (2^32 - 1) as float32, at most 1 - 2^-24.

    Source: the seeded coins of SGLang. Use `uniform` unless numbers must match theirs.
    """
    ratio = float(_hash((seed,), (position,), np.array([column], dtype=np.uint32))[0]) / _WORD
    return min(float(np.float32(ratio)), 1.0 - 2.0**-24)


def _hash(seeds: Sequence[int], positions: Sequence[int], columns_R: Words) -> Words:
    seeds_R = np.asarray(seeds, dtype=np.uint64)
    low_R = (seeds_R & np.uint64(_WORD)).astype(np.uint32)
    high_R = (seeds_R >> np.uint64(32)).astype(np.uint32)
    positions_R = np.asarray(positions, dtype=np.uint32)
    return murmur3((low_R, high_R, positions_R, columns_R))


def _rotate(words_R: Words, bits: int) -> Words:
    return (words_R << np.uint32(bits)) | (words_R >> np.uint32(32 - bits))
