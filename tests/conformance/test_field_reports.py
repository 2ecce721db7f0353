"""Reports from the field on real engines: S01, S04 (ids) and S10. S03 and S04 by HTTP: simulation/
test_stop_reports.py; P01: test_every_pair.py."""

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from time import perf_counter
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from decode_node.config import DecodeConfig
from decode_node.node import settings_of
from engine.request import Request
from speculative.build import build_engine
from speculative.loop import EngineLoop
from tests.conformance.test_loop import prompt_of, reference
from tests.draft_claims import Rounds, rounds_of
from tests.engines import VOCAB_SIZE, make_engine, make_request, run, tiny_folder, tokens_of
from tests.every_proposer import NAMES, Drafter, drafter
from tests.node_pair import NodePair
from tests.scratch import new_folder
from tests.tiny_block_drafts import standalone_folder
from tests.tiny_drafts import (
    WIDTH,
    Tensors,
    eagle3_config,
    eagle3_tensors,
    save_draft,
    target,
    tiny_draft,
)

# ---- S01: greedy output must not depend on speculation

NUM_TOKENS = 16
CHUNK = 64


def s01_prompts() -> list[list[int]]:
    """20: repeating, in steps, random (drafts are rejected), of one token, longer than a chunk."""
    rng = random.Random(1)
    print("seed 1")
    random_ids = [[rng.randrange(VOCAB_SIZE) for _ in range(5 + 9 * i)] for i in range(5)]
    return [
        *([7 + i, 8 + i, 9 + i] * (4 + i) for i in range(5)),
        *([(i + 3 * j) % VOCAB_SIZE for j in range(10 + 5 * i)] for i in range(4)),
        *random_ids,
        [77],
        *(prompt_of(CHUNK + 16 * i + 1) for i in range(5)),
    ]


Ends = list[tuple[tuple[int, ...], str, int]]


def requests_of() -> list[Request]:
    return [make_request(f"{i}", ids, max_tokens=NUM_TOKENS) for i, ids in enumerate(s01_prompts())]


def ends_of(engine: EngineLoop) -> Ends:
    """(ids, finish reason, tokens counted) of each prompt."""
    history = run(engine, requests_of())
    return [
        (tuple(tokens_of(steps)), str(steps[-1].finish_reason), sum(len(step.tokens) for step in steps))
        for steps in history.values()
    ]


@cache
def without_speculation() -> Ends:
    return ends_of(make_engine(num_pages=1200, max_running=1, chunk_tokens=CHUNK))


def widths(algorithm: str, num_drafts: int) -> Mapping[str, int]:
    counts = {"num_draft_tokens": num_drafts}
    return counts if algorithm in ("ngram", "dflash") else {**counts, "num_steps": num_drafts, "topk": 1}


S01 = [
    (name, num_drafts)
    for name in ("ngram", "eagle-chain", "eagle3-tree", "mtp-tree", "standalone", "dflash")
    for num_drafts in (1, 4, 8)
    if (name, num_drafts) != ("dflash", 8)  # its blocks are five wide
]


@pytest.mark.parametrize(("name", "num_drafts"), S01)
def test_s01_greedy_ids_reasons_and_counts_do_not_depend_on_speculation(name: str, num_drafts: int) -> None:
    row = drafter(name)
    given = {**row.options, **widths(row.algorithm, num_drafts)}
    if name == "standalone":
        del given["topk"]
    row = Drafter(algorithm=row.algorithm, options=given)
    engine_options = {"num_pages": 1200, "chunk_tokens": CHUNK}
    engine = make_engine(row.make(), **engine_options)  # type: ignore[arg-type]
    assert ends_of(engine) == without_speculation()
    assert engine.counters.drafted > 0
    assert engine.counters.accepted < engine.counters.drafted
    pair = row.pair(**engine_options)
    tids = [pair.submit(f"{i}", ids, max_tokens=NUM_TOKENS) for i, ids in enumerate(s01_prompts())]
    pair.run()
    through = [(tuple(pair.tokens(tid)), pair.ends(tid)[1], len(pair.tokens(tid))) for tid in tids]
    assert through == without_speculation()


# ---- S04: stop and cap in one step

MOST_DRAFTS = 12


def s04_cases(whole: tuple[int, ...]) -> list[tuple[dict[str, Any], tuple[int, ...], str]]:
    """(sampling, ids, finish reason): caps up to two rounds; stops with caps from one short of them on."""
    cases: list[tuple[dict[str, Any], tuple[int, ...], str]] = [
        ({"max_tokens": cap}, whole[:cap], "length") for cap in range(1, 2 * (MOST_DRAFTS + 1) + 2)
    ]
    places = [s for s in range(1, 11) if whole[s] not in whole[:s]]
    assert len(places) >= 8
    for s in places:
        stop = {"stop_token_ids": (whole[s],)}
        cases.append(({**stop, "max_tokens": s}, whole[:s], "length"))
        cases += [
            ({**stop, "max_tokens": cap}, whole[: s + 1], "stop")
            for cap in (s + 1, s + 2, s + MOST_DRAFTS + 1)
        ]
    return cases


@pytest.mark.parametrize("name", ["sure", *NAMES])
def test_s04_a_stop_token_and_the_cap_end_at_whichever_is_first(name: str) -> None:
    """Here and across the handoff. "sure" drafts with the target itself, so every round is full."""
    prompt = prompt_of(65)
    whole = reference(tuple(prompt), 40)
    cases = s04_cases(whole)
    options = {"draft": str(standalone_folder("same")), "num_steps": MOST_DRAFTS}
    row = Drafter(algorithm="standalone", options=options) if name == "sure" else drafter(name)

    def known(request: Request, count: int) -> list[int]:
        done = len(request.tokens) - len(prompt)
        return list(whole[done : done + count])

    engine = make_engine(row.make(known), num_pages=1200)
    history = run(engine, [make_request(f"{i}", prompt, **case[0]) for i, case in enumerate(cases)])
    for i, (sampling, ids, reason) in enumerate(cases):
        found = history[f"{i}"]
        assert (tuple(tokens_of(found)), found[-1].finish_reason) == (ids, reason), sampling
    assert engine.counters.output_tokens == sum(len(ids) for _, ids, _ in cases)
    if name == "sure":
        assert engine.counters.accepted > 200
    pair = row.pair(num_pages=1200)
    for some in (cases[::2], cases[1::2]):
        tids = [pair.submit(f"{case}", prompt, **case[0]) for case in some]
        pair.run()
        for tid, (sampling, ids, reason) in zip(tids, some, strict=True):
            assert tuple(pair.tokens(tid)) == ids, sampling
            assert reason in pair.ends(tid), sampling
    assert pair.is_at_rest()


# ---- S10: draft checkpoints

Change = Callable[[dict[str, Any], Tensors], None]


def changed(name: str, change: Change) -> Path:
    source = tiny_draft("eagle3")
    config = json.loads((source / "config.json").read_text())
    tensors = load_file(source / "model.safetensors")
    change(config, tensors)
    return save_draft(new_folder(name), config, tensors)


def node_engine(folder: Path) -> EngineLoop:
    """What a decode node runs with this draft. Raises what ends its start."""
    config = DecodeConfig(
        model=str(tiny_folder()),
        algorithm="eagle3",
        draft=str(folder),
        dtype="float32",
        device="cpu",
        page_size=4,
        num_pages=400,
        threads=1,
    )
    return build_engine(settings_of(config), clock=perf_counter).loop


def rounds_with(folder: Path) -> tuple[list[Rounds], int]:
    """Every round over some prompts, and how many drafts stood; the text must be the target's."""
    engine = node_engine(folder)
    requests = [make_request(f"r{n}", prompt_of(n), max_tokens=12) for n in (15, 33, 64, 129)]
    history = run(engine, requests)
    for request in requests:
        assert tuple(tokens_of(history[str(request.key)])) == reference(request.prompt_ids, 12)
    return [rounds_of(steps) for steps in history.values()], engine.counters.accepted


def unprefixed(config: dict[str, Any], tensors: Tensors) -> None:
    config["architectures"] = ["LlamaForCausalLM"]
    for name in [name for name in tensors if name.startswith("midlayer.")]:
        tensors[name.replace("midlayer.", "layers.0.")] = tensors.pop(name)


def test_s10_1_and_5_a_good_draft_and_one_with_base_names_accept_alike() -> None:
    rounds, accepted = rounds_with(tiny_draft("eagle3"))
    assert accepted >= 8
    assert rounds_with(changed("unprefixed", unprefixed)) == (rounds, accepted)


def test_s10_2_without_a_head_the_targets_is_borrowed() -> None:
    tensors = eagle3_tensors(vocab=VOCAB_SIZE)
    config = eagle3_config(draft_vocab_size=VOCAB_SIZE)
    tensors["lm_head.weight"] = target().head.weight_OI()
    filled = save_draft(new_folder("filled"), config, tensors)
    del tensors["lm_head.weight"]
    assert rounds_with(save_draft(new_folder("headless"), config, tensors)) == rounds_with(filled)


def test_s10_8_an_own_embedding_drafts_and_is_accepted() -> None:
    folder = tiny_draft("eagle3_variants")
    own = load_file(folder / "model.safetensors")["embed_tokens.weight"]
    assert not torch.allclose(own, target().embedding_VE, atol=1e-2)
    assert rounds_with(folder)[1] >= 8


def without_maps(config: dict[str, Any], tensors: Tensors) -> None:
    del tensors["d2t"], tensors["t2d"]


def map_outside(config: dict[str, Any], tensors: Tensors) -> None:
    tensors["d2t"][5] = VOCAB_SIZE


def other_width(config: dict[str, Any], tensors: Tensors) -> None:
    config |= {"hidden_size": 32, "head_dim": 16}


def other_vocabulary(config: dict[str, Any], tensors: Tensors) -> None:
    config["vocab_size"] = 300


@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(without_maps, "lacks d2t, which draft_vocab_size 160 needs", id="3"),
        pytest.param(map_outside, r"d2t must stay inside the target's vocabulary of 256, got id", id="4"),
        pytest.param(other_width, "target_hidden_size of the draft must be the target's 64, got 32", id="6"),
        pytest.param(other_vocabulary, "vocab_size of the draft must be the target's 256, got 300", id="7"),
    ],
)
def test_s10_a_draft_that_cannot_fit_ends_the_start_by_the_name_of_what_is_wrong(
    change: Change, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        node_engine(changed("misfit", change))


def test_s10_3_the_command_ends_with_status_2_and_one_line() -> None:
    folder = changed("unmapped", without_maps)
    command = [sys.executable, "-m", "deploy.cli", "decode", "--model", str(tiny_folder())]
    flags = ["--algorithm", "eagle3", "--draft", str(folder), "--num-pages", "16", "--log-level", "error"]
    done = subprocess.run([*command, *flags], capture_output=True, text=True, timeout=100)
    assert done.returncode == 2
    last = done.stderr.strip().splitlines()[-1]
    assert last == "paceline: the draft's checkpoint lacks d2t, which draft_vocab_size 160 needs"


# ---- P01: a draft whose hidden size is not the target's


def narrow_head() -> Path:
    """32 wide on a target of 64, with its own embedding and head."""
    generator = torch.Generator().manual_seed(2)

    def matrix(rows: int, columns: int) -> torch.Tensor:
        return 0.15 * torch.randn(rows, columns, generator=generator)

    width, inner = 32, 48
    tensors = {
        "fc.weight": matrix(width, 3 * WIDTH),
        "embed_tokens.weight": matrix(VOCAB_SIZE, width),
        "lm_head.weight": matrix(VOCAB_SIZE, width),
        "midlayer.self_attn.q_proj.weight": matrix(64, 2 * width),
        "midlayer.self_attn.k_proj.weight": matrix(32, 2 * width),
        "midlayer.self_attn.v_proj.weight": matrix(32, 2 * width),
        "midlayer.self_attn.o_proj.weight": matrix(width, 64),
        "midlayer.mlp.gate_proj.weight": matrix(inner, width),
        "midlayer.mlp.up_proj.weight": matrix(inner, width),
        "midlayer.mlp.down_proj.weight": matrix(width, inner),
    }
    for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        tensors[f"midlayer.{name}.weight"] = torch.ones(width)
    tensors["norm.weight"] = torch.ones(width)
    config = eagle3_config(
        hidden_size=width,
        intermediate_size=inner,
        head_dim=16,
        target_hidden_size=WIDTH,
        draft_vocab_size=VOCAB_SIZE,
    )
    return save_draft(new_folder("narrow"), config, tensors)


def test_p01_a_draft_of_another_hidden_size_goes_through_a_pair() -> None:
    """Its rounds are one engine's; wide trees, so that some of its random drafts stand."""
    shape = {"num_steps": 3, "topk": 16, "num_draft_tokens": 100}
    row = Drafter(algorithm="eagle3", options={"draft": str(narrow_head()), **shape})
    engine = make_engine(row.make(), num_pages=1200)
    prompts = {f"{n}": prompt_of(n) for n in (9, 33, 64, 65, 129)}
    history = run(engine, [make_request(key, ids, max_tokens=16) for key, ids in prompts.items()])
    assert engine.counters.accepted > 0
    pair: NodePair = row.pair(num_pages=1200)
    tids = {key: pair.submit(key, ids, max_tokens=16) for key, ids in prompts.items()}
    pair.run()
    for key, tid in tids.items():
        assert [found[1:] for found in pair.rounds(tid)] == rounds_of(history[key])
    assert pair.decode.status().counters["seedless_joins"] == 0
