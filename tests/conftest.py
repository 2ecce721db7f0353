"""Fixtures every folder of tests may use, and how property tests run."""

import os
import re
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.scratch import scratch
from tests.split import SplitByCluster

settings.register_profile(  # a busy machine is no failure
    "explore", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True
)
settings.register_profile("paceline", settings.get_profile("explore"), derandomize=True, database=None)
settings.load_profile("paceline")  # the same examples every time; others with --hypothesis-profile=explore

ROOT = Path(__file__).resolve().parent.parent


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> SplitByCluster:
    return SplitByCluster(config, log)


def pytest_unconfigure() -> None:
    scratch().cleanup()


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the source tree."""
    return ROOT


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's PACELINE_* variables and proxies must not change what a test sees."""
    is_meant = re.compile("PACELINE_.*|.*_proxy", re.IGNORECASE).fullmatch
    for name in filter(is_meant, list(os.environ)):
        monkeypatch.delenv(name)
