"""Settings of `paceline bench cluster`: one field = one flag."""

from dataclasses import dataclass
from typing import Literal

from deploy.config import BUNDLED_MODEL

PARTS = ("engine", "transfer", "router")
CLUSTERS = ("colocated", "pair_nixl", "pair_grpc")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterBench:
    """What to measure and how often. Bad values raise ValueError naming the field."""

    json: str = ""
    """File for the numbers; empty: none."""

    plot: str = ""
    """File for the plot, a PNG; empty: next to the JSON file."""

    model: str = BUNDLED_MODEL
    """Hugging Face folder, or smollm2."""

    prompts: str = ""
    """JSON lines: strings, or objects with prompt, turns, messages or user; empty: eight built-in prompts."""

    concurrency: str = "1,8"
    """Streams at once, separated by commas; 1 must be among them."""

    max_tokens: int = 64
    """Tokens of every answer; the end-of-sequence token does not end it."""

    rounds: int = 5
    """How often everything is measured, everyone in turn; numbers are medians over the rounds."""

    long_prompt_tokens: int = 1000
    """Length of the prompt whose time to first token is compared."""

    dtype: Literal["bfloat16", "float16", "float32"] = "bfloat16"
    """Type of weights and activations, on every side."""

    algorithms: str = "none,ngram"
    """Drafting algorithms of our nodes, separated by commas; the headline numbers are those of the first."""

    threads: int = 0
    """Threads of every engine; 0: all cores."""

    against: str = ""
    """URL of any other OpenAI server to measure alongside."""

    api_key: str = ""
    """Bearer token for that server."""

    vllm: str = ""
    """Environment with vLLM for CPU: it is started and measured alone and as a pair over NIXL."""

    parts: str = "engine,transfer,router"
    """Which parts to measure: engine, transfer, router."""

    clusters: str = "colocated,pair_nixl,pair_grpc"
    """Which of our clusters to measure, separated by commas; all of them run at the same time."""

    router_requests: int = 1500
    """Requests of each load on the router."""

    def __post_init__(self) -> None:
        for field, value in (
            ("max_tokens", self.max_tokens),
            ("rounds", self.rounds),
            ("long_prompt_tokens", self.long_prompt_tokens),
            ("router_requests", self.router_requests),
        ):
            if value < 1:
                raise ValueError(f"{field} must be at least 1, got {value!r}")
        if self.max_tokens < 2:
            raise ValueError(f"max_tokens must be at least 2, got {self.max_tokens!r}")
        if 1 not in self.streams or min(self.streams) < 1:
            raise ValueError(f"concurrency must hold 1 and positive numbers, got {self.concurrency!r}")
        for field, text, known in (("parts", self.parts, PARTS), ("clusters", self.clusters, CLUSTERS)):
            if unknown := set(_words(text)) - set(known):
                raise ValueError(
                    f"{field} must be among {', '.join(known)}, got {', '.join(sorted(unknown))!r}"
                )
        if not _words(self.algorithms):
            raise ValueError(f"algorithms must name at least one, got {self.algorithms!r}")

    @property
    def streams(self) -> tuple[int, ...]:
        try:
            return tuple(int(word) for word in _words(self.concurrency))
        except ValueError:
            raise ValueError(f"concurrency must be numbers, got {self.concurrency!r}") from None

    @property
    def algorithm_names(self) -> tuple[str, ...]:
        return _words(self.algorithms)

    @property
    def cluster_names(self) -> tuple[str, ...]:
        return _words(self.clusters)

    def has(self, part: str) -> bool:
        return part in _words(self.parts)


def _words(text: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in text.split(",") if word.strip())
