"""Algorithms from outside: "package.module:factory" to something the loop can call.

Owns the loading and the check against the seam. Must never know what a plugin does with its options.
"""

import inspect
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from speculative.proposer import DraftNeeds, Proposer


def is_plugin(name: str) -> bool:
    return ":" in name


def load_factory(name: str) -> Callable[..., Any]:
    """What `name` points at: it takes the algorithm's options by keyword and makes a proposer.

    Raises ValueError for a module that cannot be imported or a name it does not have.
    """
    module_name, _, attribute = name.partition(":")
    try:
        module = import_module(module_name)
    except (ImportError, ValueError) as error:
        raise ValueError(
            f"algorithm must be package.module:factory of a module that can be imported, got {name!r}:"
            f" {error}"
        ) from error
    factory = vars(module).get(attribute)
    if not callable(factory):
        raise ValueError(
            f"algorithm must be package.module:factory with something to call, got {name!r}:"
            f" {module_name} has no such function or class {attribute!r}"
        )
    if _parameters(factory) is None:
        raise ValueError(f"algorithm must name a factory whose parameters can be read, got {name!r}")
    return factory  # type: ignore[no-any-return]


def check_proposer(name: str, made: object) -> None:
    """Raises ValueError naming everything of the `Proposer` protocol that `made` lacks or has otherwise."""
    problems = [
        problem
        for member, wanted in sorted(vars(Proposer).items())
        if not member.startswith("_") and (problem := _problem(made, member, wanted))
    ]
    if problems:
        raise ValueError(f"algorithm {name!r} makes no proposer: {'; '.join(problems)}")


def _problem(made: object, member: str, wanted: object) -> str:
    """What is wrong with one member; empty when nothing is."""
    missing = object()
    found = getattr(made, member, missing)
    if found is missing:
        return f"{member} is missing"
    if isinstance(wanted, property):
        return "" if isinstance(found, DraftNeeds) else f"{member} must be a DraftNeeds, got {found!r}"
    assert callable(wanted)
    if not callable(found):
        return f"{member} must be a method, got {found!r}"
    expected = list(inspect.signature(wanted).parameters)[1:]  # without self
    actual = _parameters(found)
    if actual is None or not _takes(actual, expected):
        takes = "what cannot be read" if actual is None else f"({', '.join(map(str, actual))})"
        return f"{member} must take ({', '.join(expected)}), takes {takes}"
    return ""


def _takes(actual: Sequence[inspect.Parameter], expected: Sequence[str]) -> bool:
    """Parameters of these names, first and in order; any others have defaults."""
    first, others = actual[: len(expected)], actual[len(expected) :]
    are_named = [parameter.name for parameter in first] == list(expected)
    are_plain = all(parameter.kind is parameter.POSITIONAL_OR_KEYWORD for parameter in first)
    return are_named and are_plain and all(parameter.default is not parameter.empty for parameter in others)


def _parameters(function: Callable[..., Any]) -> Sequence[inspect.Parameter] | None:
    """None for what Python cannot tell, such as some built-in types."""
    try:
        return list(inspect.signature(function).parameters.values())
    except ValueError:
        return None
