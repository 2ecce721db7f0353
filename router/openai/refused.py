"""Fields that would change the answer and that Paceline does not serve: refused by name, never ignored.

Fields found neither here nor in `requests` are ignored, as the OpenAI API does: they label a request
(`user`, `metadata`, `store`) or ask for nothing that changes its tokens.
"""

from collections.abc import Mapping
from typing import Any

from router.errors import BadRequest

_ANY_ENDPOINT: Mapping[str, tuple[Any, ...]] = {
    "allowed_token_ids": (),
    "bad_words": ([],),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_request": (),
    "prompt_embeds": (),
    "regex": (),
    "repetition_detection": (),
    "response_format": ({"type": "text"},),
    "spaces_between_special_tokens": (True,),
    "structured_outputs": (),
    "use_beam_search": (False,),
}

_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {
    "messages": (),
    "suffix": ("",),
}

_CHAT: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "chat_template": (),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field name to the values, besides null, that ask for nothing."""

REFUSED_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {**_ANY_ENDPOINT, **_COMPLETIONS}
REFUSED_IN_CHAT: Mapping[str, tuple[Any, ...]] = {**_ANY_ENDPOINT, **_CHAT}


def check_refused(body: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises BadRequest naming the first field that asks for something not served."""
    for name, value in body.items():
        if value is not None and name in refused and not _is_harmless(value, refused[name]):
            raise BadRequest(f"{name} is not supported", param=name, code="unsupported_parameter")


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in harmless)
