"""Payload digests: the one place that computes XXH3, 64 bits.

The bytes of payloads are found elsewhere; SHA-256, of contents and signatures, is not made here.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

RunningDigest = xxhash.xxh3_64  # update(data), then intdigest() or digest()
digest_of = xxhash.xxh3_64_intdigest  # of any bytes-like; C's own, since it is called for every payload


def digest_of_pieces(pieces: Iterable[Any]) -> int:
    """Return the digest of bytes that come in pieces.

    Example:
        >>> digest_of_pieces([b"ab", b"c"]) == digest_of(b"abc")
        True
    """
    running = RunningDigest()
    for piece in pieces:
        running.update(piece)
    return running.intdigest()
