"""Files of other formats as archives: an index in memory over their bytes, which stay where they are.

A format is a row of FORMATS (`zcrecord.codec.file_types`) and a module of this folder with the row's name, with one
function:

    read(reader: Reader, out: Receiver) -> int   give a file's tensors and metadata to `out`; returns bytes read

`Outline` opens a file so; `formats.convert` copies by the same function. The rules of each format are in its module.
A reader

- compares counts and sizes with the bytes that are left; ranges lie in the file and do not overlap. A test gives it
  the format's first bytes with zeros behind them, which it refuses;
- bounds the memory that the index takes by the file's size (schema/SECURITY.md, "Limits");
- raises errors with the tensor and the offset; the caller adds the path;
- makes paths of names by `state_path`, and sets `reader.described` to the range that it made the index from, by whose
  SHA-256 `index` knows the file;
- reads forward if its row has `streams`: of a pipe `reader.nbytes` is None.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from zcrecord.archive.archive import Archive
from zcrecord.codec.file_types import FORMATS, HEAD, sniff_file_type
from zcrecord.errors import UnsupportedError, located
from zcrecord.storage.memory import Memory, map_file

from .readers import MemoryReader

if TYPE_CHECKING:
    from .receiver import Outline


def format_reader(kind: str) -> Callable[[Any, Any], int]:
    """Return the `read` of a format's module, which is imported now, because few are used."""
    read: Callable[[Any, Any], int] = importlib.import_module(f".{kind}", __name__).read
    return read


def foreign_format(memory: Memory) -> str | None:
    """Return a file's name in FORMATS by its first bytes and suffix; None for archives and unknown formats.

    Raises:
        UnsupportedError: it is an ONNX model.
    """
    head = bytes(memory.octets[:HEAD])
    if head.lstrip()[:1] == b"{" and memory.path is not None and memory.path.lower().endswith(".index.json"):
        return "safetensors"
    file_type = sniff_file_type(head)
    name = None if file_type is None else file_type.format
    if name == "onnx" and file_type is not None and (memory.path or "").endswith(".onnx"):
        advice = "zcrecord.onnx.scan(path) gives its weights as they lie, onnx2zc makes an archive of it"
        raise UnsupportedError(f"is an ONNX model; {advice}", path=memory.path)
    if file_type is None or name not in FORMATS or name in ("zcr", "onnx"):
        return None
    suffixes = *FORMATS[name].suffixes, ".metadata"  # they decide where other files may begin with these bytes
    return name if file_type.sure or (memory.path or "").lower().endswith(suffixes) else None


def open_foreign(
    kind: str,
    memory: Memory,
    *,
    read: Callable[..., Memory] = map_file,
    bring: Callable[[int, int], None] = lambda _start, _end: None,
    source_in: Any = None,
) -> Archive:
    """Return the archive over a file of another format, which has the names, values and metadata of its conversion.

    Payloads are views of the file where they lie in it as an archive would have them, and aligned; `decoding` of the
    source says of each other one why it is decoded, or copied, when it is first used. The archive has no digests.

    Args:
        kind: the format's name in FORMATS.
        memory: the file; remote memory is read through `bring`.
        read: maps, or reads, a file beside it.
        source_in: makes the payload source of one file; by default that of its memory.

    Raises:
        FormatError: a rule of the format is broken. UnsupportedError, LimitError: those of its reader. SourceError: a
        file beside it cannot be read. DependencyError: the format needs a package.
    """
    with located(path=memory.path):
        return outline_of(kind, MemoryReader(memory, read=read, bring=bring)).archive(memory, source_in)


def outline_of(kind: str, reader: MemoryReader) -> Outline:
    """Return a file's names, values and metadata, and where its payloads lie; raises what `open_foreign` does."""
    from .receiver import Outline  # here: it brings the writers' planning along

    outline = Outline()
    outline.nbytes = format_reader(kind)(reader, outline)
    return outline


def open_remote(memory: Memory, bring: Callable[[int, int], None], source_in: Any) -> Archive | None:
    """Return the archive over a file behind a URL, of which the first bytes are in memory; None if no format has them.

    UnsupportedError: the format is read as a whole. Also raises what `open_foreign` does.
    """
    kind = foreign_format(memory)
    if kind is None:
        return None
    if (memory.path or "").lower().endswith(".json"):
        advice = "download it with its shards, or have an archive beside them that zcrecord index made, and open that"
        raise UnsupportedError(f"is an index of shards, which is not read by URL; {advice}", path=memory.path)
    if kind not in ("safetensors", "gguf"):
        fault = f"is {FORMATS[kind].title}, which is not read by URL; download it, or convert it: zcrecord convert"
        raise UnsupportedError(f"{fault} {memory.path} model.zcr", path=memory.path)
    return open_foreign(kind, memory, bring=bring, source_in=source_in)
