"""`load_record` and the Record it gives: an archive as a mapping from names to tensors."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from . import unfold
from .errors import IntegrityError, TensorNotFoundError, UnsupportedError
from .reader import Archive, Embedded, Progress
from .sink import path_of
from .source import Memory, Mode, buffer_of, map_file, read_file
from .views import Verify, closed

if TYPE_CHECKING:
    import jax
    import torch

    from .describe import ArchiveLayout, ModuleInfo, TensorInfo
    from .parts import Names, Rename

__all__ = ["Record", "load_record"]

T = TypeVar("T")

_ENOUGH = 32  # lookups by search after which a dictionary of all names pays


class Record(Mapping[str, Any]):
    """An archive as a mapping from full names to views, in saved order. Immutable; threads may share it.

    Values are numpy arrays, :class:`PackedTensor` or :class:`StringTensor`, over the archive's own bytes: getting one
    copies nothing, and each keeps the mapping alive. Views are read-only, but for those of mode "c". As a context
    manager it ends lookups on leaving. It survives fork, and is pickled by its path and what lies there, or by its
    bytes if it was loaded from bytes: who unpickles it opens the file anew and gets an error if it changed.
    """

    __slots__ = ("__weakref__", "_archive", "_closed", "_lookups", "_names", "_numbers", "_origin")

    def __init__(self, archive: Archive, *, origin: tuple[Record, str, tuple[Any, ...]] | None = None) -> None:
        """For this package's own use: `load_record` opens archives. `origin` says how a part came about."""
        self._origin = origin
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
    def mode(self) -> Mode:
        """'r' where views are read-only, 'c' where they may be written, to a private copy."""
        return self._archive.mode

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
        return _describe().info(self.archive, self._number(name))

    def infos(self) -> Iterator[TensorInfo]:
        """Yield the TensorInfo of every tensor in saved order, all together in linear time."""
        return _describe().infos(self.archive)

    def walk(self) -> Iterator[tuple[int, str, Any]]:
        """Yield (depth, key, child) of every module, tensor and attribute, in pre-order and saved order.

        The record itself comes first. A module is a ModuleInfo, a tensor a TensorInfo, an attribute its value.
        """
        return _describe().walk(self.archive)

    def tree(self) -> Any:
        """Return the record nested as it was saved: dicts, lists, tuples (a dataclass as a dict), tensors as views."""
        archive = self.archive
        views = list(archive.views())
        return unfold.unflatten(archive.index, 0, views.__getitem__, archive.payload)

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """Every module by its full name, the record itself as ''; in pre-order."""
        return _describe().modules(self.archive)

    @property
    def attributes(self) -> dict[str, Any]:
        """Every attribute by its full name, in saved order; bytes as read-only memoryviews, uncopied."""
        return _describe().attributes(self.archive)

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
        return _describe().layout(self.archive)

    @property
    def nbytes(self) -> int:
        """Bytes of stored payloads, each counted once however many tensors use it."""
        return _describe().payload_bytes(self.archive)[0]

    @property
    def archive_nbytes(self) -> int:
        """Bytes of the archive: header, index, payloads, padding and trailer."""
        return self.archive.header.archive_size

    def module(self, name: str) -> Record:
        """Return one module as a record of its own, names starting below it; copies no payload.

        Its views are the same memory as this record's, and it lives as long as they do. 50 µs and some for each
        tensor in it.

        Raises:
            TensorNotFoundError: there is no such module; lists close names.

        Example:
            >>> _ = save_record({"encoder": [{"w": np.ones(3)}, {"w": np.zeros(3)}]}, "model.zcr")
            >>> load_record("model.zcr").module("encoder.1")["w"].tolist()
            [0.0, 0.0, 0.0]
        """
        if not name:
            return self
        from . import parts

        return Record(parts.module(self.archive, name), origin=(self, "module", (name,)))

    def select(self, names: Names | None = None, rename: Rename | None = None) -> Record:
        """Return chosen tensors as a record of their own, maybe under other names; copies no payload.

        Args:
            names: patterns as the shell has them, `*` matching dots too, or exact names, of tensors and of modules,
                which bring everything below them; or a function from TensorInfo to bool. Modules of what is chosen
                keep their attributes.
            rename: a mapping from names, of tensors or modules, to new ones, and from compiled regular expressions to
                what they are replaced with; or a function from name to name. Of several names that hold the longest
                counts. "" stands for the record itself. Names that change are split at their dots.

        Raises:
            TensorNotFoundError: a name without wildcards is not there. NameCollisionError: two tensors would get one
            name.

        Example:
            >>> _ = save_record({"model": {"w": np.ones(3), "b": np.zeros(3)}}, "model.zcr")
            >>> load_record("model.zcr").select("*.w", rename={"model": "encoder"}).names
            ('encoder.w',)
        """
        from . import parts

        return Record(parts.select(self.archive, names, rename), origin=(self, "select", (names, rename)))

    def into(self, kind: type[T]) -> T:
        """Return the record as an instance of a class: dataclasses, attrs classes, NamedTuples and what is in them.

        Arrays are views, as ever; attributes become fields. See `load_record`.

        Raises:
            MismatchError: a field is missing or of another kind; names its path, what was expected and what is there.
        """
        from . import typed  # here, because few records are typed

        return typed.into(self.archive, kind)

    def torch(
        self, device: Any = "cpu", names: Names | None = None, *, writable: bool = True
    ) -> dict[str, torch.Tensor]:
        """Return the tensors as torch's, by name, as `load_state_dict` takes them; see `zcrecord.handover`.

        On the CPU they lie on a private mapping, whose pages are copied when they are written: an optimizer step
        changes neither the file nor any other tensor but tied ones. Each call makes a mapping of its own, but in mode
        "c", whose memory they then share with the record's views.
        """
        from . import handover  # here, as below, because not everybody has torch or jax

        return handover.torch_tensors(self.archive, device=device, names=names, writable=writable)

    def jax(self, names: Names | None = None) -> dict[str, jax.Array]:
        """Return the tensors as jax's, by name; see `zcrecord.handover` for which are copied."""
        from . import handover

        return handover.jax_arrays(self.archive, names=names)

    def prefetch(self, names: Names | None = None) -> None:
        """Have the system read ahead what is chosen (all, by default) into its page cache; does not wait for it.

        Does nothing where the system takes no such advice, or the bytes are in memory anyway.

        Raises:
            TensorNotFoundError: a name without wildcards is not there.
        """
        (self if names is None else self.select(names)).archive.prefetch()

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

    def __reduce__(self) -> tuple[Any, ...]:
        archive = self.archive
        if self._origin is not None:
            return _repart, self._origin
        if archive.mode == "c":
            what = "a record of mode 'c' may hold edits that its file does not; save it, or pickle single tensors"
            raise UnsupportedError(what, path=self.path)
        if not archive.whole:
            raise UnsupportedError("only records of archives can be pickled", path=self.path)
        options: dict[str, Any] = {"verify": "touch" if archive.verified == "touch" else "index"}
        if self.path is None:
            return _reload, (bytes(archive.buffer), options, archive.header.encode())
        options |= {"embedded": archive.embedded, "mmap": archive.mapped}
        return _reload, (os.path.abspath(self.path), options, archive.header.encode())

    def __hash__(self) -> int:
        return id(self)

    def __eq__(self, other: object) -> bool:
        return self is other


def _describe() -> Any:
    """Return what tells of archives; imported when it is first asked, as `parts` is: few loads need more than views."""
    from . import describe

    return describe


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
        needs a later reader. IntegrityError: it has another content digest than `expect`. UnsupportedError: `source`
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


def _reload(source: Any, options: dict[str, Any], seal: bytes) -> Record:
    """Return the record that was pickled: what is loaded again has to be the same archive.

    Raises:
        IntegrityError: the file has other content by now.
    """
    record: Record = load_record(source, **options)
    if record.archive.header.encode() != seal:
        raise IntegrityError("is not the archive that was pickled; it was replaced since", path=record.path)
    return record


def _repart(record: Record, how: str, arguments: tuple[Any, ...]) -> Record:
    part: Record = getattr(record, how)(*arguments)
    return part
