"""Who is measured when: all contenders in turn, every round in another order, so that drift hits all alike.

Owns the order and the samples. Must never know who the contenders are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from bench.contenders import Contender, Wave
from deploy.local import Report

T = TypeVar("T")

WARM_UP_TOKENS = 8
LONG_ANSWER_TOKENS = 4
"""More than one: an answer of one token never leaves the prefill node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """`long_prompt(n)` gives another prompt for each n, all equally long."""

    prompts: tuple[str, ...]
    streams: tuple[int, ...]
    max_tokens: int
    rounds: int
    long_prompt: Callable[[int], str]


@dataclass(slots=True)
class Samples:
    """One contender's measurements, one a round: waves by number of streams, TTFT of the long prompt."""

    waves: dict[int, list[Wave]] = field(default_factory=dict)
    long_ttft_s: list[float] = field(default_factory=list)


async def run(contenders: Sequence[Contender], plan: Plan, *, report: Report) -> dict[str, Samples]:
    """Samples by the contender's name. Raises DeployError when one of them fails."""
    samples = {contender.name: Samples() for contender in contenders}
    numbers = iter(range(10**9))
    for contender in contenders:
        await contender.answer([f"Warm up {contender.name}."], max_tokens=WARM_UP_TOKENS)
        await contender.answer([plan.long_prompt(next(numbers))], max_tokens=LONG_ANSWER_TOKENS)
        await contender.answer(_prompts(plan, max(plan.streams), -1), max_tokens=WARM_UP_TOKENS)
    for index in range(plan.rounds):
        report(f"round {index + 1} of {plan.rounds}")
        for num_streams in plan.streams:
            prompts = _prompts(plan, num_streams, index)
            for contender in rotated(contenders, index):
                wave = await contender.answer(prompts, max_tokens=plan.max_tokens)
                samples[contender.name].waves.setdefault(num_streams, []).append(wave)
        for contender in rotated(contenders, index):
            long = await contender.answer([plan.long_prompt(next(numbers))], max_tokens=LONG_ANSWER_TOKENS)
            samples[contender.name].long_ttft_s.append(long.answers[0].ttft_s)
    return samples


def _prompts(plan: Plan, num_streams: int, index: int) -> list[str]:
    """The same for all contenders; never one that was sent before, so that no prefix cache knows it."""
    start = index * num_streams
    return [
        f"{index}.{num_streams}.{i}: {plan.prompts[(start + i) % len(plan.prompts)]}"
        for i in range(num_streams)
    ]


def rotated(items: Sequence[T], by: int) -> list[T]:
    """The same items, beginning with another one each time."""
    by %= len(items)
    return [*items[by:], *items[:by]]
