"""`edit`: change an archive's metadata, attributes, names and tensors, without reading what stays.

Holds the changed index and the new values until the block ends. `archive.subset` changes the index, `writing.edited`
plans and writes the archive.
"""

from __future__ import annotations

import contextlib
import os
import re
import time
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from zcrecord.archive import info, subset, unflatten
from zcrecord.archive.archive import Archive, Progress, has_type_name, require_archive
from zcrecord.archive.name_patterns import star_match, star_renamer
from zcrecord.archive.part_source import PartSource
from zcrecord.archive.subset import GONE, Names, Rename
from zcrecord.codec.blocks import BlockTable, add_blocks
from zcrecord.codec.conventions import CATALOGUE_TYPE, REFERENCES_TYPE, SIGNATURE_PREFIX, TUNED_TYPE
from zcrecord.codec.entries import Entries, PayloadId, TensorLayout, changed_value, is_attribute, list_type, value_type
from zcrecord.codec.index import PAYLOAD
from zcrecord.codec.layout import NONE
from zcrecord.errors import SourceError, TensorNotFoundError, UnsupportedError, located
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
from zcrecord.writing.catalogue import BLOBS, outline_of, write_catalogue
from zcrecord.writing.edited import EditedArchive, StoredArchive, plan_edited
from zcrecord.writing.module_tree import check_attribute
from zcrecord.writing.sharing import layout_of, plan_sharing

from .load import load_record
from .own_shards import check_no_shard
from .record import Record
from .save import metadata_entries, stored_entries


@dataclass(frozen=True, slots=True)
class EditReport:
    """Report of an edit. Sizes are in bytes.

    Attributes:
        source, dest: the archive that was read, and the one that was written; the same path unless another was given.
        written: False if nothing changed, so that the archive was left as it is.
        tensors, archive_bytes: of the archive now.
        cloned_bytes: those that share their place on the disk with the old archive.
        lapsed: ids of the keys whose signatures were left out, since the content changed.
        seconds: from the begin to the end of the `with` block.
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
    """Change an archive's metadata, attributes, names and tensors in a `with` block, without reading what stays.

    At the end of the block the new archive replaces the old one, whole; an exception leaves the old one as it was.
    Payloads that stay keep their digests, and are cloned where the file system can (XFS, Btrfs), which takes neither
    time nor space; else the system copies them. Records that have the old archive open keep it.

    Signatures do not cover metadata: after any other change they are left out.

    Args:
        path: of an archive in a local file.
        dest: a path for the changed archive; None replaces the archive.
        force: replace a file at `dest`.
        durable: as in `save_record`.
        progress: called with the bytes written, and all bytes.

    Example:
        >>> import numpy as np, zcrecord
        >>> _ = zcrecord.save_record({"head": {"w": np.ones(3)}, "old": np.zeros(2)}, "model.zcr")
        >>> with edit("model.zcr") as model:
        ...     model.metadata["license"] = "mit"
        ...     model.drop("old")
        >>> zcrecord.load_record("model.zcr").names
        ('head.w',)

    Raises (when the block begins or ends):
        UnsupportedError: `path` is not a path; or the archive is packed, remote, attached to a program, tuned, a
        catalogue, or a shard of one.
        SourceNotFoundError, FormatError: there is no archive. DestinationExistsError: something is at `dest`.
        NameCollisionError: two tensors would have one name. SourceError: the file system refused, or the archive was
        replaced meanwhile.
    """
    return RecordEditor(path, dest, force=force, durable=durable, progress=progress)


class RecordEditor(MutableMapping[str, Any]):
    """An archive that is edited, as a mapping from full names to tensors; see `edit`.

    Stored tensors are views, as a record's. A tensor that is set replaces the one of its name, or is added to the
    module with the longest name that is a prefix of its own. It is read when the block ends; tensors that share memory
    are tied, as by `save_record`. `del` removes a tensor; tensors tied to it keep the payload.

    Attributes:
        metadata: the file's, a dict to be changed.
        report: an EditReport, once the block has ended.
    """

    def __init__(
        self, path: Any, dest: Any = None, *, force: bool = False, durable: bool = True, progress: Any = None
    ) -> None:
        """Arguments are those of `edit`; the archive is opened when the block begins."""
        if not isinstance(path, str | os.PathLike):
            fault = f"edit takes the path of an archive, not a {type(path).__name__}"
            raise UnsupportedError(f"{fault}; save a changed record with save_record")
        if is_url(path):
            raise UnsupportedError("is remote; download it, and edit the file", path=str(path))
        self._source = path_of(path)
        self._dest = None if dest is None else path_of(dest)
        self._force, self._durable, self._progress = force, durable, progress
        self._replaces: Any = dest.replaces if isinstance(dest, Place) else None
        self._record: Record | None = None
        self.metadata: dict[str, Any] = {}
        self.report: EditReport | None = None

    def __enter__(self) -> RecordEditor:
        if self._dest is not None:
            self._replaces = check_destination(self._source, self._dest, self._force)
        else:
            check_no_shard(self._source)
        with contextlib.ExitStack() as stack:
            record = stack.enter_context(load_record(self._source))
            _check_editable(record.archive)
            stack.pop_all()
        self._begin(record)
        return self

    def __exit__(self, kind: object, *error: Any) -> None:
        record = self._open_record()
        try:
            if kind is None:
                self._write_edited()
        finally:
            record.__exit__(kind, *error)
            self._record = None

    def _begin(self, record: Record) -> None:
        """Begin with the record as it is stored: by references, numbers of stored payloads and, then, new ones."""
        self._started = time.perf_counter()
        self._record = record
        dest = self._source if self._dest is None else self._dest
        # The working folder may change in the block.
        self._absolute_dest = dest if is_url(dest) else absolute_path(dest)
        self._current: Archive = record.archive  # its index has all changes but `_tensors_set` and `_attributes_set`
        self._first_new = len(record.archive.index.payloads)
        self._refs = list(range(self._first_new))  # of the payloads of `_current`
        self._values: list[Any] = []
        self._views: dict[int, tuple[Any, int]] = {}  # by id: bytes that were returned, and their reference
        self._blobs: dict[bytes, int] = {}  # references of bytes that were set
        self._tensors_set: dict[str, tuple[TensorLayout, int, Any] | None] = {}  # layout, reference, value; None: gone
        self._attributes_set: dict[str, Any] = {}
        self._numbers: dict[str, int] = {}  # of the tensors of `_current`
        self._attributes: dict[str, Any] | None = None  # of `_current`
        self._content_changed = False
        ix = record.archive.index
        metadata = unflatten.metadata_entries(ix, PayloadId)
        self.metadata = {a.key: changed_value(a.value, self._bytes_of) for a in metadata}

    def _open_record(self) -> Record:
        if self._record is None:
            raise UnsupportedError("an archive is edited only inside a with block", path=self._source)
        return self._record

    @property
    def attributes(self) -> MutableMapping[str, Any]:
        """Every attribute by its full name, as a mapping to be changed; values as `save_record` takes them."""
        self._open_record()
        return _EditedAttributes(self)

    def __getitem__(self, name: str) -> Any:
        if name not in self:
            raise TensorNotFoundError(str(name), lambda: list(self), path=self._source)
        if (entry := self._tensors_set.get(name)) is not None:
            _, _, value = entry
            return value
        number = self._tensor_numbers()[name]
        ref = self._reference(self._current.row(number).payload)
        is_new = self._first_new <= ref < NONE
        return self._values[ref - self._first_new] if is_new else self._current.view(number)

    def __setitem__(self, name: str, value: Any) -> None:
        self._check_name(name)
        if is_attribute(value, name):
            fault = f"a {type(value).__name__} is not a tensor; see .attributes[name]"
            raise UnsupportedError(fault, path=self._source, tensor=name)
        tensor = flatten.as_tensor(value, name)
        layout = layout_of(tensor)
        self._tensors_set[name] = layout, NONE if 0 in layout.shape else self._add_value(tensor), tensor

    def __delitem__(self, name: str) -> None:
        if name not in self:
            raise TensorNotFoundError(str(name), lambda: list(self), path=self._source)
        self._tensors_set.pop(name, None)
        if name in self._tensor_numbers():
            self._tensors_set[name] = None

    def __contains__(self, name: object) -> bool:
        stored = self._tensor_numbers()
        entry = self._tensors_set.get(name, GONE) if isinstance(name, str) else GONE
        return name in stored if entry is GONE else entry is not None

    def __iter__(self) -> Iterator[str]:
        self._apply_changes()
        return iter(list(self._tensor_numbers()))

    def __len__(self) -> int:
        stored = self._tensor_numbers()
        added = sum(entry is not None and name not in stored for name, entry in self._tensors_set.items())
        return len(stored) + added - sum(entry is None for entry in self._tensors_set.values())

    __eq__, __hash__ = object.__eq__, object.__hash__

    def __repr__(self) -> str:
        return f"<RecordEditor {self._source}>"

    def tie(self, name: str, to: str) -> None:
        """Make a tensor, new or not, the same memory as another one.

        Raises:
            TensorNotFoundError: there is no tensor `to`.
        """
        self._check_name(name)
        value, entry = self[to], self._tensors_set.get(to)
        if entry is None:
            row = self._current.row(self._tensor_numbers()[to])
            entry = self._current.tensor_layout(row), self._reference(row.payload), value
        self._tensors_set[name] = entry

    def drop(self, names: Names) -> None:
        """Remove all tensors, modules and attributes that match, and modules that become empty.

        Args:
            names: as in `Record.select`: exact names, each with all below it, or patterns, in which `*` matches dots,
                too; or a function from TensorInfo to bool.

        Raises:
            TensorNotFoundError: a name is not there, or a pattern matches nothing.
        """
        archive = self._apply_changes()
        self._replace_index(subset.PartBuilder(archive).drop(names).part(), self._refs)

    def rename(self, old: str | re.Pattern[str] | Rename, new: str | None = None) -> None:
        """Rename tensors, modules with all below them, and attributes.

        Args:
            old: a name, to become `new`; a pattern in which `*` is any text, also in `new` (`rename("model.*", "*")`);
                or, without `new`, a mapping or function as the `rename` of `Record.select`.

        Raises:
            TensorNotFoundError: a name is not there, or a pattern with `*` matches nothing. NameCollisionError: two
            tensors would have one name.
        """
        archive = self._apply_changes()
        rename = self._rename_of(old, new)
        with located(path=self._source):
            self._replace_index(subset.PartBuilder(archive).rename(rename).part(), self._refs)

    def _rename_of(self, old: Any, new: str | None) -> Any:
        """Return the arguments of `rename` as one mapping or function, after a check that the old names exist."""
        rename = old
        if isinstance(old, str):
            if not isinstance(new, str):
                raise UnsupportedError(f"rename takes a new name for '{old}', not a {type(new).__name__}")
            if "*" in old and old not in self._tensor_numbers():
                rename = star_renamer(old, new)
                self._check_known([old], star_match(old))
                return rename
            rename = {old: new}
        elif isinstance(old, re.Pattern):
            rename = {old: new}
        elif new is not None:
            raise UnsupportedError("rename takes a new name with an old one alone, not with a mapping or a function")
        if isinstance(rename, Mapping):
            self._check_known([name for name in rename if isinstance(name, str) and name])
        return rename

    def _check_name(self, name: Any) -> None:
        self._open_record()
        if not isinstance(name, str) or not name:
            raise UnsupportedError(f"{name!r}: a name is a non-empty str", path=self._source)

    def _check_known(self, names: list[str], match: Callable[[str], Any] = lambda _: None) -> None:
        """Raise TensorNotFoundError for a name that no tensor, module or attribute has, lies below, or matches."""
        ix = self._current.index
        known = [*self._tensor_numbers(), *map(ix.text_of, ix.modules), *self._stored_attributes()] if names else []
        for name in names:
            if not any(other == name or other.startswith(f"{name}.") or match(other) for other in known):
                raise TensorNotFoundError(name, lambda: known, path=self._source)

    def _add_value(self, value: Any) -> int:
        self._values.append(value)
        return self._first_new + len(self._values) - 1

    def _reference(self, number: int) -> int:
        return NONE if number == NONE else self._refs[number]

    def _bytes_of(self, value: Any) -> Any:
        """Return a view of a payload's bytes by its number in `_current`; any other value as it is."""
        if not isinstance(value, PayloadId):
            return value
        ref = self._reference(value)
        is_new = self._first_new <= ref < NONE
        view = self._values[ref - self._first_new].data if is_new else self._current.payload(value)
        self._views[id(view)] = view, ref
        return view

    def _reference_of(self, octets: Any) -> int:
        """Return a reference to an attribute's bytes; bytes that are neither stored nor known yet are added."""
        if id(octets) in self._views:
            return self._views[id(octets)][1]
        if not memoryview(octets).nbytes:  # `len` counts rows
            return NONE
        if not isinstance(octets, bytes):
            return self._add_value(np.frombuffer(octets, np.uint8))
        if octets not in self._blobs:  # lists may name the same bytes a million times
            self._blobs[octets] = self._add_value(np.frombuffer(octets, np.uint8))
        return self._blobs[octets]

    def _tensor_numbers(self) -> dict[str, int]:
        self._open_record()
        if not self._numbers:
            self._numbers = {name: i for i, name in enumerate(self._current.names())}
        return self._numbers

    def _stored_attributes(self) -> dict[str, Any]:
        self._open_record()
        if self._attributes is None:
            attributes = info.attributes(self._current, PayloadId)
            self._attributes = {name: changed_value(value, self._bytes_of) for name, value in attributes.items()}
        return self._attributes

    def _replace_index(self, part: subset.PartIndex, refs: list[int]) -> None:
        """Make a changed index of `_current` the current one; its payload numbers are indices into `refs`."""
        self._refs = [refs[n] for n in part.numbers]
        stored = self._open_record().archive
        self._current = Archive(stored.header, part.index, PartSource(stored.source, self._refs))
        self._numbers, self._attributes, self._content_changed = {}, None, True

    def _apply_changes(self) -> Archive:
        """Put the tensors and attributes that were set into the index; return the current archive."""
        stored_rows = self._open_record().archive.index.payloads
        if not self._tensors_set and not self._attributes_set:
            return self._current
        refs, numbers = list(self._refs), {ref: number for number, ref in enumerate(self._refs)} | {NONE: NONE}

        def number_of(ref: int) -> int:
            if numbers.setdefault(ref, len(refs)) == len(refs):
                refs.append(ref)
            return numbers[ref]

        def as_payload(value: Any) -> Any:
            is_bytes = isinstance(value, bytes | memoryview)
            return PayloadId(number_of(self._reference_of(value))) if is_bytes else value

        tensors = {name: entry and (entry[0], number_of(entry[1])) for name, entry in self._tensors_set.items()}
        attributes = {name: changed_value(value, as_payload) for name, value in self._attributes_set.items()}
        rows = np.zeros(len(refs), PAYLOAD)
        rows[: len(self._refs)] = self._current.index.payloads
        for number, ref in enumerate(refs[len(self._refs) :], len(self._refs)):
            is_stored = ref < self._first_new
            rows[number] = stored_rows[ref] if is_stored else (0, self._values[ref - self._first_new].nbytes, 0)
        with located(path=self._source):
            builder = subset.PartBuilder(self._current).change(tensors, attributes, rows)
            self._replace_index(builder.part(), refs)
        self._tensors_set.clear()
        self._attributes_set.clear()
        return self._current

    def _write_edited(self) -> None:
        """Write the edited archive, and set the report."""
        stored = self._open_record().archive
        archive = self._apply_changes()
        lapsed = self._drop_signatures()
        entries = stored_entries(archive)
        entries.digest_kind = archive.index.digest_kind
        entries.metadata = metadata_entries(self.metadata)
        stored_numbers, sources = self._number_payloads(entries)
        path, identity = stored.source.file or (self._source, None)
        with open_source(path, regular=True)[0] as file:
            self._check_unreplaced(file.fileno(), identity)
            rows, blocks = stored.index.payloads, BlockTable(stored.index)
            old = StoredArchive(stored.header, rows, stored.buffer, file.fileno(), blocks)
            edited = plan_edited(old, stored_numbers, entries, sources)
            keeps_file = edited.unchanged and self._dest is None
            cloned = 0 if keeps_file else self._write_archive(edited, path, identity)
        self.report = EditReport(
            source=self._source,
            dest=self._source if self._dest is None else self._dest,
            written=not keeps_file,
            tensors=len(archive.index.tensors),
            archive_bytes=(stored if keeps_file else edited).header.archive_size,
            cloned_bytes=cloned,
            lapsed=lapsed,
            seconds=time.perf_counter() - self._started,
        )

    def _drop_signatures(self) -> tuple[str, ...]:
        """Remove signatures of the old content from the metadata, if it changed; return their keys' ids."""
        record = self._open_record()
        signed = {k: v for k, v in record.metadata.items() if k.startswith(SIGNATURE_PREFIX)}
        changed = self._content_changed or (signed and noncanonical_attribute(record.archive) is not None)
        lapsed = [k for k, v in signed.items() if changed and self.metadata.get(k) == v]
        for key in lapsed:
            del self.metadata[key]
        return tuple(key.removeprefix(SIGNATURE_PREFIX) for key in lapsed)

    def _check_unreplaced(self, file: int | str, identity: Any) -> None:
        if identity_of(file) != identity:
            fault = "was replaced meanwhile; start again with the archive that is there now"
            raise SourceError(fault, path=self._source)

    def _write_archive(self, edited: EditedArchive, path: str, identity: Any) -> int:
        """Write the archive, unless the file at `path` was replaced; return how many bytes the file system cloned."""
        replaces = identity if self._dest is None else self._replaces
        with open_sink(self._absolute_dest, durable=self._durable, replaces=replaces) as sink:
            if not sink.can_rewind:
                fault = "an edited archive is a regular file in a folder; name one"
                raise UnsupportedError(fault, path=self._absolute_dest)
            cloned = edited.write(sink, self._progress)
            self._check_unreplaced(path, identity)
        return cloned

    def _number_payloads(self, entries: Entries) -> tuple[list[int], list[Any]]:
        """Number the payloads that entries use; return the stored ones' old numbers, and the sources of new ones.

        The layouts of new tensors are planned here, when all tensors that may share memory are known.
        """
        first = self._first_new
        blobs: dict[int, None] = {}  # references of bytes, in the order of their use

        def as_reference(value: Any) -> Any:
            if not isinstance(value, PayloadId | bytes | memoryview):
                return value
            ref = self._reference(value) if isinstance(value, PayloadId) else self._reference_of(value)
            blobs[ref] = None
            return PayloadId(ref)

        entries.change_values(as_reference)
        refs = list(map(self._reference, entries.payloads))
        new_refs = list(dict.fromkeys(ref for ref in refs if first <= ref < NONE))
        plan = plan_sharing([self._values[ref - first] for ref in new_refs])
        sources: list[Any] = list(plan.sources)
        stored_numbers = sorted({ref for ref in (*refs, *blobs) if ref < first})
        numbers = {ref: number for number, ref in enumerate(stored_numbers)} | {NONE: NONE}
        numbers |= {ref: len(stored_numbers) + source for ref, source in zip(new_refs, plan.source_ids, strict=True)}
        for ref in blobs:
            if ref not in numbers:
                numbers[ref] = len(stored_numbers) + len(sources)
                sources.append(self._values[ref - first])
        planned = {ref: plan.layouts[n] for ref, n in zip(new_refs, plan.layout_ids, strict=True)}
        layouts: dict[TensorLayout, int] = {}  # each distinct one, and its number
        entries.layout_ids = [
            layouts.setdefault(planned.get(ref, entries.layouts[n]), len(layouts))
            for ref, n in zip(refs, entries.layout_ids, strict=True)
        ]
        entries.layouts = list(layouts)
        entries.payloads = [numbers[ref] for ref in refs]
        entries.change_values(lambda v: PayloadId(numbers[v]) if isinstance(v, PayloadId) else v)
        return stored_numbers, sources


class _EditedAttributes(MutableMapping[str, Any]):
    """The attributes of an archive that is edited: stored ones, and those that were set."""

    def __init__(self, editor: RecordEditor) -> None:
        self._editor = editor

    def __getitem__(self, name: str) -> Any:
        stored = self._editor._stored_attributes()
        value = self._editor._attributes_set.get(name, stored.get(name, GONE))
        if value is GONE:
            raise TensorNotFoundError(str(name), lambda: list(self))
        return value

    def __setitem__(self, name: str, value: Any) -> None:
        self._editor._check_name(name)
        check_attribute(value, name)
        self._editor._attributes_set[name] = value

    def __delitem__(self, name: str) -> None:
        self[name]
        self._editor._attributes_set[name] = GONE

    def __iter__(self) -> Iterator[str]:
        names = dict.fromkeys((*self._editor._stored_attributes(), *self._editor._attributes_set))
        return iter([name for name in names if self._editor._attributes_set.get(name) is not GONE])

    def __len__(self) -> int:
        return len(list(iter(self)))


def _check_editable(archive: Archive) -> None:
    """Raise UnsupportedError unless an archive is all of a local file, has no shards, and is not tuned."""
    require_archive(archive, "edit")
    if archive.source.file_names:
        fault = "is a catalogue of shards; make one archive of it, edit that, and write shards of that again"
        raise UnsupportedError(fault, path=archive.path)
    if archive.embedded is not None:
        raise UnsupportedError("is attached to a program; detach it, edit it, and attach it again", path=archive.path)
    if archive.source.file is None:
        raise UnsupportedError("is packed; unpack it, edit that, and pack it again", path=archive.path)
    if info.child_of_type(archive, TUNED_TYPE) is not None:
        advice = "remove the tuned part (untune, zcrecord tune --remove), edit it, and tune it again"
        raise UnsupportedError(f"is tuned for the model as it is; {advice}", path=archive.path)


def noncanonical_attribute(archive: Archive) -> str | None:
    """Return the key of the first attribute whose stored type a save would change (R69); None if there is none."""
    ix = archive.index
    attributes = unflatten.attribute_entries(ix, ix.attributes, PayloadId)
    for stored_type, attribute in zip(ix.attributes["type"].tolist(), attributes, strict=True):
        value = attribute.value
        saved_type = list_type(value) if isinstance(value, list | tuple) else value_type(value)
        if saved_type != stored_type:
            return attribute.key
    return None


def add_metadata(record: Record, dest: Any, added: Mapping[str, Any], *, durable: bool) -> None:
    """Write a local file's archive again, with more metadata, to `dest`, or in place if that is None."""
    editor = RecordEditor(str(record.path), dest, force=True, durable=durable)
    editor._begin(record)
    editor.metadata |= added
    editor._write_edited()


def add_metadata_to_catalogue(record: Record, added: Mapping[str, Any], *, durable: bool) -> None:
    """Replace a record's catalogue by one with more metadata, any values except bytes; the shards stay."""
    archive = record.archive
    catalogue = archive.source.file_archive(NONE)
    entries = stored_entries(archive)
    if any(a.key in added and isinstance(a.value, PayloadId) for a in entries.metadata):
        fault = "has bytes in its metadata under a name that is to be written; zcrecord convert makes one archive of it"
        raise UnsupportedError(fault, path=archive.path)
    entries.metadata = [a for a in entries.metadata if a.key not in added] + metadata_entries(added)
    entries.payload_rows, entries.digest_kind = archive.index.payloads, archive.index.digest_kind
    header = archive.header
    add_blocks(entries, BlockTable(archive.index).checksums_of(entries.payload_rows))
    outline, _ = outline_of(entries, header.alignment, header.base_alignment, header.payload_room)
    tree = Record(catalogue).tree()
    tree["outline"] = np.frombuffer(outline, np.uint8)
    if BLOBS in tree:
        is_list = isinstance(tree[BLOBS], list | tuple)  # else one value: the source refuses any but bytes
        count = len(tree[BLOBS]) if is_list else 1
        blobs = archive.source.numbers_in_file(NONE, np.arange(count))
        tree[BLOBS] = [catalogue.payload(number) for number in blobs.tolist()]
    assert catalogue.source.file is not None, "it is mapped"
    path, identity = catalogue.source.file
    type_name = REFERENCES_TYPE if has_type_name(catalogue, REFERENCES_TYPE) else CATALOGUE_TYPE
    with open_sink(path, durable=durable, replaces=identity) as sink:
        write_catalogue(tree, sink, kind=entries.digest_kind, type_name=type_name)
