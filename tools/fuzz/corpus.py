"""The inputs kept in tests/data/corpus: few and short, but every branch of the verifier and of the readers is reached.

They were chosen from the archives that the tests forge, and from what fuzzers found. An input that once showed a fault
is kept in `found`, whatever it reaches.
"""

from __future__ import annotations

from typing import Any

from readers import Question, ours

import zcrecord
from zcrecord.codec import index, layout, verify
from zcrecord.errors import RecordError

from . import CORPUS, ROOT, targets
from .crafted import crafted

WAYS: tuple[tuple[Any, Any], ...] = tuple(
    (level, embedded) for level in ("touch", "index", "full") for embedded in (None, "prefix", "suffix")
)


def inputs(kind: str) -> list[bytes]:
    """Return the inputs of a kind that are kept, those that showed a fault included."""
    folders = [CORPUS / kind, CORPUS / "found" / kind]
    return [path.read_bytes() for folder in folders if folder.is_dir() for path in sorted(folder.iterdir())]


def try_every_way(data: bytes) -> None:
    """Load an archive at each level, alone and among other bytes, and ask for everything."""
    for level, embedded in WAYS:
        try:
            record = zcrecord.load_record(data, verify=level, embedded=embedded)
        except RecordError:
            continue
        for action in targets.ACTIONS:
            try:
                action(record)
            except RecordError:
                continue
    ours(Question(data, "w", "f"))  # as an archive and nothing else, whatever it looks like


def everything() -> None:
    """Try every archive that is kept, and those too large to be, in every way; their indexes alone; and a draft."""
    for data in [*inputs("archive"), *crafted()]:
        try_every_way(data)
        index_alone(data)
    draft = (ROOT / "tests" / "data" / "draft" / "nested.zcr").read_bytes()
    try_every_way(draft)
    with layout.reading_drafts():
        zcrecord.load_record(draft)


def index_alone(data: bytes) -> None:
    """Read an index of which nothing was verified, and nothing but it is there."""
    start, size = (int.from_bytes(data[at : at + 8], "little") for at in (len(data) - 40, len(data) - 32))
    if len(data) < 128 or start + size > len(data) - 64:
        return
    try:
        found = index.decode(memoryview(data[start : start + size]), size)
        header = layout.decode_header(data[-64:], "trailer")
        assert header is not None
        for i in range(min(3, len(found.tensors))):
            found.name(i)
        verify.check_index(found, header)
    except RecordError:
        return
