"""Grammars by xgrammar: compiled on a pool of threads, kept while they fit, matched token by token.

Owns the one place that knows xgrammar. Must never know a draft tree, a request's text or the engine loop.

Whitespace in JSON: up to 20 characters wherever JSON has any, none before the first and after the last;
a bound, because small models otherwise pad for ever. Properties come in the schema's order.
"""

import json
import re
from collections.abc import Sequence
from concurrent.futures import Executor, Future

import numpy as np
import xgrammar

from engine.grammar import Matcher, Words
from engine.grammar_spec import GrammarSpec
from engine.vocabulary import Vocabulary

CACHE_BYTES = 256 * 2**20
_MAX_WHITESPACE = 20
_ORIGIN = re.compile(r"^\[\d\d:\d\d:\d\d\] \S+: ")
_ANY_OBJECT = '{"type": "object"}'


class XGrammars:
    """`Grammars` for one model. Compiled grammars of at most `cache_bytes` are kept, the least recently used
    given up first; what a live request uses stays until it ends."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        *,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        executor: Executor,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        """`vocab_size`: the width of the logits. `executor` runs the compilations."""
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos_token_ids = tuple(eos_token_ids)
        self._executor = executor
        texts = [*vocabulary.texts[:vocab_size], *[b""] * (vocab_size - len(vocabulary.texts))]
        self._compiler = xgrammar.GrammarCompiler(
            xgrammar.TokenizerInfo(texts, vocab_size=vocab_size, stop_token_ids=list(eos_token_ids)),
            max_threads=1,  # the cores are the engine's
            cache_limit_bytes=cache_bytes,
        )

    @property
    def cached_bytes(self) -> int:
        return self._compiler.get_cache_size_bytes()

    def prepare(
        self, grammar: str, *, emitted: Sequence[int], stop_token_ids: Sequence[int]
    ) -> Future[Matcher]:
        return self._executor.submit(self._prepare, grammar, tuple(emitted), tuple(stop_token_ids))

    def _prepare(self, grammar: str, emitted: Sequence[int], stop_token_ids: Sequence[int]) -> Matcher:
        spec = GrammarSpec.from_text(grammar)
        stops = self._stops(stop_token_ids)
        if not stops:
            raise ValueError("grammar: this model has no token that could end the output")
        try:
            matcher = XMatcher(self._compile(spec), stops, vocab_size=self._vocab_size)
        except RuntimeError as error:
            reason = _ORIGIN.sub("", str(error)).strip()
            raise ValueError(f"grammar: {spec.kind} cannot be used: {reason}") from error
        for index, token_id in enumerate(emitted):
            if not matcher.accept(token_id):
                raise ValueError(f"grammar: output {index}, token {token_id}, does not follow it")
        return matcher

    def _stops(self, stop_token_ids: Sequence[int]) -> tuple[int, ...]:
        """A stop token that is text is an ordinary token of the grammar: it may well be part of it."""
        control = [
            token_id
            for token_id in stop_token_ids
            if 0 <= token_id < self._vocab_size and not self._vocabulary.is_text(token_id)
        ]
        return tuple(dict.fromkeys((*self._eos_token_ids, *control)))

    def _compile(self, spec: GrammarSpec) -> xgrammar.CompiledGrammar:
        match spec.kind:
            case "json_object":
                return self._json(_ANY_OBJECT, is_strict=False)
            case "json_schema":
                return self._json(spec.value, is_strict=spec.is_strict)
            case "regex":
                return self._compiler.compile_regex(spec.value)
            case "ebnf":
                return self._compiler.compile_grammar(spec.value)
            case "choice":
                return self._compiler.compile_grammar(f"root ::= {' | '.join(map(_quoted, spec.choices))}")

    def _json(self, schema: str, *, is_strict: bool) -> xgrammar.CompiledGrammar:
        return self._compiler.compile_json_schema(
            schema, any_whitespace=True, max_whitespace_cnt=_MAX_WHITESPACE, strict_mode=is_strict
        )


class XMatcher:
    """`Matcher` over one compiled grammar."""

    def __init__(
        self, compiled: xgrammar.CompiledGrammar, stop_token_ids: tuple[int, ...], *, vocab_size: int
    ) -> None:
        self._matcher = xgrammar.GrammarMatcher(compiled, override_stop_tokens=list(stop_token_ids))
        self._vocab_size = vocab_size
        self.stop_token_ids = stop_token_ids

    @property
    def is_over(self) -> bool:
        return self._matcher.is_terminated()

    def accept(self, token_id: int) -> bool:
        if self.is_over or not 0 <= token_id < self._vocab_size:
            return False
        return self._matcher.accept_token(token_id)

    def rollback(self, count: int) -> None:
        self._matcher.rollback(count)

    def fill(self, words_NW: Words, row: int) -> None:
        assert words_NW.dtype == np.int32
        self._matcher.fill_next_token_bitmask(words_NW, row)


def _quoted(text: str) -> str:
    """An EBNF literal: its escapes are JSON's."""
    return json.dumps(text, ensure_ascii=False)
