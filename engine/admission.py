"""Is a request one that this engine can ever run? Checked once, on arrival, before anything is held."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from engine.params import SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineLimits:
    max_model_len: int
    vocab_size: int
    num_pages: int
    page_size: int

    def check(self, prompt_ids: Sequence[int], num_prompt_tokens: int, sampling: SamplingParams) -> None:
        """Raise ValueError naming the field and the value of the first thing that cannot work."""
        if not 1 <= num_prompt_tokens <= len(prompt_ids):
            raise ValueError(f"num_prompt_tokens must be in [1, {len(prompt_ids)}], got {num_prompt_tokens}")
        if (worst := max(prompt_ids)) >= self.vocab_size or (worst := min(prompt_ids)) < 0:
            raise ValueError(f"prompt_ids must be in [0, {self.vocab_size}), got {worst}")
        for name, ids in (
            ("stop_token_ids", sampling.stop_token_ids),
            ("logit_bias", [token_id for token_id, _ in sampling.logit_bias]),
            ("allowed_token_ids", sampling.allowed_token_ids),
            ("banned_sequences", itertools.chain.from_iterable(sampling.banned_sequences)),
        ):
            for token_id in ids:
                if not 0 <= token_id < self.vocab_size:
                    raise ValueError(f"{name} must be in [0, {self.vocab_size}), got {token_id}")
        if len(prompt_ids) - num_prompt_tokens >= sampling.max_tokens:
            raise ValueError(f"max_tokens is {sampling.max_tokens} but as many were already delivered")
        total = num_prompt_tokens + sampling.max_tokens
        if total > self.max_model_len:
            raise ValueError(
                f"prompt ({num_prompt_tokens} tokens) plus max_tokens ({sampling.max_tokens}) is {total},"
                f" more than max_model_len ({self.max_model_len})"
            )
        if -(-total // self.page_size) > self.num_pages:
            raise ValueError(
                f"{total} tokens need {-(-total // self.page_size)} KV pages, the pool has {self.num_pages}"
            )
