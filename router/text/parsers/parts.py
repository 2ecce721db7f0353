"""What a model's text is made of, and the seam of everything that takes it apart."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Content:
    """Words for the user."""

    text: str


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Words the model wrote to itself."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """The model calls a tool. Calls of one answer are numbered from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class CallArguments:
    """More of a call's arguments: JSON text, as the model wrote it."""

    index: int
    text: str


Part = Content | Reasoning | CallStart | CallArguments


class Parser(Protocol):
    """Takes one answer apart. The parts do not depend on how the text was split into pushes, but for
    where texts of one kind are cut."""

    def push(self, text: str) -> list[Part]: ...

    def finish(self) -> list[Part]:
        """What was held back, now that nothing follows."""
        ...


def joined(first: Part, second: Part) -> Part | None:
    """Two neighbouring texts of one kind as one, None where they are not."""
    match first, second:
        case (Content(before), Content(after)):
            return Content(before + after)
        case (Reasoning(before), Reasoning(after)):
            return Reasoning(before + after)
        case (CallArguments(index, before), CallArguments(other, after)) if index == other:
            return CallArguments(index, before + after)
    return None


def merged(parts: Sequence[Part]) -> list[Part]:
    """The same parts with neighbouring texts of one kind joined, empty ones left out."""
    result: list[Part] = []
    for part in parts:
        if not isinstance(part, CallStart) and not part.text:
            continue
        if result and (longer := joined(result[-1], part)) is not None:
            result[-1] = longer
        else:
            result.append(part)
    return result


def held_length(text: str, marker: str) -> int:
    """How many characters at the end of `text` may be the beginning of `marker`."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
