"""How much a round drafts and what of it stands, whatever the algorithm: the loop's own two choices.

Owns the settings of these choices, which stand among the algorithm's. Must never know an algorithm.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from engine.randomness import uniforms
from speculative.accept_rules import BLOCK, TOKEN_WISE, ChainRule
from speculative.budgets.adaptive import AdaptiveBudget, AdaptiveConfig
from speculative.budgets.budget import BUDGET_OPTIONS, DraftBudget
from speculative.budgets.count import DEFAULT_SLOTS, CountBudget, CountConfig
from speculative.proposer import DrawingProposer, Proposer
from speculative.simulate import SimulatedAcceptance
from speculative.verify import DrawAtEveryNode, Verify
from speculative.verify_drawn import VerifyDrawn

logger = logging.getLogger(__name__)

OPTIONS = BUDGET_OPTIONS | {"acceptance", "simulate_acceptance"}

EXACT = "exact"
_DRAWN_RULES: Mapping[str, ChainRule] = MappingProxyType({"rejection": TOKEN_WISE, "block": BLOCK})


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftPolicy:
    """budget: None for as much as the algorithm may draft. verify: the acceptance rule.

    acceptance: its name; any but `EXACT` is for drafts that were drawn (`prepare`).
    """

    budget: DraftBudget | None = None
    verify: Verify = field(default_factory=DrawAtEveryNode)
    acceptance: str = EXACT
    is_simulated: bool = False


def policy_of(
    options: Mapping[str, object], *, max_draft_tokens: int, clock: Callable[[], float]
) -> DraftPolicy:
    """Read the `OPTIONS` among the given ones. Raises ValueError naming the one that cannot work.

    `clock`: seconds, for what goes by how long rounds take.
    """
    budget = _budget(options, max_draft_tokens, clock)
    mean = _simulated_mean(options.get("simulate_acceptance", 0), max_draft_tokens)
    acceptance = _acceptance(options, is_simulated=mean > 0)
    if acceptance != EXACT:
        verify = VerifyDrawn(_DRAWN_RULES[acceptance])
        return DraftPolicy(budget=budget, verify=verify, acceptance=acceptance)
    if not mean:
        return DraftPolicy(budget=budget)
    logger.warning(
        "simulate_acceptance=%g is on: drafts are accepted whatever the model says. EVERY TEXT IS WRONG."
        " For load tests only.",
        mean,
    )
    return DraftPolicy(budget=budget, verify=DrawAtEveryNode(SimulatedAcceptance(mean)), is_simulated=True)


def prepare(policy: DraftPolicy, proposer: Proposer) -> None:
    """Once, before the engine takes both: the proposer learns that the rule wants drawn drafts.

    Raises ValueError naming the option when it cannot draw them.
    """
    if policy.acceptance == EXACT:
        return
    if not isinstance(proposer, DrawingProposer):
        raise ValueError(
            "acceptance must be exact for an algorithm that cannot draw its drafts from a distribution,"
            f" got {policy.acceptance!r}"
        )
    try:
        proposer.draw_drafts(uniforms)
    except ValueError as error:
        raise ValueError(f"acceptance {policy.acceptance!r} does not fit: {error}") from error


def _acceptance(options: Mapping[str, object], *, is_simulated: bool) -> str:
    name = options.get("acceptance", EXACT)
    known = (EXACT, *_DRAWN_RULES)
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"acceptance must be one of {', '.join(known)}, got {name!r}")
    if is_simulated and name != EXACT:
        raise ValueError(f"acceptance must be exact while simulate_acceptance is on, got {name!r}")
    return name


def _budget(
    options: Mapping[str, object], max_draft_tokens: int, clock: Callable[[], float]
) -> DraftBudget | None:
    kind = options.get("budget", "fixed")
    if kind not in ("fixed", "adaptive", "count"):
        raise ValueError(f"budget must be fixed, adaptive or count, got {kind!r}")
    if kind == "fixed":
        if "budget_slots" in options:
            raise ValueError(
                "budget_slots must be left out unless budget is adaptive or count,"
                f" got {options['budget_slots']!r}"
            )
        return None
    slots = _slots(str(options["budget_slots"])) if "budget_slots" in options else None
    if kind == "count":
        return CountBudget(
            CountConfig(start=max_draft_tokens, max_tokens=max_draft_tokens, slots=slots or DEFAULT_SLOTS)
        )
    return AdaptiveBudget(AdaptiveConfig(max_tokens=max_draft_tokens, slots=slots or {}), clock)


def _slots(text: str) -> dict[int, tuple[int, ...]]:
    """ "1:0/1/3;8:0/1" as {1: (0, 1, 3), 8: (0, 1)}."""
    try:
        pairs = [part.split(":") for part in text.split(";")]
        return {int(size): tuple(int(limit) for limit in limits.split("/")) for size, limits in pairs}
    except ValueError:
        raise ValueError(f"budget_slots must be like 1:0/1/3;8:0/1, got {text!r}") from None


def _simulated_mean(value: object, max_draft_tokens: int) -> float:
    try:
        mean = float(str(value))
    except ValueError:
        mean = -1.0
    if not 0 <= mean <= max_draft_tokens:
        raise ValueError(
            "simulate_acceptance must be a number in [0, what the algorithm may draft,"
            f" {max_draft_tokens}], got {value!r}"
        )
    return mean
