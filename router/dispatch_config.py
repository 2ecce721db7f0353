"""What the dispatcher is told: how routes are chosen, how often to try, who may wait. Plain values."""

from dataclasses import dataclass, field

from router.admission import QueueConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchConfig:
    """`max_attempts` bounds the attempts that fail; `max_preemptions`, apart, those that ran out of pages.

    `colocated`: decode nodes do all prompts. `local_prompt_tokens`: they do those of which they have to
    compute no more than that.
    `admits_by_pages`: a request waits here until a decode node has room for what it is counted on to need.
    `requeue_wait_s`: how long a broken request waits for a pair; a new one does not wait.
    """

    policy: str = "least_load"
    policy_seed: int = 0
    colocated: bool = False
    local_prompt_tokens: int = 0
    admits_by_pages: bool = True
    queue: QueueConfig = field(default_factory=QueueConfig)
    max_attempts: int = 3
    max_preemptions: int = 8
    default_deadline_s: float = 600.0
    requeue_wait_s: float = 30.0
    retry_delay_s: float = 0.05
    retry_after_s: float = 1.0
