"""`paceline bench spec`: real prompts through real engines, one stream, every algorithm in turn.

Owns the order of the run. All engines live in this process, and each prompt is answered by all of them
before the next one, every time beginning with another: a machine that gets slower hits all.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import Any

from bench import machine, spec_report
from bench.forwards import ForwardClock, forward_clock
from bench.prompts import parse
from bench.schedule import rotated
from bench.spec_config import Contender, SpecBench
from bench.spec_report import Answer
from deploy import models
from engine.params import SamplingParams
from engine.request import Request
from router.text.model_text import ModelText
from speculative.budgets.budget import BUDGET_OPTIONS
from speculative.build import BuiltEngine, build_engine
from speculative.progress import Progress
from speculative.settings import EngineSettings
from wire.node_config import draft_options

WARM_UP = "Say hello to the riders of the club."
WARM_UP_TOKENS = 8
UNNAMED = "prompts"
KV_MEMORY_MIB = 256

Prompts = Mapping[str, Sequence[str]]


async def run(settings: SpecBench) -> None:
    """Measure, print, write. Raises ValueError for settings or prompts that cannot be."""
    prompts = by_category(Path(settings.prompts), most=settings.per_category)
    folder = models.resolve(settings.model)
    engines = {
        one.label: build_engine(engine_settings(settings, one, folder), clock=time.perf_counter)
        for one in settings.contenders
    }
    encoded = await _encoded(folder, prompts)
    facts = machine.facts()
    warm_up = await _encoded(folder, {"warm-up": [WARM_UP]})
    measure(engines, warm_up, max_tokens=WARM_UP_TOKENS)
    result = spec_report.numbers(measure(engines, encoded, max_tokens=settings.max_tokens))
    print(spec_report.text(result))
    if settings.json:
        _write(Path(settings.json), {"machine": facts, "settings": asdict(settings), "categories": result})
    if settings.plot_path is not None:
        print(spec_report.draw(result, settings.plot_path))


def by_category(path: Path, *, most: int) -> dict[str, list[str]]:
    """The first prompts of each category, in the order of the file. Raises ValueError naming the line."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"prompts must be a readable file, got {str(path)!r}: {error.strerror}") from error
    found: dict[str, list[str]] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = parse(line, f"{path}:{number}")
        value = json.loads(line)
        category = str(value.get("category", UNNAMED)) if isinstance(value, dict) else UNNAMED
        members = found.setdefault(category, [])
        if not most or len(members) < most:
            members.append(prompt)
    if not found:
        raise ValueError(f"prompts must hold at least one line, got none in {str(path)!r}")
    return found


def engine_settings(settings: SpecBench, contender: Contender, folder: Path) -> EngineSettings:
    """Without a shape of its own, a bundled head drafts in the one in which a cluster would use it."""
    options = dict(contender.options)
    if options.keys() <= BUDGET_OPTIONS:
        shape = draft_options(models.bundled_draft_options(settings.model, contender.algorithm))
        options = {**shape, **options}
    draft = options.pop("draft", "") or models.bundled_draft(settings.model, contender.algorithm)
    return EngineSettings(
        model=str(folder),
        device="cpu",
        dtype=settings.dtype,
        page_size=16,
        num_pages=0,
        kv_memory_mib=KV_MEMORY_MIB,
        max_model_len=0,
        chunk_tokens=256,
        max_running=1,
        reserve_tokens=0,
        algorithm=contender.algorithm,
        draft=str(draft),
        draft_options=options,
        threads=settings.threads,
        is_prefill_only=False,
    )


def measure(
    engines: Mapping[str, BuiltEngine],
    prompts: Mapping[str, Sequence[tuple[int, ...]]],
    *,
    max_tokens: int,
) -> dict[str, dict[str, list[Answer]]]:
    """By category and contender. A prompt answered with one token has no rounds and is left out."""
    names = list(engines)
    found: dict[str, dict[str, list[Answer]]] = {}
    turn = 0
    with forward_clock() as clock:
        for category, encoded in prompts.items():
            kept: dict[str, list[Answer]] = {name: [] for name in names}
            for prompt_ids in encoded:
                order = rotated(names, turn)
                turn += 1
                answers = {name: answer(engines[name], prompt_ids, max_tokens, clock) for name in order}
                if all(len(one.tokens) > 1 for one in answers.values()):
                    for name in names:
                        kept[name].append(answers[name])
            print(f"{category}: {len(kept[names[0]])} of {len(encoded)} prompts", flush=True)
            if kept[names[0]]:
                found[category] = kept
    if not found:
        raise ValueError("prompts must hold one that is answered with several tokens, got none")
    return found


def answer(engine: BuiltEngine, prompt_ids: tuple[int, ...], max_tokens: int, clock: ForwardClock) -> Answer:
    """One prompt, greedily, to its end."""
    eos = engine.facts.eos_token_ids
    request = Request(
        key="bench",
        prompt_ids=prompt_ids,
        num_prompt_tokens=len(prompt_ids),
        sampling=SamplingParams(seed=0, max_tokens=max_tokens, temperature=0.0, stop_token_ids=tuple(eos)),
    )
    started = time.perf_counter()
    engine.loop.add(request)
    while not request.is_prompt_done:
        engine.loop.step()
    prefilled, forward_s = time.perf_counter(), clock.seconds
    rounds: list[Progress] = []
    while engine.loop.requests():
        rounds += engine.loop.step().progress
    ended = time.perf_counter()
    return Answer(
        tokens=tuple(request.tokens[len(prompt_ids) :]),
        accepted=tuple(progress.num_accepted for progress in rounds),
        drafted=sum(progress.num_drafted for progress in rounds),
        prefill_s=prefilled - started,
        decode_s=ended - prefilled,
        forward_s=clock.seconds - forward_s,
    )


def _write(path: Path, report: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(report, indent=1) + "\n")


async def _encoded(folder: Path, prompts: Prompts) -> dict[str, list[tuple[int, ...]]]:
    text = ModelText.from_folder(folder, local_time=datetime.now)
    try:
        return {
            category: [await text.encode_chat([{"role": "user", "content": prompt}]) for prompt in members]
            for category, members in prompts.items()
        }
    finally:
        text.close()
