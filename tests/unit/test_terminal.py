"""What a user of `paceline chat` and `make demo` sees, and how the stream becomes that."""

import io
import json

import pytest

from deploy import client as module
from deploy.client import Answer, Delta
from deploy.errors import GatewayError
from deploy.terminal import Terminal, bytes_text, facts


def take(answer: Answer, chunk: dict[str, object]) -> list[Delta]:
    return module._take(f"data: {json.dumps(chunk)}", answer)


def test_a_chunk_tells_its_text_and_how_much_of_it_was_drafted() -> None:
    answer = Answer()
    chunk: dict[str, object] = {
        "choices": [{"index": 0, "delta": {"content": " a b c"}, "finish_reason": None}],
        "paceline": {"accepted": 2, "accepted_chars": 4, "ids": 3},
    }
    assert take(answer, chunk) == [Delta(text=" a b c", accepted_chars=4)]


def test_a_server_that_tells_nothing_of_drafts_is_shown_too() -> None:
    assert take(Answer(), {"choices": [{"delta": {"content": "x"}}]}) == [Delta(text="x")]


def test_usage_and_details_end_up_in_the_answer() -> None:
    answer = Answer(ttft_s=0.5, total_s=1.5)
    take(answer, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
    take(
        answer,
        {
            "choices": [],
            "usage": {"prompt_tokens": 7, "completion_tokens": 21},
            "paceline": {"kv_bytes": 3 * 2**20, "transport": "nixl"},
            "metrics": {
                "speculative_decoding": {
                    "num_spec_steps": 4,
                    "num_drafted": 9,
                    "num_accepted": 6,
                    "mean_acceptance_length": 2.5,
                }
            },
        },
    )
    assert facts(answer) == [
        ("prompt", "7 tokens"),
        ("answer", "21 tokens, ended by stop"),
        ("time to first token", "500 ms"),
        ("speed after it", "20.0 tokens/s"),
        ("KV cache moved", "3.0 MiB by nixl"),
        ("mean acceptance length", "2.50 tokens in each of 4 drafted rounds"),
        ("drafts accepted", "6 of 9"),
    ]


def test_an_error_inside_the_stream_is_an_error() -> None:
    with pytest.raises(GatewayError, match="node went away"):
        take(Answer(), {"error": {"message": "node went away"}})


def test_lines_that_are_no_data_are_ignored() -> None:
    assert module._take(": ping", Answer()) == module._take("data: [DONE]", Answer()) == []


def test_colour_marks_accepted_drafts_and_only_them() -> None:
    out = io.StringIO()
    Terminal(out, has_colour=True).delta(Delta(text=" one two", accepted_chars=4))
    assert out.getvalue() == "\x1b[32m one\x1b[0m two"


def test_without_a_terminal_there_is_no_colour() -> None:
    out = io.StringIO()
    terminal = Terminal(out)
    terminal.delta(Delta(text=" one two", accepted_chars=4))
    terminal.note("x")
    terminal.summary(Answer())
    assert "\x1b" not in out.getvalue()


@pytest.mark.parametrize(
    ("count", "text"), [(5, "5 B"), (2048, "2.0 KiB"), (3 * 2**20, "3.0 MiB"), (2**30, "1.0 GiB")]
)
def test_bytes_are_shown_in_the_unit_that_fits(count: int, text: str) -> None:
    assert bytes_text(count) == text
