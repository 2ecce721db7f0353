"""Whose request it is, for fairness where requests wait.

Must never decide who may come in: a tenant is a name for the books, nothing more.
"""

from collections.abc import Mapping
from types import MappingProxyType

_MAX_NAME_CHARS = 128


def tenant_of(headers: Mapping[str, str], *, tenant_header: str, user: str) -> str:
    """The value of a header that a trusted proxy sets, where one is configured, else the API key's name.

    `headers` must answer to lower-case names. "" for a request that has neither.
    """
    if tenant_header:
        return headers.get(tenant_header.lower(), "")[:_MAX_NAME_CHARS]
    return user


def weights_of(text: str) -> Mapping[str, float]:
    """ "name=weight,name=weight" by name. Raises ValueError for anything else."""
    weights: dict[str, float] = {}
    for part in filter(None, (part.strip() for part in text.split(","))):
        name, _, value = part.rpartition("=")
        if not name or not _is_positive(value):
            raise ValueError(f"tenant_weights must be name=weight,name=weight with weights > 0, got {text!r}")
        weights[name.strip()] = float(value)
    return MappingProxyType(weights)


def _is_positive(text: str) -> bool:
    try:
        return 0 < float(text) < float("inf")
    except ValueError:
        return False
