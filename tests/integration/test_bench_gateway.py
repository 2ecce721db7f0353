"""The gateway measurement end to end with a handful of requests: real stubs, routers and client."""

import json
from itertools import repeat
from pathlib import Path

import pytest

from bench.gateway import run
from bench.gateway_config import GatewayBench
from bench.load import WordFinder
from bench.ticks import TickReader
from tests.smollm2_text import smollm2_tokenizer_folder

pytestmark = [pytest.mark.model, pytest.mark.timeout(600)]


async def test_every_word_of_every_contender_tells_how_late_it_is(tmp_path: Path) -> None:
    file = tmp_path / "gateway.json"
    config = GatewayBench(
        json=f"{file}",
        model=f"{smollm2_tokenizer_folder()}",
        concurrency=4,
        requests=8,
        tokens=10,
        step_ms=2.0,
        rounds=1,
        routers="paceline_x2",
    )
    said: list[str] = []
    result = await run(config, report=said.append)
    assert json.loads(file.read_text()) == result
    assert set(result["contenders"]) == {"direct", "paceline_x2"}
    for name, numbers in result["contenders"].items():
        assert numbers["num_failed"] == 0, name
        # Every one of the words, of a stub's ten a request, came back and was read.
        assert numbers["chunks_per_s"] == pytest.approx(10 * numbers["requests_per_s"]), name
        assert name in said[-1]
    assert result["contenders"]["direct"]["added_event_ms_median"] == 0.0
    assert result["contenders"]["direct"]["cpu_ms_per_request"] == 0.0


def test_words_are_found_in_whatever_pieces_an_answer_comes() -> None:
    answer = b'data: {"choices":[{"text":" ab"}]}\n\ndata: {"choices":[{"text":"","text":" c"}]}\n\n'
    for size in range(1, len(answer) + 1):
        finder = WordFinder()
        pieces = [answer[start : start + size] for start in range(0, len(answer), size)]
        assert [word for piece in pieces for word in finder.feed(piece)] == [b" ab", b"", b" c"], size


def test_a_word_tells_how_late_it_is_over_the_turn_of_the_clock() -> None:
    words = [f"w{i}".encode() for i in range(1000)]
    for now in (0, 2, 7399, 999_999):
        reader = TickReader(words, clock=repeat(now).__next__)
        for late in (0, 3, 400):
            assert reader.lateness_s(words[(now - late) % 1000]) == pytest.approx(late * 1e-4)
        assert reader.lateness_s(b"other") is None
