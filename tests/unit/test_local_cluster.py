"""Which processes a local cluster consists of, and how it ends."""

import json
import math
import re
import socket
from pathlib import Path

import pytest

from deploy.config import UpConfig
from deploy.errors import PortTaken
from deploy.local import Cluster, _Commands, local_cluster, readiness
from deploy.processes import Command
from deploy.up import where


def commands(config: UpConfig, *, file: Path | None = None) -> _Commands:
    return _Commands(
        config=config, model=Path("/m"), tokenizer=Path("/t"), registry_url="redis://127.0.0.1:1/0", file=file
    )


def option(command: Command, flag: str) -> str:
    words = list(command.arguments)
    return words[words.index(flag) + 1]


def test_each_node_has_its_own_name_and_port() -> None:
    nodes = list(commands(UpConfig(prefill=2, decode=1)).nodes())
    assert [node.name for node in nodes] == ["prefill-0", "prefill-1", "decode-0"]
    assert len({option(node, "--port") for node in nodes}) == 3


def test_what_up_was_not_told_is_left_to_the_processes() -> None:
    for node in commands(UpConfig()).nodes():
        assert not {"--dtype", "--transport", "--algorithm"} & set(node.arguments)
    for node in commands(UpConfig(dtype="float32", transport="grpc")).nodes():
        assert (option(node, "--dtype"), option(node, "--transport")) == ("float32", "grpc")


def test_the_bundled_head_is_handed_on_unless_another_one_is_named() -> None:
    for node in commands(UpConfig(algorithm="eagle3")).nodes():
        assert Path(option(node, "--draft")).name == "eagle3-smollm2-135m"
        assert option(node, "--draft-options") == "num_steps=1,topk=3,num_draft_tokens=3"
    for node in commands(UpConfig(algorithm="eagle3", draft_options="topk=2")).nodes():
        assert option(node, "--draft-options") == "topk=2"
    for node in commands(UpConfig(algorithm="eagle3", draft="/mine")).nodes():
        assert option(node, "--draft") == "/mine"
        assert "--draft-options" not in node.arguments
    for node in commands(UpConfig(algorithm="eagle3", model="/other")).nodes():
        assert "--draft" not in node.arguments


def test_the_file_is_handed_on_to_every_process() -> None:
    made = commands(UpConfig(), file=Path("/c.toml"))
    for command in (*made.nodes(), made.router(1, 2)):
        assert option(command, "--config") == "/c.toml"


def test_the_router_waits_for_as_many_nodes_as_there_are() -> None:
    router = commands(UpConfig(prefill=2, decode=3)).router(1, 2)
    assert (option(router, "--min-prefill"), option(router, "--min-decode")) == ("2", "3")
    assert option(router, "--model") == "/t"
    assert "--colocated" not in router.arguments


def test_without_prefill_nodes_the_decode_nodes_prefill() -> None:
    made = commands(UpConfig(prefill=0))
    assert [node.name for node in made.nodes()] == ["decode-0"]
    assert "--colocated" in made.router(1, 2).arguments


def test_a_named_registry_is_used_instead_of_an_embedded_one(tmp_path: Path) -> None:
    assert list(commands(UpConfig(registry="redis://other:6379/0")).registry(1, tmp_path)) == []
    (embedded,) = commands(UpConfig()).registry(4321, tmp_path)
    assert option(embedded, "--port") == "4321"
    assert option(embedded, "--bind") == "127.0.0.1"


def test_waiting_says_which_pair_is_held_up_and_why() -> None:
    pair = {"prefill": "p:1", "decode": "d:2", "state": "refused", "reason": "page_size: 16 here, 32 there"}
    body = json.dumps({"ready": False, "pairs": [pair], "nodes": []})
    assert readiness(body) == "p:1 -> d:2 is refused (page_size: 16 here, 32 there)"
    assert (
        readiness(json.dumps({"pairs": [], "nodes": [{"role": "prefill"}]}))
        == "nodes seen: 1 prefill, 0 decode"
    )
    assert readiness("no json") == "no json"


@pytest.mark.parametrize(("field", "value"), [("prefill", -1), ("decode", 0), ("threads", -2)])
def test_counts_out_of_range_are_refused_by_name(field: str, value: int) -> None:
    with pytest.raises(ValueError, match=rf"{field} must be at least \d, got {value}"):
        UpConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("field", "value", "complaint"),
    [
        ("port", -1, "must be in [0, 65535], got -1"),
        ("port", 70000, "must be in [0, 65535], got 70000"),
        ("grpc_port", 70000, "must be in [0, 65535], got 70000"),
        ("ready_timeout_s", 0.0, "must be a positive number, got 0.0"),
        ("ready_timeout_s", math.nan, "must be a positive number, got nan"),
    ],
)
def test_ports_and_times_that_cannot_be_are_refused_by_name(field: str, value: float, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{field} {complaint}")):
        UpConfig(**{field: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("field", ["port", "grpc_port"])
async def test_a_port_of_another_cluster_is_refused_before_anything_is_started(
    tmp_path: Path, field: str
) -> None:
    """Its /ready would be taken for ours."""
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        ports = {"port": 0, "grpc_port": 0} | {field: port}
        config = UpConfig(model=str(tmp_path), log_dir=str(tmp_path), **ports)
        with pytest.raises(PortTaken, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            async with local_cluster(config, report=said.append):
                pass
    assert said == [f"logs: {tmp_path}"]


def test_what_up_prints_can_be_copied() -> None:
    cluster = Cluster(
        base_url="http://127.0.0.1:8000",
        grpc_address="127.0.0.1:50051",
        registry="redis://127.0.0.1:1/0",
        model=Path("/models/SmolLM2"),
        log_dir=Path("/logs"),
        children=(),
    )
    text = where(cluster)
    assert "curl -N http://127.0.0.1:8000/v1/chat/completions -H 'content-type: application/json'" in text
    assert '"model": "SmolLM2"' in text
    assert "paceline chat --url http://127.0.0.1:8000" in text
