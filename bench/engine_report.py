"""From samples to the engine's sections of the report. Pure: must never know who was measured or how."""

import statistics
from collections.abc import Mapping
from typing import Any

from bench.contenders import Wave
from bench.schedule import Samples
from bench.stats import median_ratio, summary

RATIOS = {
    "pair_over_transformers": ("pair_nixl", "transformers"),
    "colocated_over_transformers": ("colocated", "transformers"),
    "pair_over_against": ("pair_nixl", "against"),
    "pair_over_vllm": ("pair_nixl", "vllm"),
    "pair_over_vllm_pair": ("pair_nixl", "vllm_pair"),
}
"""Tokens/s of the first over the second; over the faster of both runs of `transformers`, round by round."""

LONG_TTFT_RATIOS = {
    "ttft_pair_over_colocated": ("pair_nixl", "colocated"),
    "ttft_pair_grpc_over_colocated": ("pair_grpc", "colocated"),
    "ttft_vllm_pair_over_its_colocated": ("vllm_pair", "vllm_pair_colocated"),
    "ttft_pair_over_against": ("pair_nixl", "against"),
    "ttft_pair_over_vllm": ("pair_nixl", "vllm"),
    "ttft_pair_over_vllm_pair": ("pair_nixl", "vllm_pair"),
}
"""Time to first token of the long prompt, first over second."""


def phase(samples: Mapping[str, Samples]) -> dict[str, Any]:
    """Everything of one algorithm: a section for each contender, and the ratios."""
    return {
        "contenders": {name: _contender(one) for name, one in samples.items()},
        "ratios": _throughput_ratios(samples) | _ttft_ratios(samples),
    }


def sections(phases: Mapping[str, Any]) -> dict[str, Any]:
    """The report's keys: headline numbers of the first algorithm, and every phase whole."""
    first = next(iter(phases.values()))
    return {
        "tokens_per_s": tokens_per_s(first),
        "ttft_pair_over_colocated": first["ratios"].get("ttft_pair_over_colocated"),
        "ratios": first["ratios"],
        "by_algorithm": {name: {"tokens_per_s": tokens_per_s(one), **one} for name, one in phases.items()},
    }


def tokens_per_s(one: Mapping[str, Any]) -> dict[str, float]:
    """`name` for a single stream, `name_8` for eight."""
    return {
        name if streams == "1" else f"{name}_{streams}": numbers["tokens_per_s"]
        for name, contender in one["contenders"].items()
        for streams, numbers in contender["streams"].items()
    }


def _contender(samples: Samples) -> dict[str, Any]:
    lengths = [len(waves) for waves in samples.waves.values()]
    return {
        "streams": {str(streams): _waves(waves) for streams, waves in samples.waves.items()},
        "long_prompt_ttft_s": summary(samples.long_ttft_s).median,
        "long_prompt_ttft_s_each": samples.long_ttft_s,
        "rounds": min(lengths, default=0),
    }


def _waves(waves: list[Wave]) -> dict[str, Any]:
    answers = [answer for wave in waves for answer in wave.answers]
    lengths = [answer.acceptance_length for answer in answers if answer.acceptance_length is not None]
    speeds = [wave.tokens_per_s for wave in waves]
    return {
        "tokens_per_s": statistics.median(speeds),
        "tokens_per_s_each": speeds,
        "decode_tokens_per_s": statistics.median(wave.decode_tokens_per_s for wave in waves),
        "ttft_s": statistics.median(answer.ttft_s for answer in answers),
        "prompt_tokens": statistics.fmean(answer.num_prompt_tokens for answer in answers),
        "output_tokens": statistics.fmean(answer.num_output_tokens for answer in answers),
        "acceptance_length": statistics.fmean(lengths) if lengths else None,
    }


def _throughput_ratios(samples: Mapping[str, Samples]) -> dict[str, float]:
    ratios = {}
    for name, (upper, lower) in RATIOS.items():
        if upper in samples and lower in samples:
            for streams, waves in samples[upper].waves.items():
                ratios[name if streams == 1 else f"{name}_{streams}"] = median_ratio(
                    [wave.tokens_per_s for wave in waves], _best(samples, lower, streams)
                )
    return ratios


def _best(samples: Mapping[str, Samples], name: str, streams: int) -> list[float]:
    """Round by round, the faster of a contender and its passive twin: never flattered by a busy machine."""
    twins = [samples[one].waves[streams] for one in (name, f"{name}_passive") if one in samples]
    return [max(wave.tokens_per_s for wave in waves) for waves in zip(*twins, strict=True)]


def _ttft_ratios(samples: Mapping[str, Samples]) -> dict[str, float]:
    return {
        name: median_ratio(samples[upper].long_ttft_s, samples[lower].long_ttft_s)
        for name, (upper, lower) in LONG_TTFT_RATIOS.items()
        if upper in samples and lower in samples
    }
