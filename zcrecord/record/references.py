"""Writes archives of references, and records without the payloads that a base has.

CONVENTIONS.md has the tables. Payloads lie in files beside the archive: other archives, or files of another format.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import replace
from operator import eq
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive.archive import Archive, has_type_name
from zcrecord.archive.payload_source import Array, was_replaced
from zcrecord.archive.references import MOST_DESCRIBED
from zcrecord.codec.blocks import add_blocks
from zcrecord.codec.conventions import REFERENCES_TYPE
from zcrecord.codec.entries import Entries, PayloadId, digest_kind
from zcrecord.codec.index import PAYLOAD
from zcrecord.codec.layout import NONE, plan_payloads
from zcrecord.errors import DestinationExistsError, SourceError, UnsupportedError
from zcrecord.foreign.readers import path_beside
from zcrecord.storage.files import is_url, open_sink, path_of, real_path
from zcrecord.storage.folders import catalogue_of_shard, is_plain_name
from zcrecord.storage.memory import Memory
from zcrecord.storage.sink import Sink
from zcrecord.tensors.packed import StringTensor
from zcrecord.writing import flatten
from zcrecord.writing.catalogue import BLOBS, outline_of
from zcrecord.writing.equal import COMPARED
from zcrecord.writing.sharing import plan_sharing
from zcrecord.writing.writers import SaveReport, StreamWriter, renumber_payloads, report_of

from .load import load_record
from .own_shards import check_no_own_shard

_LEAST = 1024  # bytes of the smallest payload that is worth a reference


class ReferencedFile(NamedTuple):
    """A file that payloads lie in: its plain name, its size, and the range whose SHA-256 identifies it."""

    name: str
    nbytes: int
    described: tuple[int, int]
    sha256: bytes


class Range(NamedTuple):
    """A payload's place: number of a file, and offset there; if the archive itself stores it, NONE and its number."""

    file: int
    offset: int
    nbytes: int
    digest: int


class Files:
    """The files that an archive at `dest` refers to, which lie in its folder."""

    def __init__(self, dest: str) -> None:
        self._dest = real_path(dest)
        if not self._dest.endswith(".zcr"):  # savers look for references in files of this suffix
            raise UnsupportedError("an archive that refers to other files is named .zcr; rename it", path=dest)
        self._numbers: dict[str, int] = {}  # by path
        self._opened: list[tuple[str, Memory]] = []
        self.files: list[ReferencedFile] = []

    def number(self, memory: Memory, described: tuple[int, int]) -> int:
        """Return the number of a mapped file; a new one is added, known by the SHA-256 of its range `described`.

        Raises:
            UnsupportedError: it lies in another folder, has no plain name, or a huge index. DestinationExistsError: it
            is the file at `dest`.
        """
        path, (start, end) = memory.absolute or "", described
        if path in self._numbers:
            return self._numbers[path]
        self._check_path(path)
        if end - start > MOST_DESCRIBED:
            fault = f"has an index of {end - start} bytes, at most {MOST_DESCRIBED} can identify a referenced file"
            raise UnsupportedError(f"{fault}; convert it in shards, and save without a base", path=path)
        sha256 = hashlib.sha256(memory.octets[start:end]).digest()
        self.files.append(ReferencedFile(os.path.basename(path), len(memory.octets), described, sha256))
        self._opened.append((path, memory))
        return self._numbers.setdefault(path, len(self.files) - 1)

    def _check_path(self, path: str) -> None:
        """Raise unless a file may be referred to by its name: it lies beside `dest`, and no saver removes it."""
        folder, name = os.path.split(path)
        if real_path(path) == self._dest:
            raise DestinationExistsError("the new archive would refer to it; name another one", path=self._dest)
        target = os.path.basename(real_path(path))  # a link to a removed shard would lead nowhere
        if catalogue_of_shard(name) is not None or catalogue_of_shard(target) is not None:
            fault = "has the name of a catalogue's shard, which is removed when the catalogue is replaced"
            raise UnsupportedError(f"{fault}; give it another name, and refer to that", path=path)
        path_beside(self._dest, name)  # a link to elsewhere would be refused when the new archive is opened
        if real_path(folder or ".") != os.path.dirname(self._dest) or not is_plain_name(name, ""):
            fault = "lies in another folder than the archive that would refer to it, or has no plain name"
            raise UnsupportedError(f"{fault}; references name files beside it: write it to {folder or '.'}", path=path)

    def check_unreplaced(self) -> None:
        """Raise SourceError if a file was replaced since it was opened: the new archive would refuse the other one."""
        for path, memory in self._opened:
            if was_replaced(memory):
                fault = "was replaced meanwhile, and the new archive would refer to it; save again"
                raise SourceError(fault, path=path)


class Base:
    """The payloads of a record that others may refer to, by size and digest.

    Raises:
        UnsupportedError: it is a catalogue, whose shards go with it; it has no digests, or is no local file.
        DestinationExistsError: it is the file at `dest`, or refers to it, and would be lost.
    """

    def __init__(self, path: Any, files: Files, dest: str) -> None:
        self._record, self._files = load_record(path_of(path)), files
        if real_path(self._record.path or "") == real_path(dest):  # `path` may be a folder, or a file:// URL
            raise DestinationExistsError("is the base, to which the new archive would refer; name another", path=dest)
        check_no_own_shard(self._record, dest)
        archive = self._record.archive
        _check_base(archive)
        archive.ensure_all()
        rows = archive.index.payloads
        keys = zip(rows["nbytes"].tolist(), rows["digest"].tolist(), strict=True)
        self._numbers = {key: number for number, key in enumerate(keys)}

    def find(self, key: tuple[int, int], written: Iterator[bytes]) -> Range | None:
        """Return the place of the payload with a size and digest, and with the bytes of `written`; None without one."""
        number = self._numbers.get(key)
        if number is None:
            return None
        archive = self._record.archive
        [piece] = archive.source.pieces(number)
        octets = piece.source.payload(piece.number)
        stored = (bytes(octets[start : start + COMPARED]) for start in range(0, len(octets), COMPARED))
        if not all(map(eq, stored, written)):
            return None
        table = archive.source.piece_table()
        holder = archive if table is None else archive.source.file_archive(int(table.file[number]))
        file = self._files.number(piece.source.memory, holder.described)
        return Range(file, piece.source.offset + piece.start, *key)


def _check_base(archive: Archive) -> None:
    """Raise UnsupportedError unless files may refer to the payloads of an archive."""
    if archive.source.file_names and not has_type_name(archive.source.file_archive(NONE), REFERENCES_TYPE):
        fault = "is a catalogue, whose shards are removed when it is replaced; convert it to one archive"
        raise UnsupportedError(f"{fault}, and refer to that", path=archive.path)
    if not archive.index.digest_kind or not archive.source.is_mapped:
        fault = "has no digests, or is packed, attached or of another format; convert it, or index it"
        raise UnsupportedError(f"{fault}, and refer to that", path=archive.path)


class ReferencingWriter:
    """Writes an archive whose payloads lie in other files, or in itself; it has the methods of a `StreamWriter`.

    A payload is written first; if the base has it, it is removed again, and referred to.
    """

    def __init__(self, sink: Sink, files: Files, base: Base | None, *, alignment: int, digest: str | None) -> None:
        self._files, self._base, self._alignment = files, base, alignment
        self._kind = digest_kind(digest)
        self._stream = StreamWriter(sink, alignment=alignment, digest=digest)
        self.begin, self.write = self._stream.begin, self._stream.write
        self.checksums = self._stream.checksums
        self._ranges: list[Range] = []
        self._own: list[int] = []  # numbers in the stream of payloads that the archive stores itself

    def refer(self, place: Range) -> int:
        """Add a payload that lies in a file; return its id."""
        self._ranges.append(place)
        return len(self._ranges) - 1

    def store(self, source: Any) -> int:
        """Write one payload, the values of a LazyTensor or the bytes of an array or SplitSource; return its id."""
        return self._add_written(self._stream.store(source))

    def end(self) -> int:
        """Finish the payload in progress and return its id, NONE if no byte was written."""
        return self._add_written(self._stream.end())

    def _add_written(self, number: int) -> int:
        """Add the payload that was written last; return its id. One that the base has is removed from the stream."""
        if number == NONE:
            return NONE
        key = self._stream.key_of(number)
        if self._base is not None and key is not None and key[0] >= _LEAST:
            in_base = self._base.find(key, self._stream.pieces_of(number))
            if in_base is not None:
                self._stream.forget(number)
                return self.refer(in_base)
        self._own.append(number)
        return self.refer(Range(NONE, len(self._own) - 1, self._stream.row(number)[1], 0 if key is None else key[1]))

    def finish(self, entries: Entries) -> SaveReport:
        """Write outline, tables and index; the report's `archive_bytes` counts the new archive alone."""
        entries.change_values(self._store_bytes)
        ranges, outline, archive_size = self._outline(entries)
        tables = flatten.flatten(self._tables(ranges, outline))
        tables.modules[0] = tables.modules[0]._replace(type_name=REFERENCES_TYPE)
        plan = plan_sharing(tables.values)
        payloads = [self._stream.store(source) for source in plan.sources]
        tables.payloads = [NONE if s < 0 else payloads[s] for s in plan.source_ids]
        tables.layout_ids, tables.layouts = plan.layout_ids, plan.layouts
        written = self._stream.finish(tables)
        return replace(report_of(entries, archive_size), archive_bytes=written.archive_bytes)

    def _store_bytes(self, value: Any) -> Any:
        """Write the bytes of an attribute and return their payload; any other value as it is."""
        if not isinstance(value, bytes | memoryview):
            return value
        return PayloadId(self.store(np.frombuffer(value, np.uint8)) if memoryview(value).nbytes else NONE)

    def _tables(self, ranges: Array, outline: bytes) -> dict[str, Any]:
        """Return an archive of references as the tree that CONVENTIONS.md describes."""
        files = self._files.files
        tree: dict[str, Any] = {
            "files": {
                "name": StringTensor.from_strings([f.name for f in files]),
                "nbytes": np.array([f.nbytes for f in files], np.uint64),
                "described": np.array([f.described for f in files], np.uint64).reshape(-1, 2),
                "described_sha256": np.frombuffer(b"".join(f.sha256 for f in files), np.uint8).reshape(-1, 32),
            },
            "file": ranges[:, 0].astype(np.uint32),
            "offset": ranges[:, 1],
            "outline": np.frombuffer(outline, np.uint8),
        }
        if self._own:
            tree[BLOBS] = [PayloadId(number) for number in self._own]
        return tree

    def _outline(self, entries: Entries) -> tuple[Array, bytes, int]:
        """Plan the record as one archive; return its payloads' ranges as rows of Range, its outline, and its size.

        Rows are sorted by file and offset, and the payloads of `entries` are renumbered so. Equal ranges of one file
        have one offset in the outline, as equal payloads do.
        """
        ranges = np.array(self._ranges, np.uint64).reshape(-1, 4)
        order = np.lexsort((ranges[:, 2], ranges[:, 1], ranges[:, 0]))
        ordered = ranges[order]
        is_new = np.ones(len(ordered), bool)
        is_new[1:] = (ordered[1:, :3] != ordered[:-1, :3]).any(axis=1)
        rows = np.zeros(len(ranges), PAYLOAD)
        offsets, end, base = plan_payloads(ordered[is_new, 2], self._alignment)
        rows["offset"][order] = offsets[np.cumsum(is_new) - 1]
        rows["nbytes"], rows["digest"] = ranges[:, 2], ranges[:, 3]
        order = renumber_payloads(entries, rows)
        entries.digest_kind = self._kind
        add_blocks(entries, self.checksums)
        return ranges[order], *outline_of(entries, self._alignment, base, end)


@contextlib.contextmanager
def referencing(
    dest: Any, base: Any, *, alignment: int, digest: str | None, durable: bool
) -> Iterator[ReferencingWriter]:
    """Open a writer of an archive that refers to a base; the archive appears at the end, whole.

    Raises:
        UnsupportedError: `dest` is no path, or digests are off; or `Base` refuses it. DestinationExistsError: `dest` is
        the base, or a file that the base refers to.
    """
    if hasattr(dest, "write") or is_url(dest):
        raise UnsupportedError("base= is for paths: the files that it refers to lie beside the archive")
    if not digest_kind(digest):
        raise UnsupportedError("base= needs digests, by which equal payloads are found")
    path = path_of(dest)
    files = Files(path)
    base_payloads = Base(base, files, path)
    with open_sink(dest, durable=durable, check=files.check_unreplaced) as sink:
        yield ReferencingWriter(sink, files, base_payloads, alignment=alignment, digest=digest)
