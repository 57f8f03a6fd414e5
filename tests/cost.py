"""What one question to an archive costs in a process of its own: `python -m tests.cost FILE LEVEL QUESTION SMALL`."""

from __future__ import annotations

import collections
import contextlib
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zcrecord
from tools.measure import peak_rss
from zcrecord import Record, RecordError

ROOM = 6 << 30  # bytes of address space; a fault in what is tested ends this process, not the machine


def used_up(items: Any) -> None:
    """Take everything an iterator gives, and keep nothing."""
    collections.deque(items, maxlen=0)


QUESTIONS: dict[str, Callable[[Record], Any]] = {
    "open": len,
    "names": list,
    "views": lambda record: used_up(record.values()),
    "one": lambda record: record.get("a"),
    "info": lambda record: record.info("a"),
    "infos": lambda record: list(record.infos()),
    "tree": lambda record: record.tree(),
    "modules": lambda record: record.modules,
    "attributes": lambda record: record.attributes,
    "verify": lambda record: record.verify(),
    "digest": lambda record: record.content_digest(),
    "copy": lambda record: bytes(record.raw("a")),  # what a test compares with
}


def ask(path: str, level: Any, question: str, small: str) -> dict[str, Any]:
    """Return the error's type and message (empty without one), and by how many bytes the peak of memory grew.

    The same is asked of a small archive first, so that what is imported on the way does not count.
    """
    QUESTIONS[question](zcrecord.load_record(small, verify=level))
    data = Path(path).read_bytes()
    before = peak_rss() or 0
    error = ["", ""]
    try:
        QUESTIONS[question](zcrecord.load_record(data, verify=level))
    except RecordError as caught:
        error = [type(caught).__name__, str(caught)]
    return {"error": error[0], "message": error[1], "grown": (peak_rss() or 0) - before, "size": len(data)}


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    print(json.dumps(ask(*sys.argv[1:])))
