"""One request as the engine holds it: tokens, pages and how far its KV is committed.

Only the engine loop changes it. Must never know about peers, transfers or text.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

from engine.grammar import Matcher
from engine.params import SamplingParams


@dataclass(slots=True, eq=False, kw_only=True)
class Request:
    """Invariant once the prompt is computed: len(tokens) == num_committed + 1.

    tokens: `prompt_ids`, then what was emitted here. The first `num_prompt_tokens` are the user's;
        penalties, min_tokens and max_tokens count from there.
    pages: page ids in order; slot s of the request lies in pages[s // page_size]. Those that the
        prefix cache owns are shared and never written again; the rest belong to this request.
    num_published_pages, chain: how far the prefix cache has seen this request, and its digest there.
    priority: the lower, the sooner it starts, and the later it is given up when pages run out.
    matcher: where the outputs so far, earlier attempts' too, stand in their grammar; None without one.
    num_committed: slots [0, num_committed) hold the KV of tokens [0, num_committed).
    draft_start: slots before it, whole pages, hold no KV of a draft that may be read; 0 for a request whose
        draft knows all of it. The prefix cache keeps the two kinds apart.
    """

    key: Hashable
    prompt_ids: tuple[int, ...]
    num_prompt_tokens: int
    sampling: SamplingParams
    cache_salt: str = ""
    priority: int = 0
    matcher: Matcher | None = None
    draft_start: int = 0
    tokens: list[int] = field(init=False)
    pages: list[int] = field(default_factory=list)
    num_published_pages: int = 0
    chain: bytes = b""
    num_committed: int = 0
    num_cached_tokens: int = 0
    num_steps: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.prompt_ids)

    @property
    def num_outputs(self) -> int:
        """Tokens emitted after the user's prompt, by earlier attempts too."""
        return len(self.tokens) - self.num_prompt_tokens

    @property
    def has_first_token(self) -> bool:
        """Is it known what follows the prompt, be the prompt computed here or not?"""
        return len(self.tokens) > len(self.prompt_ids)

    @property
    def is_prompt_done(self) -> bool:
        return self.has_first_token and self.num_committed >= len(self.prompt_ids)
