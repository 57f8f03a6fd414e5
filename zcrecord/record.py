"""`load_record` and the Record it gives: an archive as a mapping from names to tensors."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import dtypes, tree
from .dtypes import DType
from .errors import TensorNotFoundError, UnsupportedError
from .layout import NONE
from .reader import Archive, Embedded, Verify, buffer_of, map_file

__all__ = ["ModuleInfo", "Record", "TensorInfo", "load_record"]

_ENOUGH = 32  # lookups by search after which a dictionary of all names pays


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What the index says of one tensor.

    `offset` is that of element [0, ..., 0] in the file, `nbytes` that of the tensor's own elements, `strides` count
    elements (None: C order), `alignment` is the strongest power of two, up to 65536, that divides the payload's
    offset. `payload` numbers the stored bytes, `digest` is theirs (None where none was stored), and `tied` names all
    tensors that share them, this one included, where there are others.
    """

    name: str
    dtype: DType
    shape: tuple[int, ...]
    strides: tuple[int, ...] | None
    offset: int
    nbytes: int
    alignment: int
    payload: int | None
    digest: int | None
    tied: tuple[str, ...]
    bits: int
    module: str


@dataclass(frozen=True, slots=True)
class ModuleInfo:
    """What the index says of one module; `nbytes` and `tensors` count its whole subtree, ties each time."""

    name: str
    kind: str
    type_name: str
    tensors: int
    nbytes: int
    attributes: dict[str, Any]


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
    def _open(self) -> Archive:
        if self._closed:
            raise UnsupportedError("the record is closed; views taken before stay valid", path=self._archive.path)
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
        if self._names is None:
            self._names = self._open.names()
        return self._names

    def _find(self, name: object) -> int:
        if not isinstance(name, str):
            return -1
        archive = self._open
        if self._numbers is None:
            if self._lookups < _ENOUGH:
                self._lookups += 1
                return archive.find(name)
            self._numbers = {n: i for i, n in enumerate(self._all_names())}
        return self._numbers.get(name, -1)

    def __getitem__(self, name: str) -> Any:
        """Return the tensor; TensorNotFoundError (a KeyError) lists close names when it is printed."""
        return self._open.view(self._number(name))

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
        return default if i < 0 else self._open.view(i)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all_names())

    def __len__(self) -> int:
        return len(self._open.index.tensors)

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
        return self._open.payload(self._open.row(self._number(name))[5])

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, place and ties of one tensor; reads no payload byte."""
        archive = self._open
        i = self._number(name)
        row = archive.row(i)
        shape, strides = archive.shape(row), archive.strides(row)
        kind = dtypes.by_code.get(row[9]) or DType(
            row[9], f"unknown {row[9]}", row[10], None, None, None, None, None, None
        )
        number = row[5]
        if number == NONE:
            return TensorInfo(name, kind, shape, strides, 0, 0, 0, None, None, (), row[10], self._module_name(row[3]))
        offset, nbytes, digest = archive.index.payloads[number].item()
        offset += archive.header.payload_offset
        if kind is not dtypes.STRING:
            count = 1
            for dim in shape:
                count *= dim
            nbytes = dtypes.nbytes(count, row[10])
        users = np.flatnonzero(archive.index.tensors["payload"] == number)
        tied = tuple(archive.index.name(int(u)) for u in users) if len(users) > 1 else ()
        return TensorInfo(
            name=name, dtype=kind, shape=shape, strides=strides, offset=offset + row[6], nbytes=nbytes,
            alignment=min(offset & -offset, 65536), payload=number,
            digest=digest if archive.index.digest_kind else None, tied=tied, bits=row[10],
            module=self._module_name(row[3]),
        )  # fmt: skip

    def _module_name(self, number: int) -> str:
        row = self._open.index.modules[number]
        return self._open.index.string(int(row["name"]), int(row["name_size"]))

    def tree(self) -> Any:
        """Return the record nested as it was saved: dicts, lists, tuples (a dataclass as a dict), tensors as views."""
        archive = self._open
        archive.ensure_all()
        views = list(archive.views())
        return tree.unflatten(archive.index, 0, views.__getitem__, archive.payload)

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """Every module by its full name, the record itself as ''; in pre-order."""
        archive = self._open
        archive.ensure_all()
        ix = archive.index
        found = [self._module_name(m) for m in range(len(ix.modules))]
        attributes: dict[int, dict[str, Any]] = {}
        for row in ix.attributes:
            key = ix.string(int(row["name"]), int(row["name_size"]))
            attributes.setdefault(int(row["parent"]), {})[key] = tree.attribute_value(ix, row, archive.payload)
        order = ix.by_module if ix.by_module is not None else np.arange(len(ix.tensors))
        sizes = self._sizes()[order]
        sums = np.concatenate(([0], np.cumsum(sizes)))
        first = [*ix.modules["first_tensor"].tolist(), len(ix.tensors)]
        kinds = {1: "mapping", 2: "list", 3: "tuple", 4: "object"}
        return {
            name: ModuleInfo(
                name=name,
                kind=kinds.get(int(ix.modules["kind"][m]), "mapping"),
                type_name=ix.string(int(ix.modules["type_name"][m]), int(ix.modules["type_name_size"][m])),
                tensors=first[int(ix.modules["end"][m])] - first[m],
                nbytes=int(sums[first[int(ix.modules["end"][m])]] - sums[first[m]]),
                attributes=attributes.get(m, {}),
            )
            for m, name in enumerate(found)
        }

    def _sizes(self) -> Any:
        """Return every tensor's own bytes, as a column."""
        archive = self._open
        sizes = np.zeros(len(archive.index.tensors), np.int64)
        for i, row in enumerate(archive.index.tensors.tolist()):
            count = 1
            for dim in archive.shape(row):
                count *= dim
            string = row[9] == dtypes.STRING.code
            sizes[i] = len(archive.payload(row[5])) if string else dtypes.nbytes(count, row[10])
        return sizes

    @property
    def attributes(self) -> dict[str, Any]:
        """Every attribute by its full name, in saved order; bytes as read-only memoryviews, uncopied."""
        archive = self._open
        archive.ensure_all()
        ix = archive.index
        out = {}
        for row in ix.attributes:
            key = ix.string(int(row["name"]), int(row["name_size"]))
            module = self._module_name(int(row["parent"]))
            out[f"{module}.{key}" if module else key] = tree.attribute_value(ix, row, archive.payload)
        return out

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's own metadata, by name."""
        archive = self._open
        archive.ensure_all()
        ix = archive.index
        return {
            ix.string(int(row["name"]), int(row["name_size"])): tree.attribute_value(ix, row, archive.payload)
            for row in ix.metadata
        }

    @property
    def nbytes(self) -> int:
        """Bytes of stored payloads, each counted once however many tensors use it."""
        archive = self._open
        archive.ensure_all()
        rows = archive.index.payloads
        new = np.ones(len(rows), bool)
        new[1:] = rows["offset"][1:] != rows["offset"][:-1]
        return int(rows["nbytes"][new].sum())

    @property
    def archive_nbytes(self) -> int:
        """Bytes of the archive: header, index, payloads, padding and trailer."""
        return self._open.header.archive_size

    def verify(self) -> None:
        """Check every rule of the format, payload digests included; reads the whole archive.

        Raises:
            IntegrityError: a checksum or digest does not match. FormatError: another rule is broken.
        """
        self._open.check_contents()

    def content_digest(self) -> str:
        """Return 'sha256:...' of what the record holds; the same for every layout of the same content. Reads it all."""
        from . import contents  # here, because hashlib takes 3 ms to import

        self._open.ensure_all()
        return contents.content_digest(self._open)

    def close(self) -> bool:
        """End lookups; returns whether the mapping was released. Views taken before keep it, and stay valid."""
        if self._closed:
            return True
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
        return self._record._open.views()

    def __len__(self) -> int:
        return len(self._record)


class _Items(_Values):
    """The (name, tensor) pairs of a record, made together when iterated."""

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self._record._all_names(), self._record._open.views(), strict=True)


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
        >>> import zcrecord
        >>> _ = zcrecord.save_record({"w": np.ones((2, 3), np.float32)}, "model.zcr")
        >>> load_record("model.zcr")["w"].shape
        (2, 3)
    """
    if verify not in ("touch", "index", "full"):
        raise UnsupportedError(f"verify={verify!r} is not known; 'touch', 'index' or 'full'")
    if embedded not in (None, "prefix", "suffix"):
        raise UnsupportedError(f"embedded={embedded!r} is not known; 'prefix' or 'suffix'")
    if isinstance(source, str | os.PathLike):
        path = os.fsdecode(source)
        mapping = map_file(path)
        return Record(_archive(memoryview(mapping), path, mapping, verify, embedded))
    return Record(_archive(buffer_of(source), None, None, verify, embedded))


def _archive(
    buffer: memoryview, path: str | None, mapping: mmap.mmap | None, verify: Verify, embedded: Embedded | None
) -> Archive:
    return Archive(buffer, path=path, mapping=mapping, level=verify, embedded=embedded)
