"""Archives for tests of zcrecord.js, and a server of them and of the module that misbehaves when asked to.

Node and Chromium are given the same URLs: the repository's own files of the module and its suite lie beside the
archives, so that a page and what it fetches are of one origin.
"""

from __future__ import annotations

import dataclasses
import gzip
import io
import os
import re
import shutil
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from costly_archives import write_twins
from forge import Forge, align_up, build_index, end_bytes
from malformed import saved
from node_packages import node_packages
from onnx import numpy_helper
from onnx_models import model_of

import zcrecord
from tools.range_server import Server, serving
from zcrecord.codec.layout import LARGE_ALIGNMENT
from zcrecord.onnx import convert

ROOT = Path(__file__).resolve().parents[2]
WEB = ROOT / "zcrecord" / "web"
READER = WEB / "reader"
SUITE = ROOT / "tests" / "programs" / "js" / "web"
OURS = {".js": "text/javascript", ".mjs": "text/javascript", ".html": "text/html; charset=utf-8",
        ".wasm": "application/wasm"}  # fmt: skip


def things() -> dict[str, Any]:
    """Return a record with something of everything; tests/programs/js/web knows its values."""
    w = np.arange(6, dtype=np.float32).reshape(2, 3)
    encoder = {
        "w": w,
        "b": np.array([-1, 2**60]),
        "h": np.array([1, -2], ml_dtypes.bfloat16),
        "f": np.array([1, 2], np.float16),
        "c": np.array([1 + 2j, 3 - 4j], np.complex64),
        "rate": 0.5,
    }
    return {
        "encoder": encoder,
        "again": w,
        "equal": w.copy(),
        "turned": w.T,
        "packed": np.array([-8, -1, 0, 7, 3], ml_dtypes.int4),
        "words": zcrecord.StringTensor.from_strings(["zero", "", "ünï", "\ufeffthree"]),
        "flags": np.array([True, False, True]),
        "empty": np.zeros((0, 3), np.float32),
        "scalar": np.array(2.5),
        "big": (np.arange(300_000) % 251).astype(np.uint8),
        "layers": [{"k": np.full(3, 1, np.int8)}, {"k": np.full(3, 2, np.int8)}],
        "version": 3,
        "huge": 2**60,
        "note": "hi\0there",
        "numbers": [1, -2],
        "nothing": None,
        "yes": True,
        "blob": b"\1\2\3",
    }


def write_sparse(path: Path, sizes: list[int], marks: dict[str, int], *, repeated: bool = False) -> None:
    """Write an archive of tensors t0, t1, ... of so many bytes, zero but for the four at each mark, without digests.

    `marks` are where in a tensor, by its name, its number is written: 0, or -4. A `repeated` one has its first byte in
    each place.
    """
    forged = Forge(saved({f"t{i}": np.full(1, i, np.uint8) for i in range(len(sizes))}, digest="none"))
    starts = np.cumsum([0, *(align_up(size, LARGE_ALIGNMENT) for size in sizes)])
    forged.columns["payloads"]["offset"], forged.columns["payloads"]["nbytes"] = starts[:-1], sizes
    first = forged.add("dims", sizes)
    forged.columns["tensors"]["dims"] = first + np.arange(len(sizes))
    if repeated:
        forged.columns["tensors"]["strides"] = forged.add("strides", [0])
    index = bytes(build_index(forged.columns))
    start = align_up(64 + len(index), LARGE_ALIGNMENT)
    total = align_up(start + int(starts[-2]) + sizes[-1], 64) + 64
    end = end_bytes(
        {"magic": b"\x89ZCR\r\n\x1a\n", "alignment_log2": 6, "base_alignment_log2": 14, "index_offset": 64,
         "index_size": len(index), "payload_offset": start, "archive_size": total,
         "index_crc": zlib.crc32(index)}
    )  # fmt: skip
    with path.open("wb") as file:
        file.write(end + index)
        for name, at in marks.items():
            number = int(name[1:])
            file.seek(start + int(starts[number]) + (at if at >= 0 else sizes[number] + at))
            file.write(bytes([number]) * 4)
        file.seek(total - 64)
        file.write(end)


@dataclasses.dataclass
class Asked:
    """A request for a file of so many bytes, and how often it came."""

    handler: Any
    request: Any
    path: Path
    size: int
    times: int

    def answer(self, **how: Any) -> None:
        self.handler.answer(self.request, **how)

    def limited(self, asked: tuple[int, int] | None) -> None:
        """Answer as if less, or everything, had been asked for."""
        self.request.asked = asked
        self.answer()

    def busy(self) -> None:
        """Answer what `refused` in the query says to so many requests, then as asked."""
        status, times = map(int, re.findall(r"refused=(\d+)x(\d+)", self.handler.path)[0])
        self.handler.say(status, Retry_After="soon") if self.times <= times else self.answer()

    @property
    def data(self) -> bytes:
        start, end = self.request.asked
        return self.path.read_bytes()[start:end]

    def range(self, by: int = 0, more: int = 0) -> str:
        start = self.request.asked[0] + by
        return f"bytes {start}-{start + len(self.data) - 1}/{self.size + more}"

    def part(self, body: bytes | None = None, said: str = "", **headers: str) -> None:
        self.handler.say(206, self.data if body is None else body, Content_Range=said or self.range(), **headers)

    def stopped(self, nbytes: int, wait: Callable[[], Any]) -> None:
        """Hang up after so many bytes, unless there are no more, and a while."""
        self.handler.send_response(206)
        self.handler.send_header("Content-Range", self.range())
        self.handler.send_header("Content-Length", str(len(self.data)))
        self.handler.end_headers()
        self.handler.wfile.write(self.data[:nbytes])
        self.handler.wfile.flush()
        if len(self.data) > nbytes:
            wait()
            self.handler.hang_up()


CORS: dict[str, Any] = {"ETag": '"1"', "Access_Control_Allow_Origin": "*"}
MISBEHAVIOUR: dict[str, Callable[[Asked, threading.Event], None]] = {
    "whole": lambda asked, stop: asked.limited(None),
    "missing": lambda asked, stop: asked.handler.say(404, b"not found"),
    "forbidden": lambda asked, stop: asked.handler.say(403),
    "failing": lambda asked, stop: asked.handler.say(500),
    "busy": lambda asked, stop: asked.busy(),
    "secret": lambda asked, stop: (
        asked.answer() if asked.handler.headers.get("X-Token") == "letmein" else asked.handler.say(401)
    ),
    "gzip": lambda asked, stop: asked.part(gzip.compress(asked.data), Content_Encoding="gzip"),
    "cors": lambda asked, stop: asked.part(**CORS),
    "exposing": lambda asked, stop: asked.part(**CORS, Access_Control_Expose_Headers="Content-Range, ETag"),
    "silent": lambda asked, stop: asked.handler.say(206, asked.data),
    "empty": lambda asked, stop: asked.handler.say(416, Content_Range="bytes */0"),
    "shrunk": lambda asked, stop: asked.handler.say(416, Content_Range="bytes */1000"),
    "short": lambda asked, stop: asked.answer(cut=10),
    "hangup": lambda asked, stop: asked.handler.hang_up(),
    "elsewhere": lambda asked, stop: asked.part(said=asked.range(by=7)),
    "etag": lambda asked, stop: asked.part(ETag=f'"{asked.times}"'),
    "grown": lambda asked, stop: asked.part(said=asked.range(more=asked.times > 2)),
    # browsers drop what they have not handed on when a connection breaks
    "breaking": lambda asked, stop: asked.stopped(70_000, lambda: time.sleep(0.03)),
    "sparing": lambda asked, stop: asked.limited(
        (asked.request.asked[0], min(asked.request.asked[1], asked.request.asked[0] + 70_000))
    ),
    "slow": lambda asked, stop: asked.stopped(5, lambda: stop.wait(20)),
}


class Misbehaving:
    """Does what the query of a request asks for; those that start with "late" behave while an archive is opened."""

    def __init__(self) -> None:
        self.seen: Counter[str] = Counter()
        self.stop = threading.Event()

    def __call__(self, handler: Any, number: int) -> bool:
        name = handler.path.partition("?")[0].lstrip("/")
        if name.startswith(("zcrecord/web/", "tests/programs/js/web/", "onnxruntime-web/")):
            file = (node_packages() if name.startswith("onnxruntime-web/") else ROOT) / name
            handler.say(200, file.read_bytes(), Content_Type=OURS[file.suffix], Cache_Control="no-store")
            return True
        if handler.path in ("/blank", "/favicon.ico"):
            handler.say(200, b"<!doctype html><title>blank</title>", Content_Type="text/html")
            return True
        self.seen[handler.path] += 1
        state: Server = handler.server_state
        path = state.folder / name
        size = path.stat().st_size if path.is_file() else 0
        asked = Asked(handler, state.requests[number], path, size, self.seen[handler.path])
        if found := re.fullmatch(r"bytes=-(\d+)", handler.headers.get("Range", "")):
            asked.request.asked = max(0, size - int(found[1])), size
        how = re.search(r"do=(\w+)", handler.path)
        if how is None or (how[1].startswith("late") and asked.times <= 2):
            asked.answer()
        else:
            MISBEHAVIOUR[how[1].removeprefix("late")](asked, self.stop)
        return True


def write_model(path: Path) -> None:
    """Write an archive of an ONNX model: tensors that are fetched when they are read, and others."""
    small = {"small": np.ones(100, np.float32), "least": np.arange(3), "middle": np.ones(4000, np.float32)}
    large = {"large": np.zeros(300_000, np.float32), "last": np.arange(10_000, dtype=np.float32)}
    weights = [numpy_helper.from_array(array, name) for name, array in {**small, **large}.items()]
    convert(io.BytesIO(model_of(*weights).SerializeToString()), path, durable=False)


@contextmanager
def everything_served(folder: Path) -> Iterator[Server]:
    """Serve everything the suite reads, which is written into a folder."""
    shutil.copytree(ROOT / "tests" / "conformance" / "valid", folder / "golden")
    zcrecord.save_record(things(), folder / "things.zcr", metadata={"by": "a test"})
    zcrecord.save_record({f"t{i}": np.full(25_000, i, np.float32) for i in range(10)}, folder / "front.zcr")
    sizes = [*range(1, 10), *(base + k for base in (1 << 16, 1 << 20, 3 << 20) for k in (-1, 1, 2, 3))]
    odd = {f"of{size}": np.frombuffer(os.urandom(size), np.uint8) for size in sizes}
    zcrecord.save_record(odd, folder / "odd.zcr")
    apart = {"small0": np.ones(5), "filler0": np.zeros(100_000), "small1": np.ones(6), "filler1": np.zeros(100_001)}
    zcrecord.save_record({**apart, "small2": np.ones(7), "filler2": np.zeros(100_002), "small3": np.ones(8)},
                         folder / "apart.zcr")  # fmt: skip
    long = Forge(saved({f"t{i}": np.full(25_000, i, np.float32) for i in range(10)}))
    for sealed in (True, False):
        long.front, long.sealed = False, sealed
        (folder / f"long_back_{'sealed' if sealed else 'unsealed'}.zcr").write_bytes(long.seal())
    write_sparse(folder / "sparse1.zcr", [(1 << 30) // 9 & -4] * 9 + [16384], {"t8": -4, "t9": 0})
    write_sparse(folder / "sparse6.zcr", [1 << 30] * 6 + [5000], {"t6": -4})
    write_sparse(folder / "quarter.zcr", [(1 << 28) // 10 & -4] * 10, {})
    write_sparse(folder / "huge.zcr", [1 << 43], {})
    write_sparse(folder / "repeated.zcr", [1 << 43], {}, repeated=True)
    write_twins(folder / "twins.zcr", 1200, 1 << 20)
    write_twins(folder / "twins_and_more.zcr", 1200, 1 << 20, filler=32 << 20)
    write_model(folder / "model.zcr")
    models = {f"m{i}\x1b[31m\u202e": {"onnx.graph": b"x"} for i in range(1000)}
    zcrecord.save_record(models, folder / "models.zcr")
    misbehaving = Misbehaving()
    with serving(folder) as server:
        server.misbehave = misbehaving
        try:
            yield server
        finally:
            misbehaving.stop.set()


def names_in(file: str) -> int:
    """Return how many tests a file of the suite registers where it is read, those made in a loop once."""
    return len(re.findall(r"^ *test\(", (SUITE / file).read_text(encoding="utf-8"), re.MULTILINE))


MOST = 30_000  # bytes that every `open` loads
