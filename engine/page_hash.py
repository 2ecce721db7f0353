"""How a full page of KV is named by content: a hash chain over its tokens and all before them.

Torch-free and pure, so that a router can name the pages of a prompt as a node does. Must never know who
holds which page.
"""

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

DIGEST_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class PageHash:
    """A page's digest covers (parent digest, its tokens, the `lookahead` tokens after it that it depends on).

    The chain starts from `fingerprint`, that of model and draft, and the request's cache salt; it is another
    one for pages that hold the target's KV alone.
    """

    fingerprint: str
    page_size: int
    lookahead: int = 0

    def root(self, salt: str, *, is_target_only: bool = False) -> bytes:
        start = self.fingerprint.encode() + (b"\1" if is_target_only else b"\0") + salt.encode()
        return hashlib.blake2b(start, digest_size=DIGEST_BYTES).digest()

    def link(self, parent: bytes, tokens: Sequence[int]) -> bytes:
        """Digest of the page holding `tokens` (`page_size` of them, then the lookahead) after `parent`."""
        return hashlib.blake2b(parent + array("i", tokens).tobytes(), digest_size=DIGEST_BYTES).digest()

    def num_shareable(self, num_prompt_tokens: int) -> int:
        """Pages of a prompt that may be another request's: at least one token stays to compute."""
        return max(0, num_prompt_tokens - max(1, self.lookahead)) // self.page_size

    def chain(
        self, tokens: Sequence[int], salt: str, *, max_pages: int, is_target_only: bool = False
    ) -> Iterator[bytes]:
        """Digests of the first pages of `tokens`, at most `max_pages`, only of those it knows all about."""
        digest, width = self.root(salt, is_target_only=is_target_only), self.page_size + self.lookahead
        for start in range(0, max_pages * self.page_size, self.page_size):
            page_tokens = tokens[start : start + width]
            if len(page_tokens) < width:
                return
            digest = self.link(digest, page_tokens)
            yield digest


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheChanges:
    """Pages a prefix cache took in and gave up since it was last asked.

    With `hashing` they are all there is: whatever was known before is void.
    """

    stored: tuple[bytes, ...] = ()
    removed: tuple[bytes, ...] = ()
    hashing: PageHash | None = None
