"""How many threads a step may use, given what other engines on this host are doing right now.

Two engines that each use every core spin against each other at every barrier and take many times as
long; one engine that leaves half of them idle wastes them. So engines on a host tell each other when
they compute, in a small shared file, and divide the cores step by step.
Owns that file's format. Must never know what a step computes.
"""

import fcntl
import mmap
import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Protocol

import torch

_NUM_SLOTS = 64
_SLOT = struct.Struct("<dd")  # when the engine's last step began and ended, seconds of the host's clock
_HOLD_S = 0.03  # an engine that pauses no longer than this between steps still counts as computing
_STALE_S = 10.0  # one that has been in a step for longer is taken for dead


class Cores(Protocol):
    """Wraps every step of an engine."""

    def step(self) -> AbstractContextManager[None]: ...


class OwnCores:
    """All threads, always: a single engine, or one whose cores nobody else may use."""

    @contextmanager
    def step(self) -> Iterator[None]:
        yield


class SharedCores:
    """Invariant: a step starts with max_threads / (engines computing now) threads, at least one."""

    def __init__(self, file: Path, *, max_threads: int, clock: Callable[[], float] = time.monotonic) -> None:
        """Joins the engines that share `file`, made where missing. Raises OSError when it cannot be had."""
        self._max_threads = max_threads
        self._clock = clock
        self._num_threads = max_threads
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o666)
        os.ftruncate(descriptor, _NUM_SLOTS * _SLOT.size)
        self._descriptor = descriptor
        self._memory = mmap.mmap(descriptor, _NUM_SLOTS * _SLOT.size)
        self._slot = self._take_slot()
        _SLOT.pack_into(self._memory, self._slot * _SLOT.size, 0.0, 0.0)

    @contextmanager
    def step(self) -> Iterator[None]:
        began = self._clock()
        _SLOT.pack_into(self._memory, self._slot * _SLOT.size, began, 0.0)
        self._use(max(1, self._max_threads // (1 + self._num_others(began))))
        try:
            yield
        finally:
            _SLOT.pack_into(self._memory, self._slot * _SLOT.size, began, self._clock())

    def close(self) -> None:
        self._memory.close()
        os.close(self._descriptor)

    def _use(self, num_threads: int) -> None:
        if num_threads != self._num_threads:
            self._num_threads = num_threads
            torch.set_num_threads(num_threads)

    def _num_others(self, now: float) -> int:
        return sum(
            _is_computing(began, ended, now)
            for slot, (began, ended) in enumerate(_SLOT.iter_unpack(self._memory))
            if slot != self._slot
        )

    def _take_slot(self) -> int:
        """A lock on one byte holds the slot for as long as the process lives."""
        for slot in range(_NUM_SLOTS):
            try:
                fcntl.lockf(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, slot)
            except OSError:
                continue
            return slot
        raise OSError(f"{_NUM_SLOTS} engines share this host's cores already")


def _is_computing(began: float, ended: float, now: float) -> bool:
    if ended >= began:
        return now - ended < _HOLD_S
    return now - began < _STALE_S
