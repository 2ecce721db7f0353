"""What a node asks of its engine, and what it says of itself once that stands: to peers and to the registry.

Owns the mapping from settings and facts to those values. Must never know a connection.
"""

from dataclasses import dataclass

from engine.admission import EngineLimits
from engine.facts import EngineFacts
from engine.layout import KvLayout
from kv_transfer.ids import Incarnation
from kv_transfer.messages import Hello, SemanticIdentity, TransportOffer
from kv_transfer.transport import PoolMemory
from speculative.settings import EngineSettings
from wire.model_name import model_name
from wire.node_config import NodeConfig, advertised_metrics, draft_options
from wire.records import NodeRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What a role knows once its engine stands."""

    role: str
    model_name: str
    identity: SemanticIdentity
    layout: KvLayout
    memory: PoolMemory
    limits: EngineLimits
    eos_token_ids: tuple[int, ...]


def engine_settings(config: NodeConfig, *, reserve_tokens: int, is_prefill_only: bool) -> EngineSettings:
    """What both roles ask of their engine, and what they differ in."""
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
        reserve_tokens=reserve_tokens,
        algorithm=config.algorithm,
        draft=config.draft,
        draft_options=draft_options(config.draft_options),
        threads=config.threads,
        is_prefill_only=is_prefill_only,
    )


def facts_of(role: str, config: NodeConfig, engine: EngineFacts) -> NodeFacts:
    """What peers, routers and the registry are told about an engine."""
    name = config.served_model_name or model_name(config.model)
    return NodeFacts(
        role=role,
        model_name=name,
        identity=SemanticIdentity(
            model=name,
            revision="",
            weights=engine.weights_fingerprint,
            dtype=engine.dtype,
            tokenizer=f"{engine.vocab_size} ids, end {engine.eos_token_ids}",
            draft=engine.draft,
            draft_weights=engine.draft_weights,
            algorithm=engine.prefill_identity,
        ),
        layout=engine.layout,
        memory=PoolMemory(
            address=engine.address,
            page_bytes=engine.layout.page_bytes,
            num_pages=engine.num_pages,
            buffer=engine.buffer,
        ),
        limits=EngineLimits(
            max_model_len=engine.max_model_len,
            vocab_size=engine.vocab_size,
            num_pages=engine.num_pages,
            page_size=engine.layout.page_size,
        ),
        eos_token_ids=engine.eos_token_ids,
    )


def hello_of(
    incarnation: Incarnation,
    config: NodeConfig,
    facts: NodeFacts,
    *,
    transports: tuple[str, ...],
    allow_seedless: bool,
) -> Hello:
    """What peers are told; connection blobs are made per session."""
    return Hello(
        incarnation=incarnation,
        identity=facts.identity,
        layout=facts.layout,
        offers=tuple(TransportOffer(name=name, blob=b"") for name in transports),
        checksums=config.checksums,
        allow_seedless=allow_seedless,
    )


def record_of(
    incarnation: Incarnation,
    address: str,
    facts: NodeFacts,
    *,
    transports: tuple[str, ...],
    metrics_port: int | None,
    started_at: float,
) -> NodeRecord:
    """What the registry is told."""
    return NodeRecord(
        role=facts.role,
        address=address,
        incarnation=incarnation,
        model=facts.model_name,
        layout=facts.layout.fingerprint,
        page_size=facts.layout.page_size,
        max_model_len=facts.limits.max_model_len,
        vocab_size=facts.limits.vocab_size,
        transports=transports,
        eos_token_ids=facts.eos_token_ids,
        started_at=started_at,
        metrics_address=advertised_metrics(address, metrics_port),
    )
