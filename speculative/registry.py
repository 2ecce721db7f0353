"""The catalogue of speculative algorithms: one line each, and the only place that lists them.

Algorithms from outside are named by where they are (`speculative.plugins`).

Must never know what an algorithm does with its options.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import signature
from types import MappingProxyType
from typing import Any

from speculative.dflash import DflashConfig, DflashProposer
from speculative.eagle import EagleConfig, EagleProposer
from speculative.eagle3 import Eagle3Config, Eagle3Proposer
from speculative.mtp import MtpConfig, create_mtp
from speculative.ngram import NgramConfig, NgramProposer
from speculative.null import NullConfig, NullProposer
from speculative.plugins import check_proposer, is_plugin, load_factory
from speculative.proposer import Proposer
from speculative.standalone import StandaloneConfig, StandaloneProposer


@dataclass(frozen=True, slots=True)
class Algorithm:
    """`config` is a frozen keyword-only dataclass that checks its values; `proposer` takes one."""

    config: Callable[..., Any]
    proposer: Callable[[Any], Proposer]


CATALOGUE: Mapping[str, Algorithm] = MappingProxyType(
    {
        "none": Algorithm(NullConfig, NullProposer),
        "ngram": Algorithm(NgramConfig, NgramProposer),
        "eagle": Algorithm(EagleConfig, EagleProposer),
        "eagle3": Algorithm(Eagle3Config, Eagle3Proposer),
        "mtp": Algorithm(MtpConfig, create_mtp),
        "standalone": Algorithm(StandaloneConfig, StandaloneProposer),
        "dflash": Algorithm(DflashConfig, DflashProposer),
    }
)


def create_proposer(name: str, options: Mapping[str, object]) -> Proposer:
    """Build an algorithm. Raises ValueError for an unknown name, an unknown option or a bad value."""
    algorithm = _algorithm(name)
    known = options_of(name)
    for key, value in options.items():
        if key not in known:
            raise ValueError(f"{name} has no option {key!r} (value {value!r}); it has {sorted(known)}")
    return algorithm.proposer(algorithm.config(**options))


def options_of(name: str) -> frozenset[str]:
    """Names of the options an algorithm has. Raises ValueError for an unknown algorithm."""
    return frozenset(signature(_algorithm(name).config).parameters)


def _algorithm(name: str) -> Algorithm:
    if is_plugin(name):
        return _plugin(name)
    algorithm = CATALOGUE.get(name)
    if algorithm is None:
        raise ValueError(
            f"speculative algorithm must be one of {sorted(CATALOGUE)}, got {name!r}"
            " (a plugin is named as package.module:factory)"
        )
    return algorithm


def _plugin(name: str) -> Algorithm:
    """The factory is both: it makes the proposer from the options, which is then checked and passed on."""

    def checked(made: Proposer) -> Proposer:
        check_proposer(name, made)
        return made

    return Algorithm(load_factory(name), checked)
