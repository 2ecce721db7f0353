"""One CRC-32 per page, so that corruption is noticed before a page is read and is known to the page.

Owns the function both sides must agree on. Must never know where pages lie or when they are final.
"""

import zlib


def page_checksum(page: memoryview | bytes) -> int:
    """CRC-32 of one page's bytes (any C-contiguous buffer), unsigned."""
    return zlib.crc32(page)
