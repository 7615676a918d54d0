"""The checksum of what outlives a run: CRC-32. It finds every change within 32 bits in a row, and all but one in 2^32 others.

It is for accidents, not for attackers.
"""

from __future__ import annotations

import zlib


def checksum(data: bytes | memoryview, before: int = 0) -> int:
    """Of `data`, or of all that `before` is the checksum of with `data` behind it. Lets go of the GIL."""
    return zlib.crc32(data, before)
