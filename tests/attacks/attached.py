"""Sound archives at the end of files that other readers read as something else: models, and programs beside them.

The archive lies where a format has bytes of the last tensor, or bytes that it ignores. Who checks the archive and hands
the file to another reader has checked other weights than those that are used.
"""

from __future__ import annotations

import io
import os
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from exchange import described, file_of, npy, tensor
from malformed import saved
from onnx import TensorProto, helper, numpy_helper

import zcrecord
from attacks import catalogue
from attacks.catalogue import Attack, file
from attacks.doors import ARCHIVE_DOORS, command
from zcrecord import FormatError, integrity
from zcrecord.cli.dispatch import main

KEY = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
BLOCK = 4096


def key_file(path: Path) -> list[str]:
    pub = path.with_name("key.pub")
    pub.write_bytes(KEY.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH))
    return ["--key", os.fspath(pub)]


def page(path: Path) -> list[str]:
    return ["--force", "-o", os.fspath(path.with_name("page.html"))]


DOORS = {
    **ARCHIVE_DOORS,
    "zcrecord check": command(main, "check", after=key_file),
    "zcrecord report": command(main, "report", after=page),
    "zcrecord convert": command(main, "convert", "--from", "zcr", "--force", after=lambda p: [f"{p}.npz"]),
}


def signed() -> bytes:
    record = {"w": np.arange(6.0)}
    signature = integrity.make_signature(zcrecord.load_record(saved(record)), KEY)
    out = io.BytesIO()
    zcrecord.save_record(record, out, metadata=dict([signature]))
    return out.getvalue()


def behind(start: bytes) -> bytes:
    """Return a file with the archive where an element of any type may start."""
    return start.ljust(-(-len(start) // BLOCK) * BLOCK, b"\0") + signed()


def safetensors(size: int = 504, before: bytes = b"") -> bytes:
    """Return a file whose header takes `size` bytes; the archive is the end of its tensor."""
    gap = -(8 + size) % BLOCK
    nbytes = gap + len(signed())
    header = before + file_of({"w": tensor(0, nbytes)})[8:]
    return struct.pack("<Q", size) + header.ljust(size) + bytes(gap) + signed()


def onnx_fields() -> tuple[bytes, bytes]:
    """Return a model, and one more part of its graph, whose tensor ends in the archive."""
    w = numpy_helper.from_array(np.ones(3, np.float32), "w")
    graph = helper.make_graph([], "g", [], [], [w])
    model = helper.make_model(graph, ir_version=8).SerializeToString()
    data = bytes(-len(model) % BLOCK + BLOCK) + signed()
    more = b"\x08" + varint(len(data)) + b"\x10" + varint(TensorProto.UINT8) + b"\x42\x01v\x4a" + varint(len(data))
    tag = b"\x2a" + varint(len(more) + len(data)) + more
    return model, b"\x3a" + varint(len(tag) + len(data)) + tag + data


def varint(n: int) -> bytes:
    return bytes(n >> shift & 127 | 128 for shift in (0, 7, 14, 21)) + bytes([n >> 28])


def onnx(before: bytes = b"", *, turned: bool = False) -> bytes:
    """Return a model whose last bytes are the archive, aligned; turned, its graph is in front of its version."""
    model, more = onnx_fields()
    if turned:
        model = model[2:] + model[:2]
    start = before + model
    spare = -(len(start) + len(more) - len(signed())) % BLOCK
    note = b"\x32" + varint(spare - 6 + BLOCK) + bytes(spare - 6 + BLOCK)  # doc_string
    return start + note + more


def npz() -> bytes:
    """Return a .npz file that ends in a comment, which is the archive."""
    out = io.BytesIO()
    np.savez(out, w=np.ones(3))
    used = len(out.getvalue())
    with zipfile.ZipFile(out, "a") as opened:
        opened.comment = bytes(-used % BLOCK) + signed()
    return out.getvalue()


def gguf() -> bytes:
    """Return a file of one tensor of int8, whose bytes end in the archive."""
    info = struct.pack("<Q", 1) + b"w" + struct.pack("<IQIQ", 1, BLOCK - 64 + len(signed()), 24, 0)
    return (b"GGUF" + struct.pack("<IQQ", 3, 1, 0) + info).ljust(BLOCK, b"\0") + signed()


TOLD = "^this (is|looks like) .*, with a zcrecord archive attached, whose tensors other readers .* do not see; "


def attack(name: str, data: Callable[[], bytes], error: type[FormatError] | None = FormatError) -> Attack:
    return catalogue.attack(name, "", file(data, "m.bin"), error, TOLD)


ELF = b"\x7fELF\2\1\1" + bytes(57)
ATTACKS = (
    attack("in a safetensors file", safetensors),
    attack("in a safetensors file that reads MZ", lambda: safetensors(0x5A4D)),
    attack("in a safetensors file that reads MZ, with a space", lambda: safetensors(0x5A4D, b" ")),
    attack("in a GGUF file", gguf),
    attack("in an ONNX model", onnx),
    attack("in an ONNX model, graph first", lambda: onnx(turned=True)),
    attack("in an ONNX model that reads MZ", lambda: onnx(b"MZ\x90\0\3")),
    attack("in an ONNX model that reads as a Mach-O", lambda: onnx(b"\xca\xfe\xba\xbe\0\0")),
    attack("in the comment of a .npz file", npz),
    attack("behind an array of numpy", lambda: behind(npy(described(), b"ab"))),
    attack("in a message of many fields", lambda: behind(b"\x08\x01" * 3000)),
    attack("behind a pickle", lambda: behind(b"\x80\x04N.")),
    attack("behind an HDF5 file", lambda: behind(b"\x89HDF\r\n\x1a\n\0")),
    attack("behind JSON", lambda: behind(b"{}")),
    attack("behind a script", lambda: behind(b"#!/bin/sh\nexit\n"), None),
    attack("behind bytes of no type", lambda: behind(b"\1"), None),
    attack("in an ELF program, as it is meant", lambda: behind(ELF), None),
    attack("in a Windows program, as it is meant", lambda: behind(b"MZ\x90\0\3" + bytes(59)), None),
    attack("in a Mach-O program, as it is meant", lambda: behind(b"\xcf\xfa\xed\xfe\7\0\0\1"), None),
)
HARMLESS = file(lambda: behind(ELF))
