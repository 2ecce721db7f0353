"""Sets a request of either endpoint up as an exchange: encode, plan every choice, choose the shapes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.front_door import FrontDoor
from router.openai.exchange import Choice, Exchange, Manner
from router.openai.requests import ChatRequest, CompletionRequest, Prompt, Wishes
from router.openai.shapes import ChatShape, CompletionShape, Envelope, ShownPrompt
from router.planning import Label, ModelFacts

_COMPLETION = Manner(object_name="text_completion", chunk_name="text_completion")
_CHAT = Manner(object_name="chat.completion", chunk_name="chat.completion.chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a request brought besides its body."""

    label: Label
    is_debug: bool = False


class Answers:
    """Every refusal happens here, before any node hears of the request."""

    def __init__(
        self, door: FrontDoor, *, new_id: Callable[[], str], wall_clock: Callable[[], float]
    ) -> None:
        self._door = door
        self._new_id = new_id
        self._wall_clock = wall_clock

    async def completion(self, request: CompletionRequest, origin: Origin) -> Exchange:
        """Raises RouterError."""
        facts = self._door.facts(request.wishes.model)
        wishes = request.wishes
        encoded = await asyncio.gather(
            *(self._door.encode(prompt, wishes.text) for prompt in request.prompts)
        )
        prompts = [_cut(prompt, wishes, facts) for prompt in encoded]
        params = [f"prompt[{i}]" if request.is_list else "prompt" for i in range(len(prompts))]
        envelope = self._envelope("cmpl", wishes, facts)
        shown = [
            ShownPrompt(ids=ids, echo=self._echo(prompt, ids, wishes) if request.echoes else None)
            for prompt, ids in zip(request.prompts, prompts, strict=True)
        ]
        shapes = [
            CompletionShape(index, envelope, tokenizer=self._door.tokenizer, prompt=shown[index // wishes.n])
            for index in range(len(prompts) * wishes.n)
        ]
        manner = _manner(_COMPLETION, wishes, origin)
        choices = self._choices(
            list(zip(prompts, params, strict=True)), shapes, wishes, origin=origin, facts=facts
        )
        return Exchange(
            choices, envelope=envelope, manner=manner, prompt_lens=[len(prompt) for prompt in prompts]
        )

    async def chat(self, request: ChatRequest, origin: Origin) -> Exchange:
        """Raises RouterError."""
        facts = self._door.facts(request.wishes.model)
        encoded = await self._door.encode_chat(request.messages, request.template, request.wishes.text)
        prompt = _cut(encoded, request.wishes, facts)
        envelope = self._envelope("chatcmpl", request.wishes, facts)
        shapes = [
            ChatShape(index, envelope, tokenizer=self._door.tokenizer, prompt=ShownPrompt(ids=prompt))
            for index in range(request.wishes.n)
        ]
        manner = _manner(_CHAT, request.wishes, origin)
        choices = self._choices([(prompt, "messages")], shapes, request.wishes, origin=origin, facts=facts)
        return Exchange(choices, envelope=envelope, manner=manner, prompt_lens=[len(prompt)])

    def _echo(self, prompt: Prompt, ids: tuple[int, ...], wishes: Wishes) -> str:
        """The prompt as the user wrote it, or the text of its ids where there is no such writing."""
        if isinstance(prompt, str) and wishes.text.keeps_last is None:
            return prompt
        return self._door.tokenizer.decode(ids, shows_special=wishes.options.shows_special)

    def _choices(
        self,
        prompts: Sequence[tuple[tuple[int, ...], str]],
        shapes: Sequence[CompletionShape | ChatShape],
        wishes: Wishes,
        *,
        origin: Origin,
        facts: ModelFacts,
    ) -> list[Choice]:
        """Choice i belongs to prompt i // n."""
        label = replace(origin.label, priority=wishes.priority, cache_salt=wishes.cache_salt)
        choices: list[Choice] = []
        for index, shape in enumerate(shapes):
            prompt, param = prompts[index // wishes.n]
            plan = self._door.plan(
                prompt, wishes.options, facts=facts, label=label, choice=index % wishes.n, param=param
            )
            choices.append(Choice(self._door.generation(plan), shape))
        return choices

    def _envelope(self, prefix: str, wishes: Wishes, facts: ModelFacts) -> Envelope:
        return Envelope(
            answer_id=f"{prefix}-{self._new_id()}",
            created=int(self._wall_clock()),
            model=facts.name,
            num_top=wishes.options.logprobs,
            prompt_top=wishes.prompt_top,
            wants_token_ids=wishes.wants_token_ids,
        )


def _cut(prompt: tuple[int, ...], wishes: Wishes, facts: ModelFacts) -> tuple[int, ...]:
    """The last tokens of a prompt, where only so many are wanted."""
    num_kept = wishes.text.keeps_last
    if num_kept is None:
        return prompt
    if num_kept < 0:
        num_kept = max(1, facts.max_model_len - max(1, wishes.options.max_tokens or 1))
    return prompt[-num_kept:]


def _manner(base: Manner, wishes: Wishes, origin: Origin) -> Manner:
    return replace(base, wants_usage=wishes.wants_usage, is_debug=origin.is_debug)
