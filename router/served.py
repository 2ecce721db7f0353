"""The model this router serves: its name, and its limits as the nodes report them.

Owns the joining of what the model folder says with what the registry says. Must never know requests.
"""

from collections.abc import Iterable
from typing import Protocol

from router.errors import ModelNotFound
from router.planning import ModelFacts
from router.text.model_text import ModelText
from wire.records import NodeRecord


class Records(Protocol):
    """Where the nodes are known from (wire.registry_view in production)."""

    @property
    def records(self) -> tuple[NodeRecord, ...]: ...


class ServedModel:
    """One router serves one model: the one whose tokenizer it holds."""

    def __init__(self, *, alias: str, default: str, text: ModelText, nodes: Records) -> None:
        self._alias = alias
        self._default = default
        self._text = text
        self._nodes = nodes

    @property
    def name(self) -> str:
        """The configured name, else the one all nodes agree on, else that of the router's own model."""
        if self._alias:
            return self._alias
        models = {record.model for record in self._nodes.records}
        return models.pop() if len(models) == 1 else self._default

    def facts(self, model: str | None) -> ModelFacts:
        """Facts of the model a request asks for; None asks for whatever is served. Raises ModelNotFound."""
        name = self.name
        if model is not None and model != name:
            raise ModelNotFound(f"model must be {name!r}, got {model!r}", param="model")
        records = self._nodes.records
        same = [record for record in records if record.model == name]
        tokenizer = self._text.tokenizer
        max_model_len = _least((record.max_model_len for record in same or records), self._text.max_model_len)
        vocab_size = _least((record.vocab_size for record in same or records), tokenizer.vocab_size)
        eos = [*tokenizer.eos_token_ids]
        for record in same or records:
            eos += record.eos_token_ids
        return ModelFacts(
            name=name,
            node_model=name if same else "",
            max_model_len=max_model_len or 0,
            vocab_size=vocab_size or 0,
            eos_token_ids=tuple(dict.fromkeys(eos)),
        )


def _least(told: Iterable[int], otherwise: int | None) -> int | None:
    """The smallest number any node told (0: not told)."""
    return min((number for number in told if number > 0), default=otherwise)
