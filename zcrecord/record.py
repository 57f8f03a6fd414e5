"""`load_record` and the Record it gives: an archive as a mapping from names to tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from . import describe, unfold
from .describe import ArchiveLayout, ModuleInfo, TensorInfo
from .errors import TensorNotFoundError, UnsupportedError
from .reader import Archive, Embedded, Progress, Verify, buffer_of, closed, map_file
from .sink import path_of

__all__ = ["Record", "load_record"]

_ENOUGH = 32  # lookups by search after which a dictionary of all names pays


class Record(Mapping[str, Any]):
    """An archive as a mapping from full names to read-only views, in saved order. Immutable; threads may share it.

    Values are numpy arrays, :class:`PackedTensor` or :class:`StringTensor`, over the archive's own bytes: getting one
    copies nothing, and each keeps the mapping alive. As a context manager it ends lookups on leaving.
    """

    __slots__ = ("__weakref__", "_archive", "_closed", "_lookups", "_names", "_numbers")

    def __init__(self, archive: Archive) -> None:
        self._archive = archive
        self._closed = False
        self._lookups = 0
        self._names: list[str] | None = None
        self._numbers: dict[str, int] | None = None

    @property
    def archive(self) -> Archive:
        """The opened archive behind the record, for this package's own use."""
        if self._closed:
            raise closed(self._archive.path)
        return self._archive

    @property
    def path(self) -> str | None:
        """The file's path, None for a record loaded from bytes."""
        return self._archive.path

    @property
    def names(self) -> tuple[str, ...]:
        """Every tensor's full name, in saved order."""
        return tuple(self._all_names())

    def _all_names(self) -> list[str]:
        archive = self.archive
        if self._names is None:
            self._names = archive.names()
        return self._names

    def _find(self, name: object) -> int:
        archive = self.archive
        if not isinstance(name, str):
            return -1
        if self._numbers is None:
            if self._lookups < _ENOUGH or archive.verified == "touch":  # a dictionary would touch all
                self._lookups += 1
                return archive.find(name)
            self._numbers = {n: i for i, n in enumerate(self._all_names())}
        return self._numbers.get(name, -1)

    def __getitem__(self, name: str) -> Any:
        """Return the tensor; TensorNotFoundError (a KeyError) lists close names when it is printed."""
        return self.archive.view(self._number(name))

    def _number(self, name: object) -> int:
        i = self._find(name)
        if i < 0:
            raise TensorNotFoundError(str(name), self._all_names, path=self.path)
        return i

    def __contains__(self, name: object) -> bool:
        return self._find(name) >= 0

    def get(self, name: str, default: Any = None) -> Any:
        """Return the tensor, or `default`; never searches for close names."""
        i = self._find(name)
        return default if i < 0 else self.archive.view(i)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all_names())

    def __len__(self) -> int:
        return len(self.archive.index.tensors)

    def values(self) -> Any:
        """Return a view of all tensors in saved order; iterating makes them together, at 1 µs each."""
        return _Values(self)

    def items(self) -> Any:
        """Return a view of (name, tensor) in saved order; iterating makes them together."""
        return _Items(self)

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a tensor that is an ndarray; UnsupportedError for packed and string ones, TensorNotFoundError."""
        value = self[name]
        if not isinstance(value, np.ndarray):
            raise UnsupportedError(f"a {type(value).__name__} is no ndarray; use record[name].unpack()", tensor=name)
        return value

    def raw(self, name: str) -> memoryview:
        """Return the bytes of the payload a tensor lies in, read-only and uncopied; of unknown element types too."""
        return self.archive.payload(self.archive.row(self._number(name)).payload)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, place and ties of one tensor; reads no payload byte."""
        return describe.info(self.archive, self._number(name))

    def infos(self) -> Iterator[TensorInfo]:
        """Yield the TensorInfo of every tensor in saved order, all together in linear time."""
        return describe.infos(self.archive)

    def walk(self) -> Iterator[tuple[int, str, Any]]:
        """Yield (depth, key, child) of every module, tensor and attribute, in pre-order and saved order.

        The record itself comes first. A module is a ModuleInfo, a tensor a TensorInfo, an attribute its value.
        """
        return describe.walk(self.archive)

    def tree(self) -> Any:
        """Return the record nested as it was saved: dicts, lists, tuples (a dataclass as a dict), tensors as views."""
        archive = self.archive
        views = list(archive.views())
        return unfold.unflatten(archive.index, 0, views.__getitem__, archive.payload)

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """Every module by its full name, the record itself as ''; in pre-order."""
        return describe.modules(self.archive)

    @property
    def attributes(self) -> dict[str, Any]:
        """Every attribute by its full name, in saved order; bytes as read-only memoryviews, uncopied."""
        return describe.attributes(self.archive)

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's own metadata, by name."""
        archive = self.archive
        archive.ensure_all()
        ix = archive.index
        return {a.key: a.value for a in unfold.attribute_entries(ix, ix.metadata, archive.payload)}

    @property
    def layout(self) -> ArchiveLayout:
        """Where header, index and payloads lie, and how."""
        return describe.layout(self.archive)

    @property
    def nbytes(self) -> int:
        """Bytes of stored payloads, each counted once however many tensors use it."""
        return describe.payload_bytes(self.archive)[0]

    @property
    def archive_nbytes(self) -> int:
        """Bytes of the archive: header, index, payloads, padding and trailer."""
        return self.archive.header.archive_size

    def verify(self, *, progress: Progress | None = None) -> None:
        """Check every rule of the format, payload digests included; reads the whole archive.

        `progress` is called with the bytes checked so far, and with all there are to check.

        Raises:
            IntegrityError: a checksum or digest does not match. FormatError: another rule is broken.
        """
        self.archive.check_contents(progress)

    def content_digest(self) -> str:
        """Return 'sha256:...' of what the record holds; the same for every layout of the same content. Reads it all."""
        from . import contents  # here, because hashlib takes 3 ms to import

        self.archive.ensure_all()
        return contents.content_digest(self.archive)

    def close(self) -> bool:
        """End lookups; returns whether the mapping is released. Views taken before keep it, and stay valid."""
        self._closed = True
        return self._archive.release()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        where = self.path or "bytes"
        return f"<Record {where}: closed>" if self._closed else f"<Record {where}: {len(self)} tensors>"

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


class _Values:
    """The values of a record, made together when iterated."""

    def __init__(self, record: Record) -> None:
        self._record = record

    def __iter__(self) -> Iterator[Any]:
        return self._record.archive.views()

    def __len__(self) -> int:
        return len(self._record)


class _Items(_Values):
    """The (name, tensor) pairs of a record, made together when iterated."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self._record._all_names(), self._record.archive.views(), strict=True)


def load_record(source: Any, *, verify: Verify = "index", embedded: Embedded | None = None) -> Record:
    """Open an archive without reading a payload byte: what comes out are views of the mapping, or of the given bytes.

    Args:
        source: a path (mapped read-only), or any bytes-like: bytes, bytearray, memoryview, mmap, numpy array.
        verify: 'index' checks every rule of the index first; 'touch' only what is used, as it is used, for huge
            archives of which little is read; 'full' the payloads' digests too.
        embedded: 'prefix' for an archive followed by other bytes (flash), 'suffix' for one appended to a file.

    Raises:
        SourceError: the file is missing or cannot be read. FormatError: it is no valid archive. VersionError: it
        needs a later reader. UnsupportedError: `source` is neither a path nor contiguous bytes.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> load_record("model.zcr")["w"].shape
        (2, 3)
    """
    if verify not in ("touch", "index", "full"):
        raise UnsupportedError(f"verify={verify!r} is not known; 'touch', 'index' or 'full'")
    if embedded not in (None, "prefix", "suffix"):
        raise UnsupportedError(f"embedded={embedded!r} is not known; 'prefix' or 'suffix'")
    if not isinstance(source, str | os.PathLike):
        return Record(Archive(buffer_of(source), path=None, mapping=None, level=verify, embedded=embedded))
    path = path_of(source)
    mapping = map_file(path)
    return Record(Archive(memoryview(mapping), path=path, mapping=mapping, level=verify, embedded=embedded))
