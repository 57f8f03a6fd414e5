"""`edit`: an archive's metadata, attributes, names and tensors changed, without reading what stays.

Keeps the changed index and the new values until the block ends. Parts and names are `archive.subset`'s, places and
bytes `writing.edited`'s.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import numpy as np

from zcrecord.archive import info, subset, unflatten
from zcrecord.archive.archive import Archive, Progress
from zcrecord.archive.name_patterns import star_match, starred
from zcrecord.archive.part_source import PartSource
from zcrecord.archive.subset import GONE, Names, Rename
from zcrecord.codec.conventions import SIGNATURE_PREFIX
from zcrecord.codec.entries import Entries, PayloadId, TensorLayout, change_values, is_attribute
from zcrecord.codec.index import PAYLOAD
from zcrecord.codec.layout import NONE
from zcrecord.errors import RecordError, SourceError, TensorNotFoundError, UnsupportedError
from zcrecord.storage.files import (
    Place,
    absolute_path,
    check_destination,
    identity_of,
    is_url,
    open_sink,
    open_source,
    path_of,
)
from zcrecord.writing import flatten
from zcrecord.writing.edited import EditedArchive, StoredArchive, Written, plan_edited
from zcrecord.writing.sharing import layout_of, plan_sharing

from .editable import check_editable, check_no_shard, reformed_attribute
from .load import load_record
from .record import Record
from .save import metadata_entries, stored_entries

__all__ = ["EditReport", "RecordEditor", "add_metadata", "edit"]


@dataclass(frozen=True, slots=True)
class EditReport:
    """Report of an edit. Bytes throughout.

    Attributes:
        source, dest: the archive that was read, and the one that was written; the same path unless another was given.
        written: False if nothing changed, so that the archive was left as it is.
        tensors: those that the archive has now.
        archive_bytes: its size now.
        cloned_bytes: those of it that share their place on the disk with the archive from before.
        lapsed: the ids of keys whose signatures were left out, since they were of another content.
        seconds: all of it, the block included.
    """

    source: str
    dest: str
    written: bool
    tensors: int
    archive_bytes: int
    cloned_bytes: int
    lapsed: tuple[str, ...]
    seconds: float


def edit(
    path: str | os.PathLike[str],
    dest: str | os.PathLike[str] | None = None,
    *,
    force: bool = False,
    durable: bool = True,
    progress: Progress | None = None,
) -> RecordEditor:
    """Change an archive's metadata, attributes, names and tensors in a `with` block; what stays is not read.

    At the end of the block the new archive takes the place of the old one, whole; an exception leaves the old one as it
    was. Payloads that stay are cloned where the file system can (XFS, Btrfs), which takes neither time nor space; else
    the system copies them. Their digests are kept. Who has the old archive open keeps it as it was.

    Metadata are covered by no signature, so those stay valid; any other change makes them lapse: they are left out.

    Args:
        path: of an archive in a local file.
        dest: a path for the changed archive; None replaces the archive.
        force, durable: replace what is at `dest`; that of `save_record`.
        progress: called with the bytes written, and all that will be.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"head": {"w": np.ones(3)}, "old": np.zeros(2)}, "model.zcr")
        >>> with edit("model.zcr") as model:
        ...     model.metadata["license"] = "mit"
        ...     model.drop("old")
        >>> zcrecord.load_record("model.zcr").names
        ('head.w',)

    Raises (when the block begins or ends):
        UnsupportedError: it is no path; or the archive is packed, remote, attached to a program, tuned, a catalogue, or
        a shard of one.
        SourceNotFoundError, FormatError: there is no archive. DestinationExistsError: something is at `dest`.
        NameCollisionError: two would have one name. SourceError: the file system refused, or the archive was replaced
        meanwhile.
    """
    return RecordEditor(path, dest, force=force, durable=durable, progress=progress)


class RecordEditor(MutableMapping[str, Any]):
    """An archive that is edited, as a mapping from full names to tensors; see `edit`.

    Tensors that are there are views, as a record's. A tensor that is set replaces the one of its name, or is added:
    into the module with the longest name that begins its own. It is read when the block ends; those that share memory
    are tied, as `save_record` does it. `del` takes one out. Tensors that were tied to it keep the payload.

    Attributes:
        metadata: the file's, a dict; to be changed.
        report: an EditReport once the block has ended.
    """

    __slots__ = (
        "_attributes", "_blobs", "_content", "_dest", "_first", "_force", "_how", "_now", "_numbers", "_out", "_put",
        "_record", "_refs", "_replaces", "_set", "_source", "_started", "_values", "_views", "metadata", "report",
    )  # fmt: skip

    def __init__(
        self,
        path: str | os.PathLike[str],
        dest: str | os.PathLike[str] | None = None,
        *,
        force: bool = False,
        durable: bool = True,
        progress: Progress | None = None,
    ) -> None:
        """Take what `edit` takes; the archive is opened when the block begins."""
        if not isinstance(path, str | os.PathLike):
            what = f"edit takes the path of an archive, not a {type(path).__name__}"
            raise UnsupportedError(f"{what}; save a changed record with save_record")
        if is_url(path):
            raise UnsupportedError("is remote; download it, and edit the file", path=str(path))
        self._source = path_of(path)
        self._dest = None if dest is None else path_of(dest)
        self._force, self._how = force, (durable, progress)
        self._replaces: Any = dest.replaces if isinstance(dest, Place) else None
        self._record: Record | None = None
        self._put: dict[str, tuple[TensorLayout, int, Any] | None] = {}  # tensors: layout, reference, value
        self._set: dict[str, Any] = {}  # attributes
        self.metadata: dict[str, Any] = {}
        self.report: EditReport | None = None

    def __enter__(self) -> RecordEditor:
        if self._dest is not None:
            self._replaces = check_destination(self._source, self._dest, self._force)
        else:
            check_no_shard(self._source)
        record = load_record(self._source)
        try:
            check_editable(record.archive)
        except UnsupportedError:
            record.close()
            raise
        self._begin(record)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        record = self._opened()
        try:
            if kind is None:
                self._end()
        finally:
            record.__exit__(kind, error, trace)
            self._record = None

    def _begin(self, record: Record) -> None:
        """Take over an opened record."""
        self._started = time.perf_counter()
        self._record = record
        out = self._source if self._dest is None else self._dest
        self._out = out if is_url(out) else absolute_path(out)  # the working folder may be another at the end
        self._now: Archive = record.archive  # its index has all changes but those in `_put` and `_set`
        # Payloads are referred to by numbers: those of the stored archive, from `_first` on those of `_values`.
        self._first = len(record.archive.index.payloads)
        self._refs = list(range(self._first))  # of the payloads of `_now`
        self._values: list[Any] = []
        self._views: dict[int, tuple[Any, int]] = {}  # by id: bytes that were handed out, and their reference
        self._blobs: dict[bytes, int] = {}  # bytes that were set: their references
        self._put, self._set = {}, {}
        self._numbers: dict[str, int] = {}  # tensors of `_now`
        self._attributes: dict[str, Any] | None = None  # of `_now`
        self._content = False
        ix = record.archive.index
        metadata = unflatten.attribute_entries(ix, ix.metadata, PayloadId)
        self.metadata = {a.key: _mapped(a.value, self._shown) for a in metadata}

    def _opened(self) -> Record:
        if self._record is None:
            raise UnsupportedError("an archive is edited only inside a with block", path=self._source)
        return self._record

    @property
    def attributes(self) -> MutableMapping[str, Any]:
        """Every attribute by its full name, as a mapping to be changed; values as `save_record` takes them."""
        self._opened()
        return _EditedAttributes(self._stored_attributes, self._set, self._check_name)

    # Tensors.

    def __getitem__(self, name: str) -> Any:
        put = self._put.get(name, GONE)
        if put is None or (put is GONE and name not in self._known()):
            raise TensorNotFoundError(str(name), lambda: list(self), path=self._source)
        if put is not GONE:
            return put[2]
        i = self._known()[name]
        row = self._now.index.tensor(i)
        ref = NONE if row.payload == NONE else self._refs[row.payload]
        return self._now.view(i) if ref < self._first or ref == NONE else self._values[ref - self._first]

    def __setitem__(self, name: str, value: Any) -> None:
        self._check_name(name)
        if is_attribute(value, name):
            what = f"a {type(value).__name__} is no tensor; see .attributes[name]"
            raise UnsupportedError(what, path=self._source, tensor=name)
        tensor = flatten.as_tensor(value, name)
        layout = layout_of(tensor)
        self._put[name] = layout, NONE if 0 in layout.shape else self._value(tensor), tensor

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise TensorNotFoundError(str(name), lambda: list(self), path=self._source)
        self._put.pop(name, None)
        if name in self._known():
            self._put[name] = None

    def __contains__(self, name: object) -> bool:
        put = self._put.get(name, GONE) if isinstance(name, str) else GONE
        return name in self._known() if put is GONE else put is not None

    def __iter__(self) -> Iterator[str]:
        self._settle()
        return iter(list(self._known()))

    def __len__(self) -> int:
        return len(self._known()) + sum((put is not None) - (name in self._known()) for name, put in self._put.items())

    def __eq__(self, other: object) -> bool:
        return self is other

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return f"<RecordEditor {self._source}>"

    def tie(self, name: str, to: str) -> None:
        """Have a tensor, new or not, be the same memory as another one, and stay it.

        Raises:
            TensorNotFoundError: there is no tensor `to`.
        """
        self._check_name(name)
        value, put = self[to], self._put.get(to)
        if put is None:
            row = self._now.row(self._known()[to])
            shape, strides = self._now.shape(row), self._now.strides(row)
            ref = NONE if row.payload == NONE else self._refs[row.payload]
            put = TensorLayout(row.dtype, row.bits, shape, strides, row.byte_offset), ref, value
        self._put[name] = put

    def drop(self, names: Names) -> None:
        """Take out all tensors, modules and attributes that names match, and modules that are empty by that.

        Args:
            names: as `Record.select` takes them: patterns, `*` matching dots too, or exact names, of modules with all
                that is below them; or a function from TensorInfo to bool.

        Raises:
            TensorNotFoundError: a name is not there, or a pattern matches nothing.
        """
        archive = self._settle()
        self._take(subset.without(archive, names), self._refs)

    def rename(self, old: str | re.Pattern[str] | Rename, new: str | None = None) -> None:
        """Rename tensors, modules with all that is below them, and attributes.

        Args:
            old: a name, to become `new`; a pattern in which `*` stands for any text, as it then does in `new`
                (`rename("model.*", "*")`); or, without `new`, what `Record.select` takes as `rename`.

        Raises:
            TensorNotFoundError: a name is not there, or a pattern with `*` matches nothing. NameCollisionError: two
            tensors would get one name.
        """
        archive = self._settle()
        rename: Any = old
        if isinstance(old, str):
            if not isinstance(new, str):
                raise UnsupportedError(f"rename takes a new name for '{old}', not a {type(new).__name__}")
            if "*" in old and old not in self._known():
                rename = starred(old, new)
                self._check_known([old], star_match(old))
            else:
                rename = {old: new}
        elif isinstance(old, re.Pattern):
            rename = {old: new}
        elif new is not None:
            raise UnsupportedError("rename takes a new name with an old one alone, not with a mapping or a function")
        if isinstance(rename, Mapping):
            self._check_known([name for name in rename if isinstance(name, str) and name])
        with self._located():
            self._take(subset.renamed(archive, rename), self._refs)

    def _check_name(self, name: Any) -> None:
        self._opened()
        if not isinstance(name, str) or not name:
            raise UnsupportedError(f"{name!r}: a name is a non-empty str", path=self._source)

    def _check_known(self, names: list[str], match: Callable[[str], Any] = lambda _: None) -> None:
        """Raise TensorNotFoundError for a name that is not there, begins no name before a dot, and matches nothing."""
        ix = self._now.index
        known = [*self._known(), *map(ix.text_of, ix.modules), *self._stored_attributes()] if names else []
        for name in names:
            if not any(other == name or other.startswith(f"{name}.") or match(other) for other in known):
                raise TensorNotFoundError(name, lambda: known, path=self._source)

    # Payloads.

    def _value(self, value: Any) -> int:
        self._values.append(value)
        return self._first + len(self._values) - 1

    def _shown(self, payload: Any) -> Any:
        """Return the bytes of a payload of `_now`, to be known again."""
        if not isinstance(payload, PayloadId):
            return payload
        ref = NONE if payload == NONE else self._refs[payload]
        new = self._first <= ref < NONE
        view = self._values[ref - self._first].data if new else self._now.payload(payload)
        self._views[id(view)] = view, ref
        return view

    def _referred(self, value: Any) -> int:
        """Return a reference to bytes that an attribute holds."""
        if id(value) in self._views:
            return self._views[id(value)][1]
        if not isinstance(value, bytes):
            return self._value(np.frombuffer(value, np.uint8)) if len(value) else NONE
        if value not in self._blobs:  # lists may name the same bytes a million times
            self._blobs[value] = self._value(np.frombuffer(value, np.uint8)) if value else NONE
        return self._blobs[value]

    # Changes.

    def _known(self) -> dict[str, int]:
        """Return the number of each tensor of `_now`, by its name."""
        self._opened()
        if not self._numbers:
            self._numbers = {name: i for i, name in enumerate(self._now.names())}
        return self._numbers

    def _stored_attributes(self) -> dict[str, Any]:
        """Return the attributes of `_now`, by their full names."""
        self._opened()
        if self._attributes is None:
            found = info.attributes(self._now, PayloadId).items()
            self._attributes = {name: _mapped(value, self._shown) for name, value in found}
        return self._attributes

    @contextlib.contextmanager
    def _located(self) -> Iterator[None]:
        try:
            yield
        except RecordError as error:
            raise error.located(path=self._source) from error.__cause__

    def _take(self, part: subset.PartIndex, refs: list[int]) -> None:
        """Go on with a part of `_now`, whose payloads are some of `refs`."""
        self._refs = [refs[n] for n in part.numbers]
        stored = self._opened().archive
        self._now = Archive(stored.header, part.index, PartSource(stored.source, self._refs))
        self._numbers, self._attributes, self._content = {}, None, True

    def _settle(self) -> Archive:
        """Take tensors and attributes that were set into the index; return the archive with it."""
        self._opened()
        if self._put or self._set:
            refs, local = list(self._refs), {ref: n for n, ref in enumerate(self._refs)} | {NONE: NONE}

            def number(ref: int) -> int:
                if local.setdefault(ref, len(refs)) == len(refs):
                    refs.append(ref)
                return local[ref]

            def stored(value: Any) -> Any:
                return PayloadId(number(self._referred(value))) if isinstance(value, bytes | memoryview) else value

            tensors = {name: put and (put[0], number(put[1])) for name, put in self._put.items()}
            attributes = {name: _mapped(value, stored) for name, value in self._set.items()}
            old = len(self._refs)
            rows = np.zeros(len(refs), PAYLOAD)
            rows[:old] = self._now.index.payloads
            rows[old:] = [self._row(ref) for ref in refs[old:]]
            with self._located():
                self._take(subset.changed(self._now, tensors, attributes, rows), refs)
            self._put.clear()
            self._set.clear()
        return self._now

    def _row(self, ref: int) -> tuple[int, int, int]:
        """Return the row of a payload: the stored one, or, of one to come, its size alone."""
        if ref < self._first:
            row: tuple[int, int, int] = self._opened().archive.index.payloads[ref].item()
            return row
        return 0, self._values[ref - self._first].nbytes, 0

    # The end.

    def _end(self) -> None:
        """Write the archive."""
        record = self._opened()
        archive = self._settle()
        out = self._source if self._dest is None else self._dest
        lapsed = self._leave_out_signatures()
        with self._planned(archive) as edited:
            same = edited.unchanged and self._dest is None
            written = Written(record.archive_nbytes, 0) if same else self._write(edited, self._out)
        self.report = EditReport(
            source=self._source,
            dest=out,
            written=not same,
            tensors=len(archive.index.tensors),
            archive_bytes=written.nbytes,
            cloned_bytes=written.cloned,
            lapsed=lapsed,
            seconds=time.perf_counter() - self._started,
        )

    def _leave_out_signatures(self) -> tuple[str, ...]:
        """Take signatures of the old content out of the metadata, if it changed; return their keys' ids."""
        record = self._opened()
        signed = {k: v for k, v in record.metadata.items() if k.startswith(SIGNATURE_PREFIX)}
        changed = self._content or (signed and reformed_attribute(record.archive) is not None)
        lapsed = [k for k, v in signed.items() if changed and self.metadata.get(k) == v]
        for key in lapsed:
            del self.metadata[key]
        return tuple(key.removeprefix(SIGNATURE_PREFIX) for key in lapsed)

    @contextlib.contextmanager
    def _planned(self, archive: Archive) -> Iterator[EditedArchive]:
        """Yield the plan of the archive to be written, the old one's file open meanwhile."""
        entries = stored_entries(archive)
        entries.digest_kind = archive.index.digest_kind
        entries.metadata = metadata_entries(self.metadata)
        kept, sources = self._number_payloads(entries)
        stored = self._opened().archive
        path, identity = stored.source.file or (self._source, None)
        with open_source(path)[0] as file:
            self._check_still(file.fileno(), identity)
            old = StoredArchive(stored.header, stored.index.payloads, stored.buffer, file.fileno())
            yield plan_edited(old, kept, entries, sources)

    def _check_still(self, file: int | str, identity: Any) -> None:
        """Raise SourceError unless a file is the one that was opened."""
        if identity_of(file) != identity:
            what = "was replaced meanwhile; start again with the archive that is there now"
            raise SourceError(what, path=self._source)

    def _write(self, edited: EditedArchive, out: str) -> Written:
        durable, progress = self._how
        path, identity = self._opened().archive.source.file or (self._source, None)
        replaces = identity if self._dest is None else self._replaces
        with open_sink(out, durable=durable, replaces=replaces) as sink:
            if not sink.can_rewind:
                raise UnsupportedError("an edited archive is a regular file in a folder; name one", path=out)
            written = edited.write(sink, progress)
            self._check_still(path, identity)
        return written

    def _number_payloads(self, entries: Entries) -> tuple[list[int], list[Any]]:
        """Number the payloads that entries use: those that are stored, then new ones; return both.

        The layouts of new tensors are planned now, when all are known that may share memory.
        """
        refs, first = [*self._refs], self._first
        new = dict.fromkeys(ref for p in entries.payloads if p != NONE and (ref := refs[p]) >= first)
        plan = plan_sharing([self._values[ref - first] for ref in new])
        sources: list[Any] = list(plan.sources)
        places: dict[int, int] = dict(zip(new, plan.source_ids, strict=True))
        layouts = {ref: plan.layouts[number] for ref, number in zip(new, plan.layout_ids, strict=True)}
        used: set[int] = set()

        def place(ref: int) -> int:
            """Note a use; return the reference of a stored payload, the negated place of a new one."""
            if ref < first:
                used.add(ref)
                return ref
            if places.setdefault(ref, len(sources)) == len(sources):
                sources.append(self._values[ref - first])
            return -1 - places[ref]

        def of_bytes(value: Any) -> Any:
            if isinstance(value, PayloadId):
                return value if value == NONE else PayloadId(place(refs[value]))
            if isinstance(value, bytes | memoryview):
                return PayloadId(NONE if (ref := self._referred(value)) == NONE else place(ref))
            return value

        told = [entries.layouts[n] for n in entries.layout_ids]
        for i, p in enumerate(entries.payloads):
            if p != NONE:
                told[i] = layouts.get(refs[p], told[i])
                entries.payloads[i] = place(refs[p])
        numbers: dict[TensorLayout, int] = {}
        entries.layout_ids = [numbers.setdefault(layout, len(numbers)) for layout in told]
        entries.layouts = list(numbers)
        change_values(entries.attributes, of_bytes)
        change_values(entries.metadata, of_bytes)
        kept = sorted(used)
        final = {ref: n for n, ref in enumerate(kept)} | {NONE: NONE}
        final |= {-1 - s: len(kept) + s for s in range(len(sources))}
        entries.payloads = [final[p] for p in entries.payloads]
        for values in (entries.attributes, entries.metadata):
            change_values(values, lambda v: PayloadId(final[v]) if isinstance(v, PayloadId) else v)
        return kept, sources


class _EditedAttributes(MutableMapping[str, Any]):
    """The attributes of an archive that is edited: those that are stored, and those that were set since."""

    __slots__ = ("_check", "_set", "_stored")

    def __init__(
        self, stored: Callable[[], dict[str, Any]], changed: dict[str, Any], check: Callable[[str], None]
    ) -> None:
        self._stored, self._set, self._check = stored, changed, check

    def __getitem__(self, name: str) -> Any:
        stored = self._stored()
        value = self._set.get(name, stored.get(name, GONE))
        if value is GONE:
            raise TensorNotFoundError(str(name), lambda: list(self))
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._check(name)
        if not is_attribute(value, name):
            what = "an attribute is None, bool, an int of 64 bits, float, str, bytes, or a list of one of these"
            raise UnsupportedError(f"a {type(value).__name__}; {what}", tensor=name)
        self._set[name] = value

    def __delitem__(self, name: str) -> None:
        self[name]
        self._set[name] = GONE

    def __iter__(self) -> Iterator[str]:
        stored = self._stored()
        names = [*stored, *(name for name in self._set if name not in stored)]
        return iter([name for name in names if self._set.get(name) is not GONE])

    def __len__(self) -> int:
        return len(list(iter(self)))


def _mapped(value: Any, change: Callable[[Any], Any]) -> Any:
    """Return `change(value)`, or a list or tuple of such."""
    if not isinstance(value, list | tuple):
        return change(value)
    return (list if isinstance(value, list) else tuple)(map(change, value))


def add_metadata(record: Record, dest: Any, added: Mapping[str, Any], *, durable: bool) -> None:
    """Write a record's archive, that of a whole local file, with more metadata to a path, or in its own place.

    Raises:
        SourceError: the file system refused, or the archive was replaced meanwhile.
    """
    editor = RecordEditor(str(record.path), dest, force=True, durable=durable)
    editor._begin(record)
    editor.metadata |= added
    editor._end()
