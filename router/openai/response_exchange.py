"""One accepted request for a response and its answer, whole or as typed events.

Owns the order of its events. Must never know sockets: the caller sends.
"""

from collections.abc import Awaitable, Callable
from contextlib import aclosing

from router.errors import RouterError
from router.generation import Ended, Generation, TextDelta
from router.openai.response_shapes import EventWriter, Json, ResponseShape
from router.openai.shapes import joined

Send = Callable[[bytes], Awaitable[None]]


class ResponseExchange:
    """Runs one generation. Cancelling the caller closes it at once."""

    def __init__(
        self, generation: Generation, shape: ResponseShape, *, wall_clock: Callable[[], float]
    ) -> None:
        self._generation = generation
        self._shape = shape
        self._wall_clock = wall_clock
        self._deltas: list[TextDelta] = []

    async def body(self) -> Json:
        """The whole answer. Raises RouterError."""
        async with aclosing(self._generation.run()) as items:
            async for item in items:
                if isinstance(item, Ended):
                    return self._shape.whole(joined(self._deltas), item, completed_at=self._now())
                self._deltas.append(item)
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
            return writer.closing(joined(self._deltas), item, completed_at=self._now())
        self._deltas.append(item)
        return writer.delta(item)

    def _now(self) -> int:
        return int(self._wall_clock())
