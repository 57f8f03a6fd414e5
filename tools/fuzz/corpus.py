"""The inputs kept in tests/data/corpus: few and short, but every branch of the verifier and of the readers is reached.

`make` writes them anew: from the archives that the tests forge, from what fuzzers found (folders of inputs), and from
what is there already. An input that once showed a fault is kept in `found`, whatever it reaches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from reader_archives import catalogue
from readers import Question, ours

import zcrecord
from zcrecord.codec import index, layout, verify
from zcrecord.errors import RecordError
from zcrecord.onnx import tuned

from . import CORPUS, ROOT, native, targets
from .branches import PACKAGE, VERIFIER, fewest
from .crafted import crafted

MOST = {"archive": 4096, "model": 900}  # bytes of an input
SUFFIXES = {"archive": "zcr", "model": "onnx"}
MOST_FOR_EDGES = 1000  # of one that only the readers in C and Rust go another way for
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


def forged() -> list[bytes]:
    golden = (ROOT / "tests" / "conformance" / "valid").glob("*.zcr")
    return [*catalogue(), *(path.read_bytes() for path in sorted(golden))]


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


def make(folders: Iterable[Path]) -> None:
    """Write the corpus anew; `folders` hold more inputs to choose from, archives and models alike."""
    from onnx_models import packaged_models  # here, since comparing readers takes no onnx

    more = [path.read_bytes() for folder in folders for path in sorted(folder.iterdir()) if path.is_file()]
    archives = [data for data in (*forged(), *more, *inputs("archive")) if len(data) <= MOST["archive"]]
    kept = fewest(archives, try_every_way, [PACKAGE / name for name in VERIFIER])
    kept += [data for data in inputs("archive") if tuned.TARGET_TYPE.encode() in data]  # unknown to the verifier
    _write(CORPUS / "archive", kept + native.fewest([data for data in archives if len(data) <= MOST_FOR_EDGES], kept))
    packaged = [path.read_bytes() for path in packaged_models()]
    found = [data for data in (*packaged, *more, *inputs("model")) if len(data) <= MOST["model"]]
    _write(CORPUS / "model", fewest(found, targets.model, sorted((ROOT / "zcrecord" / "onnx").rglob("*.py"))))


def _write(folder: Path, kept: Sequence[bytes]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    for data in kept:
        (folder / f"{hashlib.sha256(data).hexdigest()[:16]}.{SUFFIXES[folder.name]}").write_bytes(data)
