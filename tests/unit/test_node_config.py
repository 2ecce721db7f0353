"""Rules that both kinds of node configuration obey."""

import pytest

from decode_node.config import DecodeConfig
from wire.node_config import draft_options


def test_draft_options_are_read_by_name() -> None:
    assert draft_options("") == {}
    assert draft_options("num_steps=4, topk=4,mode=fast") == {"num_steps": 4, "topk": 4, "mode": "fast"}


@pytest.mark.parametrize("text", ["num_steps", "=4", "num_steps="])
def test_malformed_draft_options_are_refused_at_once(text: str) -> None:
    with pytest.raises(ValueError, match=r"draft_options must be name=value,name=value, got"):
        DecodeConfig(model="m", draft_options=text)
