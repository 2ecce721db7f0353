"""Real grammars over a vocabulary of bytes: token i is byte i, token 0 ends a text."""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import cache
from typing import Any

from engine.grammar import Matcher
from engine.grammar_compiler import XGrammars
from engine.grammar_spec import GrammarSpec, Kind, json_schema_grammar
from engine.vocabulary import Vocabulary

EOS = 0
BYTES = Vocabulary((b"", *(bytes([byte]) for byte in range(1, 256))))


class Inline(Executor):
    """Runs what it is given at once."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:  # noqa: BLE001 - a future records whatever was raised
            future.set_exception(error)
        return future


@cache
def byte_grammars() -> XGrammars:
    return XGrammars(BYTES, vocab_size=256, eos_token_ids=[EOS], executor=Inline())


def matcher_of(
    spec: GrammarSpec, *, emitted: bytes = b"", stop_token_ids: tuple[int, ...] = (EOS,)
) -> Matcher:
    prepared = byte_grammars().prepare(spec.to_text(), emitted=emitted, stop_token_ids=stop_token_ids)
    return prepared.result()


def spec_of(kind: Kind, value: Any, *, is_strict: bool = True) -> GrammarSpec:
    if kind == "json_schema":
        return json_schema_grammar(value, is_strict=is_strict)
    if kind == "choice":
        return GrammarSpec(kind=kind, choices=tuple(value))
    return GrammarSpec(kind=kind, value=value)


def takes(spec: GrammarSpec, text: str) -> bool:
    """Whether the whole of `text` and nothing more is an output of the grammar."""
    matcher = matcher_of(spec)
    return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(EOS)
