"""How an answer looks on a terminal: accepted draft tokens in colour, a summary below.

Owns colours and layout. Must never know where the answer came from.
"""

import os
import sys
from typing import TextIO

from deploy.client import Answer, Delta

DRAFTED = "\x1b[32m"
DIM = "\x1b[2m"
PLAIN = "\x1b[0m"


class Terminal:
    """Writes to one stream; colours only where somebody sees them."""

    def __init__(self, stream: TextIO = sys.stdout, *, has_colour: bool | None = None) -> None:
        self._stream = stream
        wanted = "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"
        self._has_colour = stream.isatty() and wanted if has_colour is None else has_colour

    def line(self, text: str = "") -> None:
        print(text, file=self._stream, flush=True)

    def note(self, text: str) -> None:
        self.line(self._paint(DIM, text))

    def delta(self, delta: Delta) -> None:
        at = delta.accepted_chars
        self._stream.write(self._paint(DRAFTED, delta.text[:at]) + delta.text[at:])
        self._stream.flush()

    def summary(self, answer: Answer) -> None:
        """One fact a line."""
        width = max(len(name) for name, _ in facts(answer))
        for name, value in facts(answer):
            self.line(f"  {name:<{width}}  {value}")
        if self._has_colour:
            self.line(f"  {DRAFTED}in colour{PLAIN}: drafted tokens that the model accepted")

    def _paint(self, colour: str, text: str) -> str:
        return f"{colour}{text}{PLAIN}" if text and self._has_colour else text


def facts(answer: Answer) -> list[tuple[str, str]]:
    """Name and value of everything the summary shows."""
    found = [
        ("prompt", f"{answer.num_prompt_tokens} tokens"),
        ("answer", f"{answer.num_output_tokens} tokens, ended by {answer.finish_reason or 'nothing'}"),
        ("time to first token", f"{answer.ttft_s * 1e3:.0f} ms"),
        ("speed after it", f"{answer.tokens_per_s:.1f} tokens/s"),
    ]
    if answer.details.get("kv_bytes") is not None:
        transport = answer.details.get("transport") or "no transport"
        found.append(("KV cache moved", f"{bytes_text(int(answer.details['kv_bytes']))} by {transport}"))
    if speculation := answer.speculation:
        rounds, length = speculation["num_spec_steps"], speculation["mean_acceptance_length"]
        accepted, drafted = speculation["num_accepted"], speculation["num_drafted"]
        found.append(("mean acceptance length", f"{length:.2f} tokens in each of {rounds} drafted rounds"))
        found.append(("drafts accepted", f"{accepted} of {drafted}"))
    return found


def bytes_text(count: int) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:.1f} {unit}"
    return f"{count} B"
