"""One accepted request for a response and its answer, whole or as typed events.

Owns the order of its events. Must never know sockets: the caller sends.
"""

from collections.abc import Callable

from router.api_keys import Bill
from router.choices import run_all
from router.errors import RouterError
from router.generation import Ended, Generation, TextDelta
from router.openai.response_output import ResponseOutput
from router.openai.response_shapes import EventWriter, Json, ResponseShape

Told = TextDelta | Ended | RouterError


class ResponseExchange:
    """Runs one generation, which tells the text of every token. Cancelling the caller closes it at once."""

    def __init__(
        self,
        generation: Generation,
        output: ResponseOutput,
        shape: ResponseShape,
        *,
        bill: Bill,
        wall_clock: Callable[[], float],
    ) -> None:
        self._bill = bill
        self._generation = generation
        self._output = output
        self._shape = shape
        self._wall_clock = wall_clock
        self._writer = EventWriter(shape)

    async def body(self) -> Json:
        """The whole answer. Raises RouterError."""
        ends: list[Ended] = []

        def collect(_: int, item: TextDelta | Ended) -> None:
            if isinstance(item, Ended):
                ends.append(item)
            else:
                self._output.push(item)

        await run_all([self._generation], collect, bill=self._bill)
        self._output.finish(is_cut=ends[0].is_cut)
        return self._whole(ends[0])

    async def stream(self, put: Callable[[Told], None]) -> None:
        """Puts all there is to show. Raises RouterError before the first event; a later one becomes
        `response.failed`."""
        has_begun = False

        def forward(_: int, item: TextDelta | Ended) -> None:
            nonlocal has_begun
            has_begun = True
            put(item)

        try:
            await run_all([self._generation], forward, bill=self._bill)
        except RouterError as error:
            if not has_begun:
                raise
            put(error)

    async def shown(self, told: Told) -> bytes:
        return self.shown_now(told)

    def shown_now(self, told: Told) -> bytes:
        """The last one is not `[DONE]`."""
        writer, output = self._writer, self._output
        opening = b"" if writer.is_open else writer.opening()
        if isinstance(told, RouterError):
            return opening + writer.failed(told)
        if isinstance(told, Ended):
            rest = writer.written(output.finish(is_cut=told.is_cut))
            return opening + rest + writer.closing(self._whole(told))
        return opening + writer.written(output.push(told))

    def _whole(self, end: Ended) -> Json:
        return self._shape.whole(self._output, end, completed_at=int(self._wall_clock()))
