"""The one way in that HTTP and gRPC share: prompts to ids, ids to plans, plans to generations.

Owns nothing but the wiring of text, limits and dispatcher. Must never know a wire format.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from router.generation import Generates, Generation
from router.planning import Label, ModelFacts, Plan, Planner, SamplingOptions
from router.served import ServedModel
from router.text.model_text import ModelText
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

    def facts(self, model: str | None) -> ModelFacts:
        return self.served.facts(model)

    async def encode(self, prompt: str | tuple[int, ...]) -> tuple[int, ...]:
        """Ids of a prompt that may be ids already."""
        return await self._text.encode(prompt) if isinstance(prompt, str) else prompt

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], options: Mapping[str, Any] | None = None
    ) -> tuple[int, ...]:
        return await self._text.encode_chat(messages, options)

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

    def generation(self, plan: Plan) -> Generation:
        return Generation(plan, dispatcher=self._dispatcher, tokenizer=self.tokenizer, clock=self._clock)
