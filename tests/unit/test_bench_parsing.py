import itertools
import json
import random

import pytest

from bench import prompts
from bench.config import ClusterBench
from bench.http_stream import BadResponse, StreamParser
from bench.load import AnswerCounter, LoadSpec, request_bytes
from bench.openai import Reading
from bench.vllm_pair import Address, for_decode, for_prefill
from deploy.errors import GatewayError
from tests.smollm2_text import smollm2_text

HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
)


def chunked(*parts: bytes) -> bytes:
    return b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in (*parts, b""))


def test_events_come_out_whole_however_the_bytes_are_split() -> None:
    answer = HEAD + chunked(b'data: {"a":1}\n\nda', b'ta: {"b":2}\n\n: comment\n\n', b"data: [DONE]\n\n")
    for seed in range(50):
        print("seed", seed)
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(answer)), rng.randrange(12)))
        parser = StreamParser()
        events = [
            event
            for start, stop in itertools.pairwise([0, *cuts, len(answer)])
            for event in parser.feed(answer[start:stop])
        ]
        assert events == [b'{"a":1}', b'{"b":2}', b"[DONE]"]
        assert parser.is_complete


def test_events_with_carriage_returns_are_events() -> None:
    parser = StreamParser()
    assert parser.feed(HEAD + chunked(b"data: x\r\n\r\n")) == [b"x"]


def test_an_error_is_a_status_and_a_body() -> None:
    parser = StreamParser()
    head = b"HTTP/1.1 404 Not Found\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n"
    assert parser.feed(head) == []
    assert not parser.is_complete
    assert parser.feed(b"{}") == []
    assert (parser.status, parser.body, parser.is_complete) == (404, b"{}", True)


def test_a_body_without_a_length_ends_with_the_connection() -> None:
    parser = StreamParser()
    parser.feed(b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n[1]")
    assert not parser.is_complete
    parser.finish()
    assert (parser.body, parser.is_complete) == (b"[1]", True)


@pytest.mark.parametrize("answer", [b"SSH-2.0-x\r\n\r\n", HEAD + b"zz\r\n"])
def test_what_is_not_http_is_refused(answer: bytes) -> None:
    with pytest.raises(BadResponse):
        StreamParser().feed(answer)


def test_a_connection_closed_in_the_middle_is_refused() -> None:
    parser = StreamParser()
    parser.feed(HEAD + b"5\r\nda")
    with pytest.raises(BadResponse, match="in the middle"):
        parser.finish()


def test_the_counter_counts_each_event_once_however_the_bytes_are_split() -> None:
    answer = HEAD + chunked(*[b'data: {"text":"x"}\n\n'] * 20, b"data: [DONE]\n\n")
    for seed in range(50):
        print("seed", seed)
        rng = random.Random(seed)
        cuts = sorted(rng.sample(range(len(answer)), rng.randrange(40)))
        counter = AnswerCounter()
        for start, stop in itertools.pairwise([0, *cuts, len(answer)]):
            assert not counter.is_complete
            counter.feed(answer[start:stop])
        assert (counter.num_events, counter.is_complete) == (21, True)


def test_the_load_sends_one_complete_request() -> None:
    spec = LoadSpec(host="h", port=1, prompt_ids=(5, 6), max_tokens=3, num_requests=1, concurrency=1)
    head, _, body = request_bytes(spec).partition(b"\r\n\r\n")
    assert b"content-length: %d" % len(body) in head
    assert json.loads(body) == {
        "prompt": [5, 6],
        "max_tokens": 3,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }


def test_tokens_are_the_servers_count_and_the_first_choice_ends_the_wait() -> None:
    times = iter([10.0, 10.5, 11.0, 12.0])
    reading = Reading(lambda: next(times))
    reading.start()
    reading.take(b'{"choices":[{"text":"a"}]}')
    reading.take(b'{"choices":[{"text":"b"}]}')
    reading.take(
        b'{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":64},'
        b'"metrics":{"speculative_decoding":{"num_spec_steps":4,"mean_acceptance_length":1.5}}}'
    )
    reading.take(b"[DONE]")
    completion = reading.completion()
    assert (completion.num_prompt_tokens, completion.num_output_tokens) == (7, 64)
    assert (completion.ttft_s, completion.total_s) == (0.5, 2.0)
    assert completion.acceptance_length == 1.5


def test_an_answer_without_usage_or_with_an_error_is_refused() -> None:
    reading = Reading(lambda: 0.0)
    reading.take(b'{"choices":[{"text":"a"}]}')
    with pytest.raises(GatewayError, match="no usage"):
        reading.completion()
    with pytest.raises(GatewayError, match="boom"):
        reading.take(b'{"error":{"message":"boom"}}')


@pytest.mark.parametrize(
    "line",
    [
        '"hi"',
        '{"prompt":"hi"}',
        '{"turns":["hi","more"]}',
        '{"messages":[{"content":"hi"}]}',
        '{"user":"hi"}',
    ],
)
def test_prompts_are_read_from_every_common_form(line: str) -> None:
    assert prompts.parse(line, "f:1") == "hi"


@pytest.mark.parametrize("line", ["{", "{}", "7", '""', '{"turns":[]}'])
def test_a_line_that_is_no_prompt_is_refused_with_its_place(line: str) -> None:
    with pytest.raises(ValueError, match=r"^f:1 must"):
        prompts.parse(line, "f:1")


def test_long_prompts_have_exactly_so_many_tokens_and_differ() -> None:
    tokenizer = smollm2_text().tokenizer
    texts = {prompts.of_length(tokenizer, 1000, seed=seed) for seed in range(3)}
    assert len(texts) == 3
    assert [len(tokenizer.encode(text, add_special_tokens=True)) for text in sorted(texts)] == [1000] * 3


def test_the_pair_front_asks_for_one_token_and_then_for_all_with_what_came_back() -> None:
    request = {"prompt": "x", "max_tokens": 9, "stream": True, "stream_options": {"include_usage": True}}
    first = for_prefill(request)
    assert (first["max_tokens"], "stream" in first, "stream_options" in first) == (1, False, False)
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    assert for_decode(request, {"kv_transfer_params": {"remote_port": 5}}) == {
        **request,
        "kv_transfer_params": {"remote_port": 5},
    }
    with pytest.raises(ValueError, match="handed nothing over"):
        for_decode(request, {"choices": []})


def test_the_pair_front_refuses_urls_without_a_port() -> None:
    assert Address.of("http://127.0.0.1:8131") == Address("127.0.0.1", 8131)
    with pytest.raises(ValueError, match="url must be"):
        Address.of("http://127.0.0.1")


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("concurrency", "2,8"),
        ("concurrency", "one"),
        ("parts", "engine,router,gpu"),
        ("clusters", "pair_rdma"),
        ("rounds", 0),
        ("max_tokens", 1),
        ("algorithms", " "),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, value: str | int) -> None:
    with pytest.raises(ValueError, match=rf"^{field} must"):
        ClusterBench(**{field: value})  # type: ignore[arg-type]
