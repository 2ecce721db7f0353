"""How a process writes its log: lines of text, or one JSON object a line.

Owns the format. What is logged about a request carries its id as `extra=about(request_id)`. Prompts and
answers are never logged, whatever the level.
"""

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Literal, TextIO

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]

_TEXT = "%(asctime)s %(levelname).1s %(name)s: %(message)s"
_REQUEST_ID = "request_id"


def set_up(*, level: LogLevel, log_format: LogFormat, stream: TextIO | None = None) -> None:
    """Send everything of this process to one stream, standard error unless another is given."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(formatter(log_format))
    logging.basicConfig(level=level.upper(), handlers=[handler])


def formatter(log_format: LogFormat) -> logging.Formatter:
    return JsonLines() if log_format == "json" else Text(_TEXT)


def about(request_id: str) -> dict[str, str]:
    """The `extra` of a message about one request."""
    return {_REQUEST_ID: request_id}


class Text(logging.Formatter):
    """Lines for people; the request's id follows the message."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        request_id = vars(record).get(_REQUEST_ID)
        message = super().formatMessage(record)
        return message if request_id is None else f"{message} [{request_id}]"


class JsonLines(logging.Formatter):
    """time (UTC), level, logger, message; request_id and exception where there are any."""

    def format(self, record: logging.LogRecord) -> str:
        entry = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        if (request_id := vars(record).get(_REQUEST_ID)) is not None:
            entry[_REQUEST_ID] = request_id
        if record.exc_info:
            entry["exception"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False)
