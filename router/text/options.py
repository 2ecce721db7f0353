"""How a request wants its prompt made. Plain values; must never know which request."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptOptions:
    """`adds_special` None: as the endpoint has it, so a plain prompt gets the model's special tokens and a
    rendered conversation, which has its own, does not. `keeps_last`: only so many last tokens, -1 for as many
    as the model has room for, None for all."""

    adds_special: bool | None = None
    keeps_last: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateOptions:
    """`opens_answer`: the prompt ends where the assistant's answer begins. `continues_last`: it ends inside
    the last message, which the answer goes on with. `tools` and `variables` reach the template."""

    opens_answer: bool = True
    continues_last: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)


AS_USUAL = PromptOptions()
OPEN_ANSWER = TemplateOptions()
