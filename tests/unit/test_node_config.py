"""Rules that both kinds of node configuration obey."""

from pathlib import Path

import pytest

from decode_node.config import DecodeConfig, LettingIn
from wire.model_name import model_name
from wire.node_config import draft_options


def test_draft_options_are_read_by_name() -> None:
    assert draft_options("") == {}
    assert draft_options("num_steps=4, topk=4,mode=fast") == {"num_steps": 4, "topk": 4, "mode": "fast"}


@pytest.mark.parametrize("text", ["num_steps", "=4", "num_steps="])
def test_malformed_draft_options_are_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"draft_options must be name=value,name=value, got"):
        DecodeConfig(model="m", draft_options=text)


def test_numbers_that_no_node_could_run_with_are_refused_before_a_model_is_read() -> None:
    with pytest.raises(ValueError, match="max_waiting must be at least 1, got 0"):
        DecodeConfig(model="m", max_waiting=0)
    with pytest.raises(ValueError, match="reserve_tokens must be at least 0, got -1"):
        LettingIn(reserve_tokens=-1)


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("/models/tiny", "tiny"),
        ("/models/Qwen2.5-0.5B-Instruct/", "Qwen2.5-0.5B-Instruct"),
        ("/models/SmolLM2.Q4_1.gguf", "SmolLM2.Q4_1"),
        ("/models/other/../Llama-3.1-8B", "Llama-3.1-8B"),
    ],
)
def test_a_model_is_called_as_its_folder_is_dots_and_all(path: str, name: str) -> None:
    assert model_name(path) == name


def test_a_model_that_is_the_folder_one_stands_in_is_called_by_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert model_name(".") == tmp_path.name
