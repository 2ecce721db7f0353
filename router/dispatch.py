"""Runs one generation on a pair of nodes, and on another pair when the first one fails."""

from collections.abc import AsyncGenerator

from router.requests import Delta, GenerateRequest, Outcome


class Dispatcher:
    """Bounded: at most `max_in_flight` generations run at once."""

    async def generate(self, request: GenerateRequest) -> AsyncGenerator[Delta | Outcome]:
        """Yields deltas in index order, then one Outcome. Raises errors.RouterError.

        Closing the generator (contextlib.aclosing) cancels the request on its nodes.
        """
        raise NotImplementedError(request)
        yield
