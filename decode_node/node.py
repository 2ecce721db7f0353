"""Wires a decode node: settings to engine, engine to core, core to process."""

from time import perf_counter

from decode_node.config import DecodeConfig
from decode_node.loop import DecodeLoop
from engine.thread import in_passing_thread
from kv_transfer.checksums import checksums_of_copies
from kv_transfer.decode_side import DecodeTransfers
from speculative.build import BuiltEngine, build_engine
from speculative.settings import EngineSettings
from wire.node_app import CoreParts, Role, serve_node
from wire.node_facts import engine_settings, facts_of


async def run(config: DecodeConfig) -> None:
    """Load, serve, drain on SIGTERM. Raises ValueError for a setting or a model that cannot work."""
    built = await in_passing_thread(lambda: build_engine(settings_of(config), clock=perf_counter))
    facts = facts_of("decode", config, built.facts)
    await serve_node(
        config,
        facts,
        Role(
            build_core=lambda parts: core_of(built, parts),
            wants=lambda record: record.role == "prefill",
            may_write=lambda _, tid, page_ids: built.loop.cache.holds_lease(tid, page_ids),
            allow_seedless=config.letting_in.allow_seedless,
        ),
    )


def settings_of(config: DecodeConfig) -> EngineSettings:
    return engine_settings(
        config,
        reserve_tokens=config.letting_in.reserve_tokens,
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
