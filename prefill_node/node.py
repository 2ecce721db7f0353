"""Wires a prefill node: settings to engine, engine to core, core to process."""

from time import perf_counter

from engine.thread import in_passing_thread
from kv_transfer.checksums import checksums_of_copies
from kv_transfer.prefill_side import PrefillTransfers
from prefill_node.config import PrefillConfig
from prefill_node.loop import PrefillLoop
from speculative.build import BuiltEngine, build_engine
from speculative.settings import EngineSettings
from wire.node_app import CoreParts, Role, serve_node
from wire.node_facts import engine_settings, facts_of


async def run(config: PrefillConfig) -> None:
    """Load, serve, drain on SIGTERM. Raises ValueError for a setting or a model that cannot work."""
    built = await in_passing_thread(lambda: build_engine(settings_of(config), clock=perf_counter))
    await serve_node(
        config,
        facts_of("prefill", config, built.facts),
        Role(build_core=lambda parts: core_of(built, parts), wants=None, may_write=None),
    )


def settings_of(config: PrefillConfig) -> EngineSettings:
    return engine_settings(
        config,
        reserve_tokens=0,  # nothing grows here: a request leaves with its first token
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
