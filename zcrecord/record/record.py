"""Record: an archive as a mapping from names to tensors."""

from __future__ import annotations

from collections.abc import Callable, ItemsView, Iterator, Mapping, ValuesView
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np

from zcrecord import dtypes
from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive, Progress
from zcrecord.archive.payload_source import Closed
from zcrecord.codec.layout import NONE
from zcrecord.errors import TensorNotFoundError, UnsupportedError
from zcrecord.storage.memory import Mode

if TYPE_CHECKING:
    from zcrecord.archive.info import ArchiveLayout, ModuleInfo, TensorInfo
    from zcrecord.archive.subset import Names, Rename

T = TypeVar("T")
Tensors = Literal["numpy", "torch", "jax"]

# A dictionary of all names pays after 32 lookups, and one for every 256 tensors; until then names are found by search.
_FEWEST_LOOKUPS, _TENSORS_A_LOOKUP = 32, 256


class Record(Mapping[str, Any]):
    """An archive as a mapping from full names to views, in saved order. Immutable; threads may share it.

    Values are numpy arrays, :class:`PackedTensor` or :class:`StringTensor` over the archive's own bytes: a lookup
    copies nothing, and each view keeps the mapping alive. Views are read-only, except in mode "c". Leaving its `with`
    block closes it. It survives fork. It is pickled by path and header, or by its bytes if it has no path; unpickling
    opens the file again, and raises an error if it changed.
    """

    __slots__ = ("__weakref__", "_archive", "_closed", "_lookups", "_names", "_numbers")

    def __init__(self, archive: Archive) -> None:
        """Take over an opened archive, which is released when the record is closed."""
        self._archive = archive
        self._closed = False
        self._lookups = 0
        self._names: list[str] | None = None
        self._numbers: dict[str, int] = {}  # by name; empty until a dictionary pays

    @property
    def archive(self) -> Archive:
        """The opened archive behind the record."""
        if self._closed:
            raise Closed.error(self._archive.path)
        self._archive = archive = self._archive.with_index()
        return archive

    @property
    def path(self) -> str | None:
        """The file's absolute path at the time of opening, or the URL; None for a record loaded from bytes."""
        return self._archive.absolute or self._archive.path

    @property
    def mode(self) -> Mode:
        """'r' if views are read-only, 'c' if they are writable views of a private copy."""
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
        """Return a tensor's number, -1 if there is none of that name."""
        archive = self.archive
        if not isinstance(name, str):
            return -1
        if not self._numbers:
            has_few = self._lookups < max(_FEWEST_LOOKUPS, len(archive.index.tensors) // _TENSORS_A_LOOKUP)
            if has_few or archive.verified == "touch":  # a dictionary would touch all names
                self._lookups += 1
                return archive.find(name)
            archive.prepare_views()
            names = self._all_names()
            self._numbers = dict(zip(names, range(len(names)), strict=True))
        return self._numbers.get(name, -1)

    def __getitem__(self, name: str) -> Any:
        """Return a view of the tensor; TensorNotFoundError (a KeyError) lists close names when it is printed.

        The view is read-only, except in mode "c". torch ignores that: the first write to
        `torch.from_numpy(record["w"])` ends the process, or changes the bytes that the record was loaded from. Use
        `record.torch()`, `load_record(path, mode="c")` or a copy: `torch.tensor(record["w"])`.
        """
        # This is all that a lookup does once the dictionary is made; `view` refuses if the archive is closed.
        i = self._numbers.get(name, -1) if type(name) is str else -1
        if i < 0:
            if (view := self._archive.early_view(name)) is not None:
                return view
            i = self._number_of(name)
        return self._archive.view(i)

    def _number_of(self, name: object) -> int:
        i = self._find(name)
        if i < 0:
            raise TensorNotFoundError(str(name), self._all_names, path=self._archive.path)
        return i

    def __contains__(self, name: object) -> bool:
        return self._find(name) >= 0

    def get(self, name: str, default: Any = None) -> Any:
        """Return a view of the tensor, or `default`; never searches for close names."""
        i = self._find(name)
        return default if i < 0 else self._archive.view(i)

    def __iter__(self) -> Iterator[str]:
        return iter(self._all_names())

    def __len__(self) -> int:
        return len(self.archive.index.tensors)

    def values(self) -> ValuesView[Any]:
        """Return an iterable of all tensors in saved order; their views are made together, at 1 µs each."""
        return _TensorValues(self)

    def items(self) -> ItemsView[str, Any]:
        """Return an iterable of (name, tensor) in saved order; the views are made together."""
        return _TensorItems(self)

    def array(self, name: str) -> np.ndarray[Any, np.dtype[Any]]:
        """Return a tensor that is an ndarray; UnsupportedError for packed and string tensors."""
        value = self[name]
        if not isinstance(value, np.ndarray):
            fault = f"a {type(value).__name__} is not an ndarray; use record[name].unpack()"
            raise UnsupportedError(fault, tensor=name)
        return value

    def raw(self, name: str) -> memoryview:
        """Return the bytes of a tensor's payload, read-only and uncopied, whether its element type is known or not.

        Elements of an unknown type with strides are copied, in C order (R77).
        """
        archive, i = self.archive, self._number_of(name)
        row = archive.row(i)
        if row.strides != NONE and row.dtype not in dtypes.by_code:
            return memoryview(archive.elements(i).tobytes())
        return archive.payload(row.payload)

    def info(self, name: str) -> TensorInfo:
        """Return dtype, shape, offset and ties of one tensor; reads no payload byte."""
        from zcrecord.archive import info

        return info.info(self.archive, self._number_of(name))

    def infos(self) -> Iterator[TensorInfo]:
        """Yield the TensorInfo of every tensor in saved order, in linear time."""
        from zcrecord.archive import info

        return info.infos(self.archive)

    def walk(self) -> Iterator[tuple[int, str, Any]]:
        """Yield (depth, key, child) of the record itself and all below it, in pre-order and saved order.

        A module is a ModuleInfo, a tensor a TensorInfo, an attribute its value.
        """
        from zcrecord.archive import info

        return info.walk(self.archive)

    def tree(self, tensors: Tensors = "numpy", *, device: Any = None, like: Any = None) -> Any:
        """Return the record nested as it was saved: dicts, lists, tuples (a dataclass as a dict), tensors as views.

        Integer keys stay integers. "torch" gives the tensors of `torch(device)`, for `load_state_dict`; "jax" those of
        `jax()`, built as the pytree `like` if one is given. See `frameworks.nested.tree`.
        """
        from zcrecord.frameworks import nested

        return nested.tree(self, tensors, device, like)

    @property
    def modules(self) -> dict[str, ModuleInfo]:
        """Every module by its full name, in pre-order; the record itself is ''."""
        from zcrecord.archive import info

        return info.modules(self.archive)

    @property
    def attributes(self) -> dict[str, Any]:
        """Every attribute by its full name, in saved order; bytes as read-only memoryviews, uncopied.

        Raises:
            LimitError: their full names add up to over 64 times the index. UnsupportedError: two have the same full
            name. In both cases use the `attributes` of each of `modules`.
        """
        from zcrecord.archive import info

        return info.attributes(self.archive)

    @property
    def metadata(self) -> dict[str, Any]:
        """The file's own metadata, by name."""
        archive = self.archive
        archive.ensure_all()
        return {a.key: a.value for a in unflatten.metadata_entries(archive.index, archive.payload)}

    @property
    def layout(self) -> ArchiveLayout:
        """Offsets, sizes and alignment of header, index and payloads."""
        from zcrecord.archive import info

        return info.layout(self.archive)

    @property
    def nbytes(self) -> int:
        """Bytes of stored payloads, each counted once."""
        from zcrecord.archive import info

        return info.payload_bytes(self.archive)[0]

    @property
    def archive_nbytes(self) -> int:
        """Bytes of the archive: header, index, payloads, padding and trailer."""
        return self.archive.header.archive_size

    def module(self, name: str) -> Record:
        """Return one module as a record, with names below it; copies no payload, and takes 50 µs and more.

        Its views share memory with this record's, and keep it alive.

        Raises:
            TensorNotFoundError: there is no such module; lists close names.

        Example:
            >>> import zcrecord
            >>> _ = zcrecord.save_record({"encoder": [{"w": np.ones(3)}, {"w": np.zeros(3)}]}, "model.zcr")
            >>> zcrecord.load_record("model.zcr").module("encoder.1")["w"].tolist()
            [0.0, 0.0, 0.0]
        """
        from zcrecord.archive import subset  # here, as in `select`, because few loads need a part

        return self if name == "" else Record(subset.module(self.archive.shared(), name))

    def select(self, names: Names | None = None, rename: Rename | None = None) -> Record:
        """Return chosen tensors as a record, under the same or other names; copies no payload.

        Args:
            names: exact names or shell patterns, in which `*` matches dots, too; of tensors, or of modules with all
                below them. Or a function from TensorInfo to bool. Modules of chosen tensors keep their attributes.
            rename: a mapping from names of tensors or modules to new ones, and from compiled regular expressions to
                their replacements; of several names that apply, the longest counts. Or a function from name to name. ""
                is the record itself. Changed names are split at their dots.

        Raises:
            TensorNotFoundError: a name without wildcards is not there. NameCollisionError: two tensors would have one
            name.

        Example:
            >>> import zcrecord
            >>> _ = zcrecord.save_record({"model": {"w": np.ones(3), "b": np.zeros(3)}}, "model.zcr")
            >>> zcrecord.load_record("model.zcr").select("*.w", rename={"model": "encoder"}).names
            ('encoder.w',)
        """
        from zcrecord.archive import subset

        return Record(subset.select(self.archive.shared(), names, rename))

    def into(self, kind: type[T]) -> T:
        """Return the record as an instance of a class, such as a dataclass, attrs class or NamedTuple of others.

        Arrays are views; attributes become fields.

        Raises:
            MismatchError: a field is missing or of another kind; names its path, and the expected and found kind.
        """
        from zcrecord import typed  # here, because few records are typed

        return typed.into(self.archive, kind)

    def torch(self, device: Any = "cpu", names: Names | None = None, *, writable: bool = True) -> dict[str, Any]:
        """Return the tensors as torch's, by name, for `load_state_dict`; see `zcrecord.frameworks.torch`.

        Tensors without a torch type, such as strings, stay the record's views. On the CPU tensors lie on a new private
        mapping, whose pages are copied when they are written: an optimizer step changes neither the file nor other
        tensors, except tied ones. In mode "c" they share memory with the record's views. Another device is filled as by
        `load_into`. If the file was replaced or removed since it was opened, the tensors are copies.
        """
        from zcrecord.frameworks import torch  # here, as below, because few programs have torch or jax

        target = torch.torch_device(torch.import_torch(), device)
        if target.type not in ("cpu", "meta"):
            return torch.beside_torch_views(self.archive, names, lambda part: Record(part).load_into(str(target)))
        return torch.torch_tensors(self.archive, device=target, names=names, writable=writable)

    def jax(self, names: Names | None = None, *, shardings: Any = None) -> dict[str, Any]:
        """Return the tensors as jax's, by name; `zcrecord.frameworks.jax` tells which are copied.

        Tensors without a jax type, such as strings, stay the record's views. With `shardings`, a
        `jax.sharding.Sharding` or several by name or pattern, each process reads only the shards of its own devices;
        see `zcrecord.loaders.jax.sharded_arrays`.
        """
        if shardings is not None:
            from zcrecord.loaders.jax import sharded_arrays

            return sharded_arrays(self.archive, names, shardings=shardings)
        from zcrecord.frameworks import jax

        return jax.jax_arrays(self.archive, names=names)

    def load_into(self, loader: Any, names: Names | None = None, **options: Any) -> dict[str, Any]:
        """Return chosen tensors on a device, each payload transferred once; see `zcrecord.loaders.load_into`."""
        from zcrecord import loaders  # here, as below, because few programs load to devices

        return loaders.load_into(self, loader, names, **options)

    def hollow(self, *, sink: Any = None) -> Any:
        """Return a `HollowRecord`: this record without its weights, to be filled; see `zcrecord.hollow.hollow_of`."""
        from zcrecord import hollow

        return hollow.hollow_of(self, sink=sink)

    def prefetch(self, names: Names | None = None) -> None:
        """Have the system read ahead chosen tensors, or all, into its page cache, without waiting.

        Tensors of a remote archive are fetched, in few merged requests. Does nothing if the bytes are in memory, or the
        system takes no such advice. TensorNotFoundError: a name without wildcards is not there.
        """
        from zcrecord.archive.by_file import prefetch

        prefetch((self if names is None else self.select(names)).archive)

    def verify(self, *, progress: Progress | None = None) -> None:
        """Check every rule of the format, payload digests included; reads the whole archive.

        `progress` is called with the bytes checked so far, and with all bytes.

        Raises:
            IntegrityError: a checksum or digest does not match; the message names the first damaged tensor, `damage`
            has all, with their ranges in the file. FormatError: another rule is broken.
        """
        from zcrecord.archive import digest  # here, as below, because hashlib takes 3 ms to import

        digest.check(self.archive.before_edits(), progress)

    def content_digest(self, *, progress: Progress | None = None) -> str:
        """Return 'sha256:...' of the record's content, the same for every layout; reads all of it.

        `progress` is called with the bytes hashed so far, and with all bytes. In mode "c" edits count.

        Raises:
            LimitError: different views of the same bytes add up to far more than the archive.

        Example:
            >>> import numpy as np, zcrecord
            >>> _ = zcrecord.save_record({"w": np.ones(3)}, "model.zcr")
            >>> zcrecord.load_record("model.zcr").content_digest()[:7]
            'sha256:'
        """
        from zcrecord.archive import digest

        self.archive.ensure_all()
        return digest.content_digest(self.archive, progress=progress)

    def close(self) -> bool:
        """End lookups; return True if the mapping is released. Views made before stay valid, and keep it."""
        self._closed = True
        return self._archive.close()

    def __enter__(self) -> Record:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        if isinstance(error, TensorNotFoundError):
            str(error)  # finds the close names now: the archive is about to be closed
        self.close()

    def __repr__(self) -> str:
        where = self._archive.path or "bytes"
        return f"<Record {where}: closed>" if self._closed else f"<Record {where}: {len(self)} tensors>"

    def __reduce__(self) -> tuple[Any, ...]:
        return _reopen, self.archive.__reduce__()

    __eq__, __hash__ = object.__eq__, object.__hash__  # not by content, as of other mappings


def _reopen(function: Callable[..., Archive], arguments: tuple[Any, ...]) -> Record:
    return Record(function(*arguments))


class _TensorValues(ValuesView[Any]):
    """The views of a record, made together when iterated."""

    _mapping: Record

    def __iter__(self) -> Iterator[Any]:
        return self._mapping.archive.views()


class _TensorItems(ItemsView[str, Any]):
    """The (name, view) pairs of a record, made together when iterated."""

    _mapping: Record

    def __iter__(self) -> Iterator[tuple[str, Any]]:
        return zip(self._mapping._all_names(), self._mapping.archive.views(), strict=True)
