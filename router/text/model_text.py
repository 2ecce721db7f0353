"""The text side of the served model: its tokenizer and chat template behind one asynchronous door.

Owns how many long texts may wait for a thread (router.aside).
"""

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

from router.aside import LONG, Aside
from router.errors import BadRequest, QueueFull
from router.text.chat import ChatTemplate, TemplateFailed
from router.text.options import OPEN_ANSWER, TemplateOptions
from router.text.tokenizer import Tokenizer, read_json

T = TypeVar("T")

_CHARS_OF_A_WORD = 64  # what tokenising a short one costs
_MAX_WAITING = 256
_MAX_WAITING_CHARS = 64 * 1024 * 1024


class ModelText:
    """Encodes prompts. Invariant: at most `_MAX_WAITING` long texts of `_MAX_WAITING_CHARS` in all wait for a
    thread or are on one.
    """

    def __init__(
        self, tokenizer: Tokenizer, *, template: ChatTemplate | None, max_model_len: int | None = None
    ) -> None:
        self.tokenizer = tokenizer
        self.max_model_len = max_model_len
        self._template = template
        self.aside = Aside()
        self._num_waiting = 0
        self._num_waiting_chars = 0

    @classmethod
    def from_folder(cls, folder: Path, *, local_time: Callable[[], datetime]) -> "ModelText":
        """Raises ValueError when the folder has no tokenizer.json."""
        tokenizer = Tokenizer.from_folder(folder)
        template = ChatTemplate.from_folder(
            folder, special_tokens=tokenizer.special_tokens, local_time=local_time
        )
        max_model_len = read_json(folder / "config.json").get("max_position_embeddings")
        return cls(tokenizer, template=template, max_model_len=max_model_len)

    @property
    def template_source(self) -> str:
        """What tells how the model writes; "" without a template."""
        return "" if self._template is None else self._template.source

    async def encode(self, text: str, *, adds_special: bool = True) -> tuple[int, ...]:
        """Ids of a plain prompt, with the special tokens that the model's post-processor adds."""
        return await self._run(
            len(text), lambda: self.tokenizer.encode(text, add_special_tokens=adds_special)
        )

    async def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Ids of each word, as it stands at the beginning of a text and after a blank."""
        spelt = [f"{blank}{word.lstrip()}" for word in words for blank in ("", " ")]

        def encode() -> tuple[tuple[int, ...], ...]:
            ids = (self.tokenizer.encode(word, add_special_tokens=False) for word in spelt)
            return tuple(dict.fromkeys(ids))

        return await self._run(sum(max(_CHARS_OF_A_WORD, len(word)) for word in spelt), encode)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: TemplateOptions = OPEN_ANSWER,
        *,
        adds_special: bool = False,
    ) -> tuple[int, ...]:
        """Ids of a conversation, open for the assistant's turn unless `options` say otherwise.

        Raises BadRequest.
        """
        template = self._template
        if template is None:
            raise BadRequest("messages cannot be used: this model has no chat template", param="messages")

        def render_and_encode() -> tuple[int, ...]:
            return self.tokenizer.encode(template.render(messages, options), add_special_tokens=adds_special)

        size = sum(map(_size, messages)) + sum(map(_size, options.tools))
        try:
            return await self._run(size, render_and_encode)
        except TemplateFailed as error:
            raise BadRequest(str(error), param="messages") from error
        except ValueError as error:
            raise BadRequest(str(error), param="chat_template_kwargs") from error

    async def decode(self, ids: Sequence[int], *, shows_special: bool = True) -> str:
        """Text of ids."""
        return await self._run(len(ids), lambda: self.tokenizer.decode(ids, shows_special=shows_special))

    def close(self) -> None:
        self.aside.close()

    async def _run(self, size: int, work: Callable[[], T]) -> T:
        if size < LONG:
            return work()
        is_full = self._num_waiting_chars + size > _MAX_WAITING_CHARS and self._num_waiting > 0
        if is_full or self._num_waiting >= _MAX_WAITING:
            raise QueueFull("too many long prompts wait to be tokenised", retry_after_s=1.0)
        self._num_waiting += 1
        self._num_waiting_chars += size
        try:
            return await self.aside.run(size, work)
        finally:
            self._num_waiting -= 1
            self._num_waiting_chars -= size


def _size(value: Any) -> int:
    """Characters of all text in a message or a tool, keys aside."""
    if isinstance(value, str):
        return len(value)
    if isinstance(value, Mapping):
        return sum(map(_size, value.values()))
    if isinstance(value, Sequence):
        return sum(map(_size, value))
    return 0
