"""Sets a request of either endpoint up as an exchange: encode, plan every choice, choose the shapes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from router.api_keys import Bill, User
from router.errors import BadRequest
from router.front_door import FrontDoor
from router.openai.chat_format import ChatFormat
from router.openai.exchange import Choice, Exchange, Manner
from router.openai.logprobs import chat_content
from router.openai.messages import Message
from router.openai.requests import ChatRequest, CompletionRequest, Prompt, Wishes
from router.openai.response_exchange import ResponseExchange
from router.openai.response_output import ResponseOutput
from router.openai.response_shapes import ResponseShape
from router.openai.responses import ResponseRequest
from router.openai.shapes import ChatShape, CompletionShape, Envelope, Json, ShownPrompt
from router.openai.tokenizing import DetokenizeRequest, TokenizeRequest
from router.openai.tools import Tools
from router.planning import Label, ModelFacts, Plan, check_token_ids, cut
from router.text.options import PromptOptions, TemplateOptions

_COMPLETION = Manner(object_name="text_completion", chunk_name="text_completion")
_IDS_AT_ONCE = 65536
_CHAT = Manner(object_name="chat.completion", chunk_name="chat.completion.chunk")


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """What a request brought besides its body."""

    label: Label
    user: User
    is_debug: bool = False


class Answers:
    """Every refusal happens here, before any node hears of the request."""

    def __init__(
        self,
        door: FrontDoor,
        *,
        new_id: Callable[[], str],
        wall_clock: Callable[[], float],
        chat_format: ChatFormat,
    ) -> None:
        self._door = door
        self._chat_format = chat_format
        self._new_id = new_id
        self._wall_clock = wall_clock

    async def completion(self, request: CompletionRequest, origin: Origin) -> Exchange:
        """Raises RouterError."""
        facts = self._door.facts(request.wishes.model)
        wishes = replace(request.wishes, options=await self._door.in_tokens(request.wishes.options))
        encoded = await self._encode(request.prompts, wishes.text)
        prompts = [
            cut(prompt, wishes.text, facts, max_tokens=wishes.options.max_tokens) for prompt in encoded
        ]
        params = [f"prompt[{i}]" if request.is_list else "prompt" for i in range(len(prompts))]
        envelope = self._envelope("cmpl", wishes, facts)
        shown = [
            ShownPrompt(ids=ids, echo=await self._echo(prompt, ids, wishes) if request.echoes else None)
            for prompt, ids in zip(request.prompts, prompts, strict=True)
        ]
        shapes = [
            CompletionShape(index, envelope, tokenizer=self._door.tokenizer, prompt=shown[index // wishes.n])
            for index in range(len(prompts) * wishes.n)
        ]
        manner = _manner(_COMPLETION, wishes, origin)
        prompt_lens = [len(prompt) for prompt in prompts]
        bill = Bill(origin.user, sum(prompt_lens))
        plans = await self._plans(list(zip(prompts, params, strict=True)), wishes, origin=origin, facts=facts)
        choices = self._choices(plans, shapes, bill)
        return Exchange(
            choices,
            envelope=envelope,
            manner=manner,
            prompt_lens=prompt_lens,
            bill=bill,
            aside=self._door.aside,
        )

    async def chat(self, request: ChatRequest, origin: Origin) -> Exchange:
        """Raises RouterError."""
        facts = self._door.facts(request.wishes.model)
        wishes = await self._wishes(request)
        encoded = await self._door.encode_chat(request.messages, request.template, wishes.text)
        prompt = cut(encoded, wishes.text, facts, max_tokens=wishes.options.max_tokens)
        envelope = self._envelope("chatcmpl", wishes, facts)
        shapes = [
            ChatShape(
                index,
                envelope,
                tokenizer=self._door.tokenizer,
                prompt=ShownPrompt(ids=prompt),
                parts=self._chat_format.parts(
                    request.tools, prompt, is_constrained=wishes.options.constraint is not None
                ),
            )
            for index in range(wishes.n)
        ]
        manner = _manner(_CHAT, wishes, origin)
        bill = Bill(origin.user, len(prompt))
        plans = await self._plans([(prompt, "messages")], wishes, origin=origin, facts=facts)
        choices = self._choices(plans, shapes, bill)
        return Exchange(
            choices,
            envelope=envelope,
            manner=manner,
            prompt_lens=[len(prompt)],
            bill=bill,
            aside=self._door.aside,
        )

    async def response(self, request: ResponseRequest, origin: Origin) -> ResponseExchange:
        """Raises RouterError."""
        facts = self._door.facts(request.wishes.model)
        wishes = await self._wishes(request)
        encoded = await self._encode_chat(request.messages, request.template, wishes, param="input")
        prompt = cut(encoded, wishes.text, facts, max_tokens=wishes.options.max_tokens)
        plan = self._door.plan(
            prompt, wishes.options, facts=facts, label=_label(origin, wishes), param="input"
        )
        sampling = plan.request.sampling
        shape = ResponseShape(
            envelope=self._envelope("resp", wishes, facts),
            shown={**request.shown, "temperature": sampling.temperature, "top_p": sampling.top_p},
            num_prompt_tokens=len(prompt),
        )
        bill = Bill(origin.user, len(prompt))
        return ResponseExchange(
            self._door.generation(plan, spend=bill.spend, tells_texts=True),
            self._output(request.tools, wishes, prompt),
            shape,
            bill=bill,
            wall_clock=self._wall_clock,
        )

    async def tokenize(self, request: TokenizeRequest) -> Json:
        """Raises RouterError."""
        facts = self._door.facts(request.model)
        if request.prompt is None:
            ids = await self._door.encode_chat(request.messages, request.template, request.options)
        else:
            ids = await self._door.encode(request.prompt, request.options)
        shown: Json = {"count": len(ids), "max_model_len": facts.max_model_len, "tokens": ids}
        if not request.wants_strings:
            return shown | {"token_strs": None}
        token_text = self._door.tokenizer.token_text
        return shown | {
            "token_strs": await self._door.aside.run(len(ids), lambda: list(map(token_text, ids)))
        }

    async def detokenize(self, request: DetokenizeRequest) -> Json:
        """Text with special tokens shown, so that it can be tokenised again. Raises RouterError."""
        facts = self._door.facts(request.model)
        for start in range(0, len(request.ids), _IDS_AT_ONCE):
            check_token_ids(request.ids[start : start + _IDS_AT_ONCE], facts, param="tokens")
            await asyncio.sleep(0)
        return {"prompt": await self._door.decode(request.ids)}

    async def _wishes(self, request: ChatRequest | ResponseRequest) -> Wishes:
        """With all that tools, their parser and the tokenizer make of them."""
        options = self._chat_format.options(request.wishes.options, request.tools)
        return replace(request.wishes, options=await self._door.in_tokens(options))

    def _output(self, tools: Tools, wishes: Wishes, prompt: tuple[int, ...]) -> ResponseOutput:
        options, tokenizer = wishes.options, self._door.tokenizer
        num_top = options.logprobs
        show = None if num_top is None else partial(chat_content, tokenizer=tokenizer, num_top=num_top)
        return ResponseOutput(
            self._chat_format.answer(tools, prompt, is_constrained=options.constraint is not None),
            new_id=self._new_id,
            show_logprobs=show,
        )

    async def _encode(self, prompts: Sequence[Prompt], options: PromptOptions) -> Sequence[tuple[int, ...]]:
        """Ids of prompts; long ones are encoded at the same time."""
        if len(prompts) == 1:
            return [await self._door.encode(prompts[0], options)]
        return await asyncio.gather(*(self._door.encode(prompt, options) for prompt in prompts))

    async def _encode_chat(
        self, messages: Sequence[Message], template: TemplateOptions, wishes: Wishes, *, param: str
    ) -> tuple[int, ...]:
        """What the template finds wrong with the messages is wrong with the field they came in."""
        try:
            return await self._door.encode_chat(messages, template, wishes.text)
        except BadRequest as error:
            if error.param != "messages":
                raise
            raise BadRequest(error.message, param=param, code=error.code) from error

    async def _echo(self, prompt: Prompt, ids: tuple[int, ...], wishes: Wishes) -> str:
        """The prompt as the user wrote it, or the text of its ids where there is no such writing."""
        if isinstance(prompt, str) and wishes.text.keeps_last is None:
            return prompt
        return await self._door.decode(ids, shows_special=wishes.options.shows_special)

    async def _plans(
        self,
        prompts: Sequence[tuple[tuple[int, ...], str]],
        wishes: Wishes,
        *,
        origin: Origin,
        facts: ModelFacts,
    ) -> list[Plan]:
        """n for each prompt, one prompt after the other."""
        label = _label(origin, wishes)
        plans: list[Plan] = []
        for index, (prompt, param) in enumerate(prompts):
            if index:  # they may be long
                await asyncio.sleep(0)
            plans += [
                self._door.plan(prompt, wishes.options, facts=facts, label=label, choice=choice, param=param)
                for choice in range(wishes.n)
            ]
        return plans

    def _choices(
        self, plans: Sequence[Plan], shapes: Sequence[CompletionShape | ChatShape], bill: Bill
    ) -> list[Choice]:
        return [
            Choice(self._door.generation(plan, spend=bill.spend), shape)
            for plan, shape in zip(plans, shapes, strict=True)
        ]

    def _envelope(self, prefix: str, wishes: Wishes, facts: ModelFacts) -> Envelope:
        return Envelope(
            answer_id=f"{prefix}-{self._new_id()}",
            created=int(self._wall_clock()),
            model=facts.name,
            num_top=wishes.options.logprobs,
            prompt_top=wishes.prompt_top,
            wants_token_ids=wishes.wants_token_ids,
        )


def _label(origin: Origin, wishes: Wishes) -> Label:
    return replace(origin.label, priority=wishes.priority, cache_salt=wishes.cache_salt)


def _manner(base: Manner, wishes: Wishes, origin: Origin) -> Manner:
    return replace(base, wants_usage=wishes.wants_usage, is_debug=origin.is_debug)
