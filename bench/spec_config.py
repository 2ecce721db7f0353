"""Settings of `paceline bench spec`: one field = one flag; and how a drafting algorithm is written."""

from dataclasses import dataclass
from pathlib import Path

from deploy.config import BUNDLED_MODEL

PLAIN = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """`label` is the algorithm as the user wrote it, options included."""

    label: str
    algorithm: str
    options: dict[str, object]


@dataclass(frozen=True, slots=True, kw_only=True)
class SpecBench:
    """What to draft with and how much of it. Bad values raise ValueError naming the field."""

    prompts: str
    """JSON lines with category and turns, as of Spec-Bench; only the first turn is used."""

    per_category: int = 0
    """Most prompts of each category, the first ones; 0: all."""

    algorithms: str = "none,ngram,eagle3,dflash"
    """What to compare, such as "ngram,eagle3:num_steps=4+topk=4"; none is always measured."""

    max_tokens: int = 64
    """Most tokens of an answer; the end-of-sequence token ends it earlier."""

    model: str = BUNDLED_MODEL
    """Hugging Face folder, .gguf file, or smollm2."""

    dtype: str = "bfloat16"
    """Type of weights and activations."""

    threads: int = 0
    """Threads of the engine; 0: all cores."""

    json: str = ""
    """File for the numbers; empty: none."""

    plot: str = ""
    """File for the plot, a PNG; empty: next to the JSON file."""

    def __post_init__(self) -> None:
        for field, value, least in (
            ("per_category", self.per_category, 0),
            ("max_tokens", self.max_tokens, 2),
            ("threads", self.threads, 0),
        ):
            if value < least:
                raise ValueError(f"{field} must be at least {least}, got {value!r}")
        if not self.prompts:
            raise ValueError("prompts must be a file, got ''")
        contenders(self.algorithms)

    @property
    def contenders(self) -> tuple[Contender, ...]:
        return contenders(self.algorithms)

    @property
    def plot_path(self) -> Path | None:
        if self.plot:
            return Path(self.plot)
        return Path(self.json).with_suffix(".png") if self.json else None


def contenders(text: str) -> tuple[Contender, ...]:
    """Plain decoding first, then the others as named: NAME:KEY=VALUE+KEY=VALUE. Raises ValueError."""
    found = [_contender(word.strip()) for word in text.split(",") if word.strip()]
    labels = [one.label for one in found]
    if len(set(labels)) != len(labels):
        raise ValueError(f"algorithms must name each one once, got {text!r}")
    if not found:
        raise ValueError(f"algorithms must name at least one, got {text!r}")
    plain = Contender(label=PLAIN, algorithm=PLAIN, options={})
    return (plain, *(one for one in found if one.label != PLAIN))


def _contender(word: str) -> Contender:
    """Whole numbers become int. The folder of a head is an option too: draft=FOLDER."""
    named, equals, _ = word.partition("=")
    # module:factory is an algorithm too, and budget_slots=1:0/2 a value.
    algorithm = named.rpartition(":")[0] if equals else word
    rest = word[len(algorithm) + 1 :]
    options: dict[str, object] = {}
    for part in rest.split("+") if rest else ():
        name, _, value = part.partition("=")
        if not (algorithm and name and value):
            raise ValueError(f"algorithms must look like NAME:KEY=VALUE+KEY=VALUE, got {word!r}")
        options[name] = int(value) if value.isdigit() else value
    return Contender(label=word, algorithm=algorithm, options=options)
