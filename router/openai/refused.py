"""Fields that would change the answer and that Paceline does not serve: refused by name, never ignored.

`tables` joins them with the fields that are read and those that only label a request.
"""

from collections.abc import Mapping
from typing import Any

from router.errors import BadRequest

_ANY_ENDPOINT: Mapping[str, tuple[Any, ...]] = {
    "guided_whitespace_pattern": (),
    "kv_transfer_params": (),
    "length_penalty": (1, 1.0),
    "logits_processors": ([],),
    "lora_request": (),
    "mm_processor_kwargs": ({},),
    "prompt_embeds": (),
    "regex": (),
    "repetition_detection": (),
    "return_tokens_as_token_ids": (False,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
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
    "include_reasoning": (True,),
    "modalities": (["text"],),
    "moderation": (),
    "prediction": (),
    "prompt": (),
    "reasoning_effort": ("none",),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field name to the values, besides null, that ask for nothing."""

_RESPONSES: Mapping[str, tuple[Any, ...]] = {
    "access_programs": (),
    "background": (False,),
    "background_options": (),
    "context_management": ([],),
    "conversation": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "image": (),
    "logprobs": (),
    "max_completion_tokens": (),
    "max_tokens": (),
    "messages": (),
    "moderation": (),
    "n": (1,),
    "previous_response_id": (),
    "prompt": (),
    "prompt_logprobs": (),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "reasoning": ({}, {"effort": "none"}),
    "store": (False,),
    "truncation": ("disabled",),
}

REFUSED_IN_COMPLETIONS: Mapping[str, tuple[Any, ...]] = {**_ANY_ENDPOINT, **_COMPLETIONS}
REFUSED_IN_CHAT: Mapping[str, tuple[Any, ...]] = {**_ANY_ENDPOINT, **_CHAT}
REFUSED_IN_RESPONSES: Mapping[str, tuple[Any, ...]] = {**_ANY_ENDPOINT, **_RESPONSES}

_WHY: Mapping[str, str] = {
    "previous_response_id": "this server keeps no responses, so send the conversation in input",
    "store": "this server keeps no responses, so leave it out or say false",
}


def check_refused(body: Mapping[str, Any], refused: Mapping[str, tuple[Any, ...]]) -> None:
    """Raises BadRequest naming the first field that asks for something not served."""
    for name, value in body.items():
        if value is not None and name in refused and not _is_harmless(value, refused[name]):
            why = f": {_WHY[name]}" if name in _WHY else ""
            raise BadRequest(f"{name} is not supported{why}", param=name, code="unsupported_parameter")


def _is_harmless(value: Any, harmless: tuple[Any, ...]) -> bool:
    return any(type(value) is type(other) and value == other for other in harmless)
