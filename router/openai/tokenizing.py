"""The bodies of /tokenize and /detokenize, in the form of vLLM's. Must never know how text becomes ids."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import BadRequest
from router.openai.fields import refuse
from router.openai.messages import Message, read_messages
from router.openai.requests import read_template
from router.openai.tables import DETOKENIZE, TOKENIZE
from router.text.options import PromptOptions, TemplateOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizeRequest:
    """Of a plain prompt, or of a conversation when `prompt` is None."""

    model: str | None
    prompt: str | None
    messages: tuple[Message, ...]
    template: TemplateOptions
    options: PromptOptions
    wants_strings: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class DetokenizeRequest:
    model: str | None
    ids: tuple[int, ...]


def read_tokenize(body: Mapping[str, Any]) -> TokenizeRequest:
    """Raises BadRequest naming the field."""
    fields = TOKENIZE.fields(body)
    prompt, messages = fields.text("prompt"), fields.raw("messages")
    if prompt is not None and messages is not None:
        raise BadRequest("messages must be left out when prompt is given", param="messages")
    if prompt is None and messages is None:
        raise refuse("prompt", "a string, unless messages are given", None)
    return TokenizeRequest(
        model=fields.text("model"),
        prompt=prompt,
        messages=() if messages is None else read_messages(messages),
        template=read_template(fields),
        options=PromptOptions(adds_special=fields.boolean_or_none("add_special_tokens")),
        wants_strings=fields.boolean("return_token_strs"),
    )


def read_detokenize(body: Mapping[str, Any]) -> DetokenizeRequest:
    """Raises BadRequest naming the field."""
    fields = DETOKENIZE.fields(body)
    if fields.raw("tokens") is None:
        raise refuse("tokens", "a list of token ids", None)
    return DetokenizeRequest(model=fields.text("model"), ids=fields.integers("tokens"))
