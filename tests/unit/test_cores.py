"""Engines on one host divide its cores by who computes now."""

from pathlib import Path

import pytest
import torch

from engine.cores import SharedCores


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Clock, SharedCores, SharedCores]:
    """Two engines of one process cannot lock against each other, so the second one is given its slot."""
    clock = Clock()
    one = SharedCores(tmp_path / "cores", max_threads=4, clock=clock)
    two = SharedCores(tmp_path / "cores", max_threads=4, clock=clock)
    two._slot = 1
    return clock, one, two


@pytest.fixture(autouse=True)
def _threads_of_others() -> object:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_engine_alone_uses_every_core(pair: tuple[Clock, SharedCores, SharedCores]) -> None:
    _, one, _ = pair
    torch.set_num_threads(4)
    with one.step():
        assert torch.get_num_threads() == 4


def test_two_that_compute_share_and_the_one_that_goes_on_gets_all_back(
    pair: tuple[Clock, SharedCores, SharedCores],
) -> None:
    clock, one, two = pair
    with one.step(), two.step():
        assert torch.get_num_threads() == 2
    clock.now += 0.01
    with one.step():
        assert torch.get_num_threads() == 2
    clock.now += 0.05
    with one.step():
        assert torch.get_num_threads() == 4


def test_engine_that_died_in_a_step_is_forgotten(pair: tuple[Clock, SharedCores, SharedCores]) -> None:
    clock, one, two = pair
    step = two.step()
    step.__enter__()
    for _ in range(2):
        with one.step():
            assert torch.get_num_threads() == 2
        clock.now += 5.5
    with one.step():
        assert torch.get_num_threads() == 4
