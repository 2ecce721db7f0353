"""Every algorithm, with a draft that partly stands on the tiny target: what common claims run over."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from speculative.proposer import Proposer
from speculative.registry import create_proposer
from tests.conformance.test_loop import greedy_truth
from tests.engines import VOCAB_SIZE
from tests.fakes_proposers import BushyProposer, Continuation
from tests.node_pair import NodePair
from tests.tiny_block_drafts import dflash_folder, standalone_folder
from tests.tiny_drafts import tiny_draft

CHAIN: Mapping[str, Any] = {"num_steps": 3}
TREE: Mapping[str, Any] = {"num_steps": 3, "topk": 4, "num_draft_tokens": 10}


@dataclass(frozen=True, slots=True, kw_only=True)
class Drafter:
    """A row of the table. `algorithm` "bushy" is the fake that drafts irregular trees; it knows the truth."""

    algorithm: str
    options: Mapping[str, Any] = field(default_factory=dict)

    def make(self, continuation: Continuation = greedy_truth, **options: Any) -> Proposer:
        """`options` take the place of the row's own."""
        if self.algorithm == "bushy":
            return BushyProposer(continuation, vocab_size=VOCAB_SIZE, num_draft_tokens=7, seed=0)
        return create_proposer(self.algorithm, {**self.options, **options})

    def pair(self, **engine_options: int) -> NodePair:
        """Both nodes with these options of `make_engine`."""
        is_fake = self.algorithm == "bushy"
        return NodePair(
            algorithm="none" if is_fake else self.algorithm,
            draft_options=self.options,
            decode_proposer=self.make() if is_fake else None,
            prefill_options=engine_options,
            decode_options=engine_options,
        )


def _head(kind: str, shape: Mapping[str, Any]) -> Drafter:
    return Drafter(algorithm=kind.split("_")[0], options={"draft": str(tiny_draft(kind)), **shape})


_ROWS: Mapping[str, Callable[[], Drafter]] = {
    "none": lambda: Drafter(algorithm="none"),
    "ngram": lambda: Drafter(algorithm="ngram", options={"num_draft_tokens": 6}),
    "ngram-branches": lambda: Drafter(
        algorithm="ngram", options={"num_draft_tokens": 12, "branches": 4, "min_ngram": 1}
    ),
    "bushy": lambda: Drafter(algorithm="bushy"),
    "eagle-chain": lambda: _head("eagle", CHAIN),
    "eagle-tree": lambda: _head("eagle", TREE),
    "eagle3-tree": lambda: _head("eagle3", TREE),
    "mtp-tree": lambda: _head("mtp", TREE),
    "mtp-modules": lambda: _head("mtp_chain", CHAIN),
    "standalone": lambda: Drafter(algorithm="standalone", options={"draft": str(standalone_folder("noisy"))}),
    "dflash": lambda: Drafter(algorithm="dflash", options={"draft": str(dflash_folder("speculators"))}),
}
NAMES = tuple(_ROWS)
every_drafter = pytest.mark.parametrize("name", NAMES)


@cache
def drafter(name: str) -> Drafter:
    """Fits its head on the first call."""
    return _ROWS[name]()
