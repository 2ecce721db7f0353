"""One accepted request for a response and its answer, whole or as typed events.

Owns the order of its events. Must never know sockets: the caller sends.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

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
        wall_clock: Callable[[], float],
    ) -> None:
        self._generation = generation
        self._output = output
        self._shape = shape
        self._wall_clock = wall_clock

    async def body(self) -> Json:
        """The whole answer. Raises RouterError."""
        async with aclosing(self._generation.run()) as items:
            async for item in items:
                if isinstance(item, Ended):
                    self._output.finish(is_cut=item.is_cut)
                    return self._whole(item)
                self._output.push(item)
        raise AssertionError("a generation ends with Ended")

    async def stream(self, send: Send) -> None:
        """Sends every event; none follows the last one, which is not `[DONE]`.

        Raises RouterError before the first event; a later one becomes `response.failed`.
        """
        writer = EventWriter(self._shape)
        is_open = False
        try:
            async with aclosing(self._generation.run()) as items:
                async for item in items:
                    data = b"" if is_open else writer.opening()
                    data += self._next(writer, item)
                    is_open = True
                    if data:
                        await send(data)
        except RouterError as error:
            if not is_open:
                raise
            await send(writer.failed(error))

    def _next(self, writer: EventWriter, item: TextDelta | Ended) -> bytes:
        if isinstance(item, Ended):
            rest = writer.written(self._output.finish(is_cut=item.is_cut))
            return rest + writer.closing(self._whole(item))
        return writer.written(self._output.push(item))

    def _whole(self, end: Ended) -> Json:
        return self._shape.whole(self._output, end, completed_at=int(self._wall_clock()))
