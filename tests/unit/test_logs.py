import json
import logging
import sys

from wire.logs import about, formatter


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
