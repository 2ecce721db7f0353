"""One text, however it is asked for: streamed or whole, by HTTP or gRPC, stops or none (R04, R05, R06)."""

import asyncio
from dataclasses import dataclass
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fakes_dispatch import FakeDispatcher
from tests.smollm2_text import smollm2_text
from tests.unit.test_http import EOS, client, events, ids_of
from tests.unit.test_router_grpc import ask
from tests.unit.test_text_detokenize import partial_characters
from wire.gen import generate_pb2 as pb

WORDS = ids_of(" the END of\n\n it,  two spaces. 안녕하세요 👩\u200d👩\u200d👧 🇰🇷 é")


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    ids: list[int]
    rounds: tuple[int, ...]
    stops: list[str]
    max_tokens: int

    @property
    def text(self) -> str:
        """What the model said, decoded at once."""
        return smollm2_text().tokenizer.decode(self.ids[: self.max_tokens])

    @property
    def expected(self) -> tuple[str, str]:
        """The text a client must get, and why it ends: by the stop that is complete first."""
        found = []
        for stop in self.stops:
            start = self.text.find(stop)
            if start >= 0:
                found.append((start + len(stop), start))
        if found:
            return self.text[: min(found)[1]], "stop"
        return self.text, "length" if self.max_tokens <= len(self.ids) else "stop"

    def dispatcher(self) -> FakeDispatcher:
        return FakeDispatcher(script=(*self.ids, EOS), rounds=self.rounds)

    def fields(self) -> dict[str, Any]:
        return {"stop": self.stops, "max_tokens": self.max_tokens}


@st.composite
def cases(draw: st.DrawFn) -> Case:
    ids = draw(
        st.lists(st.sampled_from(WORDS) | st.sampled_from(partial_characters()), min_size=1, max_size=20)
    )
    max_tokens = draw(st.integers(1, len(ids) + 1))
    text = smollm2_text().tokenizer.decode(ids)
    stops = []
    for _ in range(draw(st.integers(0, 3))):
        start = draw(st.integers(0, max(0, len(text) - 1)))
        stop = text[start : start + draw(st.integers(1, 8))] + draw(st.sampled_from(["", "", "x"]))
        if stop and "\ufffd" not in stop:
            stops.append(stop)
    rounds = tuple(draw(st.lists(st.integers(1, 6), min_size=1, max_size=4)))
    return Case(ids=ids, rounds=rounds, stops=list(dict.fromkeys(stops)), max_tokens=max_tokens)


async def by_http(case: Case, path: str, body: dict[str, Any]) -> None:
    text, reason = case.expected
    async with client(case.dispatcher()) as http:
        whole = (await http.post(path, json={**body, **case.fields()})).json()["choices"][0]
        chunks = events(await http.post(path, json={**body, **case.fields(), "stream": True}))
    parts = [chunk["choices"][0] for chunk in chunks]
    is_chat = "messages" in body
    shown = whole["message"]["content"] if is_chat else whole["text"]
    pieces = [part["delta"].get("content", "") if is_chat else part["text"] for part in parts]
    assert (shown, whole["finish_reason"]) == (text, reason)
    assert "".join(pieces) == text
    assert [part["finish_reason"] for part in parts] == [None] * (len(parts) - 1) + [reason]


async def by_grpc(case: Case) -> None:
    request = pb.GenerateRequest(text="hi", sampling=pb.Sampling(**case.fields()))
    messages = await ask(case.dispatcher(), request)
    text, reason = case.expected
    assert "".join(message.text for message in messages) == text
    assert [message.finish_reason for message in messages if message.finish_reason] == [reason]
    ids = [token for message in messages for token in message.token_ids]
    assert ids == [*case.ids, EOS][: len(ids)]
    assert messages[-1].usage.completion_tokens == len(ids)


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(case=cases())
def test_every_http_endpoint_gives_the_text_of_all_ids_up_to_the_first_stop(case: Case) -> None:
    asyncio.run(by_http(case, "/v1/completions", {"prompt": "hi"}))
    asyncio.run(by_http(case, "/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
@given(case=cases())
def test_grpc_gives_the_same_text(case: Case) -> None:
    asyncio.run(by_grpc(case))
