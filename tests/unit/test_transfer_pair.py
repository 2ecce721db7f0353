"""Both ends of many transfers at once, over queues that shuffle, lose and break, with real page contents.

Every landing checks that its page is still leased to its transfer; every join checks what is in the pages;
P overwrites pages as soon as they are released, so a write that still reads them is seen by D.
"""

import random
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count

import pytest

from kv_transfer.actions import (
    CancelWrite,
    ClosePeer,
    DecodeAction,
    Fail,
    HandedOver,
    HandoverDone,
    Join,
    PrefillAction,
    QuarantinePages,
    Refuse,
    ReleasePages,
    ReleaseQuarantine,
    Send,
    StopCompute,
    Write,
)
from kv_transfer.checksums import page_checksum
from kv_transfer.decode_side import DecodeTransfers
from kv_transfer.decode_transfer import DecodeTimeouts
from kv_transfer.ids import Incarnation, TransferId
from kv_transfer.messages import CancelTransfer, Drained, Final, Handoff, Planned, Reserve, TransferFailed
from kv_transfer.prefill_side import PrefillTransfers
from kv_transfer.prefill_transfer import PrefillTimeouts
from kv_transfer.transport import Completed, Ready, WriteHandle

PAGE_SIZE = 4
NUM_PAGES = 24
NUM_REQUESTS = 40


@dataclass(kw_only=True)
class Request:
    tid: TransferId
    decode: Incarnation
    prefill: Incarnation
    num_tokens: int

    @property
    def num_pages(self) -> int:
        return -(-self.num_tokens // PAGE_SIZE)

    def content(self, page: int) -> bytes:
        return f"{self.tid} page {page}".encode()


Leg = Callable[[Request], None]


@dataclass(kw_only=True)
class Wire:
    """One write under way: its bytes are read from P when they land, or when P's end lets go of them."""

    handle: WriteHandle
    pages: Ready
    prefill: Incarnation
    snapshot: tuple[bytes, ...] | None = None


@dataclass(kw_only=True)
class Node:
    memory: list[bytes] = field(default_factory=lambda: [b"free"] * NUM_PAGES)
    free: list[int] = field(default_factory=lambda: list(range(NUM_PAGES)))
    held: dict[TransferId, tuple[int, ...]] = field(default_factory=dict)
    quarantined: set[TransferId] = field(default_factory=set)
    computing: dict[TransferId, int] = field(default_factory=dict)
    connected: set[Incarnation] = field(default_factory=set)
    ends: Counter[TransferId] = field(default_factory=Counter)
    writing: dict[WriteHandle, None] = field(default_factory=dict)  # P's writes that have not settled

    def take(self, tid: TransferId, number: int) -> tuple[int, ...]:
        assert tid not in self.held
        self.held[tid] = tuple(self.free.pop() for _ in range(number))
        return self.held[tid]

    def give_back(self, tid: TransferId) -> None:
        for page in self.held.pop(tid):
            self.memory[page] = b"somebody else's"
            self.free.append(page)


class World:
    """Two decode and two prefill nodes. Channels keep their own order; which one moves next is random."""

    def __init__(self, seed: int, *, faults: float) -> None:
        self.rng = random.Random(seed)
        self.faults = faults
        self.now = 0.0
        self.requests: dict[TransferId, Request] = {}
        self.outcomes: Counter[str] = Counter()
        self.channels: dict[tuple[str, ...], deque[Callable[[], None]]] = {}
        self.wires: dict[WriteHandle, Wire] = {}
        self.numbers = count()
        self.broken: set[tuple[Incarnation, Incarnation]] = set()  # sessions that carry nothing any more
        self.has_checksums = self.rng.random() < 0.5
        self.decodes = {Incarnation(name): self._decode(name) for name in ("d0", "d1")}
        self.prefills = {Incarnation(name): self._prefill(name) for name in ("p0", "p1")}
        self.pairs = [(decode, prefill) for decode in self.decodes for prefill in self.prefills]
        for decode, prefill in self.pairs:
            self._open(decode, prefill)

    def _decode(self, name: str) -> tuple[DecodeTransfers, Node]:
        node = Node()
        timeouts = DecodeTimeouts(queue_s=20, prefill_s=15, progress_s=6, drain_s=1, quarantine_s=0.7)
        machine = DecodeTransfers(
            page_size=PAGE_SIZE,
            page_checksum=lambda _, page: page_checksum(node.memory[page]),
            timeouts=timeouts,
        )
        return machine, node

    def _prefill(self, name: str) -> tuple[PrefillTransfers, Node]:
        node = Node()
        machine = PrefillTransfers(
            page_size=PAGE_SIZE,
            page_checksum=lambda _, page: page_checksum(node.memory[page]),
            timeouts=PrefillTimeouts(reserve_s=10, write_s=5, drain_s=2),
        )
        return machine, node

    # -- queues

    def post(self, *channel: str, event: Callable[[], None]) -> None:
        self.channels.setdefault(channel, deque()).append(event)

    def send(
        self, sender: str, receiver: str, pair: tuple[Incarnation, Incarnation], event: Callable[[], None]
    ) -> None:
        if pair not in self.broken:
            self.post("control", sender, receiver, event=event)

    def deliver(self) -> bool:
        """Let one event of one channel happen."""
        waiting = [channel for channel, events in self.channels.items() if events]
        if not waiting:
            return False
        self.channels[self.rng.choice(waiting)].popleft()()
        return True

    # -- sessions

    def _open(self, decode: Incarnation, prefill: Incarnation) -> None:
        self.broken.discard((decode, prefill))
        decode_machine, decode_node = self.decodes[decode]
        prefill_machine, prefill_node = self.prefills[prefill]
        decode_machine.peer_ready(prefill, has_checksums=self.has_checksums)
        decode_node.connected.add(prefill)
        prefill_machine.peer_ready(decode, has_checksums=self.has_checksums)
        prefill_node.connected.add(decode)

    def lose(self, decode: Incarnation, prefill: Incarnation) -> None:
        """The session breaks: what is on its way is lost, each side notices when its turn comes."""
        self.broken.add((decode, prefill))
        for channel in (("control", decode, prefill), ("control", prefill, decode)):
            self.channels.pop(channel, None)
        self.post("notice", decode, prefill, event=lambda: self.close_decode(decode, prefill))
        self.post("notice", prefill, decode, event=lambda: self.close_prefill(decode, prefill))

    def close_decode(self, decode: Incarnation, prefill: Incarnation) -> None:
        machine, node = self.decodes[decode]
        if prefill not in node.connected:
            return
        node.connected.discard(prefill)
        for handle in [
            each for each, wire in self.wires.items() if (each.peer, wire.prefill) == (decode, prefill)
        ]:
            del self.wires[handle]
            if decode not in self.prefills[prefill][1].connected:
                self.hear_settled(prefill, handle, failure="closed by the decode node")
        self.run_decode(decode, machine.peer_lost(prefill, reason="lost"))
        self._lost(decode, prefill)

    def close_prefill(self, decode: Incarnation, prefill: Incarnation) -> None:
        machine, node = self.prefills[prefill]
        if decode not in node.connected:
            return
        node.connected.discard(decode)
        for handle in [each for each in node.writing if each.peer == decode]:
            wire = self.wires.get(handle)
            if wire is not None and self.rng.random() < 0.5:
                continue  # it cannot be released: read until it lands, or until D closes its end
            if wire is not None and wire.snapshot is None:
                wire.snapshot = tuple(node.memory[page] for page in wire.pages.local_pages)
            self.hear_settled(prefill, handle, failure="closed")
        self.run_prefill(prefill, machine.peer_lost(decode, reason="lost"))
        self._lost(decode, prefill)

    def _lost(self, decode: Incarnation, prefill: Incarnation) -> None:
        """Once one side has closed the other will notice; once both have, the session is opened again."""
        self.lose(decode, prefill)
        if prefill in self.decodes[decode][1].connected or decode in self.prefills[prefill][1].connected:
            return
        for channel in (("notice", decode, prefill), ("notice", prefill, decode)):
            self.channels.pop(channel, None)
        self.post("open", decode, prefill, event=lambda: self._open(decode, prefill))

    # -- the router

    def submit(self, number: int) -> None:
        decode, prefill = self.rng.choice(self.pairs)
        request = Request(
            tid=TransferId(f"r{number}", 0),
            decode=decode,
            prefill=prefill,
            num_tokens=self.rng.randint(1, 6 * PAGE_SIZE),
        )
        self.requests[request.tid] = request
        self.submit_leg(request, request.decode, self.submit_decode, self.cancel_decode)
        self.submit_leg(request, request.prefill, self.submit_prefill, self.cancel_prefill)

    def submit_leg(self, request: Request, node: Incarnation, submit: Leg, cancel: Leg) -> None:
        channel = ("work", node, request.tid.request_id)
        if self.rng.random() < 0.1 * self.faults:
            return
        self.post(*channel, event=lambda: submit(request))
        if self.rng.random() < 0.2 * self.faults:
            self.post(*channel, event=lambda: cancel(request))

    def submit_decode(self, request: Request) -> None:
        machine, node = self.decodes[request.decode]
        node.ends[request.tid] += 0
        actions = machine.submit(
            request.tid,
            peer=request.prefill,
            num_prompt_tokens=request.num_tokens,
            deadline=self.now + 40,
            now=self.now,
        )
        self.run_decode(request.decode, actions)

    def cancel_decode(self, request: Request) -> None:
        machine, _ = self.decodes[request.decode]
        self.run_decode(request.decode, machine.cancel(request.tid, now=self.now))

    def submit_prefill(self, request: Request) -> None:
        machine, node = self.prefills[request.prefill]
        if len(node.free) < request.num_pages:
            self.post(
                "work", request.prefill, request.tid.request_id, event=lambda: self.submit_prefill(request)
            )
            return
        node.ends[request.tid] += 0
        node.take(request.tid, request.num_pages)
        node.computing[request.tid] = 0
        actions = machine.submit(
            request.tid,
            peer=request.decode,
            num_prompt_tokens=request.num_tokens,
            deadline=self.now + 40,
            now=self.now,
        )
        if any(isinstance(action, Refuse) for action in actions):
            del node.computing[request.tid]
            node.give_back(request.tid)
        self.run_prefill(request.prefill, actions)

    def cancel_prefill(self, request: Request) -> None:
        machine, _ = self.prefills[request.prefill]
        self.run_prefill(request.prefill, machine.cancel(request.tid, now=self.now))

    # -- the engines

    def grant(self) -> None:
        decode = self.rng.choice(list(self.decodes))
        machine, node = self.decodes[decode]
        for tid in machine.grantable():
            request = self.requests[tid]
            num_skipped = self.rng.choice((0, 0, self.rng.randint(0, request.num_tokens // PAGE_SIZE)))
            if request.num_pages - num_skipped > len(node.free):
                return
            page_ids = node.take(tid, request.num_pages - num_skipped)
            actions = machine.granted(
                tid, page_ids=page_ids, skip_tokens=num_skipped * PAGE_SIZE, now=self.now
            )
            self.run_decode(decode, actions)
            return

    def compute(self) -> None:
        prefill = self.rng.choice(list(self.prefills))
        machine, node = self.prefills[prefill]
        if not node.computing:
            return
        tid = self.rng.choice(list(node.computing))
        request, pages = self.requests[tid], node.held[tid]
        num_tokens = min(request.num_tokens, node.computing[tid] + self.rng.randint(1, 10))
        node.computing[tid] = num_tokens
        is_last = num_tokens == request.num_tokens
        for page in range(num_tokens // PAGE_SIZE if not is_last else request.num_pages):
            node.memory[pages[page]] = request.content(page)
        if is_last:
            del node.computing[tid]
        if is_last and self.rng.random() < 0.15:
            node.ends[tid] += 1
            self.run_prefill(prefill, machine.finished_early(tid, now=self.now))
            return
        handoff = Handoff(first_token=1, num_tokens=num_tokens) if is_last else None
        actions = machine.computed(
            tid, num_tokens=num_tokens, pages=pages, event=Completed(), now=self.now, handoff=handoff
        )
        self.run_prefill(prefill, actions)

    # -- the data plane

    def write(self, prefill: Incarnation, action: Write) -> WriteHandle:
        pages = action.pages
        number = next(self.numbers)
        handle = WriteHandle(
            number=number, peer=action.peer, tid=pages.tid, start=pages.start, stop=pages.stop
        )
        self.prefills[prefill][1].writing[handle] = None
        if prefill not in self.decodes[action.peer][1].connected:
            return handle  # D has closed its end and P has not noticed
        self.wires[handle] = Wire(handle=handle, pages=pages, prefill=prefill)
        fate = self.rng.random()
        if fate < 0.02 * self.faults:
            return handle  # never lands, and settles only when an end is closed
        if fate < 0.05 * self.faults:
            self.post("write", str(number), event=lambda: self.settle(prefill, handle, failure="broken"))
        else:
            self.post("write", str(number), event=lambda: self.land(prefill, handle))
        return handle

    def land(self, prefill: Incarnation, handle: WriteHandle) -> None:
        wire = self.wires.get(handle)
        if wire is None:
            return
        decode, request = handle.peer, self.requests[handle.tid]
        _, node = self.decodes[decode]
        source = self.prefills[prefill][1]
        contents = wire.snapshot or tuple(source.memory[page] for page in wire.pages.local_pages)
        for page, content in zip(wire.pages.remote_pages, contents, strict=True):
            assert page in node.held.get(request.tid, ()), f"{handle} landed in a page of somebody else"
            node.memory[page] = content
        for _ in range(self.rng.choice((1, 1, 2))):
            self.post(
                "landed",
                str(handle.number),
                str(next(self.numbers)),
                event=lambda: self.landed(decode, prefill, handle),
            )
        self.settle(prefill, handle)

    def landed(self, decode: Incarnation, prefill: Incarnation, handle: WriteHandle) -> None:
        machine, node = self.decodes[decode]
        if prefill in node.connected:
            actions = machine.landed(prefill, handle.tid, start=handle.start, stop=handle.stop, now=self.now)
            self.run_decode(decode, actions)

    def settle(self, prefill: Incarnation, handle: WriteHandle, *, failure: str = "") -> None:
        """From here on nothing of this write is read or written; P hears of it when its turn comes."""
        if self.wires.pop(handle, None) is not None:
            self.hear_settled(prefill, handle, failure=failure)

    def hear_settled(self, prefill: Incarnation, handle: WriteHandle, *, failure: str) -> None:
        machine, node = self.prefills[prefill]
        if handle not in node.writing:
            return
        del node.writing[handle]

        def settled() -> None:
            if failure:
                actions = machine.write_failed(handle, reason=failure, now=self.now)
            else:
                actions = machine.write_done(handle, now=self.now)
            self.run_prefill(prefill, actions)

        self.post("settled", str(handle.number), event=settled)

    # -- carrying actions out

    def run_decode(self, decode: Incarnation, actions: list[DecodeAction]) -> None:
        _, node = self.decodes[decode]
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self.send(decode, peer, (decode, peer), partial(self.to_prefill, decode, peer, message))
                case Join(tid=tid):
                    self.join(node, action)
                case Fail(tid=tid, code=code) | Refuse(tid=tid, code=code):
                    self.end(node, tid, f"decode {code}")
                case HandedOver(tid=tid):
                    self.end(node, tid, "decode handed over")
                case ReleasePages(tid=tid):
                    self.check_no_write(tid, node)
                    assert tid not in node.quarantined
                    node.give_back(tid)
                case QuarantinePages(tid=tid):
                    node.quarantined.add(tid)
                case ReleaseQuarantine(tid=tid):
                    self.check_no_write(tid, node)
                    node.quarantined.remove(tid)
                    node.give_back(tid)
                case ClosePeer(peer=peer):
                    self.outcomes["decode closes"] += 1
                    self.close_decode(decode, peer)

    def join(self, node: Node, action: Join) -> None:
        request = self.requests[action.tid]
        first = action.skip_tokens // PAGE_SIZE
        contents = [node.memory[page] for page in action.page_ids]
        assert contents == [request.content(page) for page in range(first, request.num_pages)]
        assert node.held[action.tid] == action.page_ids
        self.check_no_write(action.tid, node)
        self.end(node, action.tid, "joined")
        node.give_back(action.tid)

    def run_prefill(self, prefill: Incarnation, actions: list[PrefillAction]) -> None:
        machine, node = self.prefills[prefill]
        for action in actions:
            match action:
                case Send(peer=peer, message=message):
                    self.send(prefill, peer, (peer, prefill), partial(self.to_decode, prefill, peer, message))
                case Write():
                    self.run_prefill(prefill, machine.wrote(self.write(prefill, action)))
                case CancelWrite(handle=handle):
                    if self.rng.random() < 0.5:
                        self.settle(prefill, handle, failure="cancelled")
                case StopCompute(tid=tid):
                    node.computing.pop(tid, None)
                case Fail(tid=tid, code=code) | Refuse(tid=tid, code=code):
                    self.end(node, tid, f"prefill {code}")
                case HandoverDone(tid=tid):
                    self.end(node, tid, "handed over")
                case ReleasePages(tid=tid):
                    assert tid not in node.computing
                    reading = [wire for wire in self.wires.values() if wire.handle.tid == tid]
                    assert all(wire.snapshot is not None for wire in reading), "released under a write"
                    node.give_back(tid)
                case ClosePeer(peer=peer):
                    self.outcomes["prefill closes"] += 1
                    self.close_prefill(peer, prefill)

    def check_no_write(self, tid: TransferId, node: Node) -> None:
        pending = {
            page for wire in self.wires.values() if wire.handle.tid == tid for page in wire.pages.remote_pages
        }
        assert not pending & set(node.held[tid]), f"{tid} given back under a write"

    def end(self, node: Node, tid: TransferId, outcome: str) -> None:
        node.ends[tid] += 1
        self.outcomes[outcome] += 1

    def to_prefill(self, decode: Incarnation, prefill: Incarnation, message: object) -> None:
        machine, _ = self.prefills[prefill]
        match message:
            case Reserve():
                self.run_prefill(prefill, machine.reserve(decode, message, now=self.now))
            case CancelTransfer():
                self.run_prefill(prefill, machine.cancel_transfer(decode, message, now=self.now))
            case _:
                raise AssertionError(f"{message} to a prefill node")

    def to_decode(self, prefill: Incarnation, decode: Incarnation, message: object) -> None:
        machine, _ = self.decodes[decode]
        match message:
            case Planned():
                actions = machine.planned(prefill, message)
            case Final():
                actions = machine.final(prefill, message, now=self.now)
            case TransferFailed():
                actions = machine.failed(prefill, message, now=self.now)
            case Drained(tid=tid):
                actions = machine.drained(prefill, tid, now=self.now)
            case _:
                raise AssertionError(f"{message} to a decode node")
        self.run_decode(decode, actions)

    def tick(self, seconds: float) -> None:
        self.now += seconds
        for decode, (machine, _) in self.decodes.items():
            self.run_decode(decode, machine.tick(self.now))
        for prefill, (prefill_machine, _) in self.prefills.items():
            self.run_prefill(prefill, prefill_machine.tick(self.now))

    # -- the whole

    def run(self) -> None:
        for number in range(NUM_REQUESTS):
            self.submit(number)
            for _ in range(self.rng.randint(5, 40)):
                self.step()
        self.faults = 0.0
        quiet = self.now + 100
        while self.deliver() or self.now < quiet:
            self.step()
            self.tick(0.05)

    def step(self) -> None:
        self.grant()
        self.compute()
        for _ in range(self.rng.randint(0, 4)):
            self.deliver()
        if self.rng.random() < 0.2:
            self.tick(self.rng.random() * 0.5 * (1 + self.faults))
        if self.rng.random() < 0.01 * self.faults:
            self.lose(*self.rng.choice(self.pairs))

    def check(self) -> None:
        for decode_machine, node in self.decodes.values():
            self.check_node(node, decode_machine.faults, decode_machine.next_deadline)
        for prefill_machine, node in self.prefills.values():
            self.check_node(node, prefill_machine.faults, prefill_machine.next_deadline)

    def check_node(self, node: Node, faults: Counter[str], next_deadline: float | None) -> None:
        assert (faults, next_deadline) == ({}, None)
        assert sorted(node.free) == list(range(NUM_PAGES))
        assert (node.held, node.quarantined, node.computing, node.writing) == ({}, set(), {}, {})
        assert {tid: ends for tid, ends in node.ends.items() if ends != 1} == {}


@pytest.mark.parametrize("seed", range(30))
def test_whatever_breaks_every_transfer_ends_once_and_every_page_comes_back(seed: int) -> None:
    print(f"seed {seed}")
    world = World(seed, faults=1.0)
    world.run()
    world.check()


def test_without_faults_every_transfer_is_handed_over() -> None:
    world = World(1, faults=0.0)
    world.run()
    world.check()
    assert world.outcomes["joined"] == world.outcomes["handed over"] > NUM_REQUESTS // 2
    assert world.outcomes["joined"] + world.outcomes["decode handed over"] == NUM_REQUESTS
    assert set(world.outcomes) == {"joined", "handed over", "decode handed over"}


def test_the_seeds_reach_every_way_a_transfer_can_end() -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(30):
        world = World(seed, faults=1.0)
        world.run()
        outcomes += world.outcomes
    print(outcomes)
    wanted = {"joined", "handed over", "decode peer_lost", "prefill write_timeout", "decode closes"}
    assert wanted <= set(outcomes)
