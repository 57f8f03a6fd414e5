"""Tuned archives taken apart, changed as their author could, and written again; and sessions of them, run elsewhere.

Digests, CRCs and, if asked for, the seal come out right, so that nothing else stops what was changed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx_graphs import request

import zcrecord
from zcrecord.codec.entries import AttributeEntry, PayloadId
from zcrecord.codec.layout import NONE
from zcrecord.errors import RecordError
from zcrecord.onnx import session, tuned, tuning
from zcrecord.record.save import stored_entries
from zcrecord.storage.files import open_sink
from zcrecord.writing.writers import StreamWriter

ROOT = Path(__file__).resolve().parents[2]


class Tuned:
    """A tuned archive taken apart.

    Attributes:
        graph, initializers: those of its first target, parsed. `front` and `back` are put around the graph's bytes.
        payloads: the numbers that the graph's numbers stand for.
        sources: the bytes of all payloads.
        entries: all else, as it is written.
        alignment: of the archive; `pages`: packed weights on pages.
        sealed: False to keep the old seal.
    """

    def __init__(self, path: Path) -> None:
        with zcrecord.load_record(path) as record:
            part = tuned.read_tuned(record.archive)
            assert part is not None
            self.module, self.target, self.originals = part.module, part.targets[0], part.originals
            self.entries = stored_entries(record.archive)
            self.sources = [bytes(record.archive.payload(n)) for n in range(len(record.archive.index.payloads))]
        self.graph = onnx.ModelProto.FromString(self.sources[self.target.graph])
        self.initializers = onnx.GraphProto.FromString(self.sources[self.target.initializers])
        self.payloads = list(self.target.payloads)
        self.front = self.back = b""
        self.alignment, self.pages, self.sealed = 64, True, True

    def value(self, key: str, module: int | None = None) -> Any:
        """Return an attribute of the first target, or of another module."""
        return self.entries.attributes[self._at(key, module)].value

    def set(self, key: str, value: Any, module: int | None = None) -> None:
        """Set an attribute of the first target, or of another module. What it named stays used, as R61 wants it."""
        at = self._at(key, module)
        self.entries.attributes[at] = self.entries.attributes[at]._replace(value=value)

    def _at(self, key: str, module: int | None) -> int:
        parent = self.module + 1 if module is None else module
        return next(i for i, a in enumerate(self.entries.attributes) if a.key == key and a.parent == parent)

    def add(self, data: bytes) -> int:
        """Return the number that stands for a new payload in the graph."""
        self.sources.append(data)
        self.payloads.append(PayloadId(len(self.sources) - 1))
        return len(self.payloads) - 1

    @property
    def weight(self) -> Any:
        """The first of those initializers of the main graph that have the most elements."""
        return max(self.initializers.initializer, key=lambda t: int(np.prod(t.dims)))

    @property
    def packed(self) -> list[Any]:
        every = [e for t in self.initializers.initializer for e in t.external_data]
        return [e for e in every if e.key.startswith("prepacked")]

    def write(self, dest: Path) -> Path:
        self.sources[self.target.graph] = self.front + self.graph.SerializeToString() + self.back
        self.sources[self.target.initializers] = self.initializers.SerializeToString() or b"\x5a\x00"
        if self.payloads != self.target.payloads:
            self.set(tuned.PAYLOADS, self.payloads)
        every = [PayloadId(n) for n in range(len(self.sources))]
        self.entries.metadata = [AttributeEntry("kept", NONE, 0, every)]
        self._write(dest)
        if self.sealed:
            with zcrecord.load_record(dest) as record:
                ix, part = record.archive.index, tuned.read_tuned(record.archive)
                assert part is not None
                found = part.targets[0]
                own = ix.payloads[[found.graph, found.initializers, *found.payloads]]
                self.set(tuned.SEAL, tuned.seal_of(ix, found.target.encode(), found.module, own))
            self._write(dest)
        return dest

    def _write(self, dest: Path) -> None:
        pages = {n for n in self.target.payloads if n not in self.entries.payloads} if self.pages else set()
        with open_sink(str(dest)) as sink:
            out = StreamWriter(sink, alignment=self.alignment)
            for number, source in enumerate(self.sources):
                out.store(np.frombuffer(source, np.uint8), alignment=4096 if number in pages else 0)
            out.finish(self.entries)


def answers(paths: Sequence[Path], folder: Path) -> Iterator[dict[str, Any]]:
    """Yield the answer to each archive: of a session its `reason` and `outputs`, or an `error`.

    They are asked one after the other in another process, in `folder`; where one ends it, another takes the rest.
    """
    rest = [str(path) for path in paths]
    search = os.pathsep.join([str(ROOT), *filter(None, sys.path)])
    while rest:
        done = subprocess.run(
            [sys.executable, "-m", "tuned_archives"], input="\n".join(rest), cwd=folder, capture_output=True,
            env=os.environ | {"PYTHONPATH": search}, text=True,
        )  # fmt: skip
        lines = done.stdout.splitlines()
        yield from map(json.loads, lines)
        rest = rest[len(lines) :]
        if rest:
            yield {"error": f"the process ended with {done.returncode}: {done.stderr[-300:]}"}
            rest = rest[1:]


def _answer(path: str) -> dict[str, Any]:
    try:
        made = session(path)
    except RecordError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    outputs = made.run(None, request(made))
    return {"reason": tuning(made).reason, "outputs": [out.tolist() for out in outputs]}


if __name__ == "__main__":
    for line in sys.stdin:
        print(json.dumps(_answer(line.strip())), flush=True)
