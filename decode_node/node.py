"""Wires a decode node: settings to engine, engine to core, core to process."""

from time import perf_counter

from decode_node.config import DecodeConfig
from decode_node.loop import DecodeLoop
from engine.thread import in_passing_thread
from kv_transfer.checksums import checksums_of_copies
from kv_transfer.decode_side import DecodeTransfers
from speculative.build import BuiltEngine, EngineSettings, build_engine
from wire.node_app import CoreParts, Role, facts_of, serve_node
from wire.node_config import draft_options


async def run(config: DecodeConfig) -> None:
    """Load, serve, drain on SIGTERM. Raises ValueError for a setting or a model that cannot work."""
    built = await in_passing_thread(lambda: build_engine(settings_of(config), clock=perf_counter))
    facts = facts_of("decode", config, built.facts)
    await serve_node(
        config,
        facts,
        Role(
            build_core=lambda parts: core_of(built, parts),
            wants=lambda record: record.role == "prefill" and record.model == facts.model_name,
            may_write=lambda _, tid, page_ids: built.loop.cache.holds_lease(tid, page_ids),
            allow_seedless=config.letting_in.allow_seedless,
        ),
    )


def settings_of(config: DecodeConfig) -> EngineSettings:
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
        reserve_tokens=config.letting_in.reserve_tokens,
        algorithm=config.algorithm,
        draft=config.draft,
        draft_options=draft_options(config.draft_options),
        threads=config.threads,
        is_prefill_only=False,
    )


def core_of(built: BuiltEngine, parts: CoreParts) -> DecodeLoop:
    pool = built.loop.pool
    transfers = DecodeTransfers(
        page_size=pool.layout.page_size,
        page_checksum=checksums_of_copies(pool.page, parts.peers),
    )
    return DecodeLoop(
        engine=built.loop,
        transfers=transfers,
        peers=parts.peers,
        intake=parts.intake,
        clock=parts.clock,
        grammars=built.grammars,
    )
