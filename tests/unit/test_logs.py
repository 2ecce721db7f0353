import json
import logging
import sys

import pytest

from tests.fakes_nodes import a_request, cluster, reading, settle, virtual
from wire.logs import about, formatter
from wire.work import Rejected, TransferId


def record(message: str, *arguments: object, **extra: object) -> logging.LogRecord:
    made = logging.LogRecord("router.x", logging.WARNING, "f", 1, message, arguments, None)
    vars(made).update(extra)
    return made


def test_a_json_line_is_one_object_with_the_request_where_one_is_meant() -> None:
    line = formatter("json").format(record("lost %s\nand more", "p:1", **about("r7")))
    entry = json.loads(line)
    assert "\n" not in line
    assert entry.pop("time").endswith("+00:00")
    assert entry == {
        "level": "warning",
        "logger": "router.x",
        "message": "lost p:1\nand more",
        "request_id": "r7",
    }
    assert "request_id" not in json.loads(formatter("json").format(record("listening")))


def test_a_json_line_carries_the_exception() -> None:
    made = record("failed")
    try:
        raise OSError("gone")
    except OSError:
        made.exc_info = sys.exc_info()
    assert "OSError: gone" in json.loads(formatter("json").format(made))["exception"]


def test_a_text_line_ends_with_the_request() -> None:
    assert formatter("text").format(record("lost", **about("r7"))).endswith("W router.x: lost [r7]")
    assert formatter("text").format(record("lost")).endswith("W router.x: lost")


def test_an_attempt_that_broke_is_logged_with_its_request_and_without_the_node_s_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    @virtual
    async def refuse() -> None:
        async with cluster() as made, reading(made, a_request()):
            words = "the schema 'zyzzyva' is no schema"
            made["p1"].emit(
                Rejected(tid=TransferId("r1", 1), code="invalid_request", retryable=False, reason=words)
            )
            await settle()

    refuse()
    [entry] = [entry for entry in caplog.records if entry.name == "router.dispatch"]
    assert entry.getMessage() == "attempt 1 broke on the prefill node p1: rejected (invalid_request)"
    assert vars(entry)["request_id"] == "r1"
