import json
import random

import pytest

from router.text.parsers.catalogue import answer_format, check_names
from router.text.parsers.parts import CallArguments, CallStart, Content, Parser, Part, Reasoning, merged
from router.text.parsers.reasoning import ReasoningParser
from router.text.parsers.tool_calls import (
    HermesCalls,
    JsonListCalls,
    Llama3Calls,
    MistralCalls,
    NamedCall,
    PlainText,
)

NUM_SPLITS = 60


class Thinking:
    """Makes reasoning parsers in front of the Hermes format."""

    def __init__(self, *, is_open: bool) -> None:
        self.is_open = is_open

    def __call__(self) -> Parser:
        return ReasoningParser(
            opening="<think>", closing="</think>", is_open=self.is_open, then=HermesCalls()
        )


def parts_of(parser: Parser, text: str, rng: random.Random | None = None) -> list[Part]:
    parts: list[Part] = []
    start = 0
    while start < len(text):
        stop = len(text) if rng is None else start + rng.randint(1, 9)
        parts += parser.push(text[start:stop])
        start = stop
    return merged([*parts, *parser.finish()])


def call(index: int, name: str, arguments: str) -> list[Part]:
    return [CallStart(index, name), CallArguments(index, arguments)]


CASES = [
    pytest.param(PlainText, " a <tool_call>{} \n", [Content(" a <tool_call>{} \n")], id="plain"),
    pytest.param(
        HermesCalls,
        'Let me see. \n<tool_call>\n{"name": "f", "arguments": {"a": "</tool_call>{\\"", "b": [1, 2]}}\n'
        '</tool_call>\n<tool_call>{"arguments": {"c": {}}, "name": "g"}</tool_call>\n done ',
        [
            Content("Let me see."),
            *call(0, "f", '{"a": "</tool_call>{\\"", "b": [1, 2]}'),
            *call(1, "g", '{"c": {}}'),
            Content("done "),
        ],
        id="hermes: several calls, markers inside strings, name behind the arguments",
    ),
    pytest.param(
        HermesCalls,
        '\n<tool_call>{"name": "f", "arguments": null, "id": 7}</tool_call>\n',
        call(0, "f", "{}"),
        id="hermes: no arguments, and no content but blanks",
    ),
    pytest.param(
        HermesCalls,
        '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>',
        call(0, "f", '{"a": 1}'),
        id="hermes: arguments written as a string",
    ),
    pytest.param(
        HermesCalls,
        "a <tool_call> b</tool_call> <tool",
        [Content("a <tool_call> b</tool_call> <tool")],
        id="hermes: markers without an object",
    ),
    pytest.param(
        HermesCalls,
        '<tool_call>{"x": {"name": "f"}}</tool_call>',
        [Content('{"x": {"name": "f"}}')],
        id="hermes: an object without a name",
    ),
    pytest.param(
        HermesCalls,
        '<tool_call>{"name": "f", "arguments": {"a": "half',
        call(0, "f", '{"a": "half'),
        id="hermes: cut by the cap",
    ),
    pytest.param(HermesCalls, '<tool_call>{"na', [Content('{"na')], id="hermes: cut before the name"),
    pytest.param(
        Llama3Calls,
        '<|python_tag|>{"name": "f", "parameters": {"q": "a;b"}}; {"name": "g", "parameters": {}}',
        [*call(0, "f", '{"q": "a;b"}'), *call(1, "g", "{}")],
        id="llama3: two calls",
    ),
    pytest.param(
        Llama3Calls,
        '{"type": "function", "name": "f", "parameters": {"q": "é"}}',
        call(0, "f", '{"q": "é"}'),
        id="llama3: without the tag, name not first",
    ),
    pytest.param(
        Llama3Calls, ' {"answer": 4}', [Content('{"answer": 4}')], id="llama3: JSON that is no call"
    ),
    pytest.param(Llama3Calls, ' So {"name": "f"}', [Content(' So {"name": "f"}')], id="llama3: content"),
    pytest.param(Llama3Calls, "<|py", [Content("<|py")], id="llama3: half a tag"),
    pytest.param(
        MistralCalls,
        'Hi [TOOL_CALLS] [{"name": "f", "arguments": {"a": "]"}}, {"name": "g", "arguments": {}}]',
        [Content("Hi"), *call(0, "f", '{"a": "]"}'), *call(1, "g", "{}")],
        id="mistral: a list",
    ),
    pytest.param(
        MistralCalls,
        '[TOOL_CALLS]f[ARGS]{"a": {"b": "}"}}[TOOL_CALLS]g[CALL_ID]x1[ARGS]{}',
        [*call(0, "f", '{"a": {"b": "}"}}'), *call(1, "g", "{}")],
        id="mistral: names and arguments",
    ),
    pytest.param(MistralCalls, "a [TOOL_", [Content("a [TOOL_")], id="mistral: half a marker"),
    pytest.param(
        JsonListCalls,
        '[{"name": "f", "parameters": {"a": [1]}}, {"name":"g","parameters":{}}]',
        [*call(0, "f", '{"a": [1]}'), *call(1, "g", "{}")],
        id="list",
    ),
    pytest.param(lambda: NamedCall("f"), ' {"a": {"b": 1}} ', call(0, "f", '{"a": {"b": 1}}'), id="named"),
    pytest.param(
        Thinking(is_open=False),
        '\n<think>\nhm, <tool_call>\n</think>\n\nSo <think>: \n<tool_call>{"name": "f"}</tool_call>',
        [Reasoning("hm, <tool_call>"), Content("So <think>:"), *call(0, "f", "{}")],
        id="reasoning, content, call",
    ),
    pytest.param(
        Thinking(is_open=True), "hm </think> So", [Reasoning("hm"), Content("So")], id="opened by the prompt"
    ),
    pytest.param(
        Thinking(is_open=True), "<think>hm</think>So", [Reasoning("hm"), Content("So")], id="opened twice"
    ),
    pytest.param(Thinking(is_open=True), "hm </thi", [Reasoning("hm </thi")], id="cut while reasoning"),
    pytest.param(
        Thinking(is_open=False),
        "  No <think>ing</think>",
        [Content("  No <think>ing</think>")],
        id="marker inside the answer",
    ),
]


@pytest.mark.parametrize(("make", "text", "expected"), CASES)
def test_an_answer_has_its_parts_however_the_text_was_split(
    make: type[Parser], text: str, expected: list[Part]
) -> None:
    assert parts_of(make(), text) == expected
    for seed in range(NUM_SPLITS):
        assert parts_of(make(), text, random.Random(seed)) == expected, f"seed {seed}"


def test_arguments_come_while_they_are_written() -> None:
    parser = HermesCalls()
    assert merged(parser.push('<tool_call>{"name": "f", "arguments": {"a": 1')) == call(0, "f", '{"a": 1')
    assert merged(parser.push("2")) == [CallArguments(0, "2")]


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_come_back_as_they_were_written(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        calls = [(f"f{rng.randrange(9)}", json.dumps(_value(rng, 3))) for _ in range(rng.randint(1, 3))]
        text = "\n".join(
            f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'
            for name, arguments in calls
        )
        expected = [
            part for index, (name, arguments) in enumerate(calls) for part in call(index, name, arguments)
        ]
        assert parts_of(HermesCalls(), text, rng) == expected


def _value(rng: random.Random, depth: int) -> dict[str, object]:
    texts = ['"', "\\", "}", "</tool_call>", "a,b", "{", ":", "ü😀"]
    leaves: list[object] = [None, True, 1.5, "".join(rng.choices(texts, k=3))]
    return {
        rng.choice(texts): _value(rng, depth - 1) if depth and rng.random() < 0.4 else rng.choice(leaves)
        for _ in range(rng.randint(0, 3))
    }


HERMES = '<tool_call> {"name": <name>, "arguments": <args-json-object>} </tool_call> <think></think>'


@pytest.mark.parametrize(
    ("template", "tools", "reasoning"),
    [
        ("{{ messages }}", type(None), None),
        (HERMES, HermesCalls, "</think>"),
        ("<tool_call><function=f></function></tool_call> arguments", type(None), None),
        ("{% if tools %}[AVAILABLE_TOOLS]{% endif %}[TOOL_CALLS] [THINK][/THINK]", MistralCalls, "[/THINK]"),
        ('Environment: ipython {"name": function name, "parameters": dictionary}', Llama3Calls, None),
    ],
)
def test_a_template_betrays_its_formats(template: str, tools: type, reasoning: str | None) -> None:
    found = answer_format(tool_parser="auto", reasoning_parser="auto", template=template)
    assert type(found.tools.make() if found.tools else None) is tools
    assert (found.reasoning.closing if found.reasoning else None) == reasoning


def test_a_name_goes_before_the_template() -> None:
    found = answer_format(tool_parser="none", reasoning_parser="deepseek_r1", template=HERMES)
    assert found.tools is None
    assert parts_of(found.parser(prompt_end=""), "hm</think>x") == [Reasoning("hm"), Content("x")]


@pytest.mark.parametrize("setting", ["tool_call_parser", "reasoning_parser"])
def test_an_unknown_parser_is_refused_by_name(setting: str) -> None:
    names = {"tool_parser": "auto", "reasoning_parser": "auto"} | {setting.replace("_call", ""): "hermess"}
    with pytest.raises(ValueError, match=f"{setting} must be one of auto, none, .*got 'hermess'"):
        check_names(**names)


def test_the_prompt_may_open_the_reasoning() -> None:
    found = answer_format(tool_parser="none", reasoning_parser="qwen3", template="")
    assert parts_of(found.parser(prompt_end="assistant\n<think>\n"), "hm</think>x") == [
        Reasoning("hm"),
        Content("x"),
    ]
    assert parts_of(found.parser(prompt_end="assistant\n"), "hm</think>x") == [Content("hm</think>x")]
