"""The metrics of a node: the table, and how a status becomes its readings.

Owns names, meanings and labels. Nothing is counted here: a scrape reads what the core counted anyway. Label
values come from closed sets: positions, transports, error codes, states and events of the transfer machines.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from wire.host_events import NodeStatus
from wire.metric import Readings, counter, exposition, gauge, histogram
from wire.records import NodeRecord
from wire.tally import Distribution

NODE_METRICS = (
    gauge(
        "paceline_node_info",
        "info/*",
        "Always 1; the labels say what this node is.",
        "incarnation",
        "address",
        "layout",
    ),
    gauge("paceline_node_pages", "total_pages", "KV pages in the pool."),
    gauge(
        "paceline_node_pages_free",
        "free_pages",
        "KV pages a request could get now: free, or cached and unused.",
    ),
    gauge(
        "paceline_node_pages_quarantined",
        "quarantined_pages",
        "KV pages that a lost peer may still write to; nobody gets them.",
    ),
    gauge(
        "paceline_node_page_books_wrong",
        "books_wrong",
        "1 when the idle node found a page without exactly one owner.",
    ),
    gauge("paceline_node_requests_running", "running", "Requests in the batch."),
    gauge(
        "paceline_node_requests_waiting",
        "waiting",
        "Requests that wait for pages, for their KV or for a place in the batch.",
    ),
    gauge("paceline_node_queued_tokens", "queued_tokens", "Prompt tokens not yet computed."),
    gauge("paceline_node_draining", "draining", "1 while the node takes nothing new."),
    gauge("paceline_node_peers", "peers/*", "Peers by state: ready, refused or connecting.", "state"),
    gauge("paceline_node_links_open", "links_open", "Streams from routers."),
    gauge("paceline_node_sessions_open", "sessions_open", "Sessions accepted from decode nodes."),
    counter("paceline_node_engine_steps_total", "engine_steps", "Forward passes."),
    counter("paceline_node_prompt_tokens_total", "prompt_tokens", "Prompt tokens computed here."),
    counter("paceline_node_output_tokens_total", "output_tokens", "Tokens emitted here."),
    counter(
        "paceline_node_prefix_query_tokens_total",
        "prefix_query_tokens",
        "Prompt tokens looked up in the prefix cache.",
    ),
    counter(
        "paceline_node_prefix_hit_tokens_total",
        "prefix_hit_tokens",
        "Prompt tokens found in the prefix cache.",
    ),
    counter("paceline_node_rounds_total", "rounds", "Rounds of decoding requests."),
    counter("paceline_node_drafted_tokens_total", "drafted_tokens", "Tokens drafted."),
    counter("paceline_node_accepted_tokens_total", "accepted_tokens", "Drafted tokens that stood."),
    counter(
        "paceline_node_accepted_at_total",
        "accepted_at_*",
        "Rounds in which the draft at this position (0 first) stood.",
        "position",
    ),
    gauge("paceline_node_draft_limit", "draft_limit", "Most tokens the last round could draft."),
    counter(
        "paceline_node_draft_limit_switches_total", "draft_limit_switches", "How often the draft limit moved."
    ),
    counter(
        "paceline_node_draft_limit_probes_total",
        "draft_limit_probes",
        "Rounds that tried another draft limit than the one in force.",
    ),
    gauge(
        "paceline_node_draft_gain",
        "draft_gain",
        "Tokens per second over plain decoding's at the draft limit in force, as estimated; 1 while unknown.",
    ),
    counter("paceline_node_constrained_rows_total", "constrained_rows", "Logits rows masked by a grammar."),
    counter(
        "paceline_node_stalled_rounds_total",
        "stalled_rounds",
        "Rounds given up because what their grammar allows was not worked out in time.",
    ),
    counter("paceline_node_preemptions_total", "preemptions", "Requests given up for want of pages."),
    counter("paceline_node_rejected_total", "rejected", "Requests refused at the door."),
    counter("paceline_node_cancelled_total", "cancelled", "Requests cancelled by their router."),
    counter(
        "paceline_node_finished_total",
        "finished/*",
        "Requests that ended well: stop, length, or handed_over to a decode node.",
        "reason",
    ),
    counter("paceline_node_failed_total", "failed/*", "Requests that failed here, by code.", "code"),
    counter(
        "paceline_node_local_prefills_total", "local_prefills", "Prompts that a decode node computed itself."
    ),
    counter("paceline_transfers_total", "transfers/*", "Prompts whose KV arrived in full.", "transport"),
    counter(
        "paceline_transfer_bytes_total",
        "transfer_bytes/*",
        "KV bytes sent (prefill) or received (decode).",
        "transport",
    ),
    counter(
        "paceline_transfer_failures_total",
        "transfer_failures/*",
        "Transfers given up, by transport and code.",
        "transport",
        "code",
    ),
    counter(
        "paceline_transfer_faults_total",
        "transfer_faults/*",
        "Messages the protocol does not allow in the state they met.",
        "fault",
    ),
    counter(
        "paceline_transfer_quarantines_total",
        "quarantined",
        "Leases whose peer did not say that it stopped writing.",
    ),
    counter("paceline_node_peers_refused_total", "peers_refused", "Peers that do not fit."),
    counter("paceline_node_peers_dropped_total", "peers_dropped", "Sessions torn down by us."),
    counter(
        "paceline_node_links_dropped_total",
        "links_dropped",
        "Router streams dropped because they were not read.",
    ),
    counter(
        "paceline_node_calls_refused_total",
        "calls_refused",
        "Calls turned away because they lacked the cluster's token.",
    ),
    counter(
        "paceline_node_registry_failures_total",
        "registry_failures",
        "Heartbeats that the registry did not take.",
    ),
    counter(
        "paceline_degraded_total",
        "degraded/*",
        "Times a second-best way was taken: the label says which.",
        "what",
    ),
    histogram("paceline_node_queue_seconds", "queue_s", "Arrival of a request until it runs here."),
    histogram("paceline_node_prefill_seconds", "prefill_s", "Start of a prompt until its first token."),
    histogram("paceline_node_decode_seconds", "decode_s", "Start in the batch until the last token."),
    histogram(
        "paceline_transfer_seconds",
        "transfer_s/*",
        "First KV page on its way until the last has arrived.",
        "transport",
    ),
    histogram("paceline_loop_lag_seconds", "loop_lag_s", "How late the event loop woke a sleeping task."),
)

VLLM_NODE_METRICS = (
    gauge("vllm:num_requests_running", "running", "Requests in the batch."),
    gauge("vllm:num_requests_waiting", "waiting", "Requests waiting."),
    gauge("vllm:kv_cache_usage_perc", "kv_usage", "Share of KV pages in use, 0 to 1."),
    gauge("vllm:gpu_cache_usage_perc", "kv_usage", "The older name of kv_cache_usage_perc."),
    gauge(
        "vllm:cache_config_info",
        "cache_config/*",
        "Always 1; sizes as labels.",
        "block_size",
        "num_gpu_blocks",
    ),
    counter("vllm:prompt_tokens_total", "prompt_tokens", "Prompt tokens computed."),
    counter("vllm:generation_tokens_total", "output_tokens", "Tokens emitted."),
    counter("vllm:prefix_cache_queries_total", "prefix_query_tokens", "Prompt tokens looked up."),
    counter("vllm:prefix_cache_hits_total", "prefix_hit_tokens", "Prompt tokens found."),
    counter("vllm:num_preemptions_total", "preemptions", "Requests given up for want of pages."),
    counter("vllm:request_success_total", "finished/*", "Requests that ended well.", "finished_reason"),
    counter("vllm:spec_decode_num_drafts_total", "drafted_rounds", "Rounds with drafts."),
    counter("vllm:spec_decode_num_draft_tokens_total", "drafted_tokens", "Tokens drafted."),
    counter("vllm:spec_decode_num_accepted_tokens_total", "accepted_tokens", "Drafts that stood."),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "accepted_at_*",
        "Drafts that stood, by position.",
        "position",
    ),
    histogram("vllm:request_queue_time_seconds", "queue_s", "Waiting."),
    histogram("vllm:request_prefill_time_seconds", "prefill_s", "Prefill."),
    histogram("vllm:request_decode_time_seconds", "decode_s", "Decode."),
)
"""The names that benchmark clients, dashboards and gateways for vLLM look for; label `model_name`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReading:
    """One look at a node. `lag` and `more` are what the process knows besides its core."""

    record: NodeRecord
    status: NodeStatus
    lag: Distribution
    more: Mapping[str, float] = field(default_factory=dict)


def node_text(reading: NodeReading) -> bytes:
    """Prometheus text of one node."""
    readings = _readings(reading)
    record = reading.record
    ours = exposition(NODE_METRICS, readings, constant={"role": record.role})
    return ours + exposition(VLLM_NODE_METRICS, readings, constant={"model_name": record.model})


def _readings(reading: NodeReading) -> Readings:
    record, status = reading.record, reading.status
    load = status.load
    peers = {"peers/ready": 0.0, "peers/refused": 0.0, "peers/connecting": 0.0}
    for state in status.peers.values():
        word = state.partition(" ")[0]
        peers[f"peers/{word}" if f"peers/{word}" in peers else "peers/connecting"] += 1
    return Readings(
        values={
            **_degraded(status.counters),
            **status.counters,
            **reading.more,
            **peers,
            f"info/{record.incarnation}/{record.address}/{record.layout}": 1.0,
            f"cache_config/{record.page_size}/{load.total_pages}": 1.0,
            "total_pages": float(load.total_pages),
            "free_pages": float(load.free_pages),
            "kv_usage": 1 - load.free_pages / load.total_pages if load.total_pages else 0.0,
            "quarantined_pages": float(status.quarantined_pages),
            "books_wrong": float(bool(status.integrity)),
            "running": float(load.running),
            "waiting": float(load.waiting),
            "queued_tokens": float(load.queued_tokens),
            "draining": float(status.is_draining),
        },
        distributions={**status.distributions, "loop_lag_s": reading.lag},
    )


def _degraded(counters: Mapping[str, float]) -> dict[str, float]:
    """What the parts count under names of their own.

    transport_fallback: a pair moves pages by another transport than this node's first. seedless_join,
    bad_handoff: no draft state came along, or none that could be used. simulated_acceptance: rounds whose
    text is wrong on purpose. registry_away: heartbeats the registry did not take.
    """
    is_simulated = bool(counters.get("simulated_acceptance"))
    return {
        "degraded/seedless_join": counters.get("seedless_joins", 0.0),
        "degraded/bad_handoff": counters.get("bad_handoffs", 0.0),
        "degraded/registry_away": counters.get("registry_failures", 0.0),
        "degraded/simulated_acceptance": counters.get("rounds", 0.0) if is_simulated else 0.0,
        "degraded/transport_fallback": counters.get("degraded/transport_fallback", 0.0),
    }
