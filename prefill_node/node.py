"""Wires a prefill node: settings to engine, engine to core, core to process."""

from time import perf_counter

from engine.thread import in_passing_thread
from kv_transfer.checksums import checksums_of_copies
from kv_transfer.prefill_side import PrefillTransfers
from prefill_node.config import PrefillConfig
from prefill_node.loop import PrefillLoop
from speculative.build import BuiltEngine, EngineSettings, build_engine
from wire.node_app import CoreParts, Role, facts_of, serve_node
from wire.node_config import draft_options


async def run(config: PrefillConfig) -> None:
    """Load, serve, drain on SIGTERM. Raises ValueError for a setting or a model that cannot work."""
    built = await in_passing_thread(lambda: build_engine(settings_of(config), clock=perf_counter))
    await serve_node(
        config,
        facts_of("prefill", config, built.facts),
        Role(build_core=lambda parts: core_of(built, parts), wants=None, may_write=None),
    )


def settings_of(config: PrefillConfig) -> EngineSettings:
    return EngineSettings(
        model=config.model,
        device=config.device,
        dtype=config.dtype,
        page_size=config.page_size,
        num_pages=config.num_pages,
        kv_memory_mib=config.kv_memory_mib,
        max_model_len=config.max_model_len,
        chunk_tokens=config.chunk_tokens,
        max_running=config.max_running,
        reserve_tokens=0,  # nothing grows here: a request leaves with its first token
        algorithm=config.algorithm,
        draft=config.draft,
        draft_options=draft_options(config.draft_options),
        threads=config.threads,
        is_prefill_only=True,
    )


def core_of(built: BuiltEngine, parts: CoreParts) -> PrefillLoop:
    pool = built.loop.pool
    transfers = PrefillTransfers(
        page_size=pool.layout.page_size,
        page_checksum=checksums_of_copies(pool.page, parts.peers),
    )
    return PrefillLoop(
        engine=built.loop,
        transfers=transfers,
        peers=parts.peers,
        intake=parts.intake,
        clock=parts.clock,
        grammars=built.grammars,
    )
