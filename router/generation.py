"""One generation as both front ends see it: a plan in, text deltas out.

Owns the text and the count of one answer. Must never know HTTP, gRPC, or which node does what.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import msgspec

from router.planning import Plan
from router.requests import Delta, GenerateRequest, Outcome, Take, TokenLogprob
from router.text.stream import Piece, TextStream
from router.text.tokenizer import Tokenizer

_NOTHING = Piece("", 0)


class Generates(Protocol):
    """The dispatcher, as front ends know it."""

    async def generate(self, request: GenerateRequest, take: Take) -> Outcome | None:
        """Deltas in index order go to `take`; None when it wanted no more. Cancelling it cancels the request.
        Raises RouterError."""
        ...


class TextDelta(msgspec.Struct, frozen=True, kw_only=True, gc=False):
    """New tokens that belong to the answer, and the text that became definite with them.

    The first `accepted` tokens were drafted; the first `accepted_chars` of `text` are theirs. The first
    delta has `prompt_logprobs` where they were asked for. `texts`: the text that became definite with each
    token, where generations were asked to tell.
    """

    text: str
    ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] | None = None
    accepted: int = 0
    accepted_chars: int = 0
    prompt_logprobs: tuple[TokenLogprob, ...] | None = None
    texts: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """Rounds in which tokens were drafted. `histogram[k]` rounds accepted k drafts."""

    num_steps: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    histogram: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The last item. `outcome` is None when a stop string ended the answer before the nodes did."""

    reason: str  # "stop" or "length"
    num_tokens: int
    speculation: Speculation
    ttft_s: float
    outcome: Outcome | None

    @property
    def is_cut(self) -> bool:
        """The answer would have gone on."""
        return self.reason == "length"


Tell = Callable[[TextDelta | Ended], None]


class Generation:
    """Runs one plan, once. Cancelling `run()` at any point cancels the work on the nodes."""

    def __init__(
        self,
        plan: Plan,
        *,
        dispatcher: Generates,
        tokenizer: Tokenizer,
        clock: Callable[[], float],
        spend: Callable[[int], None],
        tells_texts: bool = False,
    ) -> None:
        self._tells_texts = tells_texts
        self._spend = spend
        sampling = plan.request.sampling
        self._request = plan.request
        self._dispatcher = dispatcher
        self._clock = clock
        self._is_empty = plan.is_empty
        self._has_logprobs = sampling.logprobs is not None
        self._stream = TextStream(
            tokenizer.detokenizer(plan.request.prompt_ids, shows_special=plan.shows_special),
            stops=plan.stops,
            shows_stop=plan.shows_stop,
            stop_token_ids=frozenset(sampling.stop_token_ids),
            min_tokens=sampling.min_tokens,
        )
        self._drafted = 0
        self._accepted: Counter[int] = Counter()
        self._first_at: float | None = None

    async def run(self, tell: Tell) -> None:
        """Tells text deltas as they come, then one Ended. Raises RouterError, and what `tell` raises."""
        started = self._clock()

        def take(delta: Delta) -> bool:
            if self._first_at is None:
                self._first_at = self._clock()
            tell(self._shown(delta))
            return not self._stream.is_stopped_by_text

        try:
            outcome = await self._dispatcher.generate(self._request, take)
        finally:
            if self._first_at is not None:
                self._spend(self._stream.num_tokens)
        if rest := self._stream.finish():
            tell(TextDelta(text=rest, ids=(), logprobs=() if self._has_logprobs else None))
        tell(self._ended(outcome, ttft_s=0.0 if self._first_at is None else self._first_at - started))

    def _shown(self, delta: Delta) -> TextDelta:
        if self._is_empty:
            return TextDelta(text="", ids=(), prompt_logprobs=delta.prompt_logprobs)
        return self._take_each(delta) if self._tells_texts else self._take(delta)

    def _take(self, delta: Delta) -> TextDelta:
        drafted = self._stream.push(delta.ids[: delta.accepted]) if delta.accepted else _NOTHING
        drawn = self._stream.push(delta.ids[delta.accepted :])
        num_tokens = drafted.num_tokens + drawn.num_tokens
        if delta.drafted:
            self._count(delta, num_tokens=num_tokens, num_accepted=drafted.num_tokens)
        return TextDelta(
            text=drafted.text + drawn.text,
            ids=delta.ids[:num_tokens],
            logprobs=None if delta.logprobs is None else delta.logprobs[:num_tokens],
            accepted=drafted.num_tokens,
            accepted_chars=len(drafted.text),
            prompt_logprobs=delta.prompt_logprobs,
        )

    def _take_each(self, delta: Delta) -> TextDelta:
        texts: list[str] = []
        for token_id in delta.ids:
            piece = self._stream.push((token_id,))
            if not piece.num_tokens:
                break
            texts.append(piece.text)
        num_accepted = min(delta.accepted, len(texts))
        if delta.drafted:
            self._count(delta, num_tokens=len(texts), num_accepted=num_accepted)
        return TextDelta(
            text="".join(texts),
            ids=delta.ids[: len(texts)],
            logprobs=None if delta.logprobs is None else delta.logprobs[: len(texts)],
            accepted=num_accepted,
            accepted_chars=sum(map(len, texts[:num_accepted])),
            prompt_logprobs=delta.prompt_logprobs,
            texts=tuple(texts),
        )

    def _count(self, delta: Delta, *, num_tokens: int, num_accepted: int) -> None:
        if num_tokens:
            self._drafted += delta.drafted
            self._accepted[num_accepted] += 1

    def _ended(self, outcome: Outcome | None, *, ttft_s: float) -> Ended:
        is_cut = outcome is None or self._stream.is_stopped_by_text
        reason = "stop" if is_cut else outcome.reason if outcome else "stop"
        return Ended(
            reason="length" if self._is_empty else reason,
            num_tokens=self._stream.num_tokens,
            speculation=self._speculation(),
            ttft_s=ttft_s,
            outcome=outcome,
        )

    def _speculation(self) -> Speculation:
        counts = self._accepted
        return Speculation(
            num_steps=counts.total(),
            num_drafted=self._drafted,
            num_accepted=sum(accepted * times for accepted, times in counts.items()),
            histogram=tuple(counts[k] for k in range(max(counts, default=-1) + 1)),
        )
