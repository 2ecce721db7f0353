"""The one table of checkpoint names: which tensors make a model, and what each format calls them.

Names are Hugging Face's throughout; the GGUF table translates. Must never know how files are read.
Shapes: `E` hidden width, `H` heads, `D` head dim, `F` rows of q, k and v, `A` of q alone, `M` intermediate
width, `G` of gate and up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from engine.models.config import ModelConfig

EMBEDDING = "model.embed_tokens.weight"
FINAL_NORM = "model.norm.weight"
HEAD = "lm_head.weight"

# Present in some checkpoints, computed here or never read.
IGNORED_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached", "attn.bias")

GGUF_NAMES: Mapping[str, str] = {
    "token_embd.weight": EMBEDDING,
    "output_norm.weight": FINAL_NORM,
    "output.weight": HEAD,
}
GGUF_LAYER_NAMES: Mapping[str, str] = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_q.bias": "self_attn.q_proj.bias",
    "attn_k.bias": "self_attn.k_proj.bias",
    "attn_v.bias": "self_attn.v_proj.bias",
    "attn_q_norm.weight": "self_attn.q_norm.weight",
    "attn_k_norm.weight": "self_attn.k_norm.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "attn_output.bias": "self_attn.o_proj.bias",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}


@dataclass(frozen=True, slots=True)
class Piece:
    """One checkpoint tensor: its name inside the layer, and the shape it must have."""

    name: str
    shape: tuple[int, ...]


def layer_pieces(config: ModelConfig) -> Mapping[str, tuple[Piece, ...]]:
    """Part of a layer -> the tensors stacked to make it, in order; empty: the model has no such part."""
    hidden, inner = config.hidden_size, config.intermediate_size
    q_rows, kv_rows = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    rows = {"q_proj": q_rows, "k_proj": kv_rows, "v_proj": kv_rows}
    qkv = tuple(Piece(f"self_attn.{name}.weight", (count, hidden)) for name, count in rows.items())
    qkv_bias = tuple(Piece(f"self_attn.{name}.bias", (count,)) for name, count in rows.items())
    qk_norm = tuple(Piece(f"self_attn.{name}.weight", (config.head_dim,)) for name in ("q_norm", "k_norm"))
    return {
        "input_norm_E": (Piece("input_layernorm.weight", (hidden,)),),
        "qkv_FE": qkv,
        "qkv_bias_F": qkv_bias if config.has_qkv_bias else (),
        "qk_norm_HD": qk_norm if config.has_qk_norm else (),
        "output_EA": (Piece("self_attn.o_proj.weight", (hidden, q_rows)),),
        "output_bias_E": (Piece("self_attn.o_proj.bias", (hidden,)),) if config.has_output_bias else (),
        "post_norm_E": (Piece("post_attention_layernorm.weight", (hidden,)),),
        "gate_up_GE": tuple(
            Piece(f"mlp.{name}.weight", (inner, hidden)) for name in ("gate_proj", "up_proj")
        ),
        "down_EM": (Piece("mlp.down_proj.weight", (hidden, inner)),),
    }


def outer_pieces(config: ModelConfig) -> tuple[Piece, ...]:
    """The tensors outside the layers. A tied head is the embedding and has no tensor of its own."""
    table = (config.vocab_size, config.hidden_size)
    pieces = (Piece(EMBEDDING, table), Piece(FINAL_NORM, (config.hidden_size,)))
    return pieces if config.tie_embeddings else (*pieces, Piece(HEAD, table))


def layer_name(index: int, name: str) -> str:
    return f"model.layers.{index}.{name}"


def all_pieces(config: ModelConfig) -> tuple[Piece, ...]:
    """Every tensor the model needs, by its full name."""
    inside = [piece for pieces in layer_pieces(config).values() for piece in pieces]
    layers = [
        Piece(layer_name(index, piece.name), piece.shape)
        for index in range(config.num_layers)
        for piece in inside
    ]
    return (*outer_pieces(config), *layers)


def from_gguf(name: str) -> str | None:
    """The Hugging Face name of a GGUF tensor, or None when there is none."""
    if name in GGUF_NAMES:
        return GGUF_NAMES[name]
    prefix, _, rest = name.partition(".")
    index, _, inside = rest.partition(".")
    if prefix != "blk" or not index.isdigit() or inside not in GGUF_LAYER_NAMES:
        return None
    return layer_name(int(index), GGUF_LAYER_NAMES[inside])
