"""A real engine over a tiny random model, as the tests of the loop, nodes and simulation use it."""

import time
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import torch

from engine.kv_cache import KvCache
from engine.layout import PoolSpec, build_layout
from engine.loaders import LoadedModel, load_model
from engine.models.model import Model
from engine.params import SamplingParams
from engine.pool import PagePool
from engine.request import Request
from engine.scheduler import SchedulerLimits
from speculative.loop import EngineLoop
from speculative.null import NullConfig, NullProposer
from speculative.policy import DraftPolicy, prepare
from speculative.progress import Progress
from speculative.proposer import Proposer
from speculative.settings import EngineSettings
from tests.scratch import new_folder
from tests.tiny_models import save_tiny

VOCAB_SIZE = 256
UNWRITTEN = 1e4


@cache
def tiny_folder(family: str = "llama") -> Path:
    return save_tiny(family, new_folder(family))


@cache
def tiny_model(family: str = "llama", device: str = "cpu") -> LoadedModel:
    return load_model(tiny_folder(family), dtype="float32", device=torch.device(device))


def make_engine(
    proposer: Proposer | None = None,
    *,
    family: str = "llama",
    num_pages: int = 256,
    page_size: int = 4,
    device: str = "cpu",
    model: Model | None = None,
    policy: DraftPolicy | None = None,
    **limits: int,
) -> EngineLoop:
    """`limits` are fields of SchedulerLimits; `model` stands in for the tiny one that it is like."""
    loaded = tiny_model(family, device)
    config = loaded.config
    proposer, policy = proposer or NullProposer(NullConfig()), policy or DraftPolicy()
    prepare(policy, proposer)
    target = PoolSpec(
        pool="target",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    layout = build_layout(page_size=page_size, dtype="float32", pools=[target, *proposer.needs.draft_kv])
    pool = PagePool(layout, num_pages, torch.device(device))
    pool.storage.view(torch.float32).fill_(UNWRITTEN)  # what nobody wrote must not be seen
    return EngineLoop(
        model=model or loaded.model,
        pool=pool,
        cache=KvCache(
            num_pages=num_pages,
            page_size=page_size,
            fingerprint="tiny",
            lookahead=proposer.needs.num_lookahead_tokens,
        ),
        proposer=proposer,
        policy=policy,
        limits=SchedulerLimits(**{"max_running": 16, "chunk_tokens": 64, **limits}),
    )


def tiny_settings(
    algorithm: str, draft: str, options: Mapping[str, object], *, is_prefill_only: bool = False
) -> EngineSettings:
    """What a node would build its engine from."""
    return EngineSettings(
        model=str(tiny_folder()),
        device="cpu",
        dtype="float32",
        page_size=4,
        num_pages=64,
        kv_memory_mib=1,
        max_model_len=0,
        chunk_tokens=64,
        max_running=4,
        reserve_tokens=0,
        algorithm=algorithm,
        draft=draft,
        draft_options=options,
        threads=1,
        is_prefill_only=is_prefill_only,
    )


def make_request(key: str, prompt: list[int], **sampling: object) -> Request:
    params = {"seed": 0, "max_tokens": 12, "temperature": 0.0, **sampling}
    return Request(
        key=key,
        prompt_ids=tuple(prompt),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**params),  # type: ignore[arg-type]
    )


def run(engine: EngineLoop, requests: list[Request]) -> dict[str, list[Progress]]:
    """Everything each request went through, until the engine is empty; pages must come back."""
    for request in requests:
        engine.add(request)
    history: dict[str, list[Progress]] = {str(request.key): [] for request in requests}
    for _ in range(10_000):
        if not engine.requests():
            break
        found = engine.step().progress
        for progress in found:
            history[str(progress.request.key)].append(progress)
        if engine.is_masking and not found:
            time.sleep(0.003)  # a thread makes masks, on a busy machine in its own time
        assert engine.cache.problems(engine.requests()) == []
    assert not engine.requests(), "the engine does not come to an end"
    assert engine.cache.num_available == engine.cache.num_pages
    return history


def tokens_of(history: list[Progress]) -> list[int]:
    return [token for progress in history for token in progress.tokens]
