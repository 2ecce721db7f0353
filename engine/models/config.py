"""What a checkpoint says about its model, checked: a `ModelConfig` can be run as it stands.

Owns the reading of Hugging Face `config.json` keys (GGUF metadata arrives in the same words). Must
never know where the file came from or how the model is computed.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

ARCHITECTURES: Mapping[str, str] = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
}


class UnsupportedModel(ValueError):
    """This model cannot be run as asked; the message names the architecture or the field."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RopeConfig:
    """Rotary embedding: `kind` is "default", "linear" or "llama3"; the rest is read by kind."""

    theta: float
    kind: str = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_len: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry and constants of one decoder-only model of the Llama family.

    windows: per layer, how many last positions a row sees (itself included), or None for all.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope: RopeConfig
    windows: tuple[int | None, ...]
    has_qkv_bias: bool
    has_output_bias: bool
    has_qk_norm: bool
    tie_embeddings: bool
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None


def model_config(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read `config.json`, and `generation_config.json` where there is one (its eos ids win)."""
    family = _family(config)
    _refuse_what_is_not_implemented(config)
    num_heads = positive(config, "num_attention_heads")
    hidden_size = positive(config, "hidden_size")
    num_kv_heads = positive(config, "num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise UnsupportedModel(f"num_key_value_heads must divide {num_heads}, got {num_kv_heads}")
    rope = _rope(config)
    has_attention_bias = bool(config.get("attention_bias", False))
    return ModelConfig(
        architecture=family,
        hidden_size=hidden_size,
        num_layers=positive(config, "num_hidden_layers"),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=positive(config, "head_dim", 128 if family == "qwen3" else hidden_size // num_heads),
        intermediate_size=positive(config, "intermediate_size"),
        vocab_size=positive(config, "vocab_size"),
        rms_norm_eps=_number(config, "rms_norm_eps", 1e-6),
        rope=rope,
        windows=_windows(config, family),
        has_qkv_bias=has_attention_bias or family == "qwen2",
        has_output_bias=has_attention_bias,
        has_qk_norm=family == "qwen3",
        tie_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_model_len=_max_model_len(config, rope),
        eos_token_ids=_eos_token_ids(config, generation or {}),
        bos_token_id=config.get("bos_token_id"),
    )


def _family(config: Mapping[str, Any]) -> str:
    names = config.get("architectures") or []
    if not isinstance(names, list) or len(names) != 1 or names[0] not in ARCHITECTURES:
        raise UnsupportedModel(f"architectures must name one of {sorted(ARCHITECTURES)}, got {names!r}")
    return ARCHITECTURES[names[0]]


def _refuse_what_is_not_implemented(config: Mapping[str, Any]) -> None:
    required = {"hidden_act": ("silu", None), "mlp_bias": (False, None), "quantization_config": (None,)}
    for field, allowed in required.items():
        if config.get(field) not in allowed:
            raise UnsupportedModel(f"{field} must be {allowed[0]!r}, got {config[field]!r}")


def positive(config: Mapping[str, Any], field: str, default: int | None = None) -> int:
    """A width or count, which may be left out where there is a default. Raises UnsupportedModel."""
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnsupportedModel(f"{field} must be a positive integer, got {value!r}")
    return value


def _number(config: Mapping[str, Any], field: str, default: float) -> float:
    value = config.get(field)
    value = default if value is None else value
    if not isinstance(value, int | float):
        raise UnsupportedModel(f"{field} must be a number, got {value!r}")
    return float(value)


def section(config: Mapping[str, Any], field: str) -> Mapping[str, Any]:
    """A part of a config that has fields of its own; empty where there is none. Raises UnsupportedModel."""
    value = config.get(field)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UnsupportedModel(f"{field} must be an object, got {value!r}")
    return value


def _rope(config: Mapping[str, Any]) -> RopeConfig:
    """Both spellings: `rope_parameters` (transformers 5), and `rope_theta` with `rope_scaling`."""
    fields = section(config, "rope_parameters") or section(config, "rope_scaling")
    kind = fields.get("rope_type", fields.get("type", "default"))
    partial = fields.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0))
    if kind not in ("default", "linear", "llama3"):
        raise UnsupportedModel(f"rope type must be default, linear or llama3, got {kind!r}")
    if partial not in (None, 1.0):
        raise UnsupportedModel(f"partial_rotary_factor must be 1.0, got {partial!r}")
    max_len = positive(config, "max_position_embeddings")
    return RopeConfig(
        theta=_number(fields, "rope_theta", _number(config, "rope_theta", 10000.0)),
        kind=kind,
        factor=_number(fields, "factor", 1.0),
        low_freq_factor=_number(fields, "low_freq_factor", 1.0),
        high_freq_factor=_number(fields, "high_freq_factor", 4.0),
        original_max_len=positive(fields, "original_max_position_embeddings", max_len),
    )


def _max_model_len(config: Mapping[str, Any], rope: RopeConfig) -> int:
    """Linear scaling stretches the trained length; llama3 checkpoints state the stretched one."""
    trained = positive(config, "max_position_embeddings")
    return int(trained * rope.factor) if rope.kind == "linear" else trained


def _windows(config: Mapping[str, Any], family: str) -> tuple[int | None, ...]:
    num_layers = positive(config, "num_hidden_layers")
    window = config.get("sliding_window")
    if family == "llama" or window is None:
        return (None,) * num_layers
    if family == "mistral":
        return (int(window),) * num_layers
    if not config.get("use_sliding_window", False):
        return (None,) * num_layers
    layer_types = config.get("layer_types")
    if layer_types is None:
        first = int(config.get("max_window_layers", 28))
        layer_types = ["sliding_attention" if i >= first else "full_attention" for i in range(num_layers)]
    if len(layer_types) != num_layers or not set(layer_types) <= {"sliding_attention", "full_attention"}:
        raise UnsupportedModel(
            f"layer_types must be full_attention or sliding_attention, got {layer_types!r}"
        )
    return tuple(int(window) if kind == "sliding_attention" else None for kind in layer_types)


def _eos_token_ids(config: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    value = generation.get("eos_token_id")
    if value is None:
        value = config.get("eos_token_id")
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)
