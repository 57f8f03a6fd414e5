"""File formats: the table of those that are converted, and types of files by their first bytes.

The words of every error about a wrong file are here.
"""

from __future__ import annotations

import re
from typing import NamedTuple

HEAD = 256  # bytes that are enough for all types; fewer are enough for most
_CONVERT = "zcrecord convert makes an archive of it"
_DECOMPRESS = "decompress it first"
_AGAIN = "the download failed: fetch the file itself"


class Format(NamedTuple):
    """A file format that `zcrecord convert` knows."""

    name: str
    title: str
    suffixes: tuple[str, ...]  # empty for a file of a folder, which is known by its first bytes
    starts: tuple[bytes, ...] = ()  # first bytes that no other file has; others are told apart in `_known_format`
    reads: bool = True
    writes: bool = False
    streams: bool = False  # a pipe can be read
    extra: str | None = None  # installs the packages it needs
    advice: str = _CONVERT


# Of several formats in a folder the first in this order is taken; of several suffixes of a file the longest.
FORMATS = {
    row.name: row
    for row in (
        Format("zcr", "a zcrecord archive", (".zcr",), (b"\x89ZCR",), writes=True, streams=True,
               advice="zcrecord convert and zcrecord to-onnx write other formats from it"),
        Format("safetensors", "a safetensors file", (".safetensors", ".safetensors.index.json"), writes=True,
               streams=True),
        Format("gguf", "a GGUF file", (".gguf",), (b"GGUF",), extra="gguf"),
        Format("onnx", "an ONNX model", (".onnx",), streams=True, advice="onnx2zc makes an archive of it"),
        Format("torch", "a torch checkpoint", (".pt", ".pth", ".bin", ".ckpt")),
        Format("npz", "a .npz file", (".npz",), writes=True),
        Format("orbax", "the metadata of an Orbax checkpoint", (), (b'{"tree_metadata"',), extra="orbax"),
    )
}  # fmt: skip


class FileType(NamedTuple):
    """A type of file: a sentence for errors, advice, its name in FORMATS; `sure` unless other files may begin alike."""

    text: str
    advice: str = ""
    format: str | None = None
    sure: bool = True


_ZIP = b"PK\x03\x04"
_NPZ = FileType("this is a .npz file", _CONVERT, "npz")
_PICKLE = FileType("this is a pickle (a checkpoint from before torch 1.6?)", _CONVERT, "torch", sure=False)
_BY_MAGIC = {
    **{
        start: FileType(f"this is {row.title}", row.advice, row.name)
        for row in FORMATS.values()
        for start in row.starts
    },
    **dict.fromkeys((b"\x80\x02", b"\x80\x03", b"\x80\x04", b"\x80\x05"), _PICKLE),
    b"PK\x05\x06": _NPZ,  # an empty zip file: a record without arrays
    b"\x28\xb5\x2f\xfd": FileType("this is a zstd stream", _DECOMPRESS),
    b"\x1f\x8b": FileType("this is a gzip stream", _DECOMPRESS),
    b"\x93NUMPY": FileType("this is a single array of numpy (.npy)", "load it and save it under a name"),
    b"\x89HDF\r\n\x1a\n": FileType("this is an HDF5 file", "save its arrays by save_record, or as .npz or safetensors"),
    b"version https://git-lfs": FileType("this is a Git LFS pointer", "fetch the file itself with git lfs pull"),
    b"<": FileType("this is a web page", _AGAIN),
    b"{": FileType("this is JSON text"),
}
_PROGRAMS = {b"\x7fELF": "an ELF", b"MZ": "a Windows", b"\xcf\xfa\xed\xfe": "a Mach-O", b"\xca\xfe\xba\xbe": "a Mach-O"}
_MODEL_STARTS = b"\x12\x1a\x22\x2a\x3a"  # tags that follow ir_version in a ModelProto
_MOST_FIELDS = 1000  # of a message; after so many valid fields it is taken for one
_VARINT = re.compile(rb"[\x80-\xff]{0,9}[\0-\x7f]")


def sniff_file_type(head: bytes) -> FileType | None:
    """Return the type of a file by its first bytes, up to HEAD of them; None if it is unknown."""
    if (known := _known_format(head)) is not None:
        return known
    if (kind := program_of(head)) is not None:
        return FileType(f"this is {kind} program", "`zcrecord detach` takes out an archive that is attached")
    if head and all(32 <= byte < 127 or byte in b"\t\n\r" for byte in head[:64]):
        return FileType("this is a text file", sure=False)
    return None


def _known_format(head: bytes) -> FileType | None:
    """Return the type of a file by its first bytes; None for programs, plain text and unknown files."""
    # A safetensors file starts with the length of its JSON header, in 8 bytes.
    if len(head) > 8 and not any(head[4:8]) and head[8:].lstrip(b" \t\r\n")[:1] in (b"{", b""):
        return FileType("this is a safetensors file", _CONVERT, "safetensors")
    if head.startswith(_ZIP):
        return _zip_type(head)
    known = next((known for magic, known in _BY_MAGIC.items() if head.startswith(magic)), None)
    if known is None and head[:1] == b"\x08" and head[2:3] and head[2] in _MODEL_STARTS:
        return FileType("this looks like an ONNX model", "onnx2zc makes an archive of it", "onnx", sure=False)
    return known


def _zip_type(head: bytes) -> FileType:
    """Return the type of a zip file by its first member's name: size at byte 26, text at byte 30 (PKWARE's APPNOTE)."""
    size = int.from_bytes(head[26:28], "little")
    first_name = head[30 : 30 + size]
    if len(first_name) == size and first_name.endswith((b".npy", b".json")):
        return _NPZ
    if b"/" in first_name:
        return FileType("this is a zip file (a torch checkpoint?)", _CONVERT, "torch")
    return FileType("this is a zip file (an .npz or a torch checkpoint?)", _CONVERT)


def program_of(head: bytes) -> str | None:
    """Return the kind of a program with its article, such as 'an ELF'; None for any other file."""
    if 0 not in head:  # no text has a zero byte, but it may start with MZ
        return None
    return next((kind for magic, kind in _PROGRAMS.items() if head.startswith(magic)), None)


def describe_data(octets: memoryview) -> str | None:
    """Return a sentence about a file of a known data format, JSON and HTML among them; None for any other file.

    A file that is protobuf from end to end is taken for an ONNX model, even if it is a short text.
    """
    if (file_type := _known_format(bytes(octets[:HEAD]))) is not None:
        return file_type.text
    return "this looks like an ONNX model" if _is_protobuf(octets) else None


def _is_protobuf(octets: memoryview) -> bool:
    """Return True if bytes are the fields of a protobuf message, to the end; checks the first thousand fields."""
    position = 0
    for _ in range(_MOST_FIELDS):
        tag, position = _varint(octets, position)
        nbytes, wire_type = 0, tag & 7
        if tag < 8 or wire_type > 5:  # field numbers start at 1
            return False
        if wire_type in (0, 2):  # a varint; a length and so many bytes (protobuf.dev, "Encoding")
            nbytes, position = _varint(octets, position)
        position += {1: 8, 2: nbytes, 5: 4}.get(wire_type, 0)
        if position == len(octets):
            return True
    return True


def _varint(octets: memoryview, start: int) -> tuple[int, int]:
    """Return a varint's value and its end; if none starts there 0, and an end past all bytes."""
    match = _VARINT.match(octets, start)
    if match is None:
        return 0, len(octets) + 1
    return sum((byte & 127) << 7 * i for i, byte in enumerate(match[0])), match.end()


def wrong_type(head: bytes, expected: str, *, sure: bool = False) -> str | None:
    """Return the error for a file of another known (or `sure`) type than `expected`, as 'a GGUF file'; else None."""
    actual = sniff_file_type(head)
    if actual is None or (sure and not actual.sure) or actual.text == f"this is {expected}":
        return None
    return f"{actual.text}, not {expected}" + (f"; {actual.advice}" if actual.advice else "")
