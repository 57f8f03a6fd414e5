"""Shared by tests of remote archives: an archive's content, how to load it, and the files of a cache."""

from __future__ import annotations

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import zcrecord
from tools.bench.sparse import Holes
from tools.range_server import Server

Misbehave = Callable[[Any, int], bool]  # of a server: takes the handler and the number of the request
WEIGHTS = {f"w{i}": np.random.default_rng(i).integers(0, 255, 100_000, np.uint8) for i in range(8)}


def load(server: Server, cache: Any = None, name: str = "m.zcr", **options: Any) -> Any:
    return zcrecord.load_record(f"{server.url}/{name}", cache=cache, **options)


def is_right(record: Any, expected: Any = WEIGHTS) -> bool:
    return list(record) == list(expected) and all(map(np.array_equal, record.values(), expected.values()))


def replying(status: int, body: bytes = b"", **headers: str) -> Misbehave:
    """Return a server's behaviour: every request gets this answer."""
    return lambda handler, _: handler.say(status, body, **headers) or True


def hung_up(handler: Any, _: int) -> bool:
    """Break the connection off."""
    handler.hang_up()
    return True


def asked(handler: Any, number: int) -> tuple[int, int]:
    """Return the range that a request asks for."""
    start, end = handler.server_state.requests[number].asked
    return start, end


def with_zeros(size: int) -> Misbehave:
    """Return a server's behaviour: the first request gets zeros for its bytes of a file of `size` bytes."""

    def zeros(handler: Any, number: int) -> bool:
        start, end = asked(handler, number)
        if number == 0:
            handler.say(206, bytes(end - start), Content_Range=f"bytes {start}-{end - 1}/{size}", ETag='"1"')
        return number == 0

    return zeros


def cached_files(cache: Path, *, index: bool = False) -> list[Path]:
    """Return the payloads in a cache, and with `index` the indexes, too."""
    return sorted(path for path in cache.rglob("*") if path.is_file() and (index or path.name != "index"))


def write_sparse(path: Path, nbytes: int) -> np.ndarray[Any, np.dtype[np.float32]]:
    """Write an archive of 10 tensors: `small`, of 16 KiB, which is returned, amid 9 of zeros that take no disk.

    All of them are a little more than `nbytes` together.
    """
    each = (nbytes // 9 >> 20) + 1 << 20
    small = np.random.default_rng(0).standard_normal(4096).astype(np.float32)
    space = mmap.mmap(-1, each)  # closed with its last view: old releases of numpy have some left here
    with path.open("wb") as file:
        # Lazy ones are written as they come, the index last: the hardest for a reader.
        record: dict[str, Any] = {
            f"large.{i}": zcrecord.LazyTensor("float32", (each // 4,), lambda: [space]) for i in range(9)
        }
        last = record.pop("large.8")
        record |= {"small": small, "last": last}  # between others, where no other request brings it along
        zcrecord.save_record(record, Holes(file, each))
    return small
