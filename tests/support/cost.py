"""Cost of questions to an archive in its own process: `python -m tests.support.cost FILE LEVEL QUESTIONS SMALL`.

What Python and numpy allocate is counted: it is the same on every machine, as resident memory is not.
"""

from __future__ import annotations

import collections
import contextlib
import json
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import zcrecord
from zcrecord import Record, RecordError

ROOM = 6 << 30  # bytes of address space; a fault in what is tested ends this process, not the machine


def used_up(items: Any) -> None:
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


def ask(path: str, level: Any, questions: str, small: str) -> dict[str, Any]:
    """Return each question's error (type and message, empty without one), and the most that was allocated.

    Every question is the first that its record hears. The same is asked of a small archive before, so that what is
    imported on the way does not count.
    """
    asked = questions.split(",")
    for question in asked:
        QUESTIONS[question](zcrecord.load_record(small, verify=level))
    data = Path(path).read_bytes()
    tracemalloc.start()
    errors = {question: error_of(QUESTIONS[question], data, level) for question in asked}
    return {"errors": errors, "grown": tracemalloc.get_traced_memory()[1], "size": len(data)}


def error_of(question: Callable[[Record], Any], data: bytes, level: Any) -> list[str]:
    try:
        question(zcrecord.load_record(data, verify=level))
    except RecordError as error:
        return [type(error).__name__, str(error)]
    return ["", ""]


if __name__ == "__main__":
    with contextlib.suppress(ImportError):
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (ROOM, ROOM))
    print(json.dumps(ask(*sys.argv[1:])))
