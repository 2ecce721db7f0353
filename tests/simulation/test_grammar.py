"""Structured outputs while nodes die and pages run out: the grammar is replayed, the text goes on exactly."""

import asyncio
from collections.abc import Iterable, Mapping
from typing import Any

import pytest

from engine.request import Request
from router.dispatch import DispatchConfig
from router.requests import Constraint, GenerateRequest, SamplingParams
from tests.conformance.test_grammar import NO_END, NO_PADDING, SPECS
from tests.conformance.test_loop import prompt_of
from tests.engines import make_engine, run, tokens_of
from tests.grammars import EOS, byte_grammars
from tests.simulation.cluster import SimCluster, SimConfig, Stream
from tests.simulation.test_cluster import assert_whole, attempts, consume_all, mixed, simulate

MAX_TOKENS = 40


def constrained(kind: str, *, variant: int) -> Stream:
    """Greedy and sampled in turn."""
    options: dict[str, Any] = {"temperature": 0.9, "top_k": 4} if variant % 2 else {"temperature": 0.0}
    sampling = SamplingParams(
        seed=variant,
        max_tokens=MAX_TOKENS,
        stop_token_ids=(EOS,),
        logit_bias=NO_END if kind == "json_object" else NO_PADDING,
        **options,
    )
    constraint = Constraint(spec=SPECS[kind], field="structured_outputs")
    prompt = tuple(prompt_of(15 + 9 * variant, seed=variant))
    return Stream(request=GenerateRequest(prompt_ids=prompt, sampling=sampling, constraint=constraint))


def truth(asked: GenerateRequest) -> tuple[int, ...]:
    """What one engine that does it all alone writes."""
    assert asked.constraint is not None
    request = Request(
        key="r",
        prompt_ids=asked.prompt_ids,
        num_prompt_tokens=len(asked.prompt_ids),
        sampling=asked.sampling,
        matcher=byte_grammars()
        .prepare(asked.constraint.spec.to_text(), emitted=(), stop_token_ids=(EOS,))
        .result(),
    )
    return tuple(tokens_of(run(make_engine(), [request])["r"]))


def streams_of(kinds: Iterable[str]) -> list[Stream]:
    return [constrained(kind, variant=number) for number, kind in enumerate(kinds)]


def assert_constrained(streams: Iterable[Stream]) -> None:
    for each in streams:
        assert each.outcome is not None
        assert tuple(each.ids) == truth(each.request)


def config_of(*, decode: Mapping[str, Any] | None = None, **options: Any) -> SimConfig:
    both = {"grammars": byte_grammars()}
    return SimConfig(engine={"P": both, "D": {**both, **(decode or {})}}, **options)


LONG = ("json_object", "regex", "json_schema", "json_object", "regex", "json_schema")


@pytest.mark.parametrize("algorithm", ["none", "ngram"])
def test_outputs_of_a_decode_node_that_dies_go_on_exactly_at_another(algorithm: str) -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams, others = streams_of(LONG), mixed((40, 17), max_tokens=30)

        async def incident() -> None:
            await cluster.until(lambda: min(len(each.ids) for each in streams) >= 5)
            await cluster.kill("D0")

        async with asyncio.TaskGroup() as group:
            group.create_task(consume_all(cluster, [*streams, *others]))
            await incident()
        assert_constrained(streams)
        assert_whole(others)
        assert attempts([*streams, *others]) == [1] * 4 + [2] * 4

    simulate(config_of(algorithm=algorithm, num_decode=2), scenario, num_pairs=2)


def test_outputs_that_run_out_of_pages_go_on_where_there_are_some() -> None:
    async def scenario(cluster: SimCluster) -> None:
        streams = streams_of(LONG)
        await consume_all(cluster, streams)
        assert_constrained(streams)
        assert attempts(streams)[-1] > 1

    config = config_of(
        algorithm="ngram",
        decode={"num_pages": 40, "reserve_tokens": 0},
        dispatch=DispatchConfig(max_preemptions=30),
    )
    simulate(config, scenario, num_pairs=1)
