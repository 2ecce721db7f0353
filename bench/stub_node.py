"""A pair of nodes that compute nothing: they answer every Submit with ready-made tokens.

Owns what the router is measured against; a process of its own. Speaks `Work` and the registry exactly as
real nodes do. Must never know the router.
"""

import argparse
import asyncio
import dataclasses
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import uvloop

from bench.ticks import tick
from wire.channel import Channel, ChannelClosed
from wire.grpc_server import GrpcServer
from wire.host_events import NodeStatus
from wire.records import NodeRecord
from wire.registry import RedisRegistry, RegistryUnavailable
from wire.work import Event, Finished, Frame, Submit, Tokens, TransferId, WorkHello, new_incarnation

HEARTBEAT_S = 1.0
TTL_S = 5.0
PAGE_SIZE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class StubConfig:
    """`step_s` None: all tokens of a request at once; else one token of every request each `step_s`.

    tells_time: a token says when it was sent (see `bench.ticks`), instead of its index.
    """

    registry: str
    model: str
    vocab_size: int
    token_ids: tuple[int, ...]
    step_s: float | None = None
    tells_time: bool = False


@dataclass(slots=True)
class _Running:
    tid: TransferId
    next_index: int
    end: int


class StubNode:
    """One node of one role: the prefill node gives token 0, the decode node the rest."""

    def __init__(self, role: str, address: str, config: StubConfig) -> None:
        self._config = config
        self.record = NodeRecord(
            role=role,
            address=address,
            incarnation=new_incarnation(),
            model=config.model,
            layout="stub",
            page_size=PAGE_SIZE,
            max_model_len=8192,
            vocab_size=config.vocab_size,
            transports=("stub",),
        )

    async def accept_work(self, channel: Channel) -> None:
        """Serve one router until it leaves."""
        await channel.receive()
        await channel.send(WorkHello(incarnation=self.record.incarnation, role=self.record.role))
        running: dict[TransferId, _Running] = {}
        steps = itertools.count()
        async with asyncio.TaskGroup() as group:
            stepping = group.create_task(self._step(channel, running, steps))
            try:
                while True:
                    await self._take(await channel.receive(), running, channel, steps)
            except ChannelClosed:
                stepping.cancel()

    async def accept_session(self, channel: Channel) -> None:
        """Nobody opens one: stubs move no pages."""

    async def status(self) -> NodeStatus:
        raise NotImplementedError("a stub has no status")

    def drain(self) -> None:
        """Nothing to finish."""

    async def _take(
        self,
        message: Any,
        running: dict[TransferId, _Running],
        channel: Channel,
        steps: "itertools.count[int]",
    ) -> None:
        if not isinstance(message, Submit):
            running.pop(message.tid, None)
            return
        start = message.num_prompt_tokens - len(message.prompt_ids)
        first, last = -start, message.sampling.max_tokens
        is_prefill = self.record.role == "prefill"
        if message.peer is not None and not is_prefill:
            first += 1
        end = min(first + 1, last) if is_prefill else last
        if self._config.step_s is None or is_prefill:
            events = self._events(message.tid, range(first, end), ends_at=last)
            await channel.send(Frame(step=next(steps), events=tuple(events)))
        else:
            running[message.tid] = _Running(message.tid, first, last)

    async def _step(
        self, channel: Channel, running: dict[TransferId, _Running], steps: "itertools.count[int]"
    ) -> None:
        """One frame a step with one token of every request, as an engine does."""
        loop = asyncio.get_running_loop()
        while self._config.step_s is not None:
            due = loop.time() + self._config.step_s
            events: list[Event] = []
            for one in list(running.values()):
                events += self._events(one.tid, range(one.next_index, one.next_index + 1), ends_at=one.end)
                one.next_index += 1
                if one.next_index >= one.end:
                    del running[one.tid]
            if events:
                await channel.send(Frame(step=next(steps), events=tuple(events)))
            await asyncio.sleep(max(0.0, due - loop.time()))

    def _events(self, tid: TransferId, indices: Sequence[int], *, ends_at: int) -> list[Event]:
        ids = self._config.token_ids
        now = tick() if self._config.tells_time else None
        events: list[Event] = [
            Tokens(tid=tid, first_index=i, ids=(ids[(i if now is None else now) % len(ids)],))
            for i in indices
        ]
        is_last = (indices[-1] + 1 if indices else ends_at) >= ends_at
        if is_last or self.record.role == "prefill":
            events.append(Finished(tid=tid, reason="length" if is_last else "handed_over", transport="stub"))
        return events


async def run(config: StubConfig) -> None:
    """Serve both roles until killed; prints the two addresses as JSON once they listen."""
    addresses: dict[str, str] = {}
    async with RedisRegistry(config.registry) as registry, asyncio.TaskGroup() as group:
        for role in ("prefill", "decode"):
            server = GrpcServer("127.0.0.1:0")
            node = StubNode(role, f"127.0.0.1:{server.port}", config)
            await server.start(node)
            addresses[role] = node.record.address
            group.create_task(_beat(registry, node.record))
        print(json.dumps(addresses), flush=True)


async def _beat(registry: RedisRegistry, record: NodeRecord) -> None:
    while True:
        try:
            await registry.publish(record, ttl_s=TTL_S)
        except RegistryUnavailable:
            pass  # it has only just been started, or is slow
        await asyncio.sleep(HEARTBEAT_S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, fromfile_prefix_chars="@")
    parser.add_argument("config", help="StubConfig as JSON")
    values = json.loads(parser.parse_args().config)
    config = StubConfig(**{**values, "token_ids": tuple(values["token_ids"])})
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(run(config))


def command_line(config: StubConfig) -> str:
    """The argument of `python -m bench.stub_node`."""
    return json.dumps(dataclasses.asdict(config))


if __name__ == "__main__":
    main()
