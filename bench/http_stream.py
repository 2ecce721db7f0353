"""One HTTP/1.1 response as it arrives: bytes in, payloads of server-sent events out.

Owns head, chunked coding and event framing. Sans-IO: must never know sockets, time or JSON.
"""


class BadResponse(ValueError):
    """The server does not speak HTTP/1.1 as we know it."""


class StreamParser:
    """Feed it what the socket gives. `body` collects what is not an event, such as an error in JSON."""

    def __init__(self) -> None:
        self.status = 0
        self.body = b""
        self.is_complete = False
        self._received = bytearray()
        self._line = b""
        self._is_chunked = False
        self._is_events = False
        self._num_left: int | None = None

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads (what follows `data:`) of the events that are complete now. Raises BadResponse."""
        self._received += data
        if not self.status and not self._take_head():
            return []
        decoded = self._take_chunks() if self._is_chunked else self._take_plain()
        if not self._is_events:
            self.body += decoded
            return []
        return self._events(decoded)

    def finish(self) -> None:
        """The server closed the connection: fine only where nothing else marks the end."""
        if self._is_chunked or self._num_left is not None or not self.status:
            raise BadResponse("the connection was closed in the middle of a response")
        self.is_complete = True

    def _take_head(self) -> bool:
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return False
        first, *lines = bytes(self._received[:end]).split(b"\r\n")
        del self._received[: end + 4]
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            raise BadResponse(f"not an HTTP/1.1 response: {first[:80]!r}")
        headers = {
            name.strip().lower(): value.strip() for name, _, value in (x.partition(b":") for x in lines)
        }
        self.status = int(words[1])
        self._is_chunked = headers.get(b"transfer-encoding", b"").lower() == b"chunked"
        self._is_events = headers.get(b"content-type", b"").startswith(b"text/event-stream")
        length = headers.get(b"content-length")
        self._num_left = int(length) if length is not None else None
        self.is_complete = self._num_left == 0
        return True

    def _take_plain(self) -> bytes:
        taken = bytes(self._received)
        self._received.clear()
        if self._num_left is not None:
            self._num_left -= len(taken)
            self.is_complete = self._num_left <= 0
        return taken

    def _take_chunks(self) -> bytes:
        taken = b""
        while not self.is_complete:
            end = self._received.find(b"\r\n")
            if end < 0:
                break
            size = _chunk_size(bytes(self._received[:end]))
            if len(self._received) < end + 2 + size + 2:
                break
            taken += self._received[end + 2 : end + 2 + size]
            del self._received[: end + 2 + size + 2]
            self.is_complete = size == 0
        return taken

    def _events(self, decoded: bytes) -> list[bytes]:
        *lines, self._line = (self._line + decoded).split(b"\n")
        return [line[5:].strip() for line in lines if line.startswith(b"data:")]


def _chunk_size(line: bytes) -> int:
    try:
        return int(line.partition(b";")[0], 16)
    except ValueError:
        raise BadResponse(f"not a chunk size: {line[:80]!r}") from None
