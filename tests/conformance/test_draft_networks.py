"""Every head and module drafts what its definition says, whatever variant its checkpoint is of: each round
against a dense computation over the whole text.

The block drafter's: test_dflash.py; recorded rounds of a trained head: test_eagle_traces.py.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from engine.batch import ForwardOutput
from engine.models.model import Model
from engine.pool import PagePool
from engine.request import Request
from speculative.proposer import Advance, DraftNeeds, Proposal, Proposer, Seed
from speculative.registry import create_proposer
from tests.conformance.test_loop import prompt_of
from tests.dense_drafts import (
    Eagle,
    Eagle3,
    Module,
    ModuleChain,
    Target,
    Variant,
    without_qwen_names,
)
from tests.engines import VOCAB_SIZE, make_engine, make_request, run, tiny_folder
from tests.scratch import new_folder
from tests.tiny_drafts import (
    CONFIG,
    HEAD_DIM,
    HEADS,
    TAPS,
    WIDTH,
    Random,
    Tensors,
    as_qwen_next,
    as_speculators,
    deepseek_tensors,
    eagle3_config,
    eagle3_tensors,
    eagle_tensors,
    save_draft,
    speculators_config,
    tiny_draft,
)

NUM_DRAFTS = 3
NORMS = ("q_norm", "k_norm")


class Reference(Protocol):
    def draft(self, target: Target, tokens: Sequence[int], count: int) -> list[int]: ...


class Watched:
    """Another proposer, and (committed, drafted) of every round that it drafted in."""

    def __init__(self, inner: Proposer) -> None:
        self._inner = inner
        self.rounds: list[tuple[Request, int, tuple[int, ...]]] = []

    @property
    def needs(self) -> DraftNeeds:
        return self._inner.needs

    def bind(self, model: Model, pool: PagePool) -> None:
        self._inner.bind(model, pool)

    def admit(self, request: Request, seed: Seed | None) -> None:
        self._inner.admit(request, seed)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        proposals = self._inner.propose(requests, limits)
        self.rounds += [
            (request, request.num_committed, proposal.token_ids)
            for request, proposal in zip(requests, proposals, strict=True)
            if proposal.token_ids
        ]
        return proposals

    def observe(self, advances: Sequence[Advance], output: ForwardOutput) -> None:
        self._inner.observe(advances, output)

    def seed(self, request: Request) -> Seed:
        return self._inner.seed(request)

    def forget(self, request: Request) -> None:
        self._inner.forget(request)


@cache
def transformers_model() -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)


def target_of(tokens: Sequence[int]) -> Target:
    model = transformers_model()
    left_last: list[torch.Tensor] = []
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: left_last.append(args[0][0]))
    with torch.inference_mode():
        *entering, normed = model(torch.tensor([list(tokens)]), output_hidden_states=True).hidden_states
    hook.remove()
    return Target(
        embedding_VE=model.get_input_embeddings().weight.data,
        head_VE=model.lm_head.weight.data,
        hidden=[*(each[0] for each in entering), *left_last],
        normed_TE=normed[0],
    )


# Adds tensors, and says what the config says of them.
Change = Callable[[Random, Tensors], Mapping[str, Any]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A checkpoint, and what it means."""

    algorithm: str
    folder: Callable[[], Path]
    reference: Callable[[Tensors], Reference]


def eagle3_case(change: Change, *, num_layers: int = 1) -> Case:
    """Of a speculators checkpoint with the change."""

    def folder() -> Path:
        tensors = as_speculators(eagle3_tensors())
        fields = dict(change(Random(7), tensors))
        layers = {**CONFIG, "num_hidden_layers": num_layers, **fields.pop("layers", {})}
        config = speculators_config(transformer_layer_config=layers, **fields)
        return save_draft(new_folder("variant"), config, tensors)

    said = change(Random(7), {})
    flags = {name: said.get(name, False) for name in ("norm_before_residual", "norm_output")}
    variant = Variant(taps=TAPS, num_layers=num_layers, **flags)
    return Case(algorithm="eagle3", folder=folder, reference=lambda tensors: Eagle3(tensors, variant))


def flag(name: str) -> Change:
    def change(random: Random, tensors: Tensors) -> Mapping[str, Any]:
        return {name: True}

    return change


def fc_norms(random: Random, tensors: Tensors) -> Mapping[str, Any]:
    tensors |= {f"fc_norm.{index}.weight": random.norm(WIDTH) for index in range(3)}
    return {"fc_norm": True}


def one_norm(random: Random, tensors: Tensors) -> Mapping[str, Any]:
    tensors["input_norm.weight"] = random.norm(3 * WIDTH)
    return {"norm_before_fc": True}


def biases(random: Random, tensors: Tensors) -> Mapping[str, Any]:
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": 32, "v_proj": 32, "o_proj": WIDTH}
    tensors |= {
        f"layers.0.self_attn.{name}.bias": random.norm(count, base=0.0) for name, count in rows.items()
    }
    tensors["fc.bias"] = random.norm(WIDTH, base=0.0)
    return {"layers": {"attention_bias": True}}


def own_embedding(random: Random, tensors: Tensors) -> Mapping[str, Any]:
    tensors["embed_tokens.weight"] = random.matrix(VOCAB_SIZE, WIDTH)
    return {}


def qwen3_layers(random: Random, tensors: Tensors) -> Mapping[str, Any]:
    for name in NORMS:
        tensors[f"layers.0.self_attn.{name}.weight"] = random.matrix(1, HEAD_DIM, 2.0)[0]
    return {"layers": {"model_type": "qwen3", "head_dim": HEAD_DIM}}


def two_layers(random: Random, tensors: Tensors) -> Mapping[str, Any]:
    tensors |= random.layer("layers.1.", scale=0.15)
    tensors["layers.1.input_layernorm.weight"] = random.norm(WIDTH)
    return {}


def saved(algorithm: str, tensors: Callable[[], Tensors], **fields: Any) -> Callable[[], Path]:
    config = eagle3_config(**fields) if algorithm == "eagle3" else {**CONFIG, **fields}
    return lambda: save_draft(new_folder(algorithm), config, tensors())


def headless() -> Tensors:
    tensors = eagle3_tensors(vocab=VOCAB_SIZE)
    del tensors["lm_head.weight"]
    return tensors


def biased_eagle() -> Tensors:
    return {**eagle_tensors(), "fc.bias": Random(7).norm(WIDTH, base=0.0)}


def deep_eagle() -> Tensors:
    random = Random(7)
    norm = {"layers.1.input_layernorm.weight": random.norm(WIDTH)}
    return {**eagle_tensors(), **random.layer("layers.1.", scale=0.15), **norm}


def qwen_module_with_head_norms() -> Tensors:
    """Whose stored gains lack 1, as all of that layout's do."""
    norms = {f"mtp.layers.0.self_attn.{name}.weight": Random(7).matrix(1, HEAD_DIM, 2.0)[0] for name in NORMS}
    return {**as_qwen_next(deepseek_tensors()), **norms}


def variants(tensors: Tensors) -> Reference:
    return Eagle3(tensors, Variant(taps=TAPS, num_layers=2, norm_before_residual=True, norm_output=True))


CASES: Mapping[str, Case] = {
    "eagle": Case(algorithm="eagle", folder=lambda: tiny_draft("eagle"), reference=Eagle),
    "eagle biased": Case(algorithm="eagle", folder=saved("eagle", biased_eagle, bias=True), reference=Eagle),
    "eagle of two layers": Case(
        algorithm="eagle", folder=saved("eagle", deep_eagle, num_hidden_layers=2), reference=Eagle
    ),
    "eagle3": Case(
        algorithm="eagle3",
        folder=lambda: tiny_draft("eagle3"),
        reference=lambda tensors: Eagle3(tensors, Variant(taps=TAPS)),
    ),
    "eagle3 everything": Case(
        algorithm="eagle3", folder=lambda: tiny_draft("eagle3_variants"), reference=variants
    ),
    "eagle3 norm_before_residual": eagle3_case(flag("norm_before_residual")),
    "eagle3 norm_output": eagle3_case(flag("norm_output")),
    "eagle3 fc_norm": eagle3_case(fc_norms),
    "eagle3 norm_before_fc": eagle3_case(one_norm),
    "eagle3 biases": eagle3_case(biases),
    "eagle3 own embedding": eagle3_case(own_embedding),
    "eagle3 of qwen3 layers": eagle3_case(qwen3_layers),
    "eagle3 of two layers": eagle3_case(two_layers, num_layers=2),
    "eagle3 without a head": Case(
        algorithm="eagle3",
        folder=saved("eagle3", headless, draft_vocab_size=VOCAB_SIZE),
        reference=lambda tensors: Eagle3(tensors, Variant(taps=TAPS)),
    ),
    "mtp": Case(algorithm="mtp", folder=lambda: tiny_draft("mtp"), reference=Module),
    "mtp of qwen3-next": Case(
        algorithm="mtp",
        folder=lambda: tiny_draft("mtp_qwen"),
        reference=lambda tensors: Module(without_qwen_names(tensors), gain=1.0),
    ),
    "mtp of qwen3-next with head norms": Case(
        algorithm="mtp",
        folder=saved("mtp", qwen_module_with_head_norms, model_type="qwen3", head_dim=HEAD_DIM),
        reference=lambda tensors: Module(without_qwen_names(tensors), gain=1.0),
    ),
    "mtp modules": Case(
        algorithm="mtp",
        folder=lambda: tiny_draft("mtp_chain"),
        reference=lambda tensors: ModuleChain(tensors, num_modules=3),
    ),
    "mtp modules, unfitted": Case(
        algorithm="mtp",
        folder=saved("mtp", lambda: deepseek_tensors(num_modules=2)),
        reference=lambda tensors: ModuleChain(tensors, num_modules=2),
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_round_drafts_what_the_definition_says(name: str) -> None:
    case = CASES[name]
    folder = case.folder()
    options: dict[str, Any] = {"draft": str(folder), "num_steps": NUM_DRAFTS}
    watched = Watched(create_proposer(case.algorithm, options))
    requests = [make_request(f"r{n}", prompt_of(n), max_tokens=14) for n in (1, 6, 33)]
    run(make_engine(watched, chunk_tokens=16), requests)
    reference = case.reference(load_file(folder / "model.safetensors"))
    targets = {request: target_of(request.tokens) for request in requests}
    num_drafted = 0
    for request, committed, drafted in watched.rounds:
        whole = targets[request]
        seen = Target(
            embedding_VE=whole.embedding_VE,
            head_VE=whole.head_VE,
            hidden=[hidden_TE[:committed] for hidden_TE in whole.hidden],
            normed_TE=whole.normed_TE[:committed],
        )
        expected = reference.draft(seen, request.tokens[: committed + 1], len(drafted))
        assert list(drafted) == expected, (request.key, committed)
        num_drafted += len(drafted)
    assert num_drafted > 30
