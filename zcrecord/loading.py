"""`load_record`: a path or bytes to a Record, and pickled records back to what they were."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any, TypeVar, overload

from .errors import IntegrityError, UnsupportedError
from .reader import Archive, Embedded
from .record import Record
from .sink import path_of
from .source import Memory, Mode, buffer_of, map_file, read_file
from .views import Verify

if TYPE_CHECKING:
    from .parts import Names, Rename

__all__ = ["load_record", "reload", "repart"]

T = TypeVar("T")


@overload
def load_record(
    source: Any,
    *,
    into: None = None,
    names: Names | None = None,
    rename: Rename | None = None,
    mode: Mode = "r",
    verify: Verify = "index",
    mmap: bool = True,
    expect: str | None = None,
    embedded: Embedded | None = None,
) -> Record: ...


@overload
def load_record(
    source: Any,
    *,
    into: type[T],
    names: Names | None = None,
    rename: Rename | None = None,
    mode: Mode = "r",
    verify: Verify = "index",
    mmap: bool = True,
    expect: str | None = None,
    embedded: Embedded | None = None,
) -> T: ...


def load_record(
    source: Any,
    *,
    into: Any = None,
    names: Names | None = None,
    rename: Rename | None = None,
    mode: Mode = "r",
    verify: Verify = "index",
    mmap: bool = True,
    expect: str | None = None,
    embedded: Embedded | None = None,
) -> Any:
    """Open an archive without reading a payload byte: what comes out are views of the mapping, or of the given bytes.

    Args:
        source: a path (mapped), or any bytes-like: bytes, bytearray, memoryview, mmap, numpy array.
        into: a dataclass, attrs class, NamedTuple or other type that is built from the record and returned instead of
            it; arrays are views still. See `Record.into`.
        names, rename: load a part, or under other names; see `Record.select`.
        mode: 'r' for read-only views; 'c' for writable ones of a private copy, whose pages are copied when they are
            written, so that no edit reaches the file. Tied tensors stay tied; equal ones that are not tied, though
            stored once, are edited each by itself. Of bytes in memory 'c' makes a whole copy.
        verify: 'index' checks every rule of the index first; 'touch' only what is used, as it is used, for huge
            archives of which little is read; 'full' the payloads' digests too.
        mmap: False reads the file into one aligned buffer, several reads at a time: for network file systems, and for
            files that may shrink or change while they are used.
        expect: the content digest that the archive must have ('sha256:...'); reads it all.
        embedded: 'prefix' for an archive followed by other bytes (flash), 'suffix' for one appended to a file.

    Returns:
        A Record, or an instance of `into`.

    Raises:
        SourceError: the file is missing or cannot be read. FormatError: it is no valid archive. VersionError: it
        needs a later reader. IntegrityError: it has another content digest than `expect`. LimitError: in mode
        "c", equal tensors that are not tied would take out of all proportion to the archive. UnsupportedError: `source`
        is neither a path nor contiguous bytes. MismatchError: the record is no `into`.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> load_record("model.zcr")["w"].shape
        (2, 3)
    """
    _check_choice("verify", verify, ("touch", "index", "full"))
    _check_choice("embedded", embedded, (None, "prefix", "suffix"))
    _check_choice("mode", mode, ("r", "c"))
    record = Record(_open(source, mode=mode, verify=verify, mmap=mmap, embedded=embedded))
    if expect is not None and (found := record.content_digest()) != expect:
        raise IntegrityError(f"content digest {expect} was expected, it has {found}", path=record.path)
    if names is not None or rename is not None:
        record = record.select(names, rename=rename)
    return record if into is None else record.into(into)


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if value not in known:
        *others, last = (repr(k) for k in known if k is not None)
        raise UnsupportedError(f"{name}={value!r} is not known; {', '.join(others)} or {last}")


def _open(source: Any, *, mode: Mode, verify: Verify, mmap: bool, embedded: Embedded | None) -> Archive:
    if not isinstance(source, str | os.PathLike):
        archive = Archive(Memory(buffer_of(source)), level=verify, embedded=embedded)
    elif mmap:
        archive = Archive(map_file(path_of(source)), level=verify, embedded=embedded)
    else:
        return Archive(read_file(path_of(source)), level=verify, embedded=embedded, mode=mode)
    return archive.private() if mode == "c" else archive


def reload(source: Any, options: dict[str, Any], seal: bytes) -> Record:
    """Return the record that was pickled: what is loaded again has to be the same archive.

    Raises:
        IntegrityError: the file has other content by now.
    """
    record: Record = load_record(source, **options)
    if record.archive.header.encode() != seal:
        raise IntegrityError("is not the archive that was pickled; it was replaced since", path=record.path)
    return record


def repart(record: Record, how: str, arguments: tuple[Any, ...]) -> Record:
    """Return the part of a record that was pickled: what `Record.module` or `Record.select` makes of it anew."""
    part: Record = getattr(record, how)(*arguments)
    return part
