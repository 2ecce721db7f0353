"""The items of a response as they grow: messages, reasoning and calls, and the events that tell of it.

Owns the order of items and events, and whose tokens are whose. Must never know the numbers of events or the
response around the items.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import msgspec

from router.generation import TextDelta
from router.openai.answer_parts import AnswerParts
from router.requests import TokenLogprob
from router.text.parsers.parts import CallArguments, CallStart, Content, Part, Reasoning, joined

Json = dict[str, Any]
Event = tuple[str, Json]
"""Its type and its fields."""

ShowLogprobs = Callable[[Sequence[int], Sequence[TokenLogprob]], list[msgspec.Raw]]


@dataclass(frozen=True, slots=True)
class _Tokens:
    ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()

    def and_then(self, other: "_Tokens") -> "_Tokens":
        return _Tokens(self.ids + other.ids, self.logprobs + other.logprobs)


@dataclass(frozen=True, slots=True)
class _Step:
    """A part, and the tokens that were needed to know it."""

    part: Part
    tokens: _Tokens


class _Item(Protocol):
    """One item of the output, which grows until it is closed."""

    def opened(self) -> list[Event]: ...

    def grown(self, text: str, tokens: _Tokens) -> list[Event]: ...

    def closed(self, status: str) -> list[Event]: ...

    def shown(self, status: str) -> Json: ...


@dataclass(frozen=True, slots=True)
class _Place:
    item_id: str
    index: int

    def about(self, kind: str, **fields: Any) -> Event:
        return kind, {"item_id": self.item_id, "output_index": self.index, **fields}

    def item(self, kind: str, item: Json) -> Event:
        return f"response.output_item.{kind}", {"output_index": self.index, "item": item}


class _Words:
    """A message or reasoning: one part of text. `show` None: log-probabilities are not for this kind."""

    def __init__(
        self, place: _Place, *, head: Json, part: Json, event: str, show: ShowLogprobs | None
    ) -> None:
        self._place = place
        self._head = head
        self._part_head = part
        self._event = event
        self._show = show
        self._texts: list[str] = []
        self._logprobs: list[msgspec.Raw] = []
        self._is_open = False

    def opened(self) -> list[Event]:
        added = self._place.item("added", self.shown("in_progress"))
        self._is_open = True
        return [added, self._about("response.content_part.added", part=self._part())]

    def grown(self, text: str, tokens: _Tokens) -> list[Event]:
        self._texts.append(text)
        if self._show is None:
            return [self._about(f"{self._event}.delta", delta=text)]
        logprobs = self._show(tokens.ids, tokens.logprobs)
        self._logprobs += logprobs
        return [self._about(f"{self._event}.delta", delta=text, logprobs=logprobs)]

    def closed(self, status: str) -> list[Event]:
        part = self._part()
        done = {key: part[key] for key in ("text", "logprobs") if key in part}
        return [
            self._about(f"{self._event}.done", **done),
            self._about("response.content_part.done", part=part),
            self._place.item("done", self.shown(status)),
        ]

    def shown(self, status: str) -> Json:
        content = [self._part()] if self._is_open else []
        return {**self._head, "id": self._place.item_id, "status": status, "content": content}

    def _part(self) -> Json:
        logprobs = {} if self._show is None else {"logprobs": list(self._logprobs)}
        return {**self._part_head, "text": "".join(self._texts), **logprobs}

    def _about(self, kind: str, **fields: Any) -> Event:
        return self._place.about(kind, content_index=0, **fields)


class _Call:
    def __init__(self, place: _Place, *, call_id: str, name: str) -> None:
        self._place = place
        self._call_id = call_id
        self._name = name
        self._arguments: list[str] = []

    def opened(self) -> list[Event]:
        return [self._place.item("added", self.shown("in_progress"))]

    def grown(self, text: str, tokens: _Tokens) -> list[Event]:  # noqa: ARG002  calls have no log-probabilities
        self._arguments.append(text)
        return [self._place.about("response.function_call_arguments.delta", delta=text)]

    def closed(self, status: str) -> list[Event]:
        done = {"name": self._name, "arguments": "".join(self._arguments)}
        return [
            self._place.about("response.function_call_arguments.done", **done),
            self._place.item("done", self.shown(status)),
        ]

    def shown(self, status: str) -> Json:
        return {
            "type": "function_call",
            "id": self._place.item_id,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": "".join(self._arguments),
            "status": status,
        }


class ResponseOutput:
    """Items one after the other; all but the last are done. How tokens come in events changes nothing but
    where deltas are cut.

    A token is of the item whose part it completed; tokens that only held a part back are of the item that
    came of it. `show_logprobs` None: none were asked for.
    """

    def __init__(
        self, answer: AnswerParts, *, new_id: Callable[[], str], show_logprobs: ShowLogprobs | None
    ) -> None:
        self._answer = answer
        self._new_id = new_id
        self._show_logprobs = show_logprobs or _show_nothing
        self._open: _Item | None = None
        self._open_kind: type[Part] | None = None
        self._held = _Tokens()
        self.items: list[Json] = []
        self.num_reasoning_tokens = 0

    def push(self, delta: TextDelta) -> list[Event]:
        """`delta` tells the text of every token."""
        steps: list[_Step] = []
        logprobs = delta.logprobs or ()
        for index, text in enumerate(delta.texts):
            token = _Tokens(delta.ids[index : index + 1], logprobs[index : index + 1])
            self._held = self._held.and_then(token)
            self._note(self._answer.push(text), steps)
        if not delta.ids:
            self._note(self._answer.push(delta.text), steps)
        return self._told(steps)

    def finish(self, *, is_cut: bool) -> list[Event]:
        """The rest of the last item, a message when there is none. `is_cut`: it has no proper end."""
        steps: list[_Step] = []
        self._note(self._answer.finish(), steps)
        events = self._told(steps)
        if self._open is None:
            events += self._begin(Content, self._message())
        if self._held.logprobs and self._open_kind is Content and self._open is not None:
            events += self._open.grown("", self._held)
        self._count(self._held)
        return events + self._end("incomplete" if is_cut else "completed")

    def _note(self, parts: Sequence[Part], steps: list[_Step]) -> None:
        """Add parts to the steps. The tokens held so far are of the first words among them, if any are."""
        owner = next((i for i, part in enumerate(parts) if isinstance(part, Content)), 0)
        for index, part in enumerate(parts):
            tokens = self._held if index == owner else _Tokens()
            if steps and (longer := joined(steps[-1].part, part)) is not None:
                steps[-1] = replace(steps[-1], part=longer, tokens=steps[-1].tokens.and_then(tokens))
            else:
                steps.append(_Step(part, tokens))
        if parts:
            self._held = _Tokens()

    def _told(self, steps: Sequence[_Step]) -> list[Event]:
        events: list[Event] = []
        for step in steps:
            match step.part:
                case CallStart(_, name):
                    call = _Call(self._place("fc"), call_id=self._answer.new_call_id(), name=name)
                    events += self._begin(CallStart, call)
                case CallArguments(_, text):
                    events += self._grow(text, step.tokens)
                case Content(text):
                    if self._open_kind is not Content:
                        events += self._begin(Content, self._message())
                    events += self._grow(text, step.tokens)
                case Reasoning(text):
                    if self._open_kind is not Reasoning:
                        events += self._begin(Reasoning, self._reasoning())
                    events += self._grow(text, step.tokens)
        return events

    def _begin(self, kind: type[Part], item: _Item) -> list[Event]:
        events = self._end("completed")
        self._open, self._open_kind = item, kind
        return events + item.opened()

    def _grow(self, text: str, tokens: _Tokens) -> list[Event]:
        assert self._open is not None
        self._count(tokens)
        return self._open.grown(text, tokens)

    def _count(self, tokens: _Tokens) -> None:
        if self._open_kind is Reasoning:
            self.num_reasoning_tokens += len(tokens.ids)

    def _end(self, status: str) -> list[Event]:
        if self._open is None:
            return []
        self.items.append(self._open.shown(status))
        return self._open.closed(status)

    def _place(self, prefix: str) -> _Place:
        return _Place(f"{prefix}-{self._new_id()}", len(self.items) + (self._open is not None))

    def _message(self) -> _Words:
        return _Words(
            self._place("msg"),
            head={"type": "message", "role": "assistant"},
            part={"type": "output_text", "annotations": []},
            event="response.output_text",
            show=self._show_logprobs,
        )

    def _reasoning(self) -> _Words:
        return _Words(
            self._place("rs"),
            head={"type": "reasoning", "summary": [], "encrypted_content": None},
            part={"type": "reasoning_text"},
            event="response.reasoning_text",
            show=None,
        )


def _show_nothing(ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> list[msgspec.Raw]:  # noqa: ARG001
    return []
