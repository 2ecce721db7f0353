"""Sets a request of either endpoint up as an exchange: encode, plan every choice, choose the shapes."""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from router.api_keys import User
from router.errors import BadRequest
from router.front_door import FrontDoor
from router.openai.chat_parts import ChatParts
from router.openai.exchange import Choice, Exchange, Manner
from router.openai.messages import Message
from router.openai.requests import ChatRequest, CompletionRequest, Prompt, Wishes
from router.openai.response_exchange import ResponseExchange
from router.openai.response_shapes import ResponseShape
from router.openai.responses import ResponseRequest
from router.openai.shapes import ChatShape, CompletionShape, Envelope, Json, ShownPrompt
from router.openai.tokenizing import DetokenizeRequest, TokenizeRequest
from router.openai.tools import Tools
from router.planning import Label, ModelFacts, check_token_ids, cut
from router.text.options import TemplateOptions
from router.text.parsers.catalogue import PLAIN, AnswerFormat
from router.text.parsers.parts import Parser
from router.text.parsers.tool_calls import JsonListCalls, NamedCall, PlainText

_COMPLETION = Manner(object_name="text_completion", chunk_name="text_completion")
# Enough of the prompt's end to see whether it opens the reasoning.
_NUM_END_TOKENS = 8
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
        answer_format: AnswerFormat = PLAIN,
    ) -> None:
        self._door = door
        self._format = answer_format
        self._new_id = new_id
        self._wall_clock = wall_clock

    async def completion(self, request: CompletionRequest, origin: Origin) -> Exchange:
        """Raises RouterError."""
        facts = self._door.facts(request.wishes.model)
        wishes = request.wishes
        encoded = await asyncio.gather(
            *(self._door.encode(prompt, wishes.text) for prompt in request.prompts)
        )
        prompts = [
            cut(prompt, wishes.text, facts, max_tokens=wishes.options.max_tokens) for prompt in encoded
        ]
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
        wishes = self._with_format(request.wishes, request.tools)
        encoded = await self._door.encode_chat(request.messages, request.template, wishes.text)
        prompt = cut(encoded, wishes.text, facts, max_tokens=wishes.options.max_tokens)
        envelope = self._envelope("chatcmpl", wishes, facts)
        shapes = [
            ChatShape(
                index,
                envelope,
                tokenizer=self._door.tokenizer,
                prompt=ShownPrompt(ids=prompt),
                parts=self._parts(request.tools, wishes, prompt),
            )
            for index in range(wishes.n)
        ]
        manner = _manner(_CHAT, wishes, origin)
        choices = self._choices([(prompt, "messages")], shapes, wishes, origin=origin, facts=facts)
        return Exchange(choices, envelope=envelope, manner=manner, prompt_lens=[len(prompt)])

    async def response(self, request: ResponseRequest, origin: Origin) -> ResponseExchange:
        """Raises RouterError."""
        wishes = request.wishes
        facts = self._door.facts(wishes.model)
        encoded = await self._encode_chat(request.messages, request.template, wishes, param="input")
        prompt = cut(encoded, wishes.text, facts, max_tokens=wishes.options.max_tokens)
        plan = self._door.plan(
            prompt, wishes.options, facts=facts, label=_label(origin, wishes), param="input"
        )
        shape = ResponseShape(
            envelope=self._envelope("resp", wishes, facts),
            item_id=f"msg-{self._new_id()}",
            shown={
                **request.shown,
                "temperature": plan.request.sampling.temperature,
                "top_p": plan.request.sampling.top_p,
            },
            num_prompt_tokens=len(prompt),
            tokenizer=self._door.tokenizer,
        )
        return ResponseExchange(
            self._door.generation(plan, spend=origin.user.spend), shape, wall_clock=self._wall_clock
        )

    async def tokenize(self, request: TokenizeRequest) -> Json:
        """Raises RouterError."""
        facts = self._door.facts(request.model)
        if request.prompt is None:
            ids = await self._door.encode_chat(request.messages, request.template, request.options)
        else:
            ids = await self._door.encode(request.prompt, request.options)
        strings = [self._door.tokenizer.token_text(i) for i in ids] if request.wants_strings else None
        return {
            "count": len(ids),
            "max_model_len": facts.max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    async def detokenize(self, request: DetokenizeRequest) -> Json:
        """Text with special tokens shown, so that it can be tokenised again. Raises RouterError."""
        check_token_ids(request.ids, self._door.facts(request.model), param="tokens")
        return {"prompt": await self._door.decode(request.ids)}

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

    def _with_format(self, wishes: Wishes, tools: Tools) -> Wishes:
        """What parser and tools ask of the answer. Raises BadRequest where they cannot work."""
        options = wishes.options
        if tools.choice == "auto" and self._format.tools is None:
            raise BadRequest(
                "tools cannot be used with tool_choice auto: the chat template of this model shows no known"
                " format of calls (the router's tool_call_parser sets one)",
                param="tools",
                code="unsupported_parameter",
            )
        if tools.is_forced:
            if options.constraint is not None:
                raise BadRequest(
                    f"tool_choice must be none or auto: {options.constraint.field} already says what form the"
                    " answer has",
                    param="tool_choice",
                )
            options = replace(options, constraint=tools.constraint())
        if self._has_special_markers(tools):
            options = replace(options, shows_special=True)
        return replace(wishes, options=options)

    def _parts(self, tools: Tools, wishes: Wishes, prompt: tuple[int, ...]) -> ChatParts:
        """A constraint holds from the first token on, so such an answer has no reasoning."""
        calls = self._calls(tools)
        prompt_end = "".join(map(self._door.tokenizer.token_text, prompt[-_NUM_END_TOKENS:]))
        return ChatParts(
            self._format.parser(prompt_end=prompt_end, calls=calls)
            if wishes.options.constraint is None
            else calls or PlainText(),
            new_call_id=lambda: self._format.call_id(self._new_id()),
            max_calls=None if tools.is_parallel else 1,
            is_free=tools.choice != "named",
        )

    def _calls(self, tools: Tools) -> Parser | None:
        match tools.choice:
            case "named":
                return NamedCall(tools.named)
            case "required":
                return JsonListCalls()
            case "auto":
                return self._format.tools.make() if self._format.tools else None
        return None

    def _has_special_markers(self, tools: Tools) -> bool:
        """Special tokens have no text, unless the parser needs to see them."""
        markers = self._format.markers(has_tools=tools.choice == "auto")
        return any(
            self._door.tokenizer.token_text(token_id) in markers
            for token_id in self._door.tokenizer.special_ids
        )

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
        label = _label(origin, wishes)
        choices: list[Choice] = []
        for index, shape in enumerate(shapes):
            prompt, param = prompts[index // wishes.n]
            plan = self._door.plan(
                prompt, wishes.options, facts=facts, label=label, choice=index % wishes.n, param=param
            )
            choices.append(Choice(self._door.generation(plan, spend=origin.user.spend), shape))
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


def _label(origin: Origin, wishes: Wishes) -> Label:
    return replace(origin.label, priority=wishes.priority, cache_salt=wishes.cache_salt)


def _manner(base: Manner, wishes: Wishes, origin: Origin) -> Manner:
    return replace(base, wants_usage=wishes.wants_usage, is_debug=origin.is_debug)
