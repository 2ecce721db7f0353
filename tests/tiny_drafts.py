"""Draft heads for the tiny models, in every layout: random, or fitted so that some of their drafts stand.

A fitted head's last free matrix is solved for, over the target's own texts for the usual prompts; the rest
stays random but small. So acceptance is real, partial, and depends on every part of the network.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from engine.batch import ForwardBatch, Span
from engine.layout import PoolSpec, build_layout
from engine.models.llama import LlamaModel
from engine.pool import PagePool
from speculative.eagle3 import Eagle3Config, Eagle3Draft
from tests.conformance.test_loop import LENGTHS, prompt_of
from tests.engines import VOCAB_SIZE, make_engine, make_request, run, tiny_model
from tests.scratch import new_folder

Tensors = dict[str, torch.Tensor]

WIDTH, HEADS, KV_HEADS, HEAD_DIM, INNER = 64, 4, 2, 16, 96
DRAFT_VOCAB = 160
TAPS = (1, 2, 3)

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": INNER,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "max_position_embeddings": 512,
    "vocab_size": VOCAB_SIZE,
    "rms_norm_eps": 1e-6,
}


def save_draft(folder: Path, config: Mapping[str, Any], tensors: Tensors) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(
        {name: tensor.contiguous().clone() for name, tensor in tensors.items()}, folder / "model.safetensors"
    )
    return folder


class Random:
    """Draws weights; norms lie around `base`."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def matrix(self, rows: int, columns: int, scale: float = 0.15) -> torch.Tensor:
        return scale * torch.randn(rows, columns, generator=self._generator)

    def norm(self, width: int, base: float = 1.0) -> torch.Tensor:
        return base + 0.1 * torch.randn(width, generator=self._generator)

    def layer(self, prefix: str, *, input_size: int = WIDTH, scale: float = 0.05) -> Tensors:
        """A decoder layer's tensors without its norms before the attention."""
        return {
            f"{prefix}self_attn.q_proj.weight": self.matrix(HEADS * HEAD_DIM, input_size),
            f"{prefix}self_attn.k_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, input_size),
            f"{prefix}self_attn.v_proj.weight": self.matrix(KV_HEADS * HEAD_DIM, input_size),
            f"{prefix}self_attn.o_proj.weight": self.matrix(WIDTH, HEADS * HEAD_DIM, scale),
            f"{prefix}post_attention_layernorm.weight": self.norm(WIDTH),
            f"{prefix}mlp.gate_proj.weight": self.matrix(INNER, WIDTH, scale),
            f"{prefix}mlp.up_proj.weight": self.matrix(INNER, WIDTH, scale),
            f"{prefix}mlp.down_proj.weight": self.matrix(WIDTH, INNER, scale),
        }


def eagle3_tensors(seed: int = 0, *, num_taps: int = 3, vocab: int = DRAFT_VOCAB) -> Tensors:
    """An official / SpecForge head: `midlayer.*`, own head, d2t offsets and t2d for a reduced vocabulary."""
    random = Random(seed)
    tensors = {
        "fc.weight": random.matrix(WIDTH, num_taps * WIDTH),
        "midlayer.input_layernorm.weight": random.norm(WIDTH),
        "midlayer.hidden_norm.weight": random.norm(WIDTH),
        **random.layer("midlayer.", input_size=2 * WIDTH),
        "norm.weight": random.norm(WIDTH),
        "lm_head.weight": random.matrix(vocab, WIDTH),
    }
    if vocab < VOCAB_SIZE:
        ids = draft_ids(vocab)
        tensors["d2t"] = ids - torch.arange(vocab)
        tensors["t2d"] = torch.zeros(VOCAB_SIZE, dtype=torch.bool).index_fill(0, ids, True)
    return tensors


def draft_ids(vocab: int = DRAFT_VOCAB) -> torch.Tensor:
    """The target ids a reduced vocabulary holds, in no particular order."""
    return torch.randperm(VOCAB_SIZE, generator=torch.Generator().manual_seed(5))[:vocab]


def eagle3_config(**fields: Any) -> dict[str, Any]:
    ids = [tap - 1 for tap in TAPS]
    specforge = {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": ids}
    base = {**CONFIG, "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": DRAFT_VOCAB}
    return {**base, "eagle_config": specforge, **fields}


def speculators_config(**fields: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": "eagle3",
        "architectures": ["Eagle3Speculator"],
        "transformer_layer_config": dict(CONFIG),
        "draft_vocab_size": DRAFT_VOCAB,
        "eagle_aux_hidden_state_layer_ids": list(TAPS),
        **fields,
    }


def as_speculators(tensors: Tensors) -> Tensors:
    return {name.replace("midlayer.", "layers.0."): tensor for name, tensor in tensors.items()}


def eagle_tensors(seed: int = 0) -> Tensors:
    random = Random(seed)
    return {"fc.weight": random.matrix(WIDTH, 2 * WIDTH), **random.layer("layers.0.")}


def deepseek_tensors(seed: int = 0, *, num_modules: int = 1) -> Tensors:
    """Modules numbered on after the target's three layers."""
    random = Random(seed)
    tensors: Tensors = {}
    for index in range(num_modules):
        prefix = f"model.layers.{3 + index}."
        tensors |= {
            f"{prefix}enorm.weight": random.norm(WIDTH),
            f"{prefix}hnorm.weight": random.norm(WIDTH),
            f"{prefix}eh_proj.weight": random.matrix(WIDTH, 2 * WIDTH),
            f"{prefix}input_layernorm.weight": random.norm(WIDTH),
            **random.layer(prefix),
            f"{prefix}shared_head.norm.weight": target().weights.final_norm_E.clone(),
        }
    return tensors


def as_qwen_next(tensors: Tensors) -> Tensors:
    """One module under Qwen3-Next's names, whose stored norms lack the 1 that is added to them."""
    renames = {
        "enorm.weight": "mtp.pre_fc_norm_embedding.weight",
        "hnorm.weight": "mtp.pre_fc_norm_hidden.weight",
        "eh_proj.weight": "mtp.fc.weight",
        "shared_head.norm.weight": "mtp.norm.weight",
    }
    renamed: Tensors = {}
    for name, tensor in tensors.items():
        rest = name.removeprefix("model.layers.3.")
        renamed[renames.get(rest, f"mtp.layers.0.{rest}")] = tensor - 1.0 if "norm" in rest else tensor
    return renamed


# ---- fitted heads


def target() -> LlamaModel:
    return tiny_model().model


@cache
def greedy_texts() -> tuple[tuple[tuple[int, ...], int], ...]:
    """(tokens, length of the prompt) of what the target goes on with by itself."""
    requests = [make_request(f"t{n}", prompt_of(n), max_tokens=16) for n in LENGTHS]
    run(make_engine(num_pages=1000), requests)
    return tuple((tuple(request.tokens), len(request.prompt_ids)) for request in requests)


@cache
def target_rows() -> tuple[tuple[Mapping[int, torch.Tensor], tuple[int, ...], int], ...]:
    """Hidden states of every text."""
    found = []
    for tokens, num_prompt in greedy_texts():
        output = target().forward(
            ForwardBatch(spans=[text_span(tokens)], hidden_layers=(0, 1, 2, 3)), pool_with([])
        )
        found.append((output.hidden, tokens, num_prompt))
    return tuple(found)


def text_span(tokens: Sequence[int], logit_rows: Sequence[int] = ()) -> Span:
    return Span(
        token_ids=tokens,
        num_committed=0,
        pages=range(80),
        positions=range(len(tokens)),
        logit_rows=logit_rows,
    )


def pool_with(drafts: Sequence[PoolSpec]) -> PagePool:
    spec = PoolSpec(pool="target", num_layers=3, num_kv_heads=KV_HEADS, head_dim=HEAD_DIM)
    layout = build_layout(page_size=4, dtype="float32", pools=[spec, *drafts])
    return PagePool(layout, 80, torch.device("cpu"))


def _pairs(hidden: str) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Per text: (embedding of token p + 1, hidden at p, last hidden at p + 1), past the prompt."""
    for captured, tokens, num_prompt in target_rows():
        last = captured[3]
        read = target().final_norm(last) if hidden == "normed" else last
        embedded = F.embedding(torch.tensor(tokens), target().embedding_VE)
        first = num_prompt - 1
        yield embedded[first + 1 :], read[first:-1], last[first + 1 :]


def _solve(
    inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor], ridge: float = 1e-5
) -> torch.Tensor:
    """The matrix that takes inputs to outputs, by least squares."""
    x, y = torch.cat(list(inputs)).double(), torch.cat(list(outputs)).double()
    gram = x.T @ x + ridge * len(x) * torch.eye(x.shape[1], dtype=torch.float64)
    solved: torch.Tensor = torch.linalg.solve(gram, x.T @ y)
    return solved.T.float()


def _fit_eagle(tensors: Tensors) -> None:
    pairs = list(_pairs("normed"))
    tensors["fc.weight"] = _solve(
        [torch.cat((embedded, hidden), dim=1) for embedded, hidden, _ in pairs],
        [target().final_norm(after) for _, _, after in pairs],
    )


def _fit_module(tensors: Tensors, prefix: str, hidden: str) -> None:
    pairs = list(_pairs(hidden))
    norms = [tensors[f"{prefix}{name}.weight"] for name in ("enorm", "hnorm")]
    tensors[f"{prefix}eh_proj.weight"] = _solve(
        [
            torch.cat(
                [F.rms_norm(x, (WIDTH,), norm, 1e-6) for x, norm in zip(pair[:2], norms, strict=True)], dim=1
            )
            for pair in pairs
        ],
        [after for _, _, after in pairs],
    )


def _fit_eagle3(config: Mapping[str, Any], tensors: Tensors, name: str) -> None:
    """Solve for the head, over what the rest of the network makes of the texts."""
    draft = Eagle3Draft(Eagle3Config(draft=str(save_draft(new_folder("unfitted"), config, tensors))))
    pool = pool_with(draft.needs.draft_kv)
    network = draft.build(target(), pool)
    inputs, outputs = [], []
    ids = draft_ids()
    for captured, tokens, num_prompt in target_rows():
        rows = range(num_prompt - 1, len(tokens) - 2)
        recurrent, _ = network.forward(
            [text_span(tokens[1:], logit_rows=rows)],
            network.fuse({layer: hidden[:-1] for layer, hidden in captured.items()}),
        )
        is_normed = config.get("norm_output", False)
        inputs.append(
            recurrent if is_normed else F.rms_norm(recurrent, (WIDTH,), tensors["norm.weight"], 1e-6)
        )
        following = torch.tensor(tokens)[torch.tensor(rows) + 2]
        outputs.append((following[:, None] == ids[None]).float())
    tensors[name] = 20 * _solve(inputs, outputs)


@cache
def tiny_draft(kind: str) -> Path:
    """A fitted head for the tiny target."""
    folder = new_folder(kind)
    if kind == "eagle":
        tensors = eagle_tensors()
        _fit_eagle(tensors)
        return save_draft(folder, CONFIG, tensors)
    if kind == "eagle3":
        config, tensors = eagle3_config(), eagle3_tensors()
        _fit_eagle3(config, tensors, "lm_head.weight")
        return save_draft(folder, config, tensors)
    if kind == "eagle3_variants":
        return _variants(folder)
    num_modules = 3 if kind == "mtp_chain" else 1
    tensors = deepseek_tensors(num_modules=num_modules)
    for index in range(num_modules):
        _fit_module(tensors, f"model.layers.{3 + index}.", "plain" if index else "normed")
    config = {**CONFIG, "num_nextn_predict_layers": num_modules}
    return save_draft(folder, config, as_qwen_next(tensors) if kind == "mtp_qwen" else tensors)


def _variants(folder: Path) -> Path:
    """Two layers, speculators names, own embedding, every bias and norm that the layout knows."""
    random = Random(3)
    layer_config = {**CONFIG, "num_hidden_layers": 2, "attention_bias": True}
    config = speculators_config(
        transformer_layer_config=layer_config, norm_before_residual=True, norm_output=True, fc_norm=True
    )
    tensors = as_speculators(eagle3_tensors(seed=3))
    tensors |= random.layer("layers.1.")
    tensors["layers.1.input_layernorm.weight"] = random.norm(WIDTH)
    tensors["fc.bias"] = random.norm(WIDTH, base=0.0)
    tensors["embed_tokens.weight"] = random.matrix(VOCAB_SIZE, WIDTH)
    tensors |= {f"fc_norm.{index}.weight": random.norm(WIDTH) for index in range(3)}
    rows = {"q_proj": HEADS * HEAD_DIM, "k_proj": 32, "v_proj": 32, "o_proj": WIDTH}
    for layer in (0, 1):
        for name, count in rows.items():
            tensors[f"layers.{layer}.self_attn.{name}.bias"] = random.norm(count, base=0.0)
    _fit_eagle3(config, tensors, "lm_head.weight")
    return save_draft(folder, config, tensors)
