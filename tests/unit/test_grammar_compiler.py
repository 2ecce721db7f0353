import json
import random
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from engine.grammar import num_words, tree_masks
from engine.grammar_compiler import XGrammars
from engine.grammar_spec import GrammarSpec, Kind, json_schema_grammar
from engine.vocabulary import Vocabulary
from speculative.proposer import Proposal
from speculative.tree import build
from tests.fakes_grammar import unpacked
from tests.grammars import BYTES, EOS, Inline, byte_grammars, matcher_of, spec_of, takes

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
}
NODE = {
    "$defs": {
        "n": {"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#/$defs/n"}, {"type": "null"}]}}}
    },
    "$ref": "#/$defs/n",
}


@pytest.mark.parametrize(
    ("kind", "value", "good", "bad"),
    [
        (
            "json_object",
            "",
            ["{}", '{"a": [1, "b", null, {"c": 1e3}]}', '{\n  "é": true\n}'],
            ["[]", "3", "{", "{}x"],
        ),
        (
            "json_schema",
            PERSON,
            ['{"name":"a","age":3}', '{"name": "é", "age": 0}'],
            ['{"name":"a"}', "{}", " {}"],
        ),
        (
            "json_schema",
            PERSON,
            [],
            ['{"name":"a","age":-1}', '{"name":"a","age":3,"x":1}', '{"age":3,"name":"a"}'],
        ),
        (
            "json_schema",
            NODE,
            ['{"next":{"next":null}}'],
            ['{"next":3}', '{"next":{"next":{}'],
        ),
        ("json_schema", {"enum": ["a", 1, None]}, ['"a"', "1", "null"], ['"b"', "2", "true"]),
        (
            "json_schema",
            {"type": "array", "items": {"type": "boolean"}, "maxItems": 1},
            ["[]", "[true]"],
            ["[1]", "[true,true]"],
        ),
        ("json_schema", {"type": "string", "pattern": "a+"}, ['"aa"'], ['"ab"', '""']),
        ("json_schema", {"type": "string", "format": "date"}, ['"2026-01-31"'], ['"x"']),
        ("json_schema", {"type": "number", "minimum": 3, "exclusiveMaximum": 5}, ["3", "4.5"], ["5", "2.9"]),
        ("regex", r"[a-c]{2,3}-\d", ["ab-1", "abc-9"], ["a-1", "ab-", "xab-1", "ab-12"]),
        ("regex", "日本|é", ["日本", "é"], ["日", "e"]),
        ("ebnf", 'root ::= pair ("," pair)*\npair ::= [a-z] "=" [0-9]+', ["a=1", "a=1,b=22"], ["a", "a=1,"]),
        ("choice", ["yes", "no", "no way"], ["yes", "no", "no way"], ["n", "yesno", "maybe"]),
        (
            "choice",
            ['"quoted"\\', "a\nb\t", "é日😀", "x\x01"],
            ['"quoted"\\', "a\nb\t", "é日😀", "x\x01"],
            ["a", "é"],
        ),
    ],
)
def test_a_grammar_takes_its_language_and_nothing_else(
    kind: Kind, value: Any, good: list[str], bad: list[str]
) -> None:
    spec = spec_of(kind, value)
    assert [text for text in good if not takes(spec, text)] == []
    assert [text for text in bad if takes(spec, text)] == []


def test_strict_forbids_properties_that_the_schema_does_not_name() -> None:
    text = '{"name":"a","age":3,"x":1}'
    assert not takes(spec_of("json_schema", PERSON, is_strict=True), text)
    assert takes(spec_of("json_schema", PERSON, is_strict=False), text)
    assert not takes(spec_of("json_schema", PERSON, is_strict=False), '{"name":"a","x":1}')


def test_whitespace_is_free_inside_and_bounded() -> None:
    spec = spec_of("json_schema", PERSON)
    pretty = json.dumps({"name": "a", "age": 1}, indent=4)
    assert takes(spec, pretty)
    assert takes(spec, '{"name":' + " " * 20 + '"a","age":1}')
    for text in ('{"name":' + " " * 21 + '"a","age":1}', " " + pretty, pretty + "\n"):
        assert not takes(spec, text)


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        ("nonsense", "grammar: text must be JSON"),
        (
            GrammarSpec(kind="regex", value="[a").to_text(),
            "grammar: regex cannot be used: Regex parsing error",
        ),
        (
            GrammarSpec(kind="regex", value="(?=a)b").to_text(),
            "grammar: regex cannot be used: Regex parsing error",
        ),
        (
            GrammarSpec(kind="ebnf", value="root ::= foo").to_text(),
            "grammar: ebnf cannot be used: EBNF parser error",
        ),
        (GrammarSpec(kind="ebnf", value="(" * 9000).to_text(), "grammar: ebnf cannot be used: EBNF"),
        (
            json_schema_grammar({"type": "x"}, is_strict=True).to_text(),
            "grammar: json_schema cannot be used: Unsupp",
        ),
        (
            json_schema_grammar({"$ref": "#/x"}, is_strict=True).to_text(),
            "grammar: json_schema cannot be used: Cannot",
        ),
        (
            json_schema_grammar({"type": "string", "pattern": "[a"}, is_strict=True).to_text(),
            "grammar: json_schema",
        ),
    ],
)
def test_a_grammar_that_means_nothing_is_an_error_of_its_future(grammar: str, reason: str) -> None:
    error = byte_grammars().prepare(grammar, emitted=(), stop_token_ids=()).exception()
    assert isinstance(error, ValueError)
    assert str(error).startswith(reason)
    assert "/project/" not in str(error)


def test_outputs_of_earlier_attempts_are_replayed() -> None:
    matcher = matcher_of(spec_of("choice", ["abc", "abd", "x"]), emitted=b"ab")
    words_NW = np.zeros((1, num_words(256)), dtype=np.int32)
    matcher.fill(words_NW, 0)
    assert unpacked(words_NW[0]) == {ord("c"), ord("d")}
    error = (
        byte_grammars()
        .prepare(spec_of("choice", ["abc"]).to_text(), emitted=b"aX", stop_token_ids=())
        .exception()
    )
    assert str(error) == "grammar: output 1, token 88, does not follow it"


def test_a_complete_output_may_only_stop_and_then_is_over() -> None:
    matcher = matcher_of(spec_of("choice", ["a", "ab"]), emitted=b"a")
    words_NW = np.zeros((2, num_words(256)), dtype=np.int32)
    matcher.fill(words_NW, 0)
    assert matcher.accept(ord("b"))
    matcher.fill(words_NW, 1)
    assert [unpacked(words_W) for words_W in words_NW] == [{EOS, ord("b")}, {EOS}]
    assert [matcher.accept(EOS) for _ in range(2)] == [True, False]
    assert bool(matcher.is_over)
    matcher.rollback(2)
    assert matcher.accept(EOS)


def test_a_stop_token_that_is_text_is_part_of_the_grammar() -> None:
    vocabulary = Vocabulary((*BYTES.texts, b""))
    grammars = XGrammars(vocabulary, vocab_size=258, eos_token_ids=[EOS], executor=Inline())
    spec = spec_of("choice", ["a}"])
    matcher = grammars.prepare(spec.to_text(), emitted=b"a", stop_token_ids=(ord("}"), 256)).result()
    assert matcher.stop_token_ids == (EOS, 256)
    assert [matcher.accept(token_id) for token_id in (256, 257, -1, 258)] == [False] * 4
    assert matcher.accept(ord("}"))
    assert matcher.accept(256)
    assert matcher.is_over


def test_a_model_without_an_end_of_sequence_token_has_no_grammars() -> None:
    grammars = XGrammars(BYTES, vocab_size=256, eos_token_ids=[], executor=Inline())
    prepared = grammars.prepare('{"kind": "json_object"}', emitted=(), stop_token_ids=(ord("a"),))
    assert str(prepared.exception()) == "grammar: this model has no token that could end the output"


def test_compiled_grammars_are_kept_within_bounds() -> None:
    bound = 4 * 2**20
    grammars = XGrammars(BYTES, vocab_size=256, eos_token_ids=[EOS], executor=Inline(), cache_bytes=bound)
    sizes = []
    for number in range(60):
        schema = {
            "type": "object",
            "properties": {f"p{i}": {"type": "string"} for i in range(number, number + 40)},
        }
        text = json_schema_grammar(schema, is_strict=True).to_text()
        grammars.prepare(text, emitted=(), stop_token_ids=()).result()
        sizes.append(grammars.cached_bytes)
    assert max(sizes) <= bound
    assert sizes[-1] < sum(sizes[:1]) * 60
    before = grammars.cached_bytes
    grammars.prepare(text, emitted=(), stop_token_ids=()).result()
    assert grammars.cached_bytes == before


def test_compiling_runs_on_the_pool() -> None:
    seen: list[str] = []

    class Watched(ThreadPoolExecutor):
        def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Any:
            def watched() -> Any:
                seen.append(threading.current_thread().name)
                return fn(*args, **kwargs)

            return super().submit(watched)

    with Watched(max_workers=1, thread_name_prefix="grammar") as pool:
        grammars = XGrammars(BYTES, vocab_size=256, eos_token_ids=[EOS], executor=pool)
        prepared = grammars.prepare('{"kind": "json_object"}', emitted=b"{", stop_token_ids=())
        assert prepared.result(timeout=60).accept(ord("}"))
    assert seen == ["grammar_0"]


@pytest.mark.parametrize("seed", range(3))
def test_the_walk_equals_xgrammars_own_on_random_trees(seed: int) -> None:
    rng = random.Random(seed)
    spec = spec_of("regex", r"([ab]{1,3}c|b*d)+")
    for _ in range(60):
        matcher = matcher_of(spec)
        size = rng.randint(1, 24)
        parents: list[int] = []
        tokens: list[int] = []
        used: set[tuple[int, int]] = set()
        while len(tokens) < size:
            edge = (rng.randint(0, len(tokens)), rng.choice(b"abcd\0x"))
            if edge not in used:
                used.add(edge)
                parents.append(edge[0])
                tokens.append(edge[1])
        tree = build(1, Proposal(token_ids=tuple(tokens), parents=tuple(parents)))
        first_child, next_sibling = tree.links()
        masks = tree_masks(
            matcher, tree.token_ids, first_child=first_child, next_sibling=next_sibling, vocab_size=256
        )
        theirs_NW = torch.full((tree.num_nodes, num_words(256)), -1, dtype=torch.int32)
        matcher._matcher.traverse_draft_tree(  # type: ignore[attr-defined]
            torch.tensor(first_child), torch.tensor(next_sibling), torch.tensor(tree.token_ids), theirs_NW
        )
        for mask_W, theirs_W in zip(masks, theirs_NW.numpy(), strict=True):
            if mask_W is not None:  # else the node cannot come to stand
                assert unpacked(theirs_W) == unpacked(mask_W)
