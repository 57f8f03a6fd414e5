"""onnxruntime-web for the page of `zcrecord serve`: one pinned version from a public server, or a folder of the user's.

Two builds of the package are used, each a script and a WebAssembly module: one with JSPI, which reads weights one by
one, and one for browsers without JSPI. The browser checks files from the public server against the digests here, so
they can only be those of that version on npm.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple

from zcrecord.errors import SourceNotFoundError

VERSION = "1.30.0"
CDN = f"https://cdn.jsdelivr.net/npm/onnxruntime-web@{VERSION}/dist/"
_LOCAL = "onnxruntime-web/"  # the path of a folder's files on the server


class RuntimeFile(NamedTuple):
    """One file of onnxruntime-web's folder `dist`: its size in bytes, and its digest in the form browsers check."""

    name: str
    nbytes: int
    integrity: str


BUILDS = {
    "jspi": (
        RuntimeFile(
            "ort.jspi.bundle.min.mjs",
            115_872,
            "sha384-9RUgRCKe1ziB7Sof69RRpoybxSmnC67IsfHFamx/k+9m39GbvHvw5Sets/Xpsro+",
        ),
        RuntimeFile(
            "ort-wasm-simd-threaded.jspi.wasm",
            16_758_545,
            "sha384-bMP/XSpH5FjIIaVnUc1eR3cDsGZGdO1ZPjcHGEtvMwOgZZFcOEN8VrGooR81HSFO",
        ),
    ),
    "asyncify": (
        RuntimeFile(
            "ort.webgpu.bundle.min.mjs",
            117_732,
            "sha384-1ntMeyj+z5diX6vBR5h+zlJBPc4iNvhCxE6nlammh8daBYcLBZkzrwDkuJjhwI+f",
        ),
        RuntimeFile(
            "ort-wasm-simd-threaded.asyncify.wasm",
            26_781_914,
            "sha384-EPVDLTxuO663dkZO/pcKJF6vOyyfq/5z9FY1oksN0UWFX2ABH4wDDZQHeNoUleWR",
        ),
    ),
}


class WebRuntime(NamedTuple):
    """The location of onnxruntime-web for a page."""

    about: dict[str, Any]  # sent to the page
    files: dict[str, Path]  # served, by their paths
    connect: str  # the address that the page may connect to, besides its own


def web_runtime(folder: str | os.PathLike[str] | None) -> WebRuntime:
    """Return the location of onnxruntime-web: a folder, which must have all files, or for None the public server."""
    if folder is None:
        builds = {name: [file._asdict() for file in files] for name, files in BUILDS.items()}
        return WebRuntime({"url": CDN, "version": VERSION, "builds": builds}, {}, CDN)
    names = [file.name for files in BUILDS.values() for file in files]
    dist = next((p for p in (Path(folder), Path(folder) / "dist") if (p / names[0]).is_file()), Path(folder))
    if missing := [name for name in names if not (dist / name).is_file()]:
        advice = f"npm install onnxruntime-web@{VERSION} makes one, node_modules/onnxruntime-web"
        fault = f"is no folder of onnxruntime-web: it has no {missing[0]}; {advice}"
        raise SourceNotFoundError(fault, path=os.fspath(folder))
    local = {name: [{"name": file.name} for file in files] for name, files in BUILDS.items()}
    return WebRuntime({"url": _LOCAL, "builds": local}, {_LOCAL + name: dist / name for name in names}, "")
