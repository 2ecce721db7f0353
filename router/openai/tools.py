"""The tools of a request: what may be called, what must be, and what that asks of the answer.

Owns the request's side of tool calls. Must never know how a model writes them (text.parsers).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from router.errors import BadRequest
from router.openai.fields import Fields, refuse
from router.openai.grammar import schema_constraint
from router.requests import Constraint

MAX_TOOLS = 128

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
_NAME_RULE = "1 to 64 letters, digits, dots, underscores or dashes"


_NESTED = ".function"
"""Where chats have a tool's name and parameters; responses have them in the tool itself."""

_FLAT = ("name", "description", "parameters", "strict")
_FLAT_REFUSED: Mapping[str, tuple[Any, ...]] = MappingProxyType(
    {"allowed_callers": (["direct"],), "async": (False,), "defer_loading": (False,)}
)
"""What a tool of responses may say that is not done, and the values that ask for nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Tools:
    """choice: "none", "auto", "required", or "named": then only `named` may and must be called.

    definitions: as the template is shown them. A choice of "none" shows none. `within`: where a tool has its
    parameters, for complaints.
    """

    definitions: tuple[Mapping[str, Any], ...] = ()
    choice: str = "none"
    named: str = ""
    is_parallel: bool = True
    within: str = _NESTED

    @property
    def is_forced(self) -> bool:
        return self.choice in ("required", "named")

    def constraint(self) -> Constraint:
        """What a forced answer must be: the named tool's arguments, or a list of calls. Raises BadRequest."""
        if self.choice == "named":
            index, tool = next((i, t) for i, t in enumerate(self.definitions) if _name(t) == self.named)
            where = f"tools[{index}]{self.within}.parameters"
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
                    "parameters": _hoisted(
                        f"tools[{index}]{self.within}.parameters", _parameters(tool), shared
                    ),
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


def read_tools(fields: Fields, *, is_flat: bool = False) -> Tools:
    """`is_flat`: in the form of responses. Raises BadRequest naming the field."""
    tools, choice = fields.raw("tools"), fields.raw("tool_choice")
    is_parallel = fields.boolean("parallel_tool_calls", default=True)
    if tools is None or tools == []:
        if choice not in (None, "none", "auto"):
            raise refuse("tool_choice", "left out, none or auto when there are no tools", choice)
        return NO_TOOLS
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        raise refuse("tools", f"a list of at most {MAX_TOOLS} tools", tools)
    read = _flat_definition if is_flat else _definition
    definitions = tuple(read(f"tools[{index}]", tool) for index, tool in enumerate(tools))
    if choice == "none":
        return NO_TOOLS
    within = "" if is_flat else _NESTED
    if choice in (None, "auto", "required"):
        return Tools(definitions=definitions, choice=choice or "auto", is_parallel=is_parallel, within=within)
    named = _chosen(choice, is_flat=is_flat)
    if named not in [_name(tool) for tool in definitions]:
        raise refuse(f"tool_choice{within}.name", "the name of one of the tools", named)
    return Tools(definitions=definitions, choice="named", named=named, is_parallel=is_parallel, within=within)


def _chosen(choice: Any, *, is_flat: bool) -> str:
    if isinstance(choice, dict) and choice.get("type") == "function":
        function = choice if is_flat else choice.get("function")
        if isinstance(function, dict) and isinstance(function.get("name"), str):
            return str(function["name"])
    form = '"name": ...' if is_flat else '"function": {"name": ...}'
    raise refuse("tool_choice", f'none, auto, required, or {{"type": "function", {form}}}', choice)


def _definition(where: str, tool: Any) -> Mapping[str, Any]:
    _check_type(where, tool)
    function = tool.get("function")
    if not isinstance(function, dict):
        raise refuse(f"{where}{_NESTED}", "an object with a name", function)
    _check_function(f"{where}{_NESTED}", function)
    return dict(tool)


def _flat_definition(where: str, tool: Any) -> Mapping[str, Any]:
    _check_type(where, tool)
    _check_function(where, tool)
    for key, harmless in _FLAT_REFUSED.items():
        if tool.get(key) is not None and tool[key] not in harmless:
            raise BadRequest(
                f"{where}.{key} is not supported", param=f"{where}.{key}", code="unsupported_parameter"
            )
    function = {key: tool[key] for key in _FLAT if tool.get(key) is not None}
    return {"type": "function", "function": function}


def _check_type(where: str, tool: Any) -> None:
    if not isinstance(tool, dict) or tool.get("type") != "function":
        raise refuse(where, 'an object of type "function"', tool)


def _check_function(where: str, function: Mapping[str, Any]) -> None:
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise refuse(f"{where}.name", _NAME_RULE, name)
    if parameters is not None and not isinstance(parameters, dict):
        raise refuse(f"{where}.parameters", "a JSON schema", parameters)
    description = function.get("description")
    if description is not None and not isinstance(description, str):
        raise refuse(f"{where}.description", "a string", description)


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
        definitions = parameters.get(key, {})
        if not isinstance(definitions, dict):
            raise refuse(f"{where}.{key}", "an object of schemas", definitions)
        for name, definition in definitions.items():
            if shared.setdefault(key, {}).setdefault(name, definition) != definition:
                raise BadRequest(
                    f"{where}.{key} must not give {name!r} another meaning than an earlier tool does",
                    param=f"{where}.{key}",
                )
    return {key: value for key, value in parameters.items() if key not in ("$defs", "definitions")}
