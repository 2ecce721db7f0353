"""One accepted request and its answer, whole or as server-sent events.

Owns the choices of one request and the order of their chunks. Must never know sockets: the caller sends.
"""

from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from router.api_keys import Bill
from router.aside import Aside
from router.choices import Emit, run_all
from router.generation import Ended, Generation, TextDelta
from router.openai.logprobs import SIZE
from router.openai.shapes import Envelope, Json, Shape, extension, joined, usage

Told = tuple[int, TextDelta | Ended]
"""The place of a choice, and what it comes to next."""

DONE = b"data: [DONE]\n\n"
_LINE_ENDS = tuple((char.encode(), f"\\u{ord(char):04x}".encode()) for char in "\u0085\u2028\u2029")


@dataclass(frozen=True, slots=True, kw_only=True)
class Manner:
    """How the answer is to be given."""

    object_name: str
    chunk_name: str
    wants_usage: bool = False
    is_debug: bool = False


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation and how it is shown."""

    generation: Generation
    shape: Shape


class Exchange:
    """Runs the choices of one request. Cancelling the caller closes every generation at once.

    Choice i belongs to prompt i // n.
    """

    def __init__(
        self,
        choices: Sequence[Choice],
        *,
        envelope: Envelope,
        manner: Manner,
        prompt_lens: Sequence[int],
        bill: Bill,
        aside: Aside,
    ) -> None:
        self._bill = bill
        self._aside = aside
        self._choices = tuple(choices)
        self._envelope = envelope
        self._manner = manner
        self._prompt_lens = tuple(prompt_lens)
        self._ends: dict[int, Ended] = {}
        self._unopened = set(range(len(choices)))
        wants_more = envelope.num_top is not None or envelope.wants_token_ids
        self._shows_silence = wants_more or manner.is_debug
        # What all events of the answer begin with, and what most of them end with.
        self._begin = b"data: " + _encode(self._root(manner.chunk_name, [])).removesuffix(b"]}")
        self._extra: Json = {"usage": None} if manner.wants_usage else {}
        self._end = _ending(self._extra)

    async def body(self) -> Json:
        """The whole answer. Raises RouterError."""
        deltas: list[list[TextDelta]] = [[] for _ in self._choices]

        def collect(index: int, item: TextDelta | Ended) -> None:
            if isinstance(item, Ended):
                self._ends[index] = item
            else:
                deltas[index].append(item)

        await self._run(collect)
        size = sum(self._size(delta) for of_choice in deltas for delta in of_choice)
        return await self._aside.run(size, lambda: self._whole([joined(one) for one in deltas]))

    def _whole(self, whole: Sequence[TextDelta]) -> Json:
        choices = [
            choice.shape.whole(whole[index], self._ends[index].reason)
            for index, choice in enumerate(self._choices)
        ]
        return {
            **self._root(self._manner.object_name, choices),
            **self._choices[0].shape.root(whole[0]),
            "usage": self._usage(),
            **extension(self._ends),
        }

    async def stream(self, put: Callable[[Told], None]) -> None:
        """Puts all there is to show. After a RouterError nothing may follow but the error."""
        await self._run(lambda index, item: put((index, item)))

    async def shown(self, told: Told) -> bytes:
        index, item = told
        opening = b""
        if index in self._unopened:
            self._unopened.remove(index)
            opening = await self._opening(index, item)
        return opening + self._shown(index, item)

    def shown_now(self, told: Told) -> bytes | None:
        index, item = told
        return None if index in self._unopened else self._shown(index, item)

    def _shown(self, index: int, item: TextDelta | Ended) -> bytes:
        return self._closing(index, item) if isinstance(item, Ended) else self._delta(index, item)

    def _run(self, emit: Emit) -> Coroutine[Any, Any, None]:
        return run_all([choice.generation for choice in self._choices], emit, bill=self._bill)

    async def _opening(self, index: int, item: TextDelta | Ended) -> bytes:
        first = None if isinstance(item, Ended) else item
        size = 0 if first is None else self._size(first)
        choice = await self._aside.run(size, lambda: self._choices[index].shape.opening(first))
        return b"" if choice is None else self._event(choice)

    def _size(self, delta: TextDelta) -> int:
        """What showing it takes, as far as that may be long."""
        num_top = max(self._envelope.num_top or 0, self._envelope.prompt_top or 0)
        return SIZE * (1 + num_top) * (len(delta.logprobs or ()) + len(delta.prompt_logprobs or ()))

    def _delta(self, index: int, delta: TextDelta) -> bytes:
        """Tokens whose text is not definite yet make no chunk, unless the client asked for more than text."""
        shape = self._choices[index].shape
        choice = shape.chunk(delta)
        if not shape.has_text(choice) and not (self._shows_silence and delta.ids):
            return b""
        if not self._manner.is_debug:
            return self._event(choice)
        counts = {
            "accepted": delta.accepted,
            "accepted_chars": delta.accepted_chars,
            "ids": len(delta.ids),
        }
        return self._event(choice, {"paceline": counts})

    def _closing(self, index: int, end: Ended) -> bytes:
        self._ends[index] = end
        choice = self._choices[index].shape.closing(end.reason)
        if len(self._ends) < len(self._choices):
            return self._event(choice)
        if not self._manner.wants_usage:
            return self._event(choice, extension(self._ends)) + DONE
        totals = {"usage": self._usage(), **extension(self._ends)}
        return self._event(choice) + self._event(None, totals) + DONE

    def _event(self, choice: Json | None, extra: Json | None = None) -> bytes:
        """A chunk with one choice or none; `extra` stands beside the choices."""
        shown = b"" if choice is None else _encode(choice)
        return self._begin + shown + (_ending({**self._extra, **extra}) if extra else self._end)

    def _root(self, object_name: str, choices: list[Json]) -> Json:
        return {
            "id": self._envelope.answer_id,
            "object": object_name,
            "created": self._envelope.created,
            "model": self._envelope.model,
            "choices": choices,
        }

    def _usage(self) -> Json:
        return usage(self._prompt_lens, self._ends, n=len(self._choices) // len(self._prompt_lens))


def sse(value: Json, *, kind: str = "") -> bytes:
    """One server-sent event, of a kind that has a name or not.

    Clients that split text at all of Unicode's line ends, as Python's `splitlines` does, find none in it.
    """
    head = b"event: " + kind.encode() + b"\ndata: " if kind else b"data: "
    return head + _encode(value) + b"\n\n"


def _encode(value: Json) -> bytes:
    data = msgspec.json.encode(value)
    if not data.isascii():
        for line_end, escape in _LINE_ENDS:
            data = data.replace(line_end, escape)
    return data


def _ending(extra: Json) -> bytes:
    """What follows the choices of an event."""
    return b"]" + (b"," + _encode(extra)[1:] if extra else b"}") + b"\n\n"
