"""What a draft's `config.json` says, in one set of words for every layout it may be written in.

Owns the reading of the EAGLE official, SpecForge and speculators layouts, and of their layer ids, which are
normalised to indices of Hugging Face `hidden_states`. Must never know tensors.
"""

from collections.abc import Mapping
from typing import Any

from engine.models.config import ModelConfig, model_config, section

# The draft's layer by `model_type`; the architecture names of drafts say too little to go by.
_ARCHITECTURES: Mapping[str, str] = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
}
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def is_speculators(config: Mapping[str, Any]) -> bool:
    return "speculators_model_type" in config


def layer_config(config: Mapping[str, Any]) -> ModelConfig:
    """The draft's decoder layers, checked as a model's config is. Raises ValueError naming the field."""
    fields: dict[str, Any] = dict(config)
    if is_speculators(config):
        fields = dict(section(config, "transformer_layer_config"))
        if not fields:
            raise ValueError("transformer_layer_config must be given in a speculators config, got none")
    fields.setdefault("max_position_embeddings", 2048)
    family = _family(fields)
    return model_config({**fields, "architectures": [_ARCHITECTURES[family]]})


def _family(fields: Mapping[str, Any]) -> str:
    family = str(fields.get("model_type"))
    if family in _ARCHITECTURES:
        return family
    names = str(fields.get("architectures"))
    for known in ("qwen3", "qwen2", "mistral", "llama"):
        if known in names.lower():
            return known
    raise ValueError(
        f"model_type of a draft must be one of {sorted(_ARCHITECTURES)},"
        f" got {family!r} (architectures {names})"
    )


def eagle3_layer_ids(config: Mapping[str, Any]) -> tuple[int, ...] | None:
    """The target layers tapped, as `hidden_states` indices; None: the default for the target's depth.

    In an `eagle_config` (SpecForge, SGLang) id v means the output of layer v, which is
    `hidden_states[v + 1]`; at the top level (speculators, vLLM) it is the index itself.
    """
    nested = section(config, "eagle_config").get(_LAYER_IDS)
    top = config.get(_LAYER_IDS)
    if top is not None:
        return hidden_states(_LAYER_IDS, top)
    return None if nested is None else hidden_states(_LAYER_IDS, nested, offset=1)


def hidden_states(field: str, ids: object, *, offset: int = 0) -> tuple[int, ...]:
    """Listed layers as `hidden_states` indices. Raises ValueError unless distinct and ascending."""
    whole = [i + offset for i in ids if isinstance(i, int)] if isinstance(ids, list) else []
    if not isinstance(ids, list) or len(whole) != len(ids) or not whole:
        raise ValueError(f"{field} must be a list of layers, got {ids!r}")
    if whole != sorted(set(whole)) or whole[0] < 0:
        raise ValueError(f"{field} must be distinct and ascending, got {ids!r}")
    return tuple(whole)


def default_layer_ids(num_layers: int) -> tuple[int, ...]:
    """What EAGLE-3 heads tap unless they say otherwise."""
    return (2, num_layers // 2, num_layers - 3)


def flag(config: Mapping[str, Any], name: str, default: bool = False) -> bool:
    """A switch of the head, in `eagle_config` or at the top level."""
    nested = section(config, "eagle_config")
    value = nested.get(name, config.get(name, default))
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be true or false, got {value!r}")
    return value


def check_same(field: str, ours: int, target: int) -> None:
    """Raises ValueError naming the field in which a draft does not fit its target."""
    if ours != target:
        raise ValueError(f"{field} of the draft must be the target's {target}, got {ours}")
