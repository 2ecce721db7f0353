"""One CRC-32 per page, so that corruption is noticed before a page is read and is known to the page.

Owns the function both sides must agree on. Must never know where pages lie or when they are final.
"""

import zlib
from collections.abc import Callable

from kv_transfer.ids import Incarnation
from kv_transfer.peers import PeerTable


def page_checksum(page: memoryview | bytes) -> int:
    """CRC-32 of one page's bytes (any C-contiguous buffer), unsigned."""
    return zlib.crc32(page)


def checksums_of_copies(
    page_of: Callable[[int], memoryview], peers: PeerTable
) -> Callable[[Incarnation, int], int]:
    """(peer, page id) -> checksum of those bytes of our page that travel to or from a connected peer."""
    return lambda peer, page_id: page_checksum(page_of(page_id)[: peers.copy_bytes(peer)])
