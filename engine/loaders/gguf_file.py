"""A GGUF file seen as a Hugging Face checkpoint: config in `config.json` words, tensors by HF names.

Owns dequantisation and llama.cpp's permuted q and k rows. Must never know what runs the model.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize

from engine.loaders.names import from_gguf
from engine.models.config import ModelConfig, RopeConfig, UnsupportedModel, model_config
from engine.models.rope import inverse_frequencies

_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
# llama.cpp stores q and k of these with rotary pairs adjacent; Hugging Face keeps halves.
_PERMUTED = ("llama", "mistral")
_ROPE_FREQUENCIES = "rope_freqs.weight"
# Llama 3.1 and 3.2 checkpoints; GGUF keeps only the resulting divisors, which must match.
_LLAMA3_ROPE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


class GgufFile:
    """One memory-mapped file; a tensor is dequantised to float32 when it is asked for."""

    def __init__(self, path: Path) -> None:
        try:
            self._reader = GGUFReader(str(path))
        except (ValueError, LookupError) as error:
            raise UnsupportedModel(f"{path} must be a whole GGUF file: {error}") from error
        self._tensors = {tensor.name: tensor for tensor in self._reader.tensors}
        self._architecture = str(self.field("general.architecture"))
        if self._architecture not in _ARCHITECTURES:
            raise UnsupportedModel(
                f"general.architecture must be one of {sorted(_ARCHITECTURES)}, got {self._architecture!r}"
            )
        self._by_hf_name = {from_gguf(name) or name: tensor for name, tensor in self._tensors.items()}
        self._by_hf_name.pop(_ROPE_FREQUENCIES, None)

    def field(self, key: str, default: Any = None) -> Any:
        """A metadata value as plain Python, or `default`."""
        field = self._reader.get_field(key)
        return default if field is None else field.contents()

    def config(self) -> ModelConfig:
        return model_config(self.hf_config())

    def hf_config(self) -> dict[str, Any]:
        """The metadata as the `config.json` a Hugging Face checkpoint would have."""
        num_heads = self._own("attention.head_count")
        config = {
            "architectures": [_ARCHITECTURES[self._architecture]],
            "model_type": self._architecture,
            "hidden_act": "silu",
            "hidden_size": self._own("embedding_length"),
            "num_hidden_layers": self._own("block_count"),
            "num_attention_heads": num_heads,
            "num_key_value_heads": self._own("attention.head_count_kv", num_heads),
            "head_dim": self._own("attention.key_length", self._own("embedding_length") // num_heads),
            "intermediate_size": self._own("feed_forward_length"),
            "vocab_size": int(self._tensors["token_embd.weight"].shape[1]),
            "rms_norm_eps": self._own("attention.layer_norm_rms_epsilon"),
            "rope_theta": self._own("rope.freq_base", 10000.0),
            "max_position_embeddings": self._own("context_length"),
            "sliding_window": self._own("attention.sliding_window"),
            "attention_bias": "blk.0.attn_output.bias" in self._tensors,
            "tie_word_embeddings": "output.weight" not in self._tensors,
            "bos_token_id": self.field("tokenizer.ggml.bos_token_id"),
            "eos_token_id": self._eos_token_ids(),
            "pad_token_id": self.field("tokenizer.ggml.padding_token_id"),
        }
        scaling = self._rope_scaling(config)
        return config if scaling is None else config | {"rope_scaling": scaling}

    def num_elements(self, name: str) -> int:
        return int(self._by_hf_name[name].n_elements)

    def names(self) -> frozenset[str]:
        return frozenset(self._by_hf_name)

    def load(self, name: str) -> torch.Tensor:
        tensor = self._by_hf_name[name]
        values = torch.from_numpy(_dequantized(tensor))
        heads_key = {"q_proj": "attention.head_count", "k_proj": "attention.head_count_kv"}
        kind = name.split(".")[-2]
        if self._architecture in _PERMUTED and kind in heads_key:
            return _halves(values, self._own(heads_key[kind], self._own("attention.head_count")))
        return values

    def _eos_token_ids(self) -> list[int]:
        """End of sequence, turn and message: any of them ends a generation."""
        ids = [self.field(f"tokenizer.ggml.{kind}_token_id") for kind in ("eos", "eot", "eom")]
        return sorted({int(token_id) for token_id in ids if token_id is not None})

    def _own(self, key: str, default: Any = None) -> Any:
        return self.field(f"{self._architecture}.{key}", default)

    def _rope_scaling(self, config: Mapping[str, Any]) -> dict[str, Any] | None:
        if _ROPE_FREQUENCIES in self._tensors:
            return self._llama3_scaling(config)
        kind = self._own("rope.scaling.type", "none")
        if kind == "none":
            return None
        return {"rope_type": kind, "factor": self._own("rope.scaling.factor", 1.0)}

    def _llama3_scaling(self, config: Mapping[str, Any]) -> dict[str, Any]:
        divisors = torch.from_numpy(_dequantized(self._tensors[_ROPE_FREQUENCIES])).flatten()
        theta = float(config["rope_theta"])
        factor = float(divisors.max())
        rope = RopeConfig(theta=theta, kind="llama3", factor=factor, original_max_len=8192)
        plain = inverse_frequencies(RopeConfig(theta=theta), config["head_dim"])
        expected = plain / inverse_frequencies(rope, config["head_dim"])
        if divisors.shape != expected.shape or not torch.allclose(divisors, expected, rtol=1e-3):
            raise UnsupportedModel(f"{_ROPE_FREQUENCIES} is not Llama 3's scaling, got {divisors.tolist()}")
        return {"rope_type": "llama3", "factor": factor, **_LLAMA3_ROPE}


def _dequantized(tensor: ReaderTensor) -> np.ndarray[Any, np.dtype[np.float32]]:
    """float32, rows first, writable and owned."""
    return np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def _halves(values: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Rows (head, pair, 2) -> rows (head, 2, pair), the inverse of llama.cpp's permute."""
    return values.view(num_heads, -1, 2, *values.shape[1:]).transpose(1, 2).reshape(values.shape)
