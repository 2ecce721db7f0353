"""Algorithms named by module: the worked example of the documentation, and what is refused at load."""

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from docs.plugin_example import RepeatProposer
from engine.request import Request
from speculative.null import NullConfig, NullProposer
from speculative.plugins import check_proposer
from speculative.proposer import DraftNeeds, Proposer, Seed
from speculative.registry import create_proposer, options_of
from tests.conformance.test_loop import SAMPLINGS
from tests.draft_claims import check_greedy, check_pair, check_release, check_seeds, check_stop

EXAMPLE = "docs.plugin_example:RepeatProposer"
MODULE = "plugin_of_a_test"


def repeat() -> Proposer:
    return create_proposer(EXAMPLE, {"times": 3})


@pytest.fixture
def module() -> Iterator[ModuleType]:
    sys.modules[MODULE] = ModuleType(MODULE)
    yield sys.modules[MODULE]
    del sys.modules[MODULE]


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_greedy_text_with_the_example_is_plain_decodings(page_size: int) -> None:
    engine = check_greedy(repeat, page_size=page_size, chunk_tokens=64, max_running=8)
    assert engine.counters.drafted > 200


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_sampled_text_with_the_example_is_plain_decodings(sampling: dict[str, object]) -> None:
    check_seeds(repeat, sampling)


def test_the_example_keeps_the_rest_of_what_a_proposer_owes() -> None:
    check_stop(repeat, 3)
    check_release(repeat, 2)
    check_pair(EXAMPLE, {"times": 3}, repeat)


def test_a_plugins_options_are_the_parameters_of_its_factory() -> None:
    assert options_of(EXAMPLE) == {"times"}
    assert create_proposer(EXAMPLE, {}).needs == DraftNeeds(max_draft_tokens=2)
    with pytest.raises(ValueError, match="has no option 'often'"):
        create_proposer(EXAMPLE, {"often": 2})
    with pytest.raises(ValueError, match="times must be a whole number"):
        create_proposer(EXAMPLE, {"times": 0})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no.such.module:Thing", "of a module that can be imported, got 'no.such.module:Thing': No module"),
        (":Thing", "of a module that can be imported, got ':Thing'"),
        ("docs.plugin_example:Nothing", "docs.plugin_example has no such function or class 'Nothing'"),
        ("docs.plugin_example:", "has no such function or class ''"),
        ("builtins:dict", "a factory whose parameters can be read, got 'builtins:dict'"),
        ("docs.plugin_example", "must be one of .*, got .*a plugin is named as package.module:factory"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        create_proposer(name, {})


class Broken(RepeatProposer):
    """Another parameter name, and a method that is not one."""

    admit = 7  # type: ignore[assignment]

    def seed(self, req: Request) -> None:  # type: ignore[override]
        pass


class Empty:
    """Nothing of a proposer."""


def test_everything_that_is_missing_or_different_is_named_at_once(module: ModuleType) -> None:
    vars(module)["make"] = Broken
    with pytest.raises(ValueError) as raised:
        create_proposer(f"{MODULE}:make", {})
    assert str(raised.value) == (
        f"algorithm '{MODULE}:make' makes no proposer:"
        " admit must be a method, got 7; seed must take (request), takes (req: engine.request.Request)"
    )
    vars(module)["make"] = Empty
    with pytest.raises(ValueError, match="admit is missing; bind is missing; forget is missing; needs is"):
        create_proposer(f"{MODULE}:make", {})


def test_needs_must_be_what_the_nodes_read(module: ModuleType) -> None:
    class Vague(RepeatProposer):
        needs = {"max_draft_tokens": 2}  # type: ignore[assignment]  # noqa: RUF012

        def __init__(self) -> None:
            pass

    vars(module)["make"] = Vague
    with pytest.raises(ValueError, match=r"needs must be a DraftNeeds, got \{'max_draft_tokens': 2\}"):
        create_proposer(f"{MODULE}:make", {})


def test_more_parameters_are_fine_when_they_have_defaults() -> None:
    class Generous(NullProposer):
        def admit(self, request: Request, seed: Seed | None = None) -> None:
            pass

        def forget(self, request: Request, why: str = "") -> None:
            pass

    check_proposer("generous", Generous(NullConfig()))


def test_every_algorithm_of_the_catalogue_would_pass_as_a_plugin() -> None:
    for name in ("none", "ngram"):
        check_proposer(name, create_proposer(name, {}))


def test_the_documentation_names_the_example() -> None:
    assert EXAMPLE in (Path(__file__).parents[2] / "docs/plugins.md").read_text()
