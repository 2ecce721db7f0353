"""Our packages are flat, so their names must be ours alone in an environment."""

import tomllib
from importlib import metadata

from tests.unit import source_tree


def test_no_other_distribution_ships_one_of_our_top_level_names() -> None:
    owners = metadata.packages_distributions()
    assert {
        name: foreign
        for name in source_tree.PACKAGES
        if (foreign := sorted(set(owners.get(name, ())) - {"paceline"}))
    } == {}


def test_the_wheel_ships_exactly_our_packages() -> None:
    project = tomllib.loads((source_tree.ROOT / "pyproject.toml").read_text())
    assert tuple(project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == source_tree.PACKAGES
    assert tuple(project["tool"]["importlinter"]["root_packages"]) == source_tree.PACKAGES
