"""Block drafting through the loop and the pair: lossless, its KV in step, real rounds reproduced."""

import json
from collections.abc import Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from deploy.config import BUNDLED_MODEL
from deploy.models import bundled_draft
from engine.attention import TorchAttention
from engine.batch import ForwardBatch, Span
from engine.kv_cache import KvCache
from engine.layout import PoolSpec, build_layout
from engine.linear import Linear
from engine.loaders import load_model
from engine.models.llama import LlamaModel
from engine.models.weights import LayerWeights
from engine.pool import PagePool
from engine.request import Request
from engine.scheduler import SchedulerLimits
from speculative.dflash import DflashConfig, DflashProposer
from speculative.loop import EngineLoop
from speculative.proposer import Proposal
from tests.conformance.test_loop import SAMPLINGS, prompt_of
from tests.draft_claims import (
    check_continued_text,
    check_greedy,
    check_pair,
    check_preemption,
    check_prefix_hits,
    check_release,
    check_scratch_is_never_read_back,
    check_seeds,
    check_stop,
)
from tests.engines import make_engine, make_request, run, tiny_folder, tiny_model, tokens_of
from tests.tiny_block_drafts import (
    BLOCK,
    HEAD_DIM,
    HEADS,
    KV_HEADS,
    LAYER_CONFIG,
    MASK,
    NUM_LAYERS,
    TAPS,
    dflash,
    dflash_folder,
)
from tests.tiny_models import smollm2_gguf

KINDS = ("zlab", "speculators")
every_kind = pytest.mark.parametrize("kind", KINDS)


@pytest.mark.parametrize("max_running", [1, 8])
@pytest.mark.parametrize("page_size", [1, 4, 16])
@every_kind
def test_greedy_equals_transformers_at_every_border(kind: str, page_size: int, max_running: int) -> None:
    engine = check_greedy(lambda: dflash(kind), page_size=page_size, chunk_tokens=64, max_running=max_running)
    assert engine.counters.drafted > 200
    assert (engine.counters.accepted > 60) == (kind == "speculators")


@pytest.mark.parametrize("sampling", SAMPLINGS.values(), ids=SAMPLINGS)
def test_a_seeded_text_is_unchanged_by_speculation(sampling: dict[str, object]) -> None:
    check_seeds(lambda: dflash("speculators"), sampling)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_prefix_hits_change_no_round(page_size: int) -> None:
    check_prefix_hits(lambda: dflash("speculators"), page_size=page_size)


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_pages_filled_while_decoding_carry_the_drafts_context(page_size: int) -> None:
    check_continued_text(lambda: dflash("speculators"), page_size=page_size)


@pytest.mark.parametrize("index", range(8))
def test_a_stop_token_inside_an_accepted_block_ends_it_there(index: int) -> None:
    check_stop(lambda: dflash("speculators"), index)


@pytest.mark.parametrize("steps", range(6))
def test_released_in_any_phase_leaves_no_page(steps: int) -> None:
    check_release(lambda: dflash("speculators"), steps)


def test_preemption_leaves_no_page() -> None:
    check_preemption(lambda: dflash("speculators"))


def test_scratch_rows_of_a_block_are_never_read_back() -> None:
    check_scratch_is_never_read_back(lambda: dflash("speculators"))


@pytest.mark.parametrize("num_draft_tokens", [1, 3])
def test_a_cut_block_drafts_the_first_tokens_of_the_whole_one(num_draft_tokens: int) -> None:
    proposals: dict[int, list[tuple[int, ...]]] = {}
    for count in (num_draft_tokens, 4):
        proposer = dflash("speculators", num_draft_tokens=count)
        engine = make_engine(proposer)
        engine.add(make_request("r", prompt_of(20), max_tokens=20))
        engine.step()
        request = engine.requests()[0]
        engine.cache.grow(request, request.num_committed + 5)
        proposals[count] = [proposal.token_ids for proposal in proposer.propose([request], [count])]
    assert proposals[num_draft_tokens] == [proposals[4][0][:num_draft_tokens]]
    assert len(proposals[4][0]) == 4


@pytest.mark.parametrize("page_size", [1, 4, 16])
def test_context_kv_after_chunks_and_rounds_is_that_of_one_forward_over_the_text(page_size: int) -> None:
    proposer = dflash("speculators")
    engine = make_engine(proposer, page_size=page_size, chunk_tokens=16)
    request = make_request("r", prompt_of(33), max_tokens=60)
    engine.add(request)
    while request.num_outputs < 40:
        engine.step()
    assert engine.counters.accepted > 3
    length = request.num_committed
    pool = PagePool(engine.pool.layout, 100 // page_size, torch.device("cpu"))
    span = Span(
        token_ids=request.tokens[:length],
        num_committed=0,
        pages=range(100 // page_size),
        positions=range(length),
        logit_rows=(),
    )
    hidden = tiny_model().model.forward(ForwardBatch(spans=[span], hidden_layers=TAPS), pool).hidden
    expected = proposer._network.context_kv(proposer._network.join(hidden, range(length)), range(length))
    for layer, kv_T2KD in enumerate(expected):
        assert torch.allclose(context(engine, request, layer), kv_T2KD, atol=2e-4), layer


def context(engine: EngineLoop, request: Request, layer: int) -> torch.Tensor:
    """`[T, 2, K, D]` as it lies in the request's pages."""
    pages = engine.pool.kv_pair("draft", layer)[request.pages]
    return pages.transpose(1, 2).flatten(0, 1)[: request.num_committed]


@pytest.mark.parametrize(
    "sampling", [{}, {"temperature": 0.3, "top_p": 0.9, "seed": 5}], ids=["greedy", "sampled"]
)
def test_rounds_of_a_pair_are_those_of_one_engine(sampling: dict[str, object]) -> None:
    options = {"draft": str(dflash_folder("speculators"))}
    pair = check_pair("dflash", options, lambda: dflash("speculators"), sampling)
    assert pair.decode.status().counters["accepted_tokens"] > 3
    assert pair.decode.status().counters["seedless_joins"] == 0


# ---- rounds against a dense computation, and of the trained head


class Watched(DflashProposer):
    """Remembers what it was asked and answered."""

    def __init__(self, config: DflashConfig) -> None:
        super().__init__(config)
        self.log: list[tuple[int, int, tuple[int, ...]]] = []
        self.keys: list[str] = []  # whose the entries of the log are

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        proposals = super().propose(requests, limits)
        self.keys += [str(request.key) for request in requests]
        self.log += [
            (request.tokens[-1], request.num_committed, proposal.token_ids)
            for request, proposal in zip(requests, proposals, strict=True)
        ]
        return proposals


@every_kind
def test_every_round_drafts_what_a_dense_computation_over_the_whole_text_does(kind: str) -> None:
    check_rounds_against_dense(kind)


def check_rounds_against_dense(kind: str) -> None:
    proposer = Watched(DflashConfig(draft=str(dflash_folder(kind))))
    request = make_request("r", prompt_of(33), max_tokens=30)
    run(make_engine(proposer, chunk_tokens=16), [request])
    model = AutoModelForCausalLM.from_pretrained(tiny_folder(), dtype=torch.float32)
    with torch.inference_mode():
        hidden = model(torch.tensor([request.tokens]), output_hidden_states=True).hidden_states
    features_TX = torch.cat([hidden[tap][0] for tap in TAPS], dim=1)
    dense = DenseDrafter(kind, model.get_input_embeddings().weight.data, model.lm_head.weight.data)
    assert len(proposer.log) > 10
    for root, committed, drafted in proposer.log:
        assert request.tokens[committed] == root
        assert list(drafted) == dense.draft(features_TX[:committed], root)[: len(drafted)]


class DenseDrafter:
    """The drafter by its definition: no pages, no cache, one request, every key at hand."""

    def __init__(self, kind: str, embedding_VE: torch.Tensor, head_VE: torch.Tensor) -> None:
        self._tensors = load_file(dflash_folder(kind) / "model.safetensors")
        self._embedding_VE = embedding_VE
        self._head_VE = self._tensors.get("lm_head.weight", head_VE)
        offsets = self._tensors.get("d2t", torch.zeros(len(self._head_VE), dtype=torch.int64))
        self._target_ids = (offsets + torch.arange(len(offsets))).tolist()

    def draft(self, features_TX: torch.Tensor, root: int) -> list[int]:
        context_TE = self._norm(self._linear(features_TX, "fc"), "hidden_norm")
        start = len(context_TE)
        x_TE = self._embedding_VE[[root, *[MASK] * (BLOCK - 1)]]
        for layer in range(NUM_LAYERS):
            prefix = f"layers.{layer}."
            normed_TE = self._norm(x_TE, f"{prefix}input_layernorm")
            x_TE = x_TE + self._attention(f"{prefix}self_attn.", normed_TE, context_TE, start)
            normed_TE = self._norm(x_TE, f"{prefix}post_attention_layernorm")
            gate = F.silu(self._linear(normed_TE, f"{prefix}mlp.gate_proj"))
            up = self._linear(normed_TE, f"{prefix}mlp.up_proj")
            x_TE = x_TE + self._linear(gate * up, f"{prefix}mlp.down_proj")
        ids = (self._norm(x_TE, "norm")[1:] @ self._head_VE.T).argmax(dim=1).tolist()
        return [self._target_ids[index] for index in ids]

    def _attention(
        self, prefix: str, x_TE: torch.Tensor, context_TE: torch.Tensor, start: int
    ) -> torch.Tensor:
        keys_LE = torch.cat((context_TE, x_TE))
        q_THD = self._norm(self._linear(x_TE, f"{prefix}q_proj").view(BLOCK, HEADS, -1), f"{prefix}q_norm")
        k_LKD = self._norm(
            self._linear(keys_LE, f"{prefix}k_proj").view(len(keys_LE), KV_HEADS, -1), f"{prefix}k_norm"
        )
        v_LKD = self._linear(keys_LE, f"{prefix}v_proj").view(len(keys_LE), KV_HEADS, -1)
        q_THD, k_LKD = rotated(q_THD, first=start), rotated(k_LKD, first=0)
        k_LHD, v_LHD = (x.repeat_interleave(HEADS // KV_HEADS, dim=1) for x in (k_LKD, v_LKD))
        scores_HTL = torch.einsum("thd,lhd->htl", q_THD, k_LHD) / HEAD_DIM**0.5
        out_THD = torch.einsum("htl,lhd->thd", scores_HTL.softmax(dim=2), v_LHD)
        return self._linear(out_THD.reshape(BLOCK, -1), f"{prefix}o_proj")

    def _linear(self, x_TE: torch.Tensor, name: str) -> torch.Tensor:
        return x_TE @ self._tensors[f"{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x * (x.pow(2).mean(dim=-1, keepdim=True) + 1e-6).rsqrt() * self._tensors[f"{name}.weight"]


def rotated(x_THD: torch.Tensor, *, first: int) -> torch.Tensor:
    half = HEAD_DIM // 2
    frequencies = LAYER_CONFIG["rope_theta"] ** (-torch.arange(half) / half)
    angles_T1D = (torch.arange(first, first + len(x_THD))[:, None] * frequencies)[:, None]
    cos, sin = angles_T1D.cos(), angles_T1D.sin()
    low, high = x_THD[..., :half], x_THD[..., half:]
    return torch.cat((low * cos - high * sin, high * cos + low * sin), dim=-1)


HEAD = bundled_draft(BUNDLED_MODEL, "dflash")
TRACES = Path(__file__).resolve().parents[1] / "data" / "traces_dflash.json"


def in_float32(layer: LayerWeights) -> LayerWeights:
    values: dict[str, Any] = {field.name: layer.__getattribute__(field.name) for field in fields(layer)}
    widened = {name: wider(value) for name, value in values.items() if value is not None}
    return replace(layer, **widened)


def wider(value: Any) -> Any:
    """A tensor or a product in float32."""
    if isinstance(value, torch.Tensor):
        return value.float()
    return Linear(value.weight_OI().float(), None if value.bias_O is None else value.bias_O.float())


@cache
def smollm2_float32() -> LlamaModel:
    """The GGUF's values rounded to bfloat16, computed in float32."""
    loaded = load_model(smollm2_gguf(), dtype="bfloat16", device="cpu")
    weights = loaded.model.weights
    assert torch.equal(weights.head.weight_OI(), weights.embedding_VE)
    embedding_VE = weights.embedding_VE.float()
    return LlamaModel(
        loaded.config,
        type(weights)(
            embedding_VE=embedding_VE,
            head=Linear(embedding_VE),
            final_norm_E=weights.final_norm_E.float(),
            layers=tuple(in_float32(layer) for layer in weights.layers),
        ),
        attention=TorchAttention(),
    )


def trained_engine(proposer: DflashProposer) -> EngineLoop:
    model = smollm2_float32()
    config = model.config
    target = PoolSpec(
        pool="target",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    layout = build_layout(page_size=16, dtype="float32", pools=[target, *proposer.needs.draft_kv])
    pool = PagePool(layout, 96, torch.device("cpu"))
    pool.storage.view(torch.float32).fill_(1e4)
    return EngineLoop(
        model=model,
        pool=pool,
        cache=KvCache(num_pages=96, page_size=16, fingerprint="smollm2"),
        proposer=proposer,
        limits=SchedulerLimits(max_running=5, chunk_tokens=64),
    )


def test_recorded_rounds_of_the_trained_head_are_reproduced() -> None:
    """All prompts at once: company changes no round."""
    recorded = json.loads(TRACES.read_text())
    traces = {str(trace["line"]): trace for trace in recorded["traces"]}
    assert len(traces) == 5
    proposer = Watched(DflashConfig(draft=str(HEAD)))
    options = {"max_tokens": recorded["max_new_tokens"] + 6, "stop_token_ids": (recorded["eos"],)}
    requests = [make_request(key, trace["prompt_ids"], **options) for key, trace in traces.items()]
    histories = run(trained_engine(proposer), requests)
    for key, trace in traces.items():
        history = histories[key]
        assert tokens_of(history)[: recorded["max_new_tokens"]] == trace["output_ids"]
        log = [entry for whose, entry in zip(proposer.keys, proposer.log, strict=True) if whose == key]
        assert len(log) >= len(trace["rounds"])
        decoded = zip(log, history[-len(log) :], trace["rounds"], strict=False)
        for (root, committed, drafted), progress, wanted in decoded:
            found = {"root": root, "committed": committed, "drafted": list(drafted)}
            found |= {"num_accepted": progress.num_accepted, "emitted": list(progress.tokens)}
            assert found == wanted
