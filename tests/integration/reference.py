"""Prompts for SmolLM2, and what `transformers.generate` answers to them in float32."""

import functools
import hashlib
import json
import os
import random
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerBase

from deploy.models import bundled

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 300)

COUNTING = "one two three four five six seven eight nine ten\n" * 4 + "one two three four"
TEXTS = (
    "The capital of France is",
    "def add(a, b):\n    return a + b\n\ndef sub(a, b):\n",
    COUNTING,
)
CHATS = ("What is the capital of Italy?", "Say: one two three one two three")

_PASSAGE = """
A paceline is a line of cyclists who ride close behind one another. The rider in front breaks the wind, and
those who follow spend less of their strength. After a while the leader swings aside, drops back along the
line and joins it again at the end, and the next one takes the lead. Nobody stays in front for long, and
nobody hides behind for ever. It works because everyone holds a steady speed, rides a straight course and
says loudly what lies on the road. When the road turns, the wind turns with it, and the line leans over into
an echelon, each rider half a wheel to the side of the one before. A gap that opens is closed slowly, for a
sprint to close it would only tear the next one open. On a long flat road by the sea ten friends can ride
for hours at a speed that none of them could hold alone for half of one. The oldest of them, who had raced
in the mountains when the roads were still made of gravel, liked to say that a paceline is a promise: you
give your minute in the wind today because somebody gave you theirs a minute ago. In the evening they sat
by the harbour, ate fried fish and bread, drank cold lemonade, and argued about gears until it was dark.
"""


@functools.cache
def tokenizer() -> PreTrainedTokenizerBase:
    loaded: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(bundled())
    return loaded


@functools.cache
def passage() -> tuple[int, ...]:
    return tuple(tokenizer()(_PASSAGE).input_ids)


def prompt_of(length: int) -> tuple[int, ...]:
    """Text whose second half repeats its beginning, so that drafts are accepted as well as rejected."""
    start = 7 * length % 40
    head = passage()[start : start + length]
    motif = head[: max(1, length // 5)]
    return (head[: length // 2] + motif * 10)[:length] or head


def long_prompt(length: int, *, seed: int) -> list[int]:
    """Ids nobody has in a cache."""
    rng = random.Random(f"long {seed}")
    return [rng.randrange(1000, 40_000) for _ in range(length)]


def chat_ids(question: str) -> tuple[int, ...]:
    text = tokenizer().apply_chat_template(
        [{"role": "user", "content": question}], add_generation_prompt=True, tokenize=False
    )
    return tuple(tokenizer()(text, add_special_tokens=False).input_ids)


def text_of(ids: Sequence[int]) -> str:
    return str(tokenizer().decode(list(ids), skip_special_tokens=True))


class Reference:
    """Greedy continuations, computed once and kept in a file between runs."""

    def __init__(self) -> None:
        self._path = Path(tempfile.gettempdir()) / f"paceline-test-reference-{os.getuid()}-{_version()}.json"
        self._known: dict[str, list[int]] = {}
        if self._path.is_file():
            self._known = json.loads(self._path.read_text())

    def need(self, prompts: Mapping[tuple[int, ...], int]) -> None:
        """Compute what is missing: prompts with the number of tokens wanted of each."""
        missing = {ids: count for ids, count in prompts.items() if len(self._of(ids)) < count}
        if not missing:
            return
        model = AutoModelForCausalLM.from_pretrained(bundled(), dtype=torch.float32).eval()
        for ids, count in missing.items():
            with torch.inference_mode():
                output = model.generate(
                    torch.tensor([ids]),
                    attention_mask=torch.ones(1, len(ids)),  # else it would hide end tokens inside a prompt
                    max_new_tokens=count,
                    do_sample=False,
                    eos_token_id=None,
                )
            self._known[_key(ids)] = output[0, len(ids) :].tolist()
        unfinished = self._path.with_suffix(f".{os.getpid()}")
        unfinished.write_text(json.dumps(self._known))
        unfinished.rename(self._path)

    def ids(self, prompt: Sequence[int], count: int) -> list[int]:
        found = self._of(prompt)
        assert len(found) >= count, "ask with need() first"
        return found[:count]

    def _of(self, prompt: Sequence[int]) -> list[int]:
        return self._known.get(_key(prompt), [])


def _key(ids: Sequence[int]) -> str:
    return hashlib.sha256(json.dumps(list(ids)).encode()).hexdigest()


def _version() -> str:
    """Other weights or another transformers must not find our answers."""
    weights = (bundled() / "model.safetensors").stat()
    facts = [transformers.__version__, torch.__version__, weights.st_size, weights.st_mtime_ns]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:12]
