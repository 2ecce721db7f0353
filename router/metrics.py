"""The metrics of a router: the table. `router.stats` counts, `wire.metric` writes.

Owns names, meanings and labels. Label values come from closed sets (outcomes, causes, codes, policies,
routes of the HTTP server, nodes the registry knows now), so that series do not grow with requests.
"""

from wire.metric import counter, gauge, histogram

ROUTER_METRICS = (
    counter("paceline_router_requests_total", "requests/*", "Requests by how they ended.", "outcome"),
    counter(
        "paceline_router_tokens_total",
        "tokens/*",
        "Tokens by kind: prompt, cached, output, drafted, accepted.",
        "kind",
    ),
    counter("paceline_router_redispatches_total", "redispatches/*", "Further attempts by cause.", "cause"),
    counter(
        "paceline_router_decisions_total",
        "decisions/*",
        "Dispatches by policy and by where the prompt is computed.",
        "policy",
        "decision",
    ),
    counter(
        "paceline_router_duplicate_tokens_total", "duplicates", "Token reports that were already delivered."
    ),
    counter("paceline_router_duplicate_faults_total", "conflicts", "Token reports that contradict another."),
    counter("paceline_router_late_events_total", "late_events", "Events of attempts that were already over."),
    counter("paceline_router_canaries_total", "canaries/*", "Canary runs.", "outcome"),
    counter("paceline_router_kv_bytes_total", "kv_bytes", "KV bytes handed over."),
    counter("paceline_router_draft_rounds_total", "drafted_rounds", "Rounds with drafts."),
    counter(
        "paceline_router_accepted_at_total",
        "accepted_at/*",
        "Rounds in which the draft at this position (0 first) stood.",
        "position",
    ),
    counter(
        "paceline_router_http_requests_total",
        "http/*",
        "Answered HTTP requests. 499: the client left.",
        "route",
        "method",
        "status",
    ),
    counter(
        "paceline_degraded_total",
        "degraded/*",
        "Times a second-best way was taken: registry_away, redispatch.",
        "what",
    ),
    gauge("paceline_router_in_flight", "in_flight", "Requests being served."),
    gauge("paceline_router_queue_requests", "queue_requests", "Requests that wait for their turn."),
    gauge("paceline_router_queue_bytes", "queue_bytes", "Bytes of the prompts that wait."),
    gauge("paceline_router_prefix_pages", "prefix_pages", "Cached pages of nodes, as they told."),
    counter(
        "paceline_router_believed_cached_tokens_total",
        "believed_cached",
        "Prompt tokens sent to nodes that were believed to have them cached.",
    ),
    gauge("paceline_router_ready_pairs", "ready_pairs", "Pairs that may be used."),
    gauge("paceline_router_pairs", "pairs/*", "Pairs by state.", "state"),
    gauge("paceline_router_registry_stale", "registry_stale", "1 while the registry does not answer."),
    gauge("paceline_router_draining", "draining", "1 while the router takes nothing new."),
    gauge(
        "paceline_router_node_requests_running",
        "node_running/*",
        "Requests in a node's batch, as it last said.",
        "role",
        "node",
    ),
    gauge(
        "paceline_router_node_requests_waiting",
        "node_waiting/*",
        "Requests that wait on a node, as it last said.",
        "role",
        "node",
    ),
    gauge(
        "paceline_router_node_pages_free",
        "node_free/*",
        "A node's free KV pages.",
        "role",
        "node",
    ),
    gauge("paceline_router_node_pages", "node_pages/*", "A node's KV pages.", "role", "node"),
    histogram("paceline_router_ttft_seconds", "ttft_s", "Time to first token."),
    histogram("paceline_router_tpot_seconds", "tpot_s", "Time per output token after the first, by request."),
    histogram("paceline_router_itl_seconds", "itl_s", "Between two deliveries of tokens to one request."),
    histogram("paceline_router_request_seconds", "request_s", "Whole requests."),
    histogram("paceline_router_queue_seconds", "queue_s", "How long requests waited here that had to wait."),
    histogram(
        "paceline_router_stage_seconds",
        "stage_s/*",
        "Where a request's time went: queue (here and on its first node), prefill, transfer, decode. "
        "Transfer overlaps prefill.",
        "stage",
    ),
    histogram("paceline_router_http_seconds", "http_s/*", "From request to the end of the answer.", "route"),
    histogram("paceline_loop_lag_seconds", "loop_lag_s", "How late the event loop woke a sleeping task."),
)

VLLM_ROUTER_METRICS = (
    gauge("vllm:num_requests_running", "in_flight", "Requests being served."),
    gauge("vllm:num_requests_waiting", "queue_requests", "Requests that wait for their turn."),
    gauge("vllm:kv_cache_usage_perc", "kv_usage", "Share of the decode nodes' KV pages in use, 0 to 1."),
    gauge("vllm:gpu_cache_usage_perc", "kv_usage", "The older name of kv_cache_usage_perc."),
    counter("vllm:prompt_tokens_total", "tokens/prompt", "Prompt tokens."),
    counter("vllm:generation_tokens_total", "tokens/output", "Tokens delivered."),
    counter("vllm:prefix_cache_queries_total", "tokens/prompt", "Prompt tokens."),
    counter("vllm:prefix_cache_hits_total", "tokens/cached", "Prompt tokens that were in a cache."),
    counter("vllm:request_success_total", "success/*", "Requests that did not fail.", "finished_reason"),
    counter("vllm:spec_decode_num_drafts_total", "drafted_rounds", "Rounds with drafts."),
    counter("vllm:spec_decode_num_draft_tokens_total", "tokens/drafted", "Tokens drafted."),
    counter("vllm:spec_decode_num_accepted_tokens_total", "tokens/accepted", "Drafts that stood."),
    counter(
        "vllm:spec_decode_num_accepted_tokens_per_pos_total",
        "accepted_at/*",
        "Drafts that stood, by position.",
        "position",
    ),
    histogram("vllm:time_to_first_token_seconds", "ttft_s", "Time to first token."),
    histogram("vllm:inter_token_latency_seconds", "itl_s", "Between two deliveries of tokens."),
    histogram("vllm:time_per_output_token_seconds", "itl_s", "Older name of inter_token_latency_seconds."),
    histogram("vllm:request_time_per_output_token_seconds", "tpot_s", "Time per output token, by request."),
    histogram("vllm:e2e_request_latency_seconds", "request_s", "Whole requests."),
    histogram("vllm:request_queue_time_seconds", "stage_s/queue", "Waiting."),
    histogram("vllm:request_prefill_time_seconds", "stage_s/prefill", "Prefill."),
    histogram("vllm:request_decode_time_seconds", "stage_s/decode", "Decode."),
)
"""The names that benchmark clients and dashboards for vLLM look for; label `model_name`."""
