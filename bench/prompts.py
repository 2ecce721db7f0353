"""The prompts of a measurement: built in, or from a file; and prompts of an exact length.

Owns their texts. Must never know who answers them.
"""

import json
import random
from pathlib import Path
from typing import Any

from router.text.tokenizer import Tokenizer

BUILT_IN = (
    "Explain to a new rider why a paceline is faster than riding alone, in five short steps.",
    "Write a short story about a lighthouse keeper who finds a letter in a bottle.",
    "List the planets of the solar system with one fact about each of them.",
    "def fibonacci(n):\n    # Returns the first n Fibonacci numbers as a list.\n",
    "Translate into plain English: the aforementioned party shall hold the other party harmless.",
    "A recipe for a vegetable soup for four people. Ingredients:",
    "Summarise what happens to water when it is heated from ice to steam, with the temperatures.",
    "Dear hiring manager, I am writing to apply for the position of librarian at your school.",
)


def load(path: Path | None) -> tuple[str, ...]:
    """The prompts of a JSON-lines file, or the built-in ones. Raises ValueError naming the line."""
    if path is None:
        return BUILT_IN
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ValueError(f"prompts must be a readable file, got {str(path)!r}: {error.strerror}") from error
    found = tuple(parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip())
    if not found:
        raise ValueError(f"prompts must hold at least one line, got none in {str(path)!r}")
    return found


def parse(line: str, place: str) -> str:
    """One prompt: a JSON string, or an object with `prompt`, `turns`, `messages` or `user`."""
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{place} must be JSON: {error}") from error
    text = value if isinstance(value, str) else _text_of(value) if isinstance(value, dict) else None
    if not isinstance(text, str) or not text:
        raise ValueError(
            f"{place} must be a string or hold prompt, turns, messages or user, got {line[:80]!r}"
        )
    return text


def _text_of(value: dict[str, Any]) -> Any:
    match value:
        case (
            {"prompt": text} | {"turns": [text, *_]} | {"messages": [{"content": text}, *_]} | {"user": text}
        ):
            return text
    return None


def of_length(tokenizer: Tokenizer, num_tokens: int, *, seed: int) -> str:
    """A text of exactly so many tokens, different for each seed, so that no cache can know it.

    Words that are one token each, space included, in random order: encoding cannot join them.
    """
    words = _words(tokenizer)
    return "".join(random.Random(seed).choices(words, k=num_tokens))


def _words(tokenizer: Tokenizer) -> list[str]:
    texts = (tokenizer.token_bytes(token_id) for token_id in range(tokenizer.vocab_size))
    words = [text.decode() for text in texts if text[:1] == b" " and len(text) > 3 and _is_word(text[1:])]
    if not words:
        raise ValueError("the vocabulary must hold whole words with a space before them, got none")
    return words


def _is_word(text: bytes) -> bool:
    return text.isalpha() and text.islower()
