"""These tests need a CUDA device; without one each says so and is skipped."""

import pytest
import torch

_FOLDER = "tests/gpu"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _FOLDER in item.path.as_posix():
            item.add_marker(pytest.mark.gpu)
            item.add_marker(pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"))
