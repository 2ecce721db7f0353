"""What the layouts call the tensors of a draft, brought to one set of names.

Canonical names are `layers.N.*` for layers, and those below. Must never know shapes.
"""

import re
from collections.abc import Mapping

EMBEDDING = "embed_tokens.weight"
HEAD = "lm_head.weight"
D2T = "d2t"
T2D = "t2d"

_AUX_NORMS: Mapping[str, str] = {"aux_norm_low": "0", "aux_norm_mid": "1", "aux_norm_high": "2"}
# Computed here, or copies of the target's tensors that training left behind.
_NEVER_NEEDED = re.compile(r"(^|\.)(rotary_emb\.(inv_freq|cos_cached|sin_cached)$|verifier_)")


def eagle(name: str) -> str | None:
    """EAGLE and EAGLE-3 heads: official, SpecForge and speculators names, with or without `model.`."""
    if _NEVER_NEEDED.search(name):
        return None
    name = name.removeprefix("model.")
    if name.startswith("midlayer."):
        return "layers.0." + name.removeprefix("midlayer.")
    stem, _, rest = name.partition(".")
    if stem in _AUX_NORMS:
        return f"fc_norm.{_AUX_NORMS[stem]}.{rest}"
    return name
