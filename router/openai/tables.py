"""Every field of every request body: what is read, what is refused by name, and what only labels a request.

Owns the tables that the readers ask and that `document` publishes, so that neither can say what the other
does not. Must never know what a field does. Fields in no table are ignored, as vLLM does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.openai.fields import Fields
from router.openai.refused import (
    REFUSED_IN_CHAT,
    REFUSED_IN_COMPLETIONS,
    REFUSED_IN_RESPONSES,
    check_refused,
)
from router.openai.tools import MAX_TOOLS

Json = Mapping[str, Any]

MAX_CHOICES = 128
MAX_TOP_LOGPROBS = 20
SEED_MIN, SEED_MAX = -(2**63), 2**64 - 1
_INT32 = 2**31


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """One body. `reads`: name to JSON schema, null left out. `refuses`: name to the values that are taken all
    the same, because they ask for nothing. `labels` change nothing. Exactly one of `either` must be given."""

    reads: Mapping[str, Json]
    refuses: Mapping[str, tuple[Any, ...]]
    labels: frozenset[str] = frozenset()
    required: tuple[str, ...] = ()
    either: tuple[str, ...] = ()

    def fields(self, body: Mapping[str, Any]) -> Fields:
        """A reader that knows only these fields. Raises BadRequest naming one that is refused."""
        check_refused(body, self.refuses)
        return Fields(body, known=self.reads.keys())


def _integer(minimum: int | None = None, maximum: int | None = None) -> Json:
    return {"type": "integer", **_bounds(minimum, maximum)}


def _number(minimum: float | None = None, maximum: float | None = None) -> Json:
    return {"type": "number", **_bounds(minimum, maximum)}


def _bounds(minimum: float | None, maximum: float | None) -> Json:
    bounds = {"minimum": minimum, "maximum": maximum}
    return {name: value for name, value in bounds.items() if value is not None}


_BOOLEAN: Json = {"type": "boolean"}
_STRING: Json = {"type": "string"}
_OBJECT: Json = {"type": "object"}
_STOP: Json = {"type": "string", "minLength": 1, "maxLength": 1024}
_TOKEN_ID: Json = _integer(0)
_TEXT_PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["text"]}, "text": _STRING},
}
_CONTENT: Json = {"anyOf": [_STRING, {"type": "array", "minItems": 1, "items": _TEXT_PART}]}
_SAID: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {
        "role": {"enum": ["system", "developer", "user", "assistant"]},
        "content": _CONTENT,
        "name": {"type": ["string", "null"]},
    },
}
_CALL: Json = {
    "type": "object",
    "required": ["id", "function"],
    "properties": {
        "id": _STRING,
        "type": {"enum": ["function"]},
        "function": {
            "type": "object",
            "required": ["name", "arguments"],
            "properties": {"name": _STRING, "arguments": _STRING},
        },
    },
}
_CALLED: Json = {
    "type": "object",
    "required": ["role", "tool_calls"],
    "properties": {
        "role": {"enum": ["assistant"]},
        "content": {"anyOf": [*_CONTENT["anyOf"], {"type": "null"}]},
        "tool_calls": {"type": "array", "minItems": 1, "items": _CALL},
    },
}
_RESULT: Json = {
    "type": "object",
    "required": ["role", "tool_call_id", "content"],
    "properties": {"role": {"enum": ["tool"]}, "tool_call_id": _STRING, "content": _CONTENT},
}
_REFUSAL_PART: Json = {
    "type": "object",
    "required": ["type", "refusal"],
    "properties": {"type": {"enum": ["refusal"]}, "refusal": _STRING},
}
_ANSWER_PARTS: Json = {"type": "array", "minItems": 1, "items": {"anyOf": [_TEXT_PART, _REFUSAL_PART]}}
_ANSWERED: Json = {
    "type": "object",
    "required": ["role", "content"],
    "properties": {"role": {"enum": ["assistant"]}, "content": _ANSWER_PARTS},
}
_REFUSED: Json = {
    "type": "object",
    "required": ["role", "refusal"],
    "properties": {"role": {"enum": ["assistant"]}, "content": {"type": "null"}, "refusal": _STRING},
}
_MESSAGE: Json = {"anyOf": [_SAID, _CALLED, _RESULT, _ANSWERED, _REFUSED]}
_FUNCTION: Mapping[str, Json] = {
    "name": {"type": "string", "pattern": "^[A-Za-z0-9_.-]{1,64}$"},
    "description": {"type": ["string", "null"]},
    "parameters": {"type": ["object", "null"]},
}
_TOOL: Json = {
    "type": "object",
    "required": ["type", "function"],
    "properties": {
        "type": {"enum": ["function"]},
        "function": {"type": "object", "required": ["name"], "properties": _FUNCTION},
    },
}
_TOOL_CHOICE: Mapping[str, Json] = {
    "tool_choice": {"anyOf": [{"enum": ["none", "auto", "required"]}, _OBJECT]},
    "parallel_tool_calls": _BOOLEAN,
}
_MESSAGES: Json = {"type": "array", "minItems": 1, "items": _MESSAGE}
_STREAM_OPTIONS: Json = {
    "type": "object",
    "properties": {
        "include_usage": {"type": ["boolean", "null"]},
        "include_obfuscation": {"enum": [False, None]},
    },
}

_SAMPLING: Mapping[str, Json] = {
    "temperature": _number(0, 2),
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
    "top_k": _integer(-1, 2**32 - 1),
    "min_p": _number(0, 1),
    "presence_penalty": _number(-2, 2),
    "frequency_penalty": _number(-2, 2),
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "maximum": 2},
    "seed": _integer(SEED_MIN, SEED_MAX),
    "min_tokens": _integer(0),
    "stop": {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": 16}]},
    "stop_token_ids": {"type": "array", "items": _TOKEN_ID, "maxItems": 256},
    "ignore_eos": _BOOLEAN,
    "bad_words": {"type": "array", "items": _STOP, "maxItems": 256},
    "allowed_token_ids": {"type": "array", "minItems": 1, "items": _TOKEN_ID},
    "logit_bias": {
        "type": "object",
        "propertyNames": {"pattern": "^[0-9]{1,18}$"},
        "additionalProperties": _number(-100, 100),
    },
    "include_stop_str_in_output": _BOOLEAN,
    "skip_special_tokens": _BOOLEAN,
}
_PROMPT: Mapping[str, Json] = {
    "add_special_tokens": _BOOLEAN,
    "truncate_prompt_tokens": {"anyOf": [_integer(1), {"enum": [-1]}]},
}
_TEMPLATE: Mapping[str, Json] = {
    "add_generation_prompt": _BOOLEAN,
    "continue_final_message": _BOOLEAN,
    "chat_template_kwargs": _OBJECT,
}
_SERVING: Mapping[str, Json] = {
    "model": _STRING,
    "stream": _BOOLEAN,
    "priority": _integer(-_INT32, _INT32 - 1),
    "cache_salt": _STRING,
}
_SCHEMA: Json = {
    "type": "object",
    "required": ["schema"],
    "properties": {"schema": _OBJECT, "strict": {"type": ["boolean", "null"]}, "name": _STRING},
}
_FORMAT: Json = {
    "anyOf": [
        {
            "type": "object",
            "required": ["type"],
            "properties": {"type": {"enum": ["text", "json_object"]}},
        },
        {
            "type": "object",
            "required": ["type", "json_schema"],
            "properties": {"type": {"enum": ["json_schema"]}, "json_schema": _SCHEMA},
        },
    ]
}
_NON_EMPTY: Json = {"type": "string", "minLength": 1}
_JSON: Json = {"anyOf": [_OBJECT, _NON_EMPTY]}
_CHOICE: Json = {"type": "array", "minItems": 1, "items": _NON_EMPTY}
_GRAMMAR: Mapping[str, Json] = {
    "response_format": _FORMAT,
    "structured_outputs": {
        "anyOf": [
            {"type": "object", "required": [name], "properties": {name: value}}
            for name, value in (
                ("json", _JSON),
                ("regex", _NON_EMPTY),
                ("choice", _CHOICE),
                ("grammar", _NON_EMPTY),
                ("json_object", {"enum": [True]}),
            )
        ]
    },
    "guided_json": _JSON,
    "guided_regex": _NON_EMPTY,
    "guided_choice": _CHOICE,
    "guided_grammar": _NON_EMPTY,
}
_GENERATION: Mapping[str, Json] = {
    **_SAMPLING,
    **_PROMPT,
    **_SERVING,
    **_GRAMMAR,
    "n": _integer(1, MAX_CHOICES),
    "stream_options": _STREAM_OPTIONS,
    "return_token_ids": _BOOLEAN,
    "prompt_logprobs": _integer(0, MAX_TOP_LOGPROBS),
}

COMPLETIONS = Table(
    reads={
        **_GENERATION,
        "prompt": {
            "anyOf": [
                _STRING,
                {"type": "array", "minItems": 1, "items": _STRING},
                {"type": "array", "minItems": 1, "items": _TOKEN_ID},
                {"type": "array", "minItems": 1, "items": {"type": "array", "items": _TOKEN_ID}},
            ]
        },
        "max_tokens": _integer(0),
        "max_completion_tokens": _integer(0),
        "logprobs": _integer(0, MAX_TOP_LOGPROBS),
        "echo": _BOOLEAN,
        "best_of": _integer(1, MAX_CHOICES),
    },
    refuses=REFUSED_IN_COMPLETIONS,
    labels=frozenset({"user", "request_id"}),
    required=("prompt",),
)

CHAT = Table(
    reads={
        **_GENERATION,
        **_TEMPLATE,
        "messages": _MESSAGES,
        "max_tokens": _integer(0),
        "max_completion_tokens": _integer(0),
        "logprobs": _BOOLEAN,
        "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
        "tools": {"type": "array", "items": _TOOL, "maxItems": MAX_TOOLS},
        **_TOOL_CHOICE,
    },
    refuses=REFUSED_IN_CHAT,
    labels=frozenset(
        {
            "metadata",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "request_id",
            "safety_identifier",
            "service_tier",
            "store",
            "user",
        }
    ),
    required=("messages",),
)

_INPUT_PART: Json = {
    "type": "object",
    "required": ["type", "text"],
    "properties": {"type": {"enum": ["input_text", "output_text", "text"]}, "text": _STRING},
}
_INPUT_TEXT: Json = {"anyOf": [_STRING, {"type": "array", "minItems": 1, "items": _INPUT_PART}]}
_THOUGHT: Json = {
    "type": "array",
    "items": {
        "type": "object",
        "required": ["type", "text"],
        "properties": {"type": {"enum": ["reasoning_text", "summary_text"]}, "text": _STRING},
    },
}
_INPUT_ITEM: Json = {
    "anyOf": [
        {
            "type": "object",
            "required": ["role", "content"],
            "properties": {
                "type": {"enum": ["message", None]},
                "role": _SAID["properties"]["role"],
                "content": _INPUT_TEXT,
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "name", "arguments"],
            "properties": {
                "type": {"enum": ["function_call"]},
                "call_id": _STRING,
                "name": _STRING,
                "arguments": _STRING,
            },
        },
        {
            "type": "object",
            "required": ["type", "call_id", "output"],
            "properties": {
                "type": {"enum": ["function_call_output"]},
                "call_id": _STRING,
                "output": _INPUT_TEXT,
            },
        },
        {
            "type": "object",
            "required": ["type"],
            "properties": {
                "type": {"enum": ["reasoning"]},
                "content": {"anyOf": [_THOUGHT, {"type": "null"}]},
                "summary": {"anyOf": [_THOUGHT, {"type": "null"}]},
                "encrypted_content": {"enum": [None]},
            },
        },
    ]
}
_FLAT_TOOL: Json = {
    "type": "object",
    "required": ["type", "name"],
    "properties": {"type": {"enum": ["function"]}, **_FUNCTION},
}
RESPONSES = Table(
    reads={
        **_SAMPLING,
        **_PROMPT,
        **_SERVING,
        "input": {"anyOf": [_STRING, {"type": "array", "minItems": 1, "items": _INPUT_ITEM}]},
        "instructions": _STRING,
        "max_output_tokens": _integer(1),
        "top_logprobs": _integer(0, MAX_TOP_LOGPROBS),
        "include": {"type": "array", "items": _STRING},
        "text": {
            "type": "object",
            "properties": {
                "format": {
                    "anyOf": [
                        _FORMAT["anyOf"][0],
                        {
                            **_SCHEMA,
                            "required": ["type", "schema"],
                            "properties": {"type": {"enum": ["json_schema"]}, **_SCHEMA["properties"]},
                        },
                        {"type": "null"},
                    ]
                },
                "verbosity": {"enum": ["medium", None]},
            },
        },
        "metadata": _OBJECT,
        "stream_options": {
            "type": "object",
            "properties": {"include_obfuscation": {"enum": [False, None]}},
        },
        "chat_template_kwargs": _OBJECT,
        "tools": {"type": "array", "items": _FLAT_TOOL, "maxItems": MAX_TOOLS},
        **_TOOL_CHOICE,
    },
    refuses=REFUSED_IN_RESPONSES,
    labels=frozenset(
        {
            "max_tool_calls",
            "prompt_cache_key",
            "prompt_cache_options",
            "prompt_cache_retention",
            "request_id",
            "safety_identifier",
            "service_tier",
            "user",
        }
    ),
    required=("input",),
)

TOKENIZE = Table(
    reads={
        "model": _STRING,
        "prompt": _STRING,
        "messages": _MESSAGES,
        "add_special_tokens": _BOOLEAN,
        "return_token_strs": _BOOLEAN,
        **_TEMPLATE,
    },
    refuses={"chat_template": (), "tools": ([],), "mm_processor_kwargs": ()},
    either=("prompt", "messages"),
)

DETOKENIZE = Table(
    reads={"model": _STRING, "tokens": {"type": "array", "items": _TOKEN_ID}},
    refuses={},
    required=("tokens",),
)
