"""The OpenAPI document of the HTTP interface, made from the tables the readers ask.

Owns the paths and the form of answers as far as clients may count on them. Must never know how a request
is served; a test holds it against the routes and the readers.
"""

from collections.abc import Mapping
from typing import Any

from router.openai.tables import CHAT, COMPLETIONS, DETOKENIZE, RESPONSES, TOKENIZE, Table

Json = dict[str, Any]

_STRING: Json = {"type": "string"}
_INTEGER: Json = {"type": "integer"}
_COUNT: Json = {"type": "integer", "minimum": 0}
_BOOLEAN: Json = {"type": "boolean"}
_ANY_OBJECT: Json = {"type": "object"}

_ERRORS = {
    "400": "The request is wrong; `param` names the field",
    "401": "The API key is missing or wrong",
    "404": "No such model",
    "408": "The body did not come to its end",
    "413": "The body is too large",
    "415": "The body is not JSON",
    "429": "Too much load; see Retry-After",
    "500": "Something here is wrong",
    "503": "No nodes are ready; see Retry-After",
    "504": "The request took too long",
}


def document(version: str) -> Json:
    """OpenAPI 3.1."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Paceline",
            "version": version,
            "description": "Null means absent. Fields named nowhere here are ignored.",
        },
        "paths": {**_posts(), **_gets()},
        "components": {
            "schemas": _schemas(),
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{}, {"key": []}],
    }


def _posts() -> Json:
    return {
        "/v1/completions": _post("Complete prompts", COMPLETIONS, "Completion", is_streamed=True),
        "/v1/chat/completions": _post("Answer a conversation", CHAT, "ChatCompletion", is_streamed=True),
        "/v1/responses": _post("Answer a conversation", RESPONSES, "Response", is_streamed=True),
        "/tokenize": _post("Token ids of a prompt or conversation", TOKENIZE, "Tokenized"),
        "/detokenize": _post("Text of token ids", DETOKENIZE, "Detokenized"),
    }


def _gets() -> Json:
    text = {"content": {"text/plain": {"schema": _STRING}}, "description": "Prometheus text"}
    listed = {"application/json": {"schema": {"type": "array", "items": _ANY_OBJECT}}}
    targets = {"content": listed, "description": "As Prometheus' http_sd_configs wants it"}
    page = {"content": {"text/html": {"schema": _STRING}}, "description": "One file, nothing else is loaded"}
    model = {"name": "model", "in": "path", "required": True, "schema": _STRING}
    alive = {"200": _answer("It is", "Status")}
    ready = {"200": _answer("Ready", "Report"), "503": _answer("Not ready", "Report")}
    health = {"200": _answer("Healthy", "Status"), "503": _answer("Not healthy", "Status")}
    paths = {
        "/v1/models": _get("The served model", {"200": _answer("A list of one", "ModelList")}),
        "/v1/models/{model}": {
            "parameters": [model],
            **_get("The served model", {"200": _answer("The model", "Model")}, errors=("401", "404")),
        },
        "/server_info": _get("Version, model, limits and settings", {"200": _answer("Them", "ServerInfo")}),
        "/workers": _get("Nodes and pairs", {"200": _answer("Them", "Report")}),
        "/openapi.json": _get("This document", {"200": _answer("OpenAPI 3.1", "Anything")}, errors=()),
        "/version": _get("The version", {"200": _answer("The version", "Version")}, errors=()),
        "/metrics": _get("Metrics", {"200": text}, errors=()),
        "/metrics/targets": _get("Where to scrape the nodes", {"200": targets}, errors=()),
        "/dashboard": _get("The live page", {"200": page}, errors=()),
        "/dashboard/data": _get("What the live page shows", {"200": _answer("It", "Anything")}),
    }
    for names, summary, answers in (
        (("/live", "/livez", "/liveness"), "Is the process there?", alive),
        (("/ready", "/readyz", "/readiness"), "Can users be served?", ready),
        (("/health", "/healthz"), "Can users be served?", health),
    ):
        paths |= {name: _get(summary, answers, errors=()) for name in names}
    return paths


def _get(summary: str, answers: Json, *, errors: tuple[str, ...] = ("401",)) -> Json:
    return {"get": {"summary": summary, "responses": {**answers, **_errors(errors)}}}


def _post(summary: str, table: Table, answer: str, *, is_streamed: bool = False) -> Json:
    good = _answer("The answer", answer)
    if is_streamed:
        good["content"]["text/event-stream"] = {"schema": _object(data=_STRING)}  # of each event
    body = {"required": True, "content": {"application/json": {"schema": body_schema(table)}}}
    return {
        "post": {
            "summary": summary,
            "requestBody": body,
            "responses": {"200": good, **_errors(tuple(_ERRORS))},
        }
    }


def _answer(description: str, schema: str) -> Json:
    content = {"schema": {"$ref": f"#/components/schemas/{schema}"}}
    return {"description": description, "content": {"application/json": content}}


def _errors(names: tuple[str, ...]) -> Json:
    return {name: _answer(_ERRORS[name], "Error") for name in names}


def body_schema(table: Table) -> Json:
    """A request body: what is read, what is refused unless it asks for nothing, and labels."""
    properties: Json = {
        name: schema if name in table.required else _or_null(schema) for name, schema in table.reads.items()
    }
    for name, harmless in table.refuses.items():
        properties[name] = {"enum": [None, *harmless], "description": "Not supported: refused."}
    for name in sorted(table.labels):
        properties[name] = {"description": "A label: it changes nothing."}
    schema: Json = {"type": "object", "required": list(table.required), "properties": properties}
    if table.either:
        schema["oneOf"] = [
            {"required": [name], "properties": {name: table.reads[name]}} for name in table.either
        ]
    return schema


def _or_null(schema: Mapping[str, Any]) -> Json:
    if "anyOf" in schema:
        return {"anyOf": [*schema["anyOf"], {"type": "null"}]}
    return {**schema, "type": [schema["type"], "null"]}


def _object(**properties: Any) -> Json:
    """Every property is there; others may be."""
    return {"type": "object", "required": sorted(properties), "properties": properties}


def _list(items: Json) -> Json:
    return {"type": "array", "items": items}


def _null_or(schema: Json) -> Json:
    return {"anyOf": [schema, {"type": "null"}]}


def _schemas() -> Json:
    error = _object(message=_STRING, type=_STRING, param=_null_or(_STRING), code=_STRING)
    model = _object(id=_STRING, object={"const": "model"}, created=_INTEGER, owned_by=_STRING)
    return {
        "Error": _object(error=error),
        "Completion": _completion("text_completion", "cmpl-", text=_STRING),
        "ChatCompletion": _completion(
            "chat.completion",
            "chatcmpl-",
            message=_object(role={"const": "assistant"}, content=_null_or(_STRING)),
        ),
        "Response": _response(),
        "Tokenized": _object(
            count=_COUNT, max_model_len=_COUNT, tokens=_list(_COUNT), token_strs=_null_or(_list(_STRING))
        ),
        "Detokenized": _object(prompt=_STRING),
        "Model": model,
        "ModelList": _object(object={"const": "list"}, data=_list(model)),
        "Status": _object(status=_STRING),
        "Report": _object(ready=_BOOLEAN, pairs=_list(_ANY_OBJECT), nodes=_list(_ANY_OBJECT)),
        "ServerInfo": _object(
            version=_STRING, model=_STRING, max_model_len=_COUNT, vocab_size=_COUNT, settings=_ANY_OBJECT
        ),
        "Version": _object(version=_STRING),
        "Anything": _ANY_OBJECT,
    }


def _completion(object_name: str, prefix: str, **content: Any) -> Json:
    choice = _object(
        index=_COUNT,
        finish_reason={"enum": ["stop", "length", "tool_calls"]},
        logprobs=_null_or(_ANY_OBJECT),
        **content,
    )
    usage = _object(
        prompt_tokens=_COUNT,
        completion_tokens=_COUNT,
        total_tokens=_COUNT,
        prompt_tokens_details=_object(cached_tokens=_COUNT),
        completion_tokens_details=_object(
            accepted_prediction_tokens=_COUNT, rejected_prediction_tokens=_COUNT
        ),
    )
    return _object(
        id={"type": "string", "pattern": f"^{prefix}"},
        object={"const": object_name},
        created=_INTEGER,
        model=_STRING,
        choices={**_list(choice), "minItems": 1},
        usage=usage,
    )


def _response() -> Json:
    part = _object(type={"const": "output_text"}, text=_STRING, annotations=_list(_ANY_OBJECT))
    status = {"enum": ["completed", "incomplete"]}
    message = _object(
        type={"const": "message"},
        id=_STRING,
        role={"const": "assistant"},
        status=status,
        content=_list(part),
    )
    thought = _object(type={"const": "reasoning_text"}, text=_STRING)
    reasoning = _object(
        type={"const": "reasoning"},
        id=_STRING,
        status=status,
        summary=_list(_ANY_OBJECT),
        content=_list(thought),
    )
    call = _object(
        type={"const": "function_call"},
        id=_STRING,
        status=status,
        call_id=_STRING,
        name=_STRING,
        arguments=_STRING,
    )
    usage = _object(
        input_tokens=_COUNT,
        input_tokens_details=_object(cached_tokens=_COUNT),
        output_tokens=_COUNT,
        output_tokens_details=_object(reasoning_tokens=_COUNT),
        total_tokens=_COUNT,
    )
    return _object(
        id=_STRING,
        object={"const": "response"},
        created_at=_INTEGER,
        status=status,
        model=_STRING,
        output={**_list({"anyOf": [message, reasoning, call]}), "minItems": 1},
        usage=usage,
    )
