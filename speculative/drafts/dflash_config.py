"""What a block drafter's `config.json` says, in one set of words for the z-lab and speculators layouts.

Owns the reading of its fields and of its layer ids, which are normalised to indices of Hugging Face
`hidden_states`. Must never know tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from engine.models.config import ModelConfig, positive, section
from speculative.drafts.config import hidden_states, is_speculators, layer_config

_NESTED = "dflash_config"
# Parts of later block drafters that would be left out of the forward; a field may hold one of these only.
_PLAIN: Mapping[str, tuple[object, ...]] = {
    "projector_type": (None, "dflash"),
    "conv_kernel_size": (None, 0),
    "conv_group_size": (None, 0),
    "selector_rank": (None, 0),
    "selector_top_k": (None, 0),
    "attention_sink_bias": (None, False),
    "attention_value_scale": (None, 1.0),
    "markov_rank": (None, 0),
    "enable_confidence_head": (None, False),
    "sample_from_anchor": (None, False),
    "shift_label": (None, False),
}
_LAYER_KINDS = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerView:
    """What a row of the block sees in one layer: itself and its context, `window` places at most, and of
    the block all rows or only those before it."""

    window: int | None = None
    is_bidirectional: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class DflashFacts:
    """block_size: rows of the block, the anchor included; the width the draft was trained at.

    layer_ids: `hidden_states` indices of the target that make a feature, in the order they are joined.
    num_target_layers: of the target the draft was made for, where the config says. vocab_size: the
    draft's own, None for the target's. views: one per layer.
    """

    layers: ModelConfig
    views: tuple[LayerView, ...]
    block_size: int
    mask_token_id: int
    layer_ids: tuple[int, ...]
    num_target_layers: int | None
    target_hidden_size: int
    vocab_size: int | None


def dflash_facts(config: Mapping[str, Any]) -> DflashFacts:
    """Read `config.json`. Raises ValueError naming the field that cannot be honoured."""
    _refuse_what_is_not_implemented(config)
    layers = layer_config(config)
    return DflashFacts(
        layers=layers,
        views=_views(config, layers.num_layers),
        block_size=_whole(config, "block_size", least=2, default=8 if is_speculators(config) else None),
        mask_token_id=_whole(config, "mask_token_id", least=0),
        layer_ids=_layer_ids(config, layers.num_layers),
        num_target_layers=_field(config, "num_target_layers"),
        target_hidden_size=positive(config, "target_hidden_size", layers.hidden_size),
        vocab_size=config.get("draft_vocab_size"),
    )


def default_target_layers(num_target_layers: int, count: int) -> tuple[int, ...]:
    """The layers tapped unless a z-lab config lists them: evenly from the second to the third last.

    Halves go to the even neighbour, as in training.
    """
    if count == 1:
        return (num_target_layers // 2,)
    return tuple(round(1 + index * (num_target_layers - 4) / (count - 1)) for index in range(count))


def _refuse_what_is_not_implemented(config: Mapping[str, Any]) -> None:
    kind = config.get("speculators_model_type", "dflash")
    if kind != "dflash":
        raise ValueError(f"speculators_model_type must be 'dflash' for this algorithm, got {kind!r}")
    for name, allowed in _PLAIN.items():
        value = _field(config, name)
        if value not in allowed:
            raise ValueError(f"{name} of a dflash draft must be {allowed[-1]!r} or absent, got {value!r}")


def _field(config: Mapping[str, Any], name: str) -> Any:
    """A field of `dflash_config`, or at the top level."""
    nested = section(config, _NESTED)
    return nested[name] if name in nested else config.get(name)


def _whole(config: Mapping[str, Any], name: str, *, least: int, default: int | None = None) -> int:
    value = _field(config, name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ValueError(
            f"{name} of a dflash draft must be a whole number of at least {least}, got {value!r}"
        )
    return value


def _layer_ids(config: Mapping[str, Any], num_draft_layers: int) -> tuple[int, ...]:
    """A z-lab id v is the output of layer v, `hidden_states[v + 1]`; a speculators id is the index itself."""
    if is_speculators(config):
        name = "aux_hidden_state_layer_ids"
        return hidden_states(name, config.get(name))
    ids = _field(config, "target_layer_ids")
    if ids is None:
        num_target_layers = _whole(config, "num_target_layers", least=5)
        ids = list(default_target_layers(num_target_layers, num_draft_layers))
    return hidden_states("target_layer_ids", ids, offset=1)


def _views(config: Mapping[str, Any], num_layers: int) -> tuple[LayerView, ...]:
    """Sliding layers are causal inside the block unless `is_causal` says otherwise, full ones never."""
    fields = config["transformer_layer_config"] if is_speculators(config) else config
    kinds = fields.get("layer_types") or ["full_attention"] * num_layers
    if not isinstance(kinds, list) or len(kinds) != num_layers or not set(kinds) <= set(_LAYER_KINDS):
        raise ValueError(f"layer_types must be {num_layers} of {_LAYER_KINDS}, got {kinds!r}")
    is_causal = _field(config, "is_causal")
    if "sliding_attention" not in kinds:
        if is_causal:
            raise ValueError(
                f"is_causal must be false where every layer is full_attention, got {is_causal!r}"
            )
        return (LayerView(),) * num_layers
    if is_speculators(config):
        raise ValueError(f"layer_types of a speculators draft must all be 'full_attention', got {kinds!r}")
    sliding = LayerView(
        window=_whole(config, "sliding_window", least=1),
        is_bidirectional=is_causal is False,
    )
    return tuple(sliding if kind == "sliding_attention" else LayerView() for kind in kinds)
