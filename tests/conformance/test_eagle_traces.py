"""The recorded drafts of the bundled EAGLE-3 head for SmolLM2, reproduced round by round in float32."""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from deploy.config import BUNDLED_MODEL
from deploy.models import bundled_draft
from engine.kv_cache import KvCache
from engine.layout import PoolSpec, build_layout
from engine.loaders import LoadedModel, load_model
from engine.loaders.convert import convert_gguf
from engine.pool import PagePool
from engine.request import Request
from engine.scheduler import SchedulerLimits
from speculative.eagle3 import Eagle3Config, Eagle3Proposer
from speculative.loop import EngineLoop
from speculative.progress import Progress
from speculative.proposer import Proposal
from tests.engines import make_request
from tests.tiny_models import smollm2_gguf

HEAD = bundled_draft(BUNDLED_MODEL, "eagle3")
TRACES = Path(__file__).resolve().parents[1] / "data" / "traces_eagle3.json"

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


def traces() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(TRACES.read_text())["traces"]
    return found


class Recorded(Eagle3Proposer):
    """Keeps (root, committed, drafted) of every round, by request."""

    def __init__(self, config: Eagle3Config) -> None:
        super().__init__(config)
        self.rounds: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)

    def propose(self, requests: Sequence[Request], limits: Sequence[int]) -> list[Proposal]:
        proposals = super().propose(requests, limits)
        for request, proposal in zip(requests, proposals, strict=True):
            self.rounds[str(request.key)].append(
                {
                    "root": request.tokens[-1],
                    "committed": request.num_committed,
                    "drafted": list(proposal.token_ids),
                }
            )
        return proposals


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """The bfloat16 weights the traces were recorded with, computed in float32."""
    folder = convert_gguf(smollm2_gguf(), tmp_path_factory.mktemp("smollm2") / "model")
    return load_model(folder, dtype="float32", device="cpu")


def engine_of(loaded: LoadedModel, proposer: Eagle3Proposer) -> EngineLoop:
    config = loaded.config
    target = PoolSpec(
        pool="target",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    layout = build_layout(page_size=16, dtype="float32", pools=[target, *proposer.needs.draft_kv])
    cache = KvCache(num_pages=96, page_size=16, fingerprint="smollm2", lookahead=1)
    return EngineLoop(
        model=loaded.model,
        pool=PagePool(layout, 96, torch.device("cpu")),
        cache=cache,
        proposer=proposer,
        limits=SchedulerLimits(max_running=5, chunk_tokens=32, reserve_tokens=1),
    )


@pytest.mark.parametrize("num_drafts", [3, 5])
def test_recorded_rounds_are_reproduced(smollm2: LoadedModel, num_drafts: int) -> None:
    """All prompts at once: company changes no round."""
    wanted = {str(trace["line"]): trace for trace in traces() if trace["num_drafts"] == num_drafts}
    assert len(wanted) == 5
    proposer = Recorded(Eagle3Config(draft=str(HEAD), num_steps=num_drafts))
    engine = engine_of(smollm2, proposer)
    requests = {key: make_request(key, trace["prompt_ids"], max_tokens=140) for key, trace in wanted.items()}
    for request in requests.values():
        engine.add(request)
    reported: dict[str, list[Progress]] = {key: [] for key in wanted}
    while any(len(reported[key]) < len(trace["rounds"]) + 1 for key, trace in wanted.items()):
        for progress in engine.step().progress:
            if progress.tokens:
                reported[str(progress.request.key)].append(progress)
    for key, trace in wanted.items():
        first, *rounds = reported[key][: len(trace["rounds"]) + 1]
        assert first.tokens == (trace["first_token"],)
        found = [
            {**drafted, "num_accepted": progress.num_accepted, "emitted": list(progress.tokens)}
            for drafted, progress in zip(proposer.rounds[key], rounds, strict=False)
        ]
        assert found == trace["rounds"]
        request = requests[key]
        assert request.tokens[len(request.prompt_ids) :][: len(trace["output_ids"])] == trace["output_ids"]
