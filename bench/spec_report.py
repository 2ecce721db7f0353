"""What drafting gains, by category and algorithm: from answers to numbers, a table and a picture.

Pure but for the picture's file. Must never measure.
"""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench import stats, table
from bench.spec_config import PLAIN

ALL = "all"
PALETTE = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860")


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One prompt answered. The first token comes of the prompt; the rounds give the others.

    accepted: drafts that each round emitted. drafted: tokens proposed in all.
    decode_s: wall time of the rounds; forward_s: the part of it inside the two models.
    """

    tokens: tuple[int, ...]
    accepted: tuple[int, ...]
    drafted: int
    prefill_s: float
    decode_s: float
    forward_s: float

    @property
    def tokens_per_s(self) -> float:
        """Of the rounds, without the prompt."""
        return (len(self.tokens) - 1) / self.decode_s

    @property
    def whole_tokens_per_s(self) -> float:
        return len(self.tokens) / (self.prefill_s + self.decode_s)


Answers = Mapping[str, Sequence[Answer]]
"""By contender; the i-th answers of all are to the same prompt."""


def numbers(by_category: Mapping[str, Answers]) -> dict[str, dict[str, Any]]:
    """By category, and over all prompts, the numbers of each contender."""
    names = list(next(iter(by_category.values())))
    together = {name: [one for answers in by_category.values() for one in answers[name]] for name in names}
    return {category: _contenders(answers) for category, answers in {**by_category, ALL: together}.items()}


def text(result: Mapping[str, Mapping[str, Any]]) -> str:
    """A table for each contender's key numbers, a row for each category."""
    parts = [
        _grid("Speed-up of the rounds over plain decoding, median over prompts", result, "speed_up", ".2f"),
        _grid("Tokens per verify", result, "tokens_per_verify", ".2f"),
        _grid("Tokens/s of the rounds, median over prompts", result, "tokens_per_s", ".1f"),
    ]
    rows = [["all prompts", "outside the models", "whole answer", "same text", "accepted at 1, 2, …"]]
    for name, found in result[ALL].items():
        rates = " ".join(f"{rate:.2f}" for rate in found["accepted_at"])
        rows.append(
            [
                name,
                f"{100 * found['outside_share']:.1f} %",
                f"{found['whole_speed_up']:.2f}",
                f"{100 * found['same_text_share']:.0f} %",
                rates or "-",
            ]
        )
    return "\n".join(["", *parts, table.columns(rows)])


def draw(result: Mapping[str, Mapping[str, Any]], path: Path) -> str:
    """Write a PNG: speed-up and tokens per verify, a group of bars for each category."""
    try:
        import matplotlib as mpl
    except ImportError:
        return "no plot: matplotlib is not installed (pip install paceline[bench])"
    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12.0, 7.0), layout="constrained")
    titles = {"speed_up": "speed-up over plain decoding", "tokens_per_verify": "tokens per verify"}
    for axes, (key, title) in zip(figure.subplots(2, 1), titles.items(), strict=True):
        _bars(axes, result, key)
        axes.set_title(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return f"plot: {path}"


def accepted_at(accepted: Sequence[int]) -> list[float]:
    """[i]: share of all rounds that accepted more than i drafts."""
    return [sum(n > i for n in accepted) / len(accepted) for i in range(max(accepted, default=0))]


def _contenders(answers: Answers) -> dict[str, Any]:
    return {name: _numbers(found, answers[PLAIN]) for name, found in answers.items()}


def _numbers(answers: Sequence[Answer], plain: Sequence[Answer]) -> dict[str, Any]:
    """Each ratio is of the two answers to one prompt, which ran next to each other."""
    accepted = [count for answer in answers for count in answer.accepted]
    decode_s = sum(answer.decode_s for answer in answers)
    pairs = list(zip(answers, plain, strict=True))
    speed_ups = [answer.tokens_per_s / other.tokens_per_s for answer, other in pairs]
    whole = [answer.whole_tokens_per_s / other.whole_tokens_per_s for answer, other in pairs]
    return {
        "prompts": len(answers),
        "rounds": len(accepted),
        "tokens": sum(len(answer.tokens) for answer in answers),
        "drafted": sum(answer.drafted for answer in answers),
        "tokens_per_verify": stats.rounded(1 + statistics.fmean(accepted)),
        "accepted_at": [stats.rounded(rate) for rate in accepted_at(accepted)],
        "tokens_per_s": stats.rounded(statistics.median(answer.tokens_per_s for answer in answers)),
        "plain_tokens_per_s": stats.rounded(statistics.median(answer.tokens_per_s for answer in plain)),
        "speed_up": stats.rounded(statistics.median(speed_ups)),
        "whole_speed_up": stats.rounded(statistics.median(whole)),
        "outside_share": stats.rounded(1 - sum(answer.forward_s for answer in answers) / decode_s),
        "round_ms": stats.rounded(1000 * decode_s / len(accepted)),
        "same_text_share": stats.rounded(
            statistics.fmean(answer.tokens == other.tokens for answer, other in pairs)
        ),
    }


def _grid(title: str, result: Mapping[str, Mapping[str, Any]], key: str, form: str) -> str:
    names = list(result[ALL])
    rows = [["", "prompts", *names]]
    for category, found in result.items():
        values = [format(found[name][key], form) for name in names]
        rows.append([category, f"{found[PLAIN]['prompts']}", *values])
    return f"{title}\n{table.columns(rows)}"


def _bars(axes: Any, result: Mapping[str, Mapping[str, Any]], key: str) -> None:
    names = [name for name in result[ALL] if name != PLAIN] or [PLAIN]
    width = 0.8 / len(names)
    for index, name in enumerate(names):
        places = [place + index * width for place in range(len(result))]
        values = [found[name][key] for found in result.values()]
        axes.bar(places, values, width, label=name, color=PALETTE[index % len(PALETTE)])
    middles = [place + 0.4 - width / 2 for place in range(len(result))]
    axes.set_xticks(middles, list(result), rotation=20, ha="right")
    axes.axhline(1.0, color="grey", linestyle="--", linewidth=1)
    axes.legend()
