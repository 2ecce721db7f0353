"""One accepted request for a response and its answer, whole or as typed events.

Owns the order of its events. Must never know sockets: the caller sends.
"""

from collections.abc import Awaitable, Callable

from router.api_keys import Bill
from router.choices import run_all
from router.errors import RouterError
from router.generation import Ended, Generation, TextDelta
from router.openai.response_output import ResponseOutput
from router.openai.response_shapes import EventWriter, Json, ResponseShape

Send = Callable[[bytes], Awaitable[None]]


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

    async def body(self) -> Json:
        """The whole answer. Raises RouterError."""
        ends: list[Ended] = []

        async def collect(_: int, item: TextDelta | Ended) -> None:
            if isinstance(item, Ended):
                ends.append(item)
            else:
                self._output.push(item)

        await run_all([self._generation], collect, bill=self._bill)
        self._output.finish(is_cut=ends[0].is_cut)
        return self._whole(ends[0])

    async def stream(self, send: Send) -> None:
        """Sends every event; none follows the last one, which is not `[DONE]`.

        Raises RouterError before the first event; a later one becomes `response.failed`.
        """
        writer = EventWriter(self._shape)

        async def forward(_: int, item: TextDelta | Ended) -> None:
            data = b"" if writer.is_open else writer.opening()
            data += self._next(writer, item)
            if data:
                await send(data)

        try:
            await run_all([self._generation], forward, bill=self._bill)
        except RouterError as error:
            if not writer.is_open:
                raise
            await send(writer.failed(error))

    def _next(self, writer: EventWriter, item: TextDelta | Ended) -> bytes:
        if isinstance(item, Ended):
            rest = writer.written(self._output.finish(is_cut=item.is_cut))
            return rest + writer.closing(self._whole(item))
        return writer.written(self._output.push(item))

    def _whole(self, end: Ended) -> Json:
        return self._shape.whole(self._output, end, completed_at=int(self._wall_clock()))
