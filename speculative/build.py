"""From settings to an engine that steps: checkpoint, proposer, page layout, pool, loop.

Owns the order in which these are made and the sizes derived from settings. Must never know a role, a
network or which algorithm it builds.
"""

import logging
import os
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from engine.cores import Cores, OwnCores, SharedCores
from engine.facts import EngineFacts
from engine.grammar import Grammars
from engine.grammar_compiler import XGrammars
from engine.kv_cache import KvCache
from engine.layout import PoolSpec, build_layout
from engine.loaders import Checkpoint, LoadedModel, load_model, open_checkpoint
from engine.loaders.vocabulary import vocabulary_of
from engine.models.config import ModelConfig, UnsupportedModel
from engine.pool import PagePool
from engine.scheduler import SchedulerLimits
from engine.side_threads import SideThreads
from speculative.loop import EngineLoop
from speculative.null import NullConfig, NullProposer
from speculative.policy import OPTIONS, DraftPolicy, policy_of, prepare
from speculative.proposer import DraftNeeds, Proposer
from speculative.registry import create_proposer, options_of
from speculative.settings import EngineSettings

_GRAMMAR_THREADS = 2
_MASK_THREADS = 4

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltEngine:
    """`grammars` None: the checkpoint has no vocabulary, so outputs cannot be constrained."""

    loop: EngineLoop
    facts: EngineFacts
    grammars: Grammars | None


def build_engine(settings: EngineSettings, *, clock: Callable[[], float]) -> BuiltEngine:
    """Load and allocate everything. Raises ValueError naming the setting that cannot work.

    `clock`: seconds, to tell how long rounds take.
    """
    torch.set_num_threads(_max_threads(settings))
    torch.set_grad_enabled(False)
    proposer = _proposer(settings)
    policy = _policy(settings, proposer, clock)
    checkpoint = open_checkpoint(Path(settings.model))
    loaded = load_model(checkpoint, dtype=settings.dtype, device=_device(settings.device))
    max_model_len = _max_model_len(settings, loaded.config)
    pool = _pool(settings, loaded, proposer.needs)
    loop = _loop(settings, loaded, pool, proposer=proposer, policy=policy)
    return BuiltEngine(
        loop=loop,
        facts=_facts(loaded, pool, proposer.needs, max_model_len=max_model_len),
        grammars=_grammars(checkpoint, loaded.config),
    )


def _max_threads(settings: EngineSettings) -> int:
    return settings.threads or len(os.sched_getaffinity(0))


def _max_model_len(settings: EngineSettings, config: ModelConfig) -> int:
    wanted = settings.max_model_len or config.max_model_len
    if wanted > config.max_model_len:
        raise ValueError(f"max_model_len must be at most {config.max_model_len} for this model, got {wanted}")
    return wanted


def _loop(
    settings: EngineSettings,
    loaded: LoadedModel,
    pool: PagePool,
    *,
    proposer: Proposer,
    policy: DraftPolicy,
) -> EngineLoop:
    cache = KvCache(
        num_pages=pool.num_pages,
        page_size=settings.page_size,
        fingerprint=f"{loaded.weights_fingerprint} {proposer.needs.draft_weights}",
        lookahead=proposer.needs.num_lookahead_tokens,
    )
    limits = SchedulerLimits(
        max_running=settings.max_running,
        chunk_tokens=settings.chunk_tokens,
        reserve_tokens=settings.reserve_tokens,
    )
    loop = EngineLoop(
        model=loaded.model,
        pool=pool,
        cache=cache,
        proposer=proposer,
        limits=limits,
        cores=_cores(_max_threads(settings), pool.device),
        policy=policy,
    )
    loop.mask_on(SideThreads(_MASK_THREADS, name="mask"))
    return loop


def _facts(loaded: LoadedModel, pool: PagePool, needs: DraftNeeds, *, max_model_len: int) -> EngineFacts:
    return EngineFacts(
        layout=pool.layout,
        address=pool.address,
        buffer=pool.buffer,
        num_pages=pool.num_pages,
        vocab_size=loaded.config.vocab_size,
        eos_token_ids=loaded.config.eos_token_ids,
        max_model_len=max_model_len,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        weights_fingerprint=loaded.weights_fingerprint,
        prefill_identity=needs.prefill_identity,
        draft=needs.draft,
        draft_weights=needs.draft_weights,
    )


def _grammars(checkpoint: Checkpoint, config: ModelConfig) -> Grammars | None:
    try:
        vocabulary = vocabulary_of(checkpoint)
    except UnsupportedModel as error:
        logger.warning("outputs cannot be constrained by a grammar: %s", error)
        return None
    return XGrammars(
        vocabulary,
        vocab_size=config.vocab_size,
        eos_token_ids=config.eos_token_ids,
        executor=SideThreads(_GRAMMAR_THREADS, name="grammar"),
    )


def _proposer(settings: EngineSettings) -> Proposer:
    known = options_of(settings.algorithm)
    paths = {"target": settings.model, "draft": settings.draft}
    given = {name: path for name, path in paths.items() if path and name in known}
    if settings.draft and "draft" not in known:
        raise ValueError(f"draft must be empty for algorithm {settings.algorithm!r}, got {settings.draft!r}")
    if "draft" in known and not settings.draft:
        raise ValueError(f"draft must be set for algorithm {settings.algorithm!r}: it needs a draft model")
    own = {name: value for name, value in settings.draft_options.items() if name not in OPTIONS}
    proposer = create_proposer(settings.algorithm, {**given, **own})
    if settings.is_prefill_only and not proposer.needs.prefill_identity:
        return NullProposer(NullConfig())
    return proposer


def _policy(settings: EngineSettings, proposer: Proposer, clock: Callable[[], float]) -> DraftPolicy:
    if settings.is_prefill_only:
        return DraftPolicy()  # both nodes of a pair may be given the same settings
    max_draft_tokens = proposer.needs.max_draft_tokens
    policy = policy_of(settings.draft_options, max_draft_tokens=max_draft_tokens, clock=clock)
    prepare(policy, proposer)
    return policy


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ValueError(f"device must be auto or cpu where there is no CUDA, got {name!r}")
    return torch.device(name)


def _cores(max_threads: int, device: torch.device) -> Cores:
    """Engines on this host that may use the same cores divide them."""
    if device.type != "cpu" or max_threads == 1:
        return OwnCores()
    affinity = "-".join(map(str, sorted(os.sched_getaffinity(0))))
    file = Path(tempfile.gettempdir()) / f"paceline-cores-{os.getuid()}-{affinity}"
    try:
        return SharedCores(file, max_threads=max_threads)
    except OSError as error:
        logger.warning("cores are not shared with other engines on this host: %s", error)
        return OwnCores()


def _pool(settings: EngineSettings, loaded: LoadedModel, needs: DraftNeeds) -> PagePool:
    config = loaded.config
    target = PoolSpec(
        pool="target",
        num_layers=config.num_layers,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
    )
    layout = build_layout(
        page_size=settings.page_size,
        dtype=str(loaded.model.dtype).removeprefix("torch."),
        pools=[target, *needs.draft_kv],
    )
    num_pages = settings.num_pages or settings.kv_memory_mib * 2**20 // layout.page_bytes
    if num_pages < 1:
        raise ValueError(
            f"kv_memory_mib must hold at least one page of {layout.page_bytes} bytes,"
            f" got {settings.kv_memory_mib}"
        )
    logger.info(
        "KV pool: %d pages of %d tokens, %.0f MiB",
        num_pages,
        settings.page_size,
        num_pages * layout.page_bytes / 2**20,
    )
    return PagePool(layout, num_pages, loaded.model.device)
