"""The one way in that HTTP and gRPC share: prompts to ids, ids to plans, plans to generations.

Owns nothing but the wiring of text, limits and dispatcher. Must never know a wire format.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from router.aside import Aside
from router.errors import BadRequest
from router.generation import Generates, Generation
from router.planning import Label, ModelFacts, Plan, Planner, SamplingOptions, check_bad_words
from router.served import ServedModel
from router.text.model_text import ModelText
from router.text.options import AS_USUAL, OPEN_ANSWER, PromptOptions, TemplateOptions
from router.text.tokenizer import Tokenizer


class FrontDoor:
    """Raises RouterError wherever a request cannot be served."""

    def __init__(
        self,
        dispatcher: Generates,
        *,
        text: ModelText,
        served: ServedModel,
        planner: Planner,
        clock: Callable[[], float],
    ) -> None:
        self._dispatcher = dispatcher
        self._text = text
        self._planner = planner
        self._clock = clock
        self.served = served

    @property
    def tokenizer(self) -> Tokenizer:
        return self._text.tokenizer

    @property
    def aside(self) -> Aside:
        """For what takes long to show."""
        return self._text.aside

    def facts(self, model: str | None) -> ModelFacts:
        return self.served.facts(model)

    async def encode(
        self, prompt: str | tuple[int, ...], options: PromptOptions = AS_USUAL
    ) -> tuple[int, ...]:
        """Ids of a prompt that may be ids already; not cut yet."""
        if not isinstance(prompt, str):
            return prompt
        return await self._text.encode(prompt, adds_special=options.adds_special is not False)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: TemplateOptions = OPEN_ANSWER,
        options: PromptOptions = AS_USUAL,
    ) -> tuple[int, ...]:
        return await self._text.encode_chat(messages, template, adds_special=bool(options.adds_special))

    async def in_tokens(self, options: SamplingOptions) -> SamplingOptions:
        """With the tokens of bad words. Raises BadRequest."""
        check_bad_words(options.bad_words)
        if not options.bad_words:
            return options
        words = tuple(dict.fromkeys(options.bad_words))
        sequences = await self._text.encode_words(words)
        if not all(sequences):
            raise BadRequest("bad_words must hold words that the tokenizer has tokens for", param="bad_words")
        return replace(options, banned_sequences=sequences)

    async def decode(self, ids: Sequence[int], *, shows_special: bool = True) -> str:
        return await self._text.decode(ids, shows_special=shows_special)

    def plan(
        self,
        prompt_ids: tuple[int, ...],
        options: SamplingOptions,
        *,
        facts: ModelFacts,
        label: Label,
        choice: int = 0,
        param: str = "prompt",
    ) -> Plan:
        """See `Planner.plan`."""
        return self._planner.plan(prompt_ids, options, facts=facts, label=label, choice=choice, param=param)

    def generation(
        self, plan: Plan, *, spend: Callable[[int], None], tells_texts: bool = False
    ) -> Generation:
        """`spend` is told the tokens of the answer when it is done with, if a first one came."""
        return Generation(
            plan,
            dispatcher=self._dispatcher,
            tokenizer=self.tokenizer,
            clock=self._clock,
            spend=spend,
            tells_texts=tells_texts,
        )
