"""Where on a request's time line its stages lie. Pure arithmetic on what nodes told and the router saw.

Owns the order of the stages. Must never know nodes or attempts.
"""

from router.requests import Stage


def stages_of(
    *,
    since_arrival_s: float,
    total_s: float,
    queue_s: float,
    prefill_s: float,
    transfer_s: float,
    join_s: float,
) -> tuple[Stage, ...]:
    """`since_arrival_s`: from arrival to the dispatch of the attempt that succeeded; the rest is told by its
    nodes and counts from there. Empty stages are left out; none reaches past the end."""
    began = since_arrival_s + queue_s
    joined = since_arrival_s + join_s
    stages = (
        Stage(name="queue", start_s=0.0, end_s=began),
        Stage(name="prefill", start_s=began, end_s=began + prefill_s),
        Stage(name="transfer", start_s=joined - transfer_s, end_s=joined),
        Stage(name="decode", start_s=joined, end_s=total_s),
    )
    clipped = [
        Stage(name=stage.name, start_s=max(0.0, stage.start_s), end_s=min(stage.end_s, total_s))
        for stage in stages
    ]
    return tuple(stage for stage in clipped if stage.end_s > stage.start_s)


def unfinished_stages(started_at: float, first_token_at: float | None, ended_at: float) -> tuple[Stage, ...]:
    """Of a request whose nodes told nothing in the end: what was seen here."""
    total_s = ended_at - started_at
    if first_token_at is None:
        return (Stage(name="waiting", start_s=0.0, end_s=total_s),)
    first_s = first_token_at - started_at
    return (
        Stage(name="waiting", start_s=0.0, end_s=first_s),
        Stage(name="decode", start_s=first_s, end_s=total_s),
    )
