"""Payload digests: the one place that computes XXH3, 64 bits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import xxhash

RunningDigest = xxhash.xxh3_64  # update(data), then intdigest() or digest()
digest_of = xxhash.xxh3_64_intdigest  # of any bytes-like; C's own, since it is called for every payload


def digest_of_pieces(pieces: Iterable[Any]) -> int:
    """Return the digest of bytes that come in pieces."""
    running = RunningDigest()
    for piece in pieces:
        running.update(piece)
    return running.intdigest()
