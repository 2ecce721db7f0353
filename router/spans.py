"""What a request's span says of it: OpenTelemetry's names where it has one, else ours. No text.

Owns the names. Must never know when a span begins or ends.
"""

from router.requests import Summary
from wire.tracing import Attribute


def attributes_of(summary: Summary, *, model: str) -> dict[str, Attribute]:
    """`model` "": whatever the cluster serves."""
    attributes: dict[str, Attribute] = {
        "gen_ai.provider.name": "paceline",
        "gen_ai.usage.input_tokens": summary.num_prompt_tokens,
        "gen_ai.usage.output_tokens": summary.num_output_tokens,
        "paceline.request_id": summary.request_id,
        "paceline.outcome": summary.ending,
        "paceline.attempts": summary.num_attempts,
        "paceline.cached_tokens": summary.cached_tokens,
        "paceline.drafted_tokens": summary.drafted,
        "paceline.accepted_tokens": summary.accepted,
        "paceline.prefill_node": summary.prefill_node,
        "paceline.decode_node": summary.decode_node,
    }
    if model:
        attributes["gen_ai.request.model"] = model
    if summary.ttft_s is not None:
        attributes["gen_ai.latency.time_to_first_token"] = summary.ttft_s
    if summary.is_failure:
        attributes["error.type"] = summary.ending
    return attributes
