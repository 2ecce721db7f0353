"""Fixtures every folder of tests may use, and how property tests run."""

import gc
import os
import sys
import warnings
from collections.abc import Generator
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


def pytest_configure() -> None:
    """Tests ask this machine only, and so do clusters they share: no proxy must get between them."""
    for name in [name for name in os.environ if name.lower().endswith("_proxy")]:
        del os.environ[name]


def pytest_collection_finish() -> None:
    """What was imported and collected stays: to look through it for garbage would halt a test for seconds."""
    gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()
    scratch().cleanup()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """What a failed test left open goes at once: its warnings must not fail whichever test comes next."""
    before = item.session.testsfailed
    result = yield
    if item.session.testsfailed > before:
        for name in ("last_exc", "last_value", "last_traceback"):  # they hold the test's variables
            vars(sys).pop(name, None)
        told, sys.unraisablehook = sys.unraisablehook, sys.__unraisablehook__
        with warnings.catch_warnings(action="ignore"):
            gc.collect()
        sys.unraisablehook = told
    return result


@pytest.fixture(scope="session")
def root() -> Path:
    """The folder of the source tree."""
    return ROOT


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """A developer's PACELINE_* variables must not change what a test sees."""
    for name in [name for name in os.environ if name.startswith("PACELINE_")]:
        monkeypatch.delenv(name)
