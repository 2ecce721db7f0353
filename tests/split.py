"""Which tests must run in one process when `make test` uses several.

Owns the split: a running cluster takes seconds to start and gigabytes to keep, so tests that share one
stay together, and every other test goes to whoever is free.
"""

from xdist.scheduler import LoadScopeScheduling

CLUSTERS = "tests/integration/"
FOUR_PAIRS = f"{CLUSTERS}four_pairs/"


def group_of(nodeid: str) -> str:
    """Tests of one group run in one process, in their order."""
    if nodeid.startswith(FOUR_PAIRS):
        return FOUR_PAIRS
    if nodeid.startswith(CLUSTERS):
        return nodeid.partition("::")[0]
    return nodeid


class SplitByCluster(LoadScopeScheduling):  # type: ignore[misc]  # it has no types
    """Groups start in the order of their size, the largest first."""

    def _split_scope(self, nodeid: str) -> str:
        return group_of(nodeid)
