"""Block drafters and standalone drafts for the tiny target: random, or fitted so that some drafts stand."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from engine.batch import ForwardBatch, Span
from engine.layout import PoolSpec, build_layout
from engine.pool import PagePool
from speculative.dflash import DflashConfig, DflashProposer
from speculative.drafts.dflash_config import dflash_facts
from speculative.drafts.dflash_network import DflashNetwork, tensor_name
from speculative.drafts.folder import open_draft
from speculative.standalone import StandaloneConfig, StandaloneProposer
from tests.conformance.test_loop import LENGTHS, prompt_of, reference
from tests.engines import VOCAB_SIZE, tiny_folder, tiny_model
from tests.scratch import new_folder
from tests.tiny_drafts import Random
from tests.tiny_models import build_tiny

Tensors = dict[str, torch.Tensor]

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER, NUM_LAYERS = 64, 4, 1, 16, 96, 2
BLOCK, MASK = 5, 0
TAPS = (1, 2)  # hidden states of the tiny target
DRAFT_VOCAB = 200

LAYER_CONFIG: Mapping[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": NUM_LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 512,
    "rope_theta": 20000.0,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
}


def zlab_config(**fields: Any) -> dict[str, Any]:
    nested = {"target_layer_ids": [tap - 1 for tap in TAPS], "mask_token_id": MASK}
    base = {**LAYER_CONFIG, "architectures": ["DFlashDraftModel"], "block_size": BLOCK}
    return {**base, "num_target_layers": 3, "dflash_config": nested, **fields}


def speculators_config(**fields: Any) -> dict[str, Any]:
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "transformer_layer_config": dict(LAYER_CONFIG),
        "aux_hidden_state_layer_ids": list(TAPS),
        "mask_token_id": MASK,
        "block_size": BLOCK,
        "draft_vocab_size": DRAFT_VOCAB,
        **fields,
    }


def dflash_tensors(seed: int = 0) -> Tensors:
    """As z-lab stores them: no embedding, no head."""
    random = Random(seed)
    matrix, norm = random.matrix, random.norm
    tensors = {
        "fc.weight": matrix(WIDTH, len(TAPS) * WIDTH),
        "hidden_norm.weight": norm(WIDTH),
        "norm.weight": norm(WIDTH),
    }
    for layer in range(NUM_LAYERS):
        prefix = f"layers.{layer}."
        tensors |= {
            f"{prefix}self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, WIDTH),
            f"{prefix}self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, WIDTH),
            f"{prefix}self_attn.v_proj.weight": 4 * matrix(KV_HEADS * HEAD_DIM, WIDTH),
            f"{prefix}self_attn.o_proj.weight": matrix(WIDTH, HEADS * HEAD_DIM),
            f"{prefix}self_attn.q_norm.weight": norm(HEAD_DIM),
            f"{prefix}self_attn.k_norm.weight": norm(HEAD_DIM),
            f"{prefix}mlp.gate_proj.weight": matrix(INNER, WIDTH),
            f"{prefix}mlp.up_proj.weight": matrix(INNER, WIDTH),
            f"{prefix}mlp.down_proj.weight": matrix(WIDTH, INNER),
            f"{prefix}input_layernorm.weight": norm(WIDTH),
            f"{prefix}post_attention_layernorm.weight": norm(WIDTH),
        }
    return tensors


def draft_ids() -> torch.Tensor:
    """The target ids of a reduced vocabulary, in no particular order."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(5))[:DRAFT_VOCAB]


def save_draft(config: Mapping[str, Any], tensors: Tensors, *, name: str = "draft") -> Path:
    folder = new_folder(name)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


@cache
def dflash_folder(kind: str) -> Path:
    """zlab: random, with the target's head. speculators: own vocabulary, its head fitted to the target."""
    tensors = dflash_tensors()
    if kind == "zlab":
        return save_draft(zlab_config(), tensors, name=kind)
    ids = draft_ids()
    tensors["d2t"] = ids - torch.arange(DRAFT_VOCAB)
    tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
    tensors["verifier_norm.weight"] = torch.ones(WIDTH)
    tensors["lm_head.weight"] = torch.zeros(DRAFT_VOCAB, WIDTH)
    tensors["lm_head.weight"] = _fitted_head(save_draft(speculators_config(), tensors), ids)
    return save_draft(speculators_config(), tensors, name=kind)


def dflash(kind: str, **options: Any) -> DflashProposer:
    return DflashProposer(DflashConfig(draft=str(dflash_folder(kind)), **options))


@cache
def standalone_folder(kind: str) -> Path:
    """same: the target itself. noisy: near it, so that about half its drafts stand. other: another family
    of other depth, heads and widths."""
    if kind == "same":
        return tiny_folder()
    folder = new_folder(kind)
    if kind == "other":
        build_tiny(
            "qwen3_tied", seed=4, num_hidden_layers=2, hidden_size=32, num_attention_heads=6
        ).save_pretrained(folder)
        return folder
    model = build_tiny("llama")
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.01 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder)
    return folder


def standalone(kind: str, **options: Any) -> StandaloneProposer:
    return StandaloneProposer(StandaloneConfig(draft=str(standalone_folder(kind)), **options))


def pool_for_drafts(specs: tuple[PoolSpec, ...], *, page_size: int = 4, num_pages: int = 90) -> PagePool:
    config = tiny_model().config
    target = PoolSpec(
        pool="target",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    layout = build_layout(page_size=page_size, dtype="float32", pools=[target, *specs])
    return PagePool(layout, num_pages, torch.device("cpu"))


def open_network(folder: Path) -> tuple[DflashNetwork, PagePool]:
    """The network alone, over a pool of its own."""
    draft = open_draft(str(folder), tensor_name)
    pool = pool_for_drafts(DflashProposer(DflashConfig(draft=str(folder))).needs.draft_kv)
    model = tiny_model().model
    reader = draft.reader(dtype=model.dtype, device=model.device)
    return DflashNetwork(dflash_facts(draft.config), reader, model, pool), pool


def block_span(root: int, start: int) -> Span:
    return Span(
        token_ids=(root, *[MASK] * (BLOCK - 1)),
        num_committed=start,
        pages=range(90),
        positions=range(start, start + BLOCK),
        logit_rows=range(1, BLOCK),
        is_bidirectional=True,
    )


def _fitted_head(folder: Path, ids: torch.Tensor) -> torch.Tensor:
    """Least squares over what the rest of the network makes of the target's own texts."""
    network, pool = open_network(folder)
    inputs, outputs = [], []
    for length in LENGTHS:
        prompt = tuple(prompt_of(length))
        tokens = [*prompt, *reference(prompt, 12)]
        span = Span(
            token_ids=tokens,
            num_committed=0,
            pages=range(90),
            positions=range(len(tokens)),
            logit_rows=(),
        )
        hidden = tiny_model().model.forward(ForwardBatch(spans=[span], hidden_layers=TAPS), pool).hidden
        for root in range(length, len(tokens) - BLOCK + 1):
            network.write_context(network.join(hidden, range(root)), range(root), range(root))
            inputs.append(network.hidden([block_span(tokens[root], root)]))
            following = torch.tensor(tokens[root + 1 : root + BLOCK])
            outputs.append((following[:, None] == ids[None]).float())
    x, y = torch.cat(inputs).double(), torch.cat(outputs).double()
    gram = x.T @ x + 1e-5 * len(x) * torch.eye(WIDTH, dtype=torch.float64)
    solved: torch.Tensor = torch.linalg.solve(gram, x.T @ y)
    return 20 * solved.T.float()
