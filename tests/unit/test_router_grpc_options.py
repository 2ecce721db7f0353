"""gRPC's fields beyond plain sampling: choices, scores of the prompt, how text is made, and deadlines."""

import asyncio
from typing import Any

import grpc
import pytest

from router.errors import DeadlineExceeded
from tests.fakes_dispatch import MAX_MODEL_LEN, FakeDispatcher
from tests.smollm2_text import smollm2_text
from tests.unit.test_router_grpc import EOS, TEXT, answering, ask, channel, ids_of, stub, trailing
from wire.gen import generate_pb2 as pb


def prompt_text(dispatcher: FakeDispatcher) -> str:
    return smollm2_text().tokenizer.decode(dispatcher.requests[0].prompt_ids, shows_special=True)


async def refusal(request: pb.GenerateRequest) -> tuple[grpc.StatusCode, str]:
    dispatcher = answering()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(dispatcher, request)
    assert dispatcher.requests == []
    return caught.value.code(), trailing(caught.value)["paceline-param"]


async def test_choices_have_an_index_and_usage_over_all_comes_last() -> None:
    def script(request: Any) -> list[int]:
        return [*ids_of(f"s{request.sampling.seed}"), EOS]

    request = pb.GenerateRequest(text="hi", n=3, sampling=pb.Sampling(seed=7))
    messages = await ask(FakeDispatcher(script_for=script), request)
    texts = {i: "".join(one.text for one in messages if one.index == i) for i in range(3)}
    assert texts == {0: "s7", 1: "s8", 2: "s9"}
    assert sorted(one.index for one in messages if one.finish_reason) == [0, 1, 2]
    assert [one.HasField("usage") for one in messages] == [False] * (len(messages) - 1) + [True]
    usage = messages[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (1, 3 * (len(ids_of("s7")) + 1))
    assert await refusal(pb.GenerateRequest(text="hi", n=0)) == (grpc.StatusCode.INVALID_ARGUMENT, "n")
    assert (await refusal(pb.GenerateRequest(text="hi", n=129)))[1] == "n"


async def test_a_prompt_is_scored_and_needs_no_answer() -> None:
    request = pb.GenerateRequest(
        token_ids=pb.TokenIds(ids=[5, 6, 7]), sampling=pb.Sampling(prompt_logprobs=1, max_tokens=0)
    )
    first, last = await ask(answering(), request)
    assert [(entry.logprob, list(entry.top_ids)) for entry in first.prompt_logprobs] == [(-1, [6]), (-2, [7])]
    assert (first.text, list(first.token_ids), last.finish_reason) == ("", [], "length")
    assert (last.usage.prompt_tokens, last.usage.completion_tokens) == (3, 0)
    request.sampling.max_tokens = 2
    first, *_, last = await ask(answering(), request)
    assert (len(first.prompt_logprobs), last.usage.completion_tokens) == (2, 2)


async def test_stops_and_special_tokens_are_shown_when_asked_for() -> None:
    shown = pb.Sampling(stop=["END"], include_stop_str_in_output=True)
    messages = await ask(answering(), pb.GenerateRequest(text="hi", sampling=shown))
    assert "".join(one.text for one in messages) == TEXT[: TEXT.index("END") + 3]
    script = (*ids_of("a"), 1, *ids_of("b"), EOS)
    for skips, expected in ((None, "ab"), (True, "ab"), (False, "a<|im_start|>b")):
        sampling = pb.Sampling(skip_special_tokens=skips)
        messages = await ask(FakeDispatcher(script=script), pb.GenerateRequest(text="x", sampling=sampling))
        assert "".join(one.text for one in messages) == expected


async def test_the_template_takes_its_options() -> None:
    chat = pb.ChatMessages(
        messages=[pb.ChatMessage(role="user", content="hi"), pb.ChatMessage(role="assistant", content="Well")]
    )
    usual, closed, continued = answering(), answering(), answering()
    await ask(usual, pb.GenerateRequest(chat=chat))
    chat.add_generation_prompt = False
    chat.template_variables.update({"anything": {"a": [1, True]}})
    await ask(closed, pb.GenerateRequest(chat=chat))
    chat.ClearField("add_generation_prompt")
    chat.continue_final_message = True
    await ask(continued, pb.GenerateRequest(chat=chat))
    assert prompt_text(usual).endswith("Well<|im_end|>\n<|im_start|>assistant\n")
    assert prompt_text(closed).endswith("Well<|im_end|>\n")
    assert prompt_text(continued).endswith("<|im_start|>assistant\nWell")
    chat.add_generation_prompt = True
    assert (await refusal(pb.GenerateRequest(chat=chat)))[1] == "continue_final_message"
    chat.continue_final_message = False
    chat.template_variables.update({"messages": []})
    assert (await refusal(pb.GenerateRequest(chat=chat)))[1] == "chat_template_kwargs"


async def test_a_prompt_can_be_cut() -> None:
    dispatcher = answering()
    ids = pb.TokenIds(ids=[5] * (2 * MAX_MODEL_LEN))
    await ask(dispatcher, pb.GenerateRequest(token_ids=ids, truncate_prompt_tokens=9))
    await ask(dispatcher, pb.GenerateRequest(token_ids=ids, truncate_prompt_tokens=-1))
    assert [len(request.prompt_ids) for request in dispatcher.requests] == [9, MAX_MODEL_LEN - 1]
    assert (await refusal(pb.GenerateRequest(text="x", truncate_prompt_tokens=0)))[
        1
    ] == "truncate_prompt_tokens"


async def test_the_calls_deadline_is_the_requests_and_ends_it() -> None:
    dispatcher = answering(stall_after=1)
    async with channel(dispatcher) as opened:
        await opened.channel_ready()
        call = stub(opened).Generate(pb.GenerateRequest(text="x"), timeout=4)
        assert (await anext(aiter(call))).text
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await asyncio.wait_for(dispatcher.until_idle(), timeout=60)
    (request,) = dispatcher.requests
    assert request.deadline_s is not None
    assert 0 < request.deadline_s < 4.1
    assert dispatcher.num_closed_early == 1


async def test_a_deadline_that_passes_on_the_nodes_is_told_as_such() -> None:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await ask(answering(error=DeadlineExceeded("out of time")), pb.GenerateRequest(text="x"))
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    assert trailing(caught.value)["paceline-code"] == "deadline_exceeded"


async def test_a_cancelled_call_closes_every_choice() -> None:
    dispatcher = answering(stall_after=2)
    async with channel(dispatcher) as opened:
        call = stub(opened).Generate(pb.GenerateRequest(text="x", n=4))
        await dispatcher.until_stalled(4)
        call.cancel()
        await asyncio.wait_for(dispatcher.until_idle(), timeout=60)
    assert dispatcher.num_closed_early == 4
