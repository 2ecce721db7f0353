"""The tools of a chat request: what may be called, what must be, and what that asks of the answer.

Owns the request's side of tool calls. Must never know how a model writes them (text.parsers).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from router.errors import BadRequest
from router.openai.fields import Fields, refuse
from router.openai.grammar import schema_constraint
from router.requests import Constraint

MAX_TOOLS = 128

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "1 to 64 letters, digits, dots, underscores or dashes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """choice: "none", "auto", "required", or "named": then only `named` may and must be called.

    definitions: as the template is shown them. A choice of "none" shows none.
    """

    definitions: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    named: str = ""
    is_parallel: bool = True

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    def constraint(self) -> Constraint:
        """What a forced answer must be: the named tool's arguments, or a list of calls. Raises BadRequest."""
        if self.choice == "named":
            index, tool = next((i, t) for i, t in enumerate(self.definitions) if _name(t) == self.named)
            where = f"tools[{index}].function.parameters"
            return schema_constraint(where, _parameters(tool), is_strict=_is_strict(tool))
        is_open = any(_is_strict(tool) is False for tool in self.definitions)
        return schema_constraint("tools", self._list_schema(), is_strict=False if is_open else None)

    def _list_schema(self) -> dict[str, Any]:
        shared: dict[str, Any] = {}
        calls = [
            {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "enum": [_name(tool)]},
                    "parameters": _hoisted(f"tools[{index}].function.parameters", _parameters(tool), shared),
                },
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
            for index, tool in enumerate(self.definitions)
        ]
        limit = {} if self.is_parallel else {"maxItems": 1}
        schema: dict[str, Any] = {"type": "array", "items": {"anyOf": calls}, "minItems": 1, **limit}
        return schema | shared


NO_TOOLS = Tools()


def read_tools(fields: Fields) -> Tools:
    """Raises BadRequest naming the field."""
    tools, choice = fields.raw("tools"), fields.raw("tool_choice")
    is_parallel = fields.boolean("parallel_tool_calls", default=True)
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise refuse("tool_choice", "left out, none or auto when there are no tools", choice)
        return NO_TOOLS
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise refuse("tools", f"a list of at most {MAX_TOOLS} tools", tools)
    definitions = tuple(_definition(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    if choice == "none":
        return NO_TOOLS
    if choice in (None, "auto", "required"):
        return Tools(definitions=definitions, choice=choice or "auto", is_parallel=is_parallel)
    named = _chosen(choice)
    if named not in [_name(tool) for tool in definitions]:
        raise refuse("tool_choice.function.name", "the name of one of the tools", named)
    return Tools(definitions=definitions, choice="named", named=named, is_parallel=is_parallel)


def _chosen(choice: Any) -> str:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    rule = 'none, auto, required, or {"type": "function", "function": {"name": ...}}'
    raise refuse("tool_choice", rule, choice)


def _definition(where: str, tool: Any) -> Mapping[str, Any]:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise refuse(where, 'an object of type "function"', tool)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{where}.function", "an object with a name", function)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse(f"{where}.function.name", _NAME_RULE, name)
    if parameters is not None and not isinstance(parameters, dict):
        raise refuse(f"{where}.function.parameters", "a JSON schema", parameters)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise refuse(f"{where}.function.description", "a string", description)
    return tool


def _name(tool: Mapping[str, Any]) -> str:
    return str(tool["function"]["name"])


def _parameters(tool: Mapping[str, Any]) -> dict[str, Any]:
    return tool["function"].get("parameters") or {"type": "object", "properties": {}}


def _is_strict(tool: Mapping[str, Any]) -> bool | None:
    strict = tool["function"].get("strict")
    return strict if isinstance(strict, bool) else None


def _hoisted(where: str, parameters: dict[str, Any], shared: dict[str, Any]) -> dict[str, Any]:
    """Without its definitions, which go into `shared`: references count from the root of a schema."""
    for key in ("$defs", "definitions"):
        for name, definition in parameters.get(key, {}).items():
            if shared.setdefault(key, {}).setdefault(name, definition) != definition:
                raise BadRequest(
                    f"{where}.{key} must not give {name!r} another meaning than an earlier tool does",
                    param=f"{where}.{key}",
                )
    return {key: value for key, value in parameters.items() if key not in ("$defs", "definitions")}
