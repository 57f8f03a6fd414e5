"""An archive without its tensors' bytes: its index, the bytes of attributes, and the place of each payload in the file.

Allocates memory for the payloads, and reads and verifies them in one forward pass. Which payloads to read is left to
`hollow_record`.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from zcrecord.archive import unflatten
from zcrecord.archive.archive import Archive
from zcrecord.archive.payloads import check_blobs
from zcrecord.archive.private_copy import check_apart
from zcrecord.codec.digests import RunningDigest
from zcrecord.codec.entries import PayloadId
from zcrecord.codec.index import Index
from zcrecord.codec.layout import ALIGNMENT, HEADER_SIZE, NONE, plan_payloads
from zcrecord.errors import IntegrityError, SourceError, located
from zcrecord.storage.memory import Memory, aligned
from zcrecord.storage.stream_reader import StreamReader

_CHUNK = 1 << 20  # bytes verified at a time


class _ExpectedDigest(NamedTuple):
    """The expected SHA-256 of a box of a payload, which is the whole of it unless it is split over shards."""

    sha256: bytes
    shape: tuple[int, ...]  # of the payload, in bytes: that of its elements, and the size of one
    box: tuple[tuple[int, int], ...] = ()

    def matches(self, payload: Any) -> bool:
        """Return True if the box has this SHA-256."""
        octets = np.frombuffer(payload, np.uint8).reshape(self.shape)[tuple(slice(*ends) for ends in self.box)]
        return bool(_sha256(np.ascontiguousarray(octets).data).digest() == self.sha256)


@dataclass(eq=False)
class RecordSkeleton:
    """An archive without its tensors' bytes; small, and can be pickled."""

    index: Index  # a copy, which keeps no mapping
    places: np.ndarray[Any, np.dtype[Any]]  # of each payload the offset in the archive, nbytes and digest
    blobs: dict[int, bytes]  # the bytes of the payloads that attributes and metadata use, by number
    header: bytes  # of the archive; empty for a file of another format
    path: str | None
    seal: bytes  # as `Archive.seal` has it
    file: tuple[str, tuple[int, ...]] | None  # absolute path and identity of the mapped file
    pins: dict[Any, Any]  # the expected SHA-256 of payloads, if a remote record was checked against them
    expected: dict[int, list[_ExpectedDigest]]  # the same by a payload's number

    @classmethod
    def from_archive(cls, archive: Archive) -> RecordSkeleton:
        """Return an archive's skeleton; of the payloads only those of attributes and metadata are read."""
        archive.ensure_all()
        ix, header = archive.index, archive.header
        check_filled(archive, ix.payloads["nbytes"].sum(dtype=np.float64))
        check_blobs(archive)
        places = ix.payloads.copy()
        places["offset"] += np.uint64(header.payload_offset)
        blobs = {number: bytes(archive.payload(number)) for number in _blob_numbers(ix)}
        path, start = archive.absolute or archive.path, header.encode() if header.payload_offset else b""
        index, pins, file = _index_of(_columns(ix)), archive.source.pins(), archive.source.file
        expected = _expected_digests(archive) if pins else {}
        return cls(index, places, blobs, start, path, archive.seal(), file, pins, expected)

    def is_replaced(self, archive: Archive) -> bool:
        """Return True if an archive has another seal than the skeleton's, or its file another identity."""
        file = archive.source.file
        moved = self.file is None or file is None or self.file[0] != file[0]
        return archive.seal() != self.seal or not (moved or file == self.file)

    def find_in(self, archive: Archive) -> Archive | None:
        """Return the archive, or the part of it, that this is the skeleton of; None if it is another archive's."""
        ix, own = archive.index, self.index
        columns = ("payloads", "tensors", "dims", "strides")
        if ix.text == own.text and all(getattr(ix, c).tobytes() == getattr(own, c).tobytes() for c in columns):
            return archive
        if not self.header or archive.mode != "r" or archive.header.encode() != self.header:
            return None
        known = {row: number for number, row in enumerate(ix.payloads.tolist())}
        numbers = [known.get(row, NONE) for row in own.payloads.tolist()]
        return None if NONE in numbers else archive.part(own, numbers)

    def nbytes(self, number: int) -> int:
        """Return a payload's size in bytes."""
        return int(self.places["nbytes"][number])

    def allocate(self, *, tensors: bool) -> tuple[memoryview, Archive]:
        """Return memory for all payloads, or for those of attributes alone, and an archive over that memory."""
        sizes = self.index.payloads["nbytes"].copy()
        if not tensors:
            sizes[[n for n in range(len(sizes)) if n not in self.blobs]] = 0
        offsets, end, _ = plan_payloads(sizes, ALIGNMENT)
        block, octets = aligned(max(end, 1), sparse=True)
        for number, blob in self.blobs.items():
            start = int(offsets[number])
            octets[start : start + len(blob)] = blob
        payloads = self.index.payloads.copy()
        payloads["offset"], payloads["digest"] = offsets, 0
        index = self.index._replace(payloads=payloads, digest_kind=0)
        return octets, Archive.foreign(Memory(octets, None, block), index)

    def read(self, file: Any, payloads: Collection[int]) -> Iterator[tuple[list[int], Iterator[memoryview]]]:
        """Yield payloads, given by number, with their bytes in chunks, read forward from the archive's first byte on.

        Payloads that lie in the same place come together. Read all chunks before the next payload; each is valid until
        the next is read. A file that can seek skips the rest.
        """
        groups: dict[tuple[int, int, int], list[int]] = {}
        for number in sorted(payloads):
            groups.setdefault(self.places[number].item(), []).append(number)
        with located(path=self.path):
            reader = StreamReader(file)
            if self.header:
                start = b"".join(_chunks(reader, file, 0, HEADER_SIZE))
                if start != self.header and (start[:8] != self.header[:8] or any(start[10:60])):  # zeros: not sealed
                    raise IntegrityError("the file is not the archive that the hollow record is of")
            for (offset, nbytes, _), numbers in groups.items():
                yield numbers, self._verify_chunks(_chunks(reader, file, offset, nbytes), numbers)

    @property
    def has_digests(self) -> bool:
        """True if `verify_payload` compares payloads with anything."""
        return bool(self.index.digest_kind or self.expected)

    def verify_payload(self, number: int, octets: memoryview) -> Iterator[memoryview]:
        """Yield the bytes of a payload in chunks; raises IntegrityError after the last unless they match its digest."""
        chunks = (octets[start : start + _CHUNK] for start in range(0, len(octets), _CHUNK))
        return self._verify_chunks(chunks, [number])

    def _verify_chunks(self, chunks: Iterator[memoryview], numbers: list[int]) -> Iterator[memoryview]:
        """Pass on the chunks of payloads of one place; raises IntegrityError after the last if they do not match."""
        expected = list(dict.fromkeys(e for number in numbers for e in self.expected.get(number, ())))
        if not expected and not self.index.digest_kind:
            yield from chunks
            return
        running = _sha256() if expected else RunningDigest()
        whole = bytearray() if any(e.box for e in expected) else None  # of split payloads
        for chunk in chunks:
            running.update(chunk)
            if whole is not None:
                whole += chunk
            yield chunk
        matches = running.digest() == int(self.places["digest"][numbers[0]]).to_bytes(8, "big")
        if expected:
            matches = all(e.matches(whole) if e.box else running.digest() == e.sha256 for e in expected)
        if not matches:
            message = "a payload's digest does not match; the file is damaged, or not the one the hollow record is of"
            raise IntegrityError(message, path=self.path)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "index": _columns(self.index)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, index=_index_of(state["index"]))


def check_filled(archive: Archive, nbytes: float) -> None:
    """Raise LimitError if the bytes to fill are out of all proportion to the files of an archive; opens no shard.

    Sizes of shards are those in the catalogue: `HollowRecord` asks the shards themselves when they are opened.
    """
    source, table = archive.source, archive.source.piece_table()
    stored = archive.header.archive_size
    if table is not None:
        stored = sum(source.file_size(file) for file in {NONE, *table.files()})
    check_apart(int(nbytes), stored, archive.path)


def _columns(ix: Index) -> dict[str, Any]:
    """Return copies of the columns of an index, which keep no mapping."""
    columns = {k: v.copy() if isinstance(v, np.ndarray) else v for k, v in ix._asdict().items()}
    return {**columns, "memory": None, "text": bytes(ix.text)}


def _index_of(columns: dict[str, Any]) -> Index:
    memory, size = memoryview(columns["text"] + bytes(64)), len(columns["text"])  # names are compared by 32 bytes
    return Index(**{**columns, "memory": memory, "text": memory[:size]})


def _blob_numbers(ix: Index) -> set[int]:
    """Return the numbers of the payloads that attributes and metadata use."""
    numbers: set[int] = set()
    for rows in (ix.attributes, ix.metadata):
        for entry in unflatten.attribute_entries(ix, rows, PayloadId):
            values = entry.value if isinstance(entry.value, list | tuple) else [entry.value]
            numbers |= {int(v) for v in values if isinstance(v, PayloadId)}
    return numbers - {NONE}


def _expected_digests(archive: Archive) -> dict[int, list[_ExpectedDigest]]:
    """Return the SHA-256 that each payload, or each piece of one, is expected to have, by payload."""
    expected: dict[int, list[_ExpectedDigest]] = {}
    for number, nbytes in enumerate(archive.index.payloads["nbytes"].tolist()):
        pins = archive.source.expected(number)
        if any(pins):
            boxes = _boxes_of(archive, number) if len(pins) > 1 else [((nbytes,), ())]
            # A piece without a pin matches nothing.
            expected[number] = [_ExpectedDigest(pin or b"", *box) for pin, box in zip(pins, boxes, strict=True)]
    return expected


def _boxes_of(archive: Archive, number: int) -> list[tuple[tuple[int, ...], tuple[tuple[int, int], ...]]]:
    """Return the shape in bytes of a split payload, with the box of each piece."""
    i = int(np.flatnonzero(archive.index.tensors["payload"] == number)[0])
    row = archive.row(i)
    shape = *archive.shape(row), row.bits >> 3
    origin, extent = (corners.tolist() for corners in archive.boxes(i))
    return [(shape, tuple(zip(lo, np.add(lo, n).tolist(), strict=True))) for lo, n in zip(origin, extent, strict=True)]


def _sha256(data: Any = b"") -> Any:
    import hashlib  # here, because it takes 3 ms

    return hashlib.sha256(data)


def _chunks(reader: StreamReader, file: Any, offset: int, nbytes: int) -> Iterator[memoryview]:
    """Yield a range of the file under a reader, which is passed forward; SourceError if the file ends before."""
    if offset > reader.position and callable(getattr(file, "seekable", None)) and file.seekable():
        file.seek(offset - reader.position, os.SEEK_CUR)
        reader.position = offset
    for end, inside in ((offset, False), (offset + nbytes, True)):
        while reader.position < end:
            if not len(chunk := reader.piece(end - reader.position)):
                raise SourceError(f"the file ends at {reader.position:#x}, {end:#x} bytes are needed; copy it again")
            if inside:
                yield chunk.toreadonly()
